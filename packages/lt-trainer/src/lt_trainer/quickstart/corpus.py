"""Documents for the quickstart: Python's standard library, or the user's folder or file.

The standard library exists on every machine, is real text with structure to learn, and its file list depends only on
the interpreter's version. One document in twenty, chosen by a hash of its name, is held out for validation. Written as
JSON Lines, so that every later stage can be repeated by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lt_data import Document, read_documents
from lt_trainer.quickstart.settings import QuickstartError, QuickstartFolder

VALIDATION_SHARE = 20
"""One document in this many is held out for validation."""
EXCLUDED_FOLDERS = frozenset(
    {"__pycache__", "config", "dist-packages", "encodings", "idlelib", "lib2to3", "site-packages", "test", "tests"}
)
"""Folders that not every distribution ships, that are not part of the library, or that contain generated tables."""


@dataclass(frozen=True, kw_only=True)
class CorpusCounts:
    """Documents and bytes of the corpus."""

    train_documents: int
    train_bytes: int
    validation_documents: int
    validation_bytes: int


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


def documents(source: str) -> Iterator[Document]:
    """Return the documents of `source`, by default of the standard library."""
    return read_documents([source]) if source else standard_library()


def write_corpus(folder: QuickstartFolder, source: str) -> CorpusCounts:
    """Split the documents and write the training and validation files.

    Raises:
        QuickstartError: fewer than two documents with text, or the files cannot be written.
        DataError: the source cannot be read.
    """
    ranked = sorted(
        (hashlib.sha256(document.source.encode()).hexdigest(), i)
        for i, document in enumerate(documents(source))
        if document.as_text().strip()
    )
    if len(ranked) < 2:
        raise QuickstartError(
            f"--source {source or 'standard library'}: {len(ranked)} document(s) with text; at least two are needed, "
            "one for training and one for validation (a text file or a line of a .jsonl file is one document)"
        )
    validation = {i for _, i in ranked[: max(1, len(ranked) // VALIDATION_SHARE)]}
    used = {i for _, i in ranked}
    counts = {True: [0, 0], False: [0, 0]}
    suffix = f".{secrets.token_hex(8)}.tmp"  # not to be guessed, and made new: a link there would be followed
    temporary = {True: folder.corpus_validation.with_suffix(suffix), False: folder.corpus_train.with_suffix(suffix)}
    try:
        folder.corpus_train.parent.mkdir(exist_ok=True)
        with (
            open(temporary[True], "x", encoding="utf-8") as validation_file,
            open(temporary[False], "x", encoding="utf-8") as train_file,
        ):
            for i, document in enumerate(documents(source)):
                if i in used:
                    count = counts[i in validation]
                    count[0] += 1
                    count[1] += len(document.as_text().encode())
                    (validation_file if i in validation else train_file).write(
                        json.dumps({"text": document.as_text(), "source": document.source}) + "\n"
                    )
        os.replace(temporary[False], folder.corpus_train)
        os.replace(temporary[True], folder.corpus_validation)
    except OSError as exc:
        raise QuickstartError(
            f"cannot write the corpus to {folder.out}: {exc.strerror}; free space or choose another folder with --out"
        ) from exc
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return CorpusCounts(
        train_documents=counts[False][0],
        train_bytes=counts[False][1],
        validation_documents=counts[True][0],
        validation_bytes=counts[True][1],
    )
