"""Exact deduplication by 128 bits of SHA-256: 16 bytes of memory per distinct document, at most 32.

The hashes are stored as sorted runs. A block of new hashes is looked up in every run by binary search and becomes a new
run; runs of similar size are merged, so there are at most log2(n) runs and each hash is moved log2(n) times. The 32
bytes are reached while the two longest runs are merged. A collision is expected once in 10^19 documents. Uses only
numpy, and does not depend on Python's hash order.
"""

import hashlib

import numpy as np

HASH_DTYPE = np.dtype("S16")  # numpy compares these bytewise; a trailing 0 byte equals padding


def hash_text(content: bytes) -> bytes:
    """Return the hash (16 bytes) of a text document, given in UTF-8."""
    return hashlib.sha256(content).digest()[:16]


def hash_ids(ids: np.ndarray) -> bytes:
    """Return the hash (16 bytes) of a document given as ids; it never equals that of a text."""
    return hashlib.sha256(b"\xffids" + ids.astype("<u4").tobytes()).digest()[:16]  # 0xff begins no UTF-8


class DocumentHashSet:
    """Growing set of document hashes."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(run.size for run in self._runs)

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Add hashes (S16 [n]); return a mask of those not in the set or earlier in `hashes` (bool [n])."""
        is_new = np.zeros(hashes.size, bool)
        distinct, first = np.unique(hashes, return_index=True)
        unseen = np.ones(distinct.size, bool)
        for run in self._runs:
            position = np.searchsorted(run, distinct)
            unseen &= run[np.minimum(position, run.size - 1)] != distinct
        is_new[first[unseen]] = True
        if unseen.any():
            self._runs.append(distinct[unseen])
        while len(self._runs) > 1 and 2 * self._runs[-1].size > self._runs[-2].size:
            merged = np.concatenate((self._runs.pop(-2), self._runs.pop()))
            merged.sort(kind="stable")  # merges the two sorted halves
            self._runs.append(merged)
        return is_new
