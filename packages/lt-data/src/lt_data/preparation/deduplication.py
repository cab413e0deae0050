"""Exact deduplication by 128 bits of SHA-256: documents that an earlier one equals are left out of a store by masks.

The hashes of all documents lie in files, in order. They are compared range by range: range i of n has those whose first
two bytes, as a number, are from i/n to (i+1)/n of 2^16, so that only the hashes of a range are in memory. Equal hashes
are in the same range and stay in the order of the documents. A collision is expected once in 10^19 documents. Uses only
numpy, and does not depend on Python's hash order.

Cost: each range reads the first bytes of all hashes; memory of about 80 bytes per document of a range, and a bool per
document. 8 million documents take 5 s and 0.5 GB.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lt_data.preparation.masking import mask_documents
from lt_data.store.manifest import DUPLICATE, DocumentTotals, StoreManifest
from lt_data.store.token_store import TokenStore

HASH_DTYPE = np.dtype("S16")  # numpy compares these bytewise; a trailing 0 byte equals padding
RANGE_DOCUMENTS = 2**23
"""Documents of a range, on average."""


def hash_text(content: bytes) -> bytes:
    """Return the hash (16 bytes) of a text document, given in UTF-8."""
    return hashlib.sha256(content).digest()[:16]


def hash_ids(ids: np.ndarray) -> bytes:
    """Return the hash (16 bytes) of a document given as ids; it never equals that of a text."""
    return hashlib.sha256(b"\xffids" + ids.astype("<u4").tobytes()).digest()[:16]  # 0xff begins no UTF-8


def find_repeated(hashes: Sequence[np.ndarray], n_ranges: int) -> list[np.ndarray]:
    """Find the documents that an earlier one equals.

    Args:
        hashes: hashes of the documents of each part, in order (S16 [n]).
        n_ranges: number of ranges, 1 to 2^16; the result is the same.

    Returns:
        Masks of the repeated documents of each part (bool [n]).
    """
    repeated = [np.zeros(each.size, bool) for each in hashes]
    for index in range(n_ranges):
        found, ids = [np.zeros(0, HASH_DTYPE)], [np.zeros(0, np.int64)]
        for part, each in enumerate(hashes):
            first_bytes = np.ascontiguousarray(each).view(np.uint8).reshape(-1, 16)[:, :2].astype(np.int64)
            ranges = (first_bytes[:, 0] * 256 + first_bytes[:, 1]) * n_ranges >> 16
            documents = np.flatnonzero(ranges == index)
            found.append(each[documents])
            ids.append(documents | part << 40)
        keys, places = np.concatenate(found), np.concatenate(ids)
        order = np.argsort(keys, kind="stable")
        again = places[order[1:][keys[order[1:]] == keys[order[:-1]]]]
        for part, mask in enumerate(repeated):
            mask[again[again >> 40 == part] & (1 << 40) - 1] = True
    return repeated


def drop_repeated(
    manifest: StoreManifest, folder: Path, hashes: Sequence[np.ndarray], text_bytes: Sequence[np.ndarray]
) -> StoreManifest:
    """Return the manifest of a store without the documents that an earlier one equals; their masks are written.

    Args:
        manifest: the manifest, which is not written yet.
        folder: folder of the store.
        hashes: hashes of the documents of each part, in order (S16 [n]).
        text_bytes: UTF-8 bytes of the text of each [n].

    Raises:
        DataError: a file system error, or a broken index.
    """
    store = TokenStore.of_manifest(folder, manifest)
    repeated = np.concatenate(find_repeated(hashes, max(1, -(-store.n_documents // RANGE_DOCUMENTS))))
    assert repeated.size == store.n_documents, "a document without a hash"
    masked = replace(manifest, parts=mask_documents(store, ~repeated, folder))
    n_bytes = sum(int(sizes[mask].sum()) for sizes, mask in zip(text_bytes, _split(repeated, hashes), strict=True))
    dropped = DocumentTotals(documents=int(repeated.sum()), text_bytes=n_bytes)
    before = manifest.left_out.get(DUPLICATE, DocumentTotals())
    return replace(
        masked,
        text_bytes=manifest.text_bytes - n_bytes,
        # their ids do not count as read: one process would not have encoded them
        read=manifest.read + DocumentTotals(tokens=masked.tokens - manifest.tokens),
        left_out={**manifest.left_out, **({DUPLICATE: before + dropped} if dropped.documents else {})},
        selection=replace(manifest.selection, drop_duplicates=True),
    )


def _split(mask: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    return np.split(mask, np.cumsum([each.size for each in like])[:-1])
