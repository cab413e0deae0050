"""Rows of random ids: training without data, to measure an engine and to try out a layout.

The id at place t of row r is a function of (seed, r, t) alone: the 64-bit finalizer of SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014) over a counter, whose upper 32 bits are scaled to the
vocabulary. So any rank makes any row, at any time, without a state, in integer arithmetic that is the same everywhere.
Row r stands at position r of the global sequence; there are no epochs and no shuffle. Every position has a label, since
a row is cut from one text that never ends: row r has T + 1 ids of its own, the first T as input, the last T as labels.

A model that has learnt all there is to learn has the loss ln(vocabulary). Cost: 10 to 20 nanoseconds per id.
"""

from __future__ import annotations

import hashlib

import numpy as np

from lt_data import DataError, RowReader, TokenRows

ENDLESS = 2**62
"""Rows that are said to be there: more than any run reads."""
_BLOCK_IDS = 2**20


class SyntheticRows:
    """Rows of random ids, for `lt_data.Stream`.

    Args:
        vocab_size: ids are below it.
        seq_len: positions of a row.
        seed: another seed gives other rows.
    """

    def __init__(self, *, vocab_size: int, seq_len: int, seed: int) -> None:
        self.vocab_size, self.seq_len, self._seed = vocab_size, seq_len, seed
        self.n_rows = ENDLESS
        self._dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")

    def fingerprint_at(self, position: int) -> str:
        """What the rows are, in words; the same at every position."""
        assert position >= 0
        return f"synthetic:1 vocab_size:{self.vocab_size} seq_len:{self.seq_len}"

    def rows_at(self, position: int, count: int, *, seed: int, shuffle: bool) -> np.ndarray:
        """Row p stands at position p (int64 [count])."""
        return np.arange(position, position + count)

    def epochs_at(self, position: int, count: int) -> np.ndarray:
        """All rows are of one epoch (int64 [count])."""
        return np.zeros(count, np.int64)

    def locate(self, row: int) -> tuple[RowReader, int]:
        """No store has the row.

        Raises:
            DataError: always.
        """
        raise DataError(f"row {row} is made of random ids and stands in no store")

    def labels_in(self, rows: np.ndarray) -> int:
        """Positions with a label in some rows together: all."""
        return rows.size * self.seq_len

    def compact(self, rows: np.ndarray) -> TokenRows:
        """The rows of these numbers, in this order."""
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
        )

    def _ids(self, rows: np.ndarray) -> np.ndarray:
        """The seq_len + 1 ids of each row."""
        key = np.frombuffer(hashlib.sha256(f"lt synthetic rows 1 {self._seed}".encode()).digest()[:8], "<u8")
        # A row's key is mixed before places are counted from it: rows overlap nowhere, whatever the row length.
        row_keys = _mixed(rows.astype(np.uint64) * _GAMMA + key)
        places = np.arange(self.seq_len + 1, dtype=np.uint64) * _GAMMA
        return ((_mixed(row_keys[:, None] + places) >> _32) * np.uint64(self.vocab_size)) >> _32


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer, in place."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
