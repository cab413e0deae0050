"""Synthetic rows of random ids, to measure an engine or try out a layout without data.

The id at position t of row r is a function of (seed, r, t) alone: the 64-bit finalizer of SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014) over a counter, whose upper 32 bits are scaled to the
vocabulary. So any rank computes any row without state, in integer arithmetic that is the same everywhere. Row r is at
position r of the global sequence; there are no epochs and no shuffling. Every position has a label: row r has T + 1
ids, the first T as input, the last T as labels.

The lowest reachable loss is ln(vocabulary). Cost: 10 to 20 nanoseconds per id.
"""

from __future__ import annotations

import hashlib

import numpy as np

from lt_data import DataError, RowReader, TokenRows

UNBOUNDED_ROWS = 2**62
"""Number of rows reported: more than any run reads."""
_BLOCK_IDS = 2**20


class SyntheticRows:
    """Rows of random ids, for `lt_data.Stream`.

    Args:
        vocab_size: ids are less than this.
        seq_len: positions per row.
        seed: seed of the ids.
    """

    def __init__(self, *, vocab_size: int, seq_len: int, seed: int) -> None:
        self.vocab_size, self.seq_len, self._seed = vocab_size, seq_len, seed
        self.n_rows = UNBOUNDED_ROWS
        self._dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")

    def fingerprint_at(self, position: int) -> str:
        """Return the description of the rows, the same at every position."""
        assert position >= 0
        return f"synthetic:1 vocab_size:{self.vocab_size} seq_len:{self.seq_len}"

    def rows_at(self, position: int, count: int, *, seed: int, shuffle: bool) -> np.ndarray:
        """Return the rows at some positions: row p at position p (int64 [count])."""
        return np.arange(position, position + count)

    def epochs_at(self, position: int, count: int) -> np.ndarray:
        """Return the epochs of some positions: all 0 (int64 [count])."""
        return np.zeros(count, np.int64)

    def locate(self, row: int) -> tuple[RowReader, int]:
        """Raise: no store has the row.

        Raises:
            DataError: always.
        """
        raise DataError(f"row {row} is synthetic; no store has it")

    def count_labels(self, rows: np.ndarray) -> int:
        """Return the total number of labels of some rows: all positions."""
        return rows.size * self.seq_len

    def read_token_rows(self, rows: np.ndarray) -> TokenRows:
        """Return the rows with these numbers, in this order."""
        rows = np.asarray(rows, np.int64)
        n, width = rows.size, self.seq_len + 1
        ids = np.empty((n, width), self._dtype)
        per_block = max(1, _BLOCK_IDS // width)
        for start in range(0, n, per_block):
            ids[start : start + per_block] = self._ids(rows[start : start + per_block])
        return TokenRows(
            input_ids=ids[:, :-1].copy(),
            slice_row=np.arange(n),
            slice_begin=np.arange(n) * self.seq_len,
            slice_length=np.full(n, self.seq_len),
            next_ids=ids[:, -1].copy(),
            has_next=np.ones(n, bool),
            document_mask=True,
            max_segments_per_row=1,
        )

    def _ids(self, rows: np.ndarray) -> np.ndarray:
        """Return the seq_len + 1 ids of each row."""
        key = np.frombuffer(hashlib.sha256(f"lt synthetic rows 1 {self._seed}".encode()).digest()[:8], "<u8")
        # The row's key is hashed before positions are added, so rows do not overlap at any row length.
        row_keys = _splitmix64(rows.astype(np.uint64) * _GAMMA + key)
        positions = np.arange(self.seq_len + 1, dtype=np.uint64) * _GAMMA
        return ((_splitmix64(row_keys[:, None] + positions) >> _32) * np.uint64(self.vocab_size)) >> _32


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 in place."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
