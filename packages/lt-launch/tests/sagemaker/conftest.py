"""Golden files of this folder."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares text with a file of `data/`; LT_WRITE_GOLDEN=1 writes it, to be looked at before it is committed."""

    def compare(name: str, text: str) -> None:
        path = DATA / name
        if os.environ.get("LT_WRITE_GOLDEN"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a small packed token store."""
    root = tmp_path_factory.mktemp("data")
    words = [
        "the",
        "loss",
        "of",
        "a",
        "model",
        "falls",
        "when",
        "its",
        "data",
        "is",
        "read",
        "in",
        "order",
        "and",
        "its",
        "state",
        "is",
        "kept",
    ]
    (root / "text").mkdir()
    for i in range(60):
        text = " ".join(words[(i * 5 + j * j + j // 7) % len(words)] for j in range(8 + 13 * i % 170))
        (root / "text" / f"{i:03}.txt").write_text(f"train {i}: {text}.\n")
    lt = str(Path(sys.executable).with_name("lt"))
    for command in (
        ["train-tokenizer", "text", "--vocab-size", "320", "--out", "tokenizer"],
        ["prepare", "text", "--tokenizer", "tokenizer", "--out", "store"],
        ["pack", "store", "--seq-len", "64", "--mode", "bfd"],
    ):
        subprocess.run([lt, "data", *command], cwd=root, check=True, capture_output=True)
    return root
