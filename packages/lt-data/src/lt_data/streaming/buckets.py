"""Length buckets: rows of several lengths in one stream, one length and equally many tokens per step.

A `buckets` pack (lt_data.packing.algorithms) holds rows of T, T/2, T/4, ... tokens, most of them one slice of one
document, so that attention is not spent on unrelated documents ("dataset decomposition", Pouransari and others,
https://arxiv.org/abs/2405.13226). A step of B rows of T tokens reads B rows of the longest bucket or 2B of the next,
and so on. The bucket of a step is a closed form of the step index and the weights (lt_data.streaming.interleave);
weights by phase make a curriculum, such as short rows first. Without weights every bucket is read in proportion to its
size, so that all epochs end together.

Positions of the global sequence count rows of T tokens, and a step takes B of them: a resumed run may change dp_size,
not B. Each bucket has its own epochs, shuffled by its own key.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from lt_data.errors import DataError
from lt_data.packing.pack_index import PackIndex
from lt_data.store.token_store import TokenStore
from lt_data.streaming.interleave import Weight
from lt_data.streaming.phases import Phase, PhasedSchedule
from lt_data.streaming.rows import RowReader, Rows, TokenRows
from lt_data.streaming.shuffle import shuffle_positions


class Buckets:
    """Rows of a `buckets` pack as a sequence of steps; row indices are those of the pack.

    Args:
        store: the token store.
        pack: its pack, of mode `buckets`.
        global_batch_size: rows of the longest bucket in one step; must equal the stream's.
        weights: share of the steps by row length, or phases that begin at a step; None: by size, with at least a
            ten-thousandth of the steps per bucket.
        document_mask: as for `RowReader`.

    Attributes:
        readers: readers by row length, longest first; without empty buckets.

    Raises:
        DataError: another packing mode, no rows, or invalid weights.
    """

    def __init__(
        self,
        store: TokenStore,
        pack: PackIndex,
        *,
        global_batch_size: int,
        weights: Mapping[int, Weight] | Sequence[Phase] | None = None,
        document_mask: bool = True,
    ) -> None:
        if pack.buckets is None:
            raise DataError(f"pack of mode {pack.mode!r}: has no buckets; make one with mode='buckets'")
        if global_batch_size < 1:
            raise DataError(f"global_batch_size = {global_batch_size}: at least 1")
        filled = [(length, rows) for length, rows in pack.buckets if rows]
        if not filled:
            raise DataError("the pack has no rows")
        self.store = store
        self.pack = pack
        self.global_batch_size = global_batch_size
        self.readers = {
            length: RowReader(store, pack.bucket(length), document_mask=document_mask) for length, _ in filled
        }
        self._lengths = tuple(self.readers)
        # a bucket's rows are consecutive in the pack; the omitted buckets are empty
        self._boundaries = np.cumsum([0, *(rows for _, rows in filled)], dtype=np.int64)
        sizes = {length: length * rows for length, rows in filled}
        phases = (
            (Phase(weights=sizes if weights is None else weights),)
            if weights is None or isinstance(weights, Mapping)
            else tuple(weights)
        )
        names = [str(length) for length in self._lengths]
        self._schedule = PhasedSchedule(names, phases, rows_per_slot=global_batch_size, at_least_one=weights is None)

    @property
    def n_rows(self) -> int:
        """Positions (rows of the longest length) in which as many tokens are read as the pack holds."""
        return max(1, self.pack.n_positions // self.pack.seq_len)

    @property
    def seq_len(self) -> int:
        """Tokens in a row of the longest bucket."""
        return self.pack.seq_len

    @property
    def shares(self) -> list[dict[str, int]]:
        """Quantized weights of each phase, by bucket."""
        return self._schedule.shares

    def rows_per_step(self, length: int) -> int:
        """Return the rows of a step that reads the bucket of that length."""
        return self.global_batch_size * (self.seq_len // length)

    def epochs(self, position: int) -> dict[int, float]:
        """Return the epochs of each bucket before a position."""
        counts = self._schedule.counts(self._slot(position))
        return {
            length: counts[str(length)] * self.rows_per_step(length) / reader.n_rows
            for length, reader in self.readers.items()
        }

    def fingerprint_at(self, position: int) -> str:
        """Return the fingerprint of the sequence up to a position, in words."""
        words = [
            f"buckets:{self.pack.seq_len}-{self.pack.fingerprint[:16]}",
            f"global_batch_size:{self.global_batch_size}",
        ]
        longest = next(iter(self.readers.values())).fingerprint.split()
        kept = [word for word in longest if not word.startswith("pack:")]
        return " ".join([*kept, *words, *self._schedule.fingerprint_words(position // self.global_batch_size)])

    def rows_at(self, position: int, count: int, *, seed: int, shuffle: bool) -> np.ndarray:
        """Return the row indices of some steps (int64); `position` and `count` must be whole steps.

        Raises:
            DataError: they are not.
        """
        source, number = self._schedule.lookup(self._slot(position), self._slot(count))
        steps: list[np.ndarray] = [np.zeros(0, np.int64)]
        for j, before in zip(source.tolist(), number.tolist(), strict=True):
            length = self._lengths[j]
            n = self.rows_per_step(length)
            positions = np.arange(before * n, (before + 1) * n)
            key = f"{seed}/{length}" if shuffle else None
            steps.append(shuffle_positions(positions, self.readers[length].n_rows, key) + self._boundaries[j])
        return np.concatenate(steps)

    def epochs_at(self, position: int, count: int) -> np.ndarray:
        """Return the epoch of its bucket, from 0, of each row that `rows_at` returns (int64)."""
        source, number = self._schedule.lookup(self._slot(position), self._slot(count))
        steps: list[np.ndarray] = [np.zeros(0, np.int64)]
        for j, before in zip(source.tolist(), number.tolist(), strict=True):
            n = self.rows_per_step(self._lengths[j])
            steps.append(np.arange(before * n, (before + 1) * n) // self.readers[self._lengths[j]].n_rows)
        return np.concatenate(steps)

    def locate(self, row: int) -> tuple[RowReader, int]:
        """Return the reader of the row's bucket, and the row index there."""
        j = self._bucket_index(np.array([row]))
        return self.readers[self._lengths[j]], row - int(self._boundaries[j])

    def count_labels(self, rows: np.ndarray) -> int:
        """Return the total number of labels in some rows."""
        return int(self.pack.valid[rows].sum(dtype=np.int64))

    def read_rows(self, rows: np.ndarray) -> Rows:
        """Read the given rows of one bucket, in this order, as int32 arrays."""
        return self.read_token_rows(rows).to_int32()

    def read_token_rows(self, rows: np.ndarray) -> TokenRows:
        """Read the given rows of one bucket, in this order, in the store's dtype."""
        j = self._bucket_index(np.asarray(rows, np.int64))
        return self.readers[self._lengths[j]].read_token_rows(rows - self._boundaries[j])

    def _bucket_index(self, rows: np.ndarray) -> int:
        if not rows.size or not (rows.min() >= 0 and rows.max() < self._boundaries[-1]):
            raise IndexError(f"rows must not be empty and in 0..{self._boundaries[-1] - 1}")
        indices = sorted(set((np.searchsorted(self._boundaries, rows, side="right") - 1).tolist()))
        if len(indices) > 1:
            raise IndexError(f"rows must be of one bucket, not of {[self._lengths[j] for j in indices]}")
        return indices[0]

    def _slot(self, position: int) -> int:
        if position % self.global_batch_size:
            raise DataError(
                f"{position} rows: not whole steps of the buckets' global_batch_size = {self.global_batch_size}; give "
                "the stream the same global_batch_size, and skip a multiple of it"
            )
        return position // self.global_batch_size
