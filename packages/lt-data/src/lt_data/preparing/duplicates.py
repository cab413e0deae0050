"""Which documents were there before, by 128 bits of SHA-256: 16 bytes of memory per distinct document, 32 at the most.

The hashes are kept as sorted runs. A block of new ones is looked up in every run by bisection and becomes a run of its
own; runs of like size are merged, so there are at most log2(n) of them and each hash is moved log2(n) times. The 32
bytes are reached while the two longest runs are merged. Two different documents that pass for equal are to be expected
once among 10^19 documents. Only numpy; nothing here depends on the order in which Python hashes.
"""

import hashlib

import numpy as np

HASH = np.dtype("S16")  # numpy compares such strings byte by byte, and a trailing 0 equals the padding that it is


def hash_text(content: bytes) -> bytes:
    """The hash of a document that is text, given in UTF-8 (16 bytes)."""
    return hashlib.sha256(content).digest()[:16]


def hash_ids(ids: np.ndarray) -> bytes:
    """The hash of a document that came as ids (16 bytes); it never equals that of a text."""
    return hashlib.sha256(b"\xffids" + ids.astype("<u4").tobytes()).digest()[:16]  # 0xff begins no UTF-8


class SeenHashes:
    """A growing set of hashes."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(run.size for run in self._runs)

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Add hashes (S16 [n]); tells of each (bool [n]) whether it was new: not there, and not earlier among them."""
        new = np.zeros(hashes.size, bool)
        distinct, first = np.unique(hashes, return_index=True)
        fresh = np.ones(distinct.size, bool)
        for run in self._runs:
            place = np.searchsorted(run, distinct)
            found = run[np.minimum(place, run.size - 1)] == distinct
            fresh &= ~found
        new[first[fresh]] = True
        if fresh.any():
            self._runs.append(distinct[fresh])
        while len(self._runs) > 1 and 2 * self._runs[-1].size > self._runs[-2].size:
            merged = np.concatenate((self._runs.pop(-2), self._runs.pop()))
            merged.sort(kind="stable")  # finds the two sorted halves and merges them
            self._runs.append(merged)
        return new
