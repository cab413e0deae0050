"""Counts of a job of several parts without the documents that an earlier part has too.

A part drops its own duplicates, and lists the documents that it encoded (lt_data.preparation.store_writer). A document
that an earlier part has too would not have been encoded by one process, so it counts as a duplicate, whatever the part
counted it as.

Cost: one read of the list.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.preparation.counts import DocumentCounts
from lt_data.preparation.store_writer import (
    DOCUMENTS,
    ENTRY_DTYPE,
    PART_FOLDER,
    SOURCES,
    SPECIAL_STRINGS,
    filter_by_tokens,
)
from lt_data.storage import open_regular, read_regular, translate_os_errors
from lt_data.store.manifest import DUPLICATE, MANIFEST_FILE, DocumentTotals, StoreManifest

REMEDY = "prepare this part again"


@dataclass(frozen=True, kw_only=True)
class _DocumentSpecials:
    """Line of a part's list of special strings: their counts in a document."""

    document: int
    special: Mapping[str, int]


def check_part_files(path: Path, manifest: StoreManifest) -> None:
    """Compare the lists of a part with their hashes.

    Raises:
        DataError: one is missing or differs.
    """
    assert manifest.part is not None
    needed = [SOURCES, *([DOCUMENTS, SPECIAL_STRINGS] if manifest.selection.drop_duplicates else [])]
    if missing := [name for name in needed if name not in manifest.part.files]:
        raise DataError(f"{path / MANIFEST_FILE}: part.files lists no {missing[0]}; {REMEDY}")
    for name, sha256 in manifest.part.files.items():
        file_path = path / PART_FOLDER / name
        with translate_os_errors("read", file_path), open_regular(file_path, inside=path) as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != sha256:
            raise DataError(f"{file_path}: SHA-256 differs from the manifest: copy the part again")


def read_entries(path: Path) -> np.ndarray:
    """Read the list of the documents that a part encoded (`ENTRY_DTYPE`)."""
    file = path / PART_FOLDER / DOCUMENTS
    with translate_os_errors("read", file):
        return np.fromfile(file, ENTRY_DTYPE)


def add_manifest(counts: DocumentCounts, manifest: StoreManifest) -> None:
    """Add the counts of a part."""
    counts.read += manifest.read
    counts.text_bytes += manifest.text_bytes
    counts.skipped.update(manifest.skipped)
    counts.special_strings.update(manifest.special_strings)
    for reason, amount in manifest.left_out.items():
        counts.left_out[reason] = counts.left_out.get(reason, DocumentTotals()) + amount


def recount_duplicates(
    counts: DocumentCounts,
    path: Path,
    manifest: StoreManifest,
    entries: np.ndarray,
    is_new: np.ndarray,
    *,
    has_text: bool = True,
) -> np.ndarray:
    """Recount the documents of a part that an earlier part has too.

    Args:
        counts: counts that include those of the part.
        path: its folder.
        manifest: its manifest.
        entries: the documents that it encoded (`ENTRY_DTYPE` [n]).
        is_new: which of them no earlier part has (bool [n]).
        has_text: whether the counts have the bytes of texts.

    Returns:
        Which of its stored documents no earlier part has (bool [documents]).

    Raises:
        DataError: the list does not match the manifest.
    """
    tokens = entries["tokens"].astype(np.int64)
    text_bytes = entries["text_bytes"].astype(np.int64) if has_text else np.zeros(entries.size, np.int64)
    stored = np.ones(entries.size, bool)
    for reason, mask in filter_by_tokens(tokens, manifest.selection):
        stored &= ~mask
        _recount(counts, reason, mask & ~is_new, text_bytes, tokens)
    if int(stored.sum()) != manifest.documents or int(tokens[stored].sum()) != manifest.tokens:
        raise DataError(f"{path / PART_FOLDER / DOCUMENTS}: does not match the manifest; {REMEDY}")
    repeated = stored & ~is_new
    _recount(counts, None, repeated, text_bytes, tokens)
    _subtract_special_strings(counts, path / PART_FOLDER / SPECIAL_STRINGS, repeated)
    return is_new[stored]


def _recount(
    counts: DocumentCounts, reason: str | None, mask: np.ndarray, text_bytes: np.ndarray, tokens: np.ndarray
) -> None:
    """Recount documents that were left out for `reason`, or stored (None), as duplicates.

    A single run would not have encoded them, so their ids no longer count as read.
    """
    if not mask.any():
        return
    amount = DocumentTotals(
        documents=int(mask.sum()), text_bytes=int(text_bytes[mask].sum()), tokens=int(tokens[mask].sum())
    )
    if reason is None:
        counts.text_bytes -= amount.text_bytes
    else:
        left = counts.left_out[reason]
        rest = DocumentTotals(
            documents=left.documents - amount.documents,
            text_bytes=left.text_bytes - amount.text_bytes,
            tokens=left.tokens - amount.tokens,
        )
        if rest == DocumentTotals():
            del counts.left_out[reason]
        else:
            counts.left_out[reason] = rest
    counts.read += DocumentTotals(tokens=-amount.tokens)
    counts.add_left_out(DUPLICATE, documents=amount.documents, text_bytes=amount.text_bytes)


def _subtract_special_strings(counts: DocumentCounts, path: Path, repeated: np.ndarray) -> None:
    with translate_os_errors("read", path):
        lines = read_regular(path).splitlines()
    for number, line in enumerate(lines, start=1):
        at = f"{path}:{number}"
        found = strict_json.parse(_DocumentSpecials, strict_json.loads(line, at, REMEDY), at, REMEDY)
        if not 0 <= found.document < repeated.size:
            raise DataError(f"{at}: no document {found.document}; {REMEDY}")
        if repeated[found.document]:
            counts.special_strings -= Counter(found.special)
