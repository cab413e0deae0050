"""Copies of runs of a store, which are ranges of its tokens, into rows.

Rows of one full run each, as in a `concat` pack, are copied by one numpy call: a strided view of the memory in which
the shards are mapped has every run as one item of a row's size, and those asked for are taken from it. Before, a token
of each page of all runs is read, so that their cache and page misses overlap.

A run that spans two or more extents (of shards, or around documents that are left out) has no such item in the shards.
The ids around each end of an extent, `seq_len - 1` on either side, are copied once to where they follow each other, a
seam, and such runs are taken from there. A store of so many extents that its seams would take more than 64 MiB has no
seams: there such runs are joined from views, as are all that are not full.

Cost: about 0.2 microseconds a run (1 if it is joined) plus memory bandwidth, for any number of shards. A seam takes
4 KiB for rows of 1024 two-byte ids, and is made for the first run that needs it; a store with seams takes 160 bytes an
extent more at most.
"""

import weakref
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from lt_data.packing.algorithms import concat_aranges
from lt_data.store.interval_lookup import IntervalLookup
from lt_data.store.mapped_files import item_of
from lt_data.store.token_store import TokenStore

_TOUCH_BYTES = 4096  # a page
_RUNS_PER_COPY = 8192  # so that a copy holds no more maps than a process may have
_SEAM_BYTES = 2**26
_UNKNOWN = -(2**62)


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
        # index that token 0 of the store would have if it were in each place, in an array of the store's maps
        self._begins: tuple[weakref.ref[np.ndarray] | None, np.ndarray] = (None, np.zeros(0, np.int64))

    def __reduce__(self) -> tuple[Any, ...]:
        return (RunReader, (self.store, self.seq_len))  # another process maps and copies for itself

    @cached_property
    def _seams(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Ids of each seam [extents, 2 * seq_len - 2], and which were made; None for a store without."""
        n, seam_len = self.store.extents.first_token.size - 1, max(2 * self.seq_len - 2, 1)
        is_local = self.store.mmap_shards(np.zeros(0, np.int64)) is not None
        if not is_local or n * seam_len * self.store.dtype.itemsize > _SEAM_BYTES:
            return None
        return np.empty((n, seam_len), self.store.dtype), np.zeros(n, bool)

    @cached_property
    def _places(self) -> IntervalLookup:
        """Search for the places of full runs by their first tokens.

        Place 2 i has the runs in extent i, place 2 i + 1 those of seam i: they begin in extent i and end behind it.
        """
        first = self.store.extents.first_token
        boundaries = np.repeat(first, 2)[:-1]
        boundaries[1::2] = np.maximum(first[1:] - (self.seq_len - 1), first[:-1])
        return IntervalLookup(boundaries)

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
        extent = extents.find_tokens(positions)
        if (found := self._find_in_shards(extent, positions)) is not None:
            ids, index = found
            return ids[index]
        shard, offset = extents.place(extent, positions)
        columns = zip(shard.tolist(), offset.tolist(), strict=True)
        return [int(self.store.read(number, i, i + 1)[0]) for number, i in columns]

    def _copy_some(self, row: np.ndarray, start: np.ndarray, length: np.ndarray, n: int) -> np.ndarray:
        if length.size == n and (rows := self._copy_full(start, length)) is not None:
            return rows
        return self._join(row, start, length, n)

    def _copy_full(self, start: np.ndarray, length: np.ndarray) -> np.ndarray | None:
        """Copy rows of one run each by one numpy call if most are full; else None."""
        is_other = length != self.seq_len
        extent = None
        if self._seams is None:
            extents = self.store.extents
            extent = extents.find_tokens(start)
            is_other |= start + self.seq_len > extents.first_token[extent + 1]
        others = np.flatnonzero(is_other)
        if 2 * others.size >= start.size:
            return None
        full = start
        if others.size:  # they are joined; a full run is taken in the place of each
            taken = np.where(is_other, is_other.argmin(), np.arange(start.size))
            full = start[taken]
            extent = None if extent is None else extent[taken]
        if (found := self._find(full) if extent is None else self._find_in_shards(extent, full)) is None:
            return None
        rows = self._take(*found)
        if others.size:
            rows[others] = self._join(np.arange(others.size), start[others], length[others], others.size)
        return rows

    def _find_in_shards(self, extent: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return an array that contains tokens of these extents, and where they are in it; None if not mapped."""
        shard, offset = self.store.extents.place(extent, tokens)
        if (mapped := self.store.mmap_shards(shard)) is None:
            return None
        ids, of_shards = mapped
        return ids, offset + of_shards

    def _find(self, start: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return an array with full runs, and where they begin in it; None if they are not mapped."""
        place = self._places.find(start)
        known, begins = self._begins  # one read: other threads may replace the pair
        ids = known() if known else None
        if ids is not None:
            source = start + begins[place]
            if source.min() >= 0:
                return ids, source
        wanted = np.unique(place)
        extent, is_seam = wanted >> 1, (wanted & 1).astype(bool)
        extents = self.store.extents
        of_seams = self._make_seams(extent[is_seam])
        shard, offset = extents.place(extent, np.zeros(extent.size, np.int64))
        if (mapped := self.store.mmap_shards(shard[~is_seam])) is None:
            return None
        array, of_shards = mapped
        if array is not ids:  # what was known is of maps that are gone
            begins = np.full(2 * (extents.first_token.size - 1), _UNKNOWN)
        begins[wanted[~is_seam]] = offset[~is_seam] + of_shards
        begins[wanted[is_seam]] = of_seams
        self._begins = (weakref.ref(array), begins)
        return array, start + begins[place]

    def _make_seams(self, extent: np.ndarray) -> np.ndarray:
        """Make the seams of some extents; return the origin of each.

        It is the index that token 0 of the store would have if it were in the seam.
        """
        if not extent.size:
            return extent
        assert self._seams is not None
        seams, is_made = self._seams
        first = self.store.extents.first_token
        start = np.maximum(first[extent + 1] - (self.seq_len - 1), first[extent])
        if (todo := np.flatnonzero(~is_made[extent])).size:
            length = np.minimum(first[extent[todo] + 1] + (self.seq_len - 1), first[-1]) - start[todo]
            seams[extent[todo]] = self._join(np.arange(todo.size), start[todo], length, todo.size, seams.shape[1])
            is_made[extent[todo]] = True
        return item_of(seams) + extent * seams.shape[1] - start

    def _take(self, ids: np.ndarray, source: np.ndarray) -> np.ndarray:
        """Copy the full runs of an array that begin at `source`."""
        ids[(source[:, None] + self._touched).reshape(-1)]
        row = np.dtype((np.void, self.seq_len * ids.itemsize))
        runs = np.ndarray((ids.size - self.seq_len + 1,), row, ids.data, strides=(ids.itemsize,))  # they overlap
        return runs[source].view(ids.dtype).reshape(source.size, self.seq_len)

    def _join(
        self, row: np.ndarray, start: np.ndarray, length: np.ndarray, n: int, row_len: int | None = None
    ) -> np.ndarray:
        """Copy as `copy` does, run by run, into rows of `seq_len` or of another length."""
        row_len = row_len or self.seq_len
        used = np.bincount(row, weights=length, minlength=n).astype(np.int64)
        padding = row_len - used
        item = self.store.dtype.itemsize
        row, shard, begin, length = self._split_at_extents(row, start, length)
        parts: list[Any] = list(self._run_buffers(shard, begin, length))
        if padding.any():
            ends = np.searchsorted(row, np.arange(n), side="right")
            zeros = memoryview(bytes(int(padding.max()) * item))
            for i in np.flatnonzero(padding)[::-1].tolist():
                parts.insert(int(ends[i]), zeros[: int(padding[i]) * item])
        return np.frombuffer(bytearray().join(parts), self.store.dtype).reshape(n, row_len)

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
