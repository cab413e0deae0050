"""Documents for the quickstart: the standard library of the running interpreter, or the person's own folder or file.

The standard library is in every Python, is real text with structure to learn, and its file list depends on the
interpreter's version alone. One document in twenty, chosen by a hash of its name, is kept for validation; a document is
never split between the two. Written as JSON lines, so that every later step can be repeated by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lt_data import Document, read_documents
from lt_trainer.quickstart.settings import Folder, QuickstartError

VALIDATION_SHARE = 20
"""One document in this many is for validation."""
LEFT_OUT = frozenset(
    {"__pycache__", "config", "dist-packages", "encodings", "idlelib", "lib2to3", "site-packages", "test", "tests"}
)
"""Folders that not every distribution ships, that are no part of the library, or that hold generated tables."""


@dataclass(frozen=True, kw_only=True)
class CorpusCounts:
    """How much text there is."""

    train_documents: int
    train_bytes: int
    validation_documents: int
    validation_bytes: int


def standard_library() -> Iterator[Document]:
    """The sources of the interpreter's standard library, sorted by name; files that are not UTF-8 are left out."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if LEFT_OUT.isdisjoint(name.split("/")):
            try:
                yield Document(text=path.read_bytes().decode("utf-8"), source=name)
            except UnicodeDecodeError:
                continue  # a source in another declared encoding


def documents(source: str) -> Iterator[Document]:
    """The documents of the quickstart."""
    return read_documents([source]) if source else standard_library()


def write_corpus(folder: Folder, source: str) -> CorpusCounts:
    """Split the documents and write both halves.

    Raises:
        QuickstartError: fewer than two documents with text, or the disk is full.
        DataError: the source cannot be read.
    """
    ranked = sorted(
        (hashlib.sha256(document.source.encode()).hexdigest(), i)
        for i, document in enumerate(documents(source))
        if document.as_text().strip()
    )
    if len(ranked) < 2:
        raise QuickstartError(
            f"--source {source or 'standard library'}: {len(ranked)} document(s) with text; at least two are "
            "needed, one to train on and one to validate on. "
            "A text file is one document, a line of a .jsonl file is one"
        )
    validation = {i for _, i in ranked[: max(1, len(ranked) // VALIDATION_SHARE)]}
    used = {i for _, i in ranked}
    counts = {True: [0, 0], False: [0, 0]}
    temporary = {True: folder.corpus_validation.with_suffix(".tmp"), False: folder.corpus_train.with_suffix(".tmp")}
    try:
        folder.corpus_train.parent.mkdir(exist_ok=True)
        with (
            open(temporary[True], "w", encoding="utf-8") as kept,
            open(temporary[False], "w", encoding="utf-8") as train,
        ):
            for i, document in enumerate(documents(source)):
                if i in used:
                    count = counts[i in validation]
                    count[0] += 1
                    count[1] += len(document.as_text().encode())
                    (kept if i in validation else train).write(
                        json.dumps({"text": document.as_text(), "source": document.source}) + "\n"
                    )
        os.replace(temporary[False], folder.corpus_train)
        os.replace(temporary[True], folder.corpus_validation)
    except OSError as exc:
        raise QuickstartError(
            f"cannot write the corpus to {folder.out}: {exc.strerror}; free space or name another folder with --out"
        ) from exc
    return CorpusCounts(
        train_documents=counts[False][0],
        train_bytes=counts[False][1],
        validation_documents=counts[True][0],
        validation_bytes=counts[True][1],
    )
