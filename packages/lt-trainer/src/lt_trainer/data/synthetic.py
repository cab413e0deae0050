"""Synthetic rows of random ids, to measure an engine or try out a layout without data.

The ids of row r are a function of (seed, r) alone: the 64-bit words of Philox4x64-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011) with the seed as key and r in the counter's second word, each scaled to the
vocabulary by its upper 32 bits. So any rank computes any row without state. Row r is at position r of the global
sequence; there are no epochs and no shuffling. Every position has a label: row r has T + 1 ids, the first T as input,
the last T as labels.

The lowest reachable loss is ln(vocabulary). Cost: 10 microseconds per row and a few nanoseconds per id.
"""

import numpy as np

from lt_data import DataError, RowReader
from lt_data.streaming.rows import TokenRows

UNBOUNDED_ROWS = 2**62
"""Number of rows reported: more than any run reads."""


class SyntheticRows:
    """Rows of random ids, for `lt_data.Stream`.

    Args:
        vocab_size: ids are less than this.
        seq_len: positions per row.
        seed: seed of the ids.
    """

    n_rows = UNBOUNDED_ROWS

    def __init__(self, *, vocab_size: int, seq_len: int, seed: int) -> None:
        self.vocab_size, self.seq_len, self._seed = vocab_size, seq_len, seed

    def fingerprint_at(self, position: int) -> dict[str, str]:
        """Return the description of the rows, the same at every position."""
        return {"synthetic": "2", "vocab_size": str(self.vocab_size), "seq_len": str(self.seq_len)}

    def rows_at(self, position: int, count: int, *, seed: int, shuffle: bool) -> np.ndarray:
        """Return the rows at some positions: row p at position p (int64 [count])."""
        return np.arange(position, position + count)

    def epochs_at(self, position: int, count: int) -> np.ndarray:
        """Return the epochs of some positions: all 0 (int64 [count])."""
        return np.zeros(count, np.int64)

    def locate(self, row: int) -> tuple[str, RowReader, int]:
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
        n, length = len(rows), self.seq_len
        ids = np.stack([self._ids(int(row)) for row in rows]).astype("<u2" if self.vocab_size <= 2**16 else "<u4")
        where = {"slice_row": np.arange(n), "slice_begin": np.arange(n) * length, "slice_length": np.full(n, length)}
        last = {"next_ids": ids[:, -1].copy(), "has_next": np.ones(n, bool)}
        return TokenRows(input_ids=ids[:, :-1].copy(), document_mask=True, max_segments_per_row=1, **where, **last)

    def _ids(self, row: int) -> np.ndarray:
        """Return the seq_len + 1 ids of a row."""
        words = np.random.Philox(key=self._seed, counter=[0, row, 0, 0]).random_raw(self.seq_len + 1)
        return ((words >> np.uint64(32)) * np.uint64(self.vocab_size)) >> np.uint64(32)
