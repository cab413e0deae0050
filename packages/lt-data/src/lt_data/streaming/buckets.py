"""Rows of several lengths in one stream: each step one length, and as many tokens in every step.

A `buckets` pack (lt_data.packing.filling) holds rows of T, T/2, T/4, ... tokens, most of them one piece of one
document, so that attention costs what the documents need and no row joins strangers ("dataset decomposition",
Pouransari and others, https://arxiv.org/abs/2405.13226). A step of B rows of T tokens is B rows of the longest bucket
or 2B of the next, and so on. Which bucket a step reads is a closed form of the step's number and the weights
(lt_data.streaming.apportion); weights by phase make a curriculum, short rows first. Without weights every bucket is
read at the rate of its size, so that all their epochs end together.

Positions of the global sequence count rows of T tokens, and a step takes B of them: dp_size may change in a run that
goes on, B may not. Each bucket has its own epochs, shuffled by its own key.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from lt_data.errors import DataError
from lt_data.packing.packs import PackIndex
from lt_data.store.token_store import TokenStore
from lt_data.streaming.apportion import Weight
from lt_data.streaming.order import shuffled_rows
from lt_data.streaming.phases import Phase, PhasedTurns
from lt_data.streaming.rows import RowReader, Rows, TokenRows


class Buckets:
    """The rows of a `buckets` pack as a sequence of steps. A row's number is its number in the pack.

    Args:
        store: the tokens.
        pack: of mode `buckets`.
        global_batch: rows of the longest bucket in one step; the stream's must be the same.
        weights: share of the steps, by length of the rows, or phases that begin with a step; None: by size, where a
            bucket below a ten-thousandth of the tokens gets a ten-thousandth of the steps.
        document_mask: as of `RowReader`.

    Attributes:
        readers: by length of the rows, longest first; buckets without rows are left out.

    Raises:
        DataError: another mode of pack, no rows, or wrong weights.
    """

    def __init__(
        self,
        store: TokenStore,
        pack: PackIndex,
        *,
        global_batch: int,
        weights: Mapping[int, Weight] | Sequence[Phase] | None = None,
        document_mask: bool = True,
    ) -> None:
        if pack.buckets is None:
            raise DataError(f"a pack of mode {pack.mode!r} has no buckets; make one with mode='buckets'")
        if global_batch < 1:
            raise DataError(f"global_batch={global_batch}: at least 1")
        filled = [(length, rows) for length, rows in pack.buckets if rows]
        if not filled:
            raise DataError("the pack has no rows")
        self.store = store
        self.pack = pack
        self.global_batch = global_batch
        self.readers = {
            length: RowReader(store, pack.bucket(length), document_mask=document_mask) for length, _ in filled
        }
        self._lengths = tuple(self.readers)
        # A bucket's rows lie together in the pack, and those that are left out hold none.
        self._borders = np.cumsum([0, *(rows for _, rows in filled)], dtype=np.int64)
        sizes = {length: length * rows for length, rows in filled}
        phases = (
            (Phase(weights=sizes if weights is None else weights),)
            if weights is None or isinstance(weights, Mapping)
            else tuple(weights)
        )
        names = [str(length) for length in self._lengths]
        self._turns = PhasedTurns(names, phases, rows_per_turn=global_batch, at_least_one=weights is None)

    @property
    def n_rows(self) -> int:
        """Positions, rows of the longest length, in which as many tokens are read as there are."""
        return max(1, self.pack.positions // self.pack.seq_len)

    @property
    def seq_len(self) -> int:
        """Tokens in a row of the longest bucket."""
        return self.pack.seq_len

    @property
    def shares(self) -> list[dict[str, int]]:
        """The parts of each bucket in each phase, as whole numbers: what the weights were rounded to."""
        return self._turns.shares

    def rows_per_step(self, length: int) -> int:
        """Rows of a step that reads the bucket of that length."""
        return self.global_batch * (self.seq_len // length)

    def epochs(self, position: int) -> dict[int, float]:
        """How often each bucket was read before a position."""
        counts = self._turns.counts(self._turn(position))
        return {
            length: counts[str(length)] * self.rows_per_step(length) / reader.n_rows
            for length, reader in self.readers.items()
        }

    def fingerprint_at(self, position: int) -> str:
        """What the sequence up to a position is made of, in words."""
        words = [f"buckets:{self.pack.seq_len}-{self.pack.fingerprint[:16]}", f"global_batch:{self.global_batch}"]
        longest = next(iter(self.readers.values())).fingerprint.split()
        kept = [word for word in longest if not word.startswith("pack:")]
        return " ".join([*kept, *words, *self._turns.words(position // self.global_batch)])

    def rows_at(self, position: int, count: int, *, seed: int, shuffle: bool) -> np.ndarray:
        """Numbers in the pack of the rows of some steps (int64); positions and their number are whole steps.

        Raises:
            DataError: they are not.
        """
        source, number = self._turns.at(self._turn(position), self._turn(count))
        steps: list[np.ndarray] = [np.zeros(0, np.int64)]
        for j, before in zip(source.tolist(), number.tolist(), strict=True):
            length = self._lengths[j]
            n = self.rows_per_step(length)
            positions = np.arange(before * n, (before + 1) * n)
            key = f"{seed}/{length}" if shuffle else None
            steps.append(shuffled_rows(positions, self.readers[length].n_rows, key) + self._borders[j])
        return np.concatenate(steps)

    def epochs_at(self, position: int, count: int) -> np.ndarray:
        """Which pass over its bucket each of the rows that `rows_at` gives belongs to, from 0 (int64)."""
        source, number = self._turns.at(self._turn(position), self._turn(count))
        steps: list[np.ndarray] = [np.zeros(0, np.int64)]
        for j, before in zip(source.tolist(), number.tolist(), strict=True):
            n = self.rows_per_step(self._lengths[j])
            steps.append(np.arange(before * n, (before + 1) * n) // self.readers[self._lengths[j]].n_rows)
        return np.concatenate(steps)

    def locate(self, row: int) -> tuple[RowReader, int]:
        """The reader of the bucket that has a row, and its number there."""
        j = self._bucket_of(np.array([row]))
        return self.readers[self._lengths[j]], row - int(self._borders[j])

    def labels_in(self, rows: np.ndarray) -> int:
        """Positions with a label in some rows together."""
        return int(self.pack.valid[rows].sum(dtype=np.int64))

    def gather(self, rows: np.ndarray) -> Rows:
        """The rows of these numbers, all of one bucket, in this order, as int32 arrays."""
        return self.compact(rows).widen()

    def compact(self, rows: np.ndarray) -> TokenRows:
        """The rows of these numbers, all of one bucket, in this order, as the store holds them."""
        j = self._bucket_of(np.asarray(rows, np.int64))
        return self.readers[self._lengths[j]].compact(rows - self._borders[j])

    def _bucket_of(self, rows: np.ndarray) -> int:
        if not rows.size or not (rows.min() >= 0 and rows.max() < self._borders[-1]):
            raise IndexError(f"rows must be some and in 0..{self._borders[-1] - 1}")
        found = sorted(set((np.searchsorted(self._borders, rows, side="right") - 1).tolist()))
        if len(found) > 1:
            raise IndexError(f"rows of one bucket at a time, not of {[self._lengths[j] for j in found]}")
        return found[0]

    def _turn(self, position: int) -> int:
        if position % self.global_batch:
            raise DataError(
                f"{position} rows are not whole steps of global_batch={self.global_batch}, which buckets are read in: "
                "give the stream the same global_batch, and skip a multiple of it"
            )
        return position // self.global_batch
