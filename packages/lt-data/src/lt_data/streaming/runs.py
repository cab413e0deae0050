"""Copies of runs of a store, which are ranges of its tokens, into rows.

Rows of one full run each, as in a `concat` pack, are copied by one numpy call: a strided view of all memory from the
lowest map of a shard to the highest has every run as one item of a row's size, and those asked for are taken from it.
Before, a token of each page of all runs is read, so that their cache and page misses overlap. A run that spans two
extents (of two shards, or around documents that are left out) has no such item: instead the last full run up to the end
of its first extent is taken and moved to the front, and the tail is copied behind it. All other runs are joined from
views.

Cost: about 0.2 microseconds a run (1 if it spans extents) plus memory bandwidth, for any number of shards.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from lt_data.packing.algorithms import concat_aranges
from lt_data.store.token_store import TokenStore

_TOUCH_BYTES = 4096  # a page
_RUNS_PER_COPY = 8192  # so that a copy holds no more maps than a process may have


class RunReader:
    """Reader of runs.

    Args:
        store: the token store.
        seq_len: tokens in a row.
    """

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        self.store = store
        self.seq_len = seq_len
        pages = np.arange(0, seq_len, _TOUCH_BYTES // store.dtype.itemsize)
        self._touched = np.unique(np.append(pages, seq_len - 1))  # tokens of a row: of each page, and the last

    @cached_property
    def _has_small_extents(self) -> bool:
        """True if an extent before the last may have no full run."""
        extents = self.store.extents
        return not extents.has_all or bool((np.diff(extents.first_token)[:-1] < self.seq_len).any())

    def copy(self, row: np.ndarray, start: np.ndarray, length: np.ndarray, n: int) -> np.ndarray:
        """Copy runs into zeroed rows, in the store's dtype [n, seq_len].

        Args:
            row: row of each run, in order (int64); the runs of a row fit in it.
            start: global offset of each run, which must be in the store (int64).
            length: tokens in each run (int64).
            n: number of rows.

        Raises:
            DataError: a shard cannot be read.
        """
        if length.size <= _RUNS_PER_COPY or n == 1:
            return self._copy_some(row, start, length, n)
        bounds = np.searchsorted(row, [0, n // 2, n])
        return np.concatenate(
            [
                self.copy(row[a:b] - first, start[a:b], length[a:b], rows)
                for a, b, first, rows in zip(bounds[:-1], bounds[1:], (0, n // 2), (n // 2, n - n // 2), strict=True)
            ]
        )

    def tokens_at(self, positions: np.ndarray) -> np.ndarray | list[int]:
        """Return single tokens by their global offsets (int64 [n])."""
        if positions.size > _RUNS_PER_COPY:
            parts = np.array_split(positions, -(-positions.size // _RUNS_PER_COPY))
            return np.concatenate([self.tokens_at(part) for part in parts])
        extents = self.store.extents
        shard, offset = extents.place(extents.find_tokens(positions), positions)
        if (mapped := self.store.mmap_shards(shard)) is not None:
            ids, begin = mapped
            return ids[offset + begin]
        columns = zip(shard.tolist(), offset.tolist(), strict=True)
        return [int(self.store.read(number, i, i + 1)[0]) for number, i in columns]

    def _copy_some(self, row: np.ndarray, start: np.ndarray, length: np.ndarray, n: int) -> np.ndarray:
        if length.size == n and (rows := self._copy_full(start, length)) is not None:
            return rows
        return self._join(row, start, length, n)

    def _copy_full(self, start: np.ndarray, length: np.ndarray) -> np.ndarray | None:
        """Copy rows of one run each by one numpy call if most are full and in one extent; else None."""
        seq_len, extents = self.seq_len, self.store.extents
        extent = extents.find_tokens(start)
        ends = extents.first_token[extent + 1]
        over = start + seq_len - ends  # tokens that a full row has after the end of the extent
        is_other = (over > 0) | (length != seq_len)
        others = np.flatnonzero(is_other)
        if 2 * others.size >= start.size:
            return None
        shard, source = extents.place(extent, start)
        if not others.size:
            if (mapped := self.store.mmap_shards(shard)) is None:
                return None
            return self._take(mapped[0], source + mapped[1])
        split, rest = others, others[:0]
        source[others] -= over[others]
        if self._has_small_extents or length[others].min() < seq_len:
            next_ends = extents.first_token.take(extent[others] + 2, mode="clip")
            is_split = (length[others] == seq_len) & (source[others] >= 0) & (start[others] + seq_len <= next_ends)
            split, rest = others[is_split], others[~is_split]
        tail_shard, tails = extents.place(extent[split] + 1, ends[split])
        if (mapped := self.store.mmap_shards(np.concatenate([shard, tail_shard]))) is None:
            return None
        ids, begin = mapped
        source += begin[: start.size]
        if rest.size:
            source[rest] = source[is_other.argmin()]  # placeholder
        tails, n_tail = tails + begin[start.size :], over[split]
        rows = self._take(ids, source, tails)
        to, of = rows.reshape(-1).data, ids.data
        for at, tail, n in zip((split * seq_len).tolist(), tails.tolist(), n_tail.tolist(), strict=True):
            end = at + seq_len
            to[at : end - n] = to[at + n : end]
            to[end - n : end] = of[tail : tail + n]
        if rest.size:
            rows[rest] = self._join(np.arange(rest.size), start[rest], length[rest], rest.size)
        return rows

    def _take(self, ids: np.ndarray, source: np.ndarray, touched: np.ndarray | None = None) -> np.ndarray:
        """Copy the full runs of an array that begin at `source`, after reading single ids at `touched` too."""
        pages = (source[:, None] + self._touched).reshape(-1)
        ids[pages if touched is None else np.concatenate([pages, touched])]
        row = np.dtype((np.void, self.seq_len * ids.itemsize))
        runs = np.ndarray((ids.size - self.seq_len + 1,), row, ids.data, strides=(ids.itemsize,))  # they overlap
        return runs[source].view(ids.dtype).reshape(source.size, self.seq_len)

    def _join(self, row: np.ndarray, start: np.ndarray, length: np.ndarray, n: int) -> np.ndarray:
        """Copy as `copy` does, run by run."""
        used = np.bincount(row, weights=length, minlength=n).astype(np.int64)
        padding = self.seq_len - used
        item = self.store.dtype.itemsize
        row, shard, begin, length = self._split_at_extents(row, start, length)
        parts: list[Any] = list(self._run_buffers(shard, begin, length))
        if padding.any():
            ends = np.searchsorted(row, np.arange(n), side="right")
            zeros = memoryview(bytes(int(padding.max()) * item))
            for i in np.flatnonzero(padding)[::-1].tolist():
                parts.insert(int(ends[i]), zeros[: int(padding[i]) * item])
        return np.frombuffer(bytearray().join(parts), self.store.dtype).reshape(n, self.seq_len)

    def _split_at_extents(
        self, row: np.ndarray, start: np.ndarray, length: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Split runs that span extents; return row, shard, first token in the shard, and length of each run."""
        extents = self.store.extents
        first = extents.find_tokens(start)
        if (start + length <= extents.first_token[first + 1]).all():
            return row, *extents.place(first, start), length
        n_extents = extents.find_tokens(start + length - 1) + 1 - first
        run = np.repeat(np.arange(start.size), n_extents)
        extent = first[run] + concat_aranges(n_extents)
        begin = np.maximum(start[run], extents.first_token[extent])
        end = np.minimum(start[run] + length[run], extents.first_token[extent + 1])
        return row[run], *extents.place(extent, begin), end - begin

    def _run_buffers(self, shard: np.ndarray, begin: np.ndarray, length: np.ndarray) -> Iterable[Any]:
        """Return the bytes of each run, which is in one shard."""
        if (mapped := self.store.mmap_shards(shard)) is None:
            end = begin + length
            self.store.prefetch(shard, begin, end)
            spans = zip(shard.tolist(), begin.tolist(), end.tolist(), strict=True)
            return [np.ascontiguousarray(self.store.read(*span)).data for span in spans]
        ids, first = mapped
        source = begin + first
        # views of the runs, without a copy
        return map(ids.data.__getitem__, map(slice, source.tolist(), (source + length).tolist()))
