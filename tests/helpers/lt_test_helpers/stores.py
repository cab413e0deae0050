"""Text, tokenizer and packed stores for tests, created with the `lt-data` command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SENTENCE = "the loss of a model falls when its data is read in order and its state is kept"


def make_stores(root: Path, documents: Mapping[str, int], *, seq_len: int = 64) -> None:
    """Create `tokenizer`, and `text/NAME` and the packed store `NAME` for each name, in a folder.

    Documents have 8 to 177 words and are deterministic; the tokenizer is trained on those of the first name.

    Args:
        root: existing folder.
        documents: number of documents by store name.
        seq_len: tokens per row.
    """
    words = SENTENCE.split()
    for name, n_documents in documents.items():
        folder = root / "text" / name
        folder.mkdir(parents=True)
        for i in range(n_documents):
            text = " ".join(words[(i * 5 + j * j + j // 7) % len(words)] for j in range(8 + 13 * i % 170))
            (folder / f"{i:03}.txt").write_text(f"{name} {i}: {text}.\n", encoding="utf-8")
    first = next(iter(documents))
    _run_lt_data(root, "train-tokenizer", f"text/{first}", "--vocab-size", "320", "--out", "tokenizer")
    for name in documents:
        _run_lt_data(root, "prepare", f"text/{name}", "--tokenizer", "tokenizer", "--out", name)
        _run_lt_data(root, "pack", name, "--seq-len", str(seq_len), "--mode", "bfd")


def _run_lt_data(root: Path, *args: str) -> None:
    command = [sys.executable, "-m", "lt_data", *args]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}: {result.stderr}"
