"""Documents for the quickstart: Python's standard library, or the user's folder or file.

The standard library exists on every machine, is real text with structure to learn, and its file list depends only on
the interpreter's version. One document in twenty, chosen by a hash of its name, is held out for validation. Written as
JSON Lines, so that every later stage can be repeated by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from lt_data import Document
from lt_data.sources.reader import read_documents
from lt_trainer.quickstart.settings import QuickstartError

VALIDATION_SHARE = 20
"""One document in this many is held out for validation."""
EXCLUDED_FOLDERS = frozenset(
    {"__pycache__", "config", "dist-packages", "encodings", "idlelib", "lib2to3", "site-packages", "test", "tests"}
)
"""Folders that not every distribution ships, that are not part of the library, or that contain generated tables."""


def standard_library() -> Iterator[Document]:
    """Yield the sources of the standard library by name, without files that are not UTF-8."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if EXCLUDED_FOLDERS.isdisjoint(name.split("/")):
            try:
                yield Document(text=path.read_bytes().decode("utf-8"), source=name)
            except UnicodeDecodeError:
                continue  # declares another encoding


def write_corpus(folder: Path, source: str) -> tuple[int, int]:
    """Split the documents and write train.jsonl and validation.jsonl.

    Args:
        folder: Folder to make, which appears once it is complete.
        source: Folder or file with text; "" for the standard library.

    Returns:
        Numbers of documents for training and for validation.

    Raises:
        QuickstartError: Fewer than two documents with text, or the files cannot be written.
        DataError: The source cannot be read.
    """
    documents = [d for d in (read_documents([source]) if source else standard_library()) if d.as_text().strip()]
    if len(documents) < 2:
        raise QuickstartError(
            f"--source {source or 'standard library'}: {len(documents)} document(s) with text; at least two are needed,"
            " one for training and one for validation (a text file or a line of a .jsonl file is one document)"
        )
    ranked = sorted(range(len(documents)), key=lambda i: hashlib.sha256(documents[i].source.encode()).digest())
    held_out = set(ranked[: max(1, len(documents) // VALIDATION_SHARE)])
    texts = {"train": "", "validation": ""}
    for i, document in enumerate(documents):
        line = json.dumps({"text": document.as_text(), "source": document.source}) + "\n"
        texts["validation" if i in held_out else "train"] += line
    try:
        temporary = folder.with_name(f".{folder.name}.tmp")
        temporary.mkdir(exist_ok=True)
        for name, text in texts.items():
            (temporary / f"{name}.jsonl").write_text(text, encoding="utf-8")
        os.replace(temporary, folder)
    except OSError as exc:
        raise QuickstartError(f"cannot write {folder}: {exc.strerror}; free space or choose another --out") from exc
    return len(documents) - len(held_out), len(held_out)
