"""Text, a tokenizer and packed stores for tests, made with the commands that a person would type."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["make_stores"]

SENTENCE = "the loss of a model falls when its data is read in order and its state is kept"


def make_stores(root: Path, documents: Mapping[str, int], *, seq_len: int = 64) -> None:
    """Make `tokenizer` and, for each name, `text/NAME` with so many documents and the packed store `NAME` in a folder.

    The documents have 8 to 177 words, the same ones each time; the tokenizer learns from the first name's.

    Args:
        root: the folder, which exists.
        documents: how many each store has, by its name.
        seq_len: tokens of a row.
    """
    words = SENTENCE.split()
    for name, number in documents.items():
        folder = root / "text" / name
        folder.mkdir(parents=True)
        for i in range(number):
            text = " ".join(words[(i * 5 + j * j + j // 7) % len(words)] for j in range(8 + 13 * i % 170))
            (folder / f"{i:03}.txt").write_text(f"{name} {i}: {text}.\n", encoding="utf-8")
    first = next(iter(documents))
    _data(root, "train-tokenizer", f"text/{first}", "--vocab-size", "320", "--out", "tokenizer")
    for name in documents:
        _data(root, "prepare", f"text/{name}", "--tokenizer", "tokenizer", "--out", name)
        _data(root, "pack", name, "--seq-len", str(seq_len), "--mode", "bfd")


def _data(root: Path, *words: str) -> None:
    command = [str(Path(sys.executable).with_name("lt-data")), *words]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
