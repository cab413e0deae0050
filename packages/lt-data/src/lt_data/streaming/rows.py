"""Rows of a pack as arrays: ids, labels, positions and document numbers, for any rows in any order.

Two forms. `TokenRows` is what lies in the store: the ids in their own type (2 or 4 bytes) and where each slice begins
and ends, so that nothing wide is made before the device. `Rows` is four int32 arrays, made by `TokenRows.widen`.

The labels are shifted here and nowhere else: a position's label is the token that follows it. In a `bfd` or `buckets`
pack that is the next token of the same document, also where the document goes on in another row, and a document's last
token has none. In a `concat` pack documents are simply joined, so only the last token of the store has none.

Cost: one copy of each slice (in a `concat` pack of each row) out of the mapped files, all joined in one call: about 0.2
microseconds per slice and the memory's speed. Widening: a few nanoseconds per token.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.packing.filling import counted
from lt_data.packing.packs import PackIndex
from lt_data.store.token_store import TokenStore
from lt_data.streaming.order import shuffled_rows

IGNORE = -100  # the label of a position that has none
NO_DOCUMENT = -1  # the document number of padding
_TOUCH_BYTES = 2048


@dataclass(frozen=True, eq=False)
class Rows:
    """Training rows, each array int32 [n, seq_len].

    Attributes:
        input_ids: tokens; 0 in padding.
        labels: the token to predict at each position, `IGNORE` where there is none.
        position_ids: position in the slice; 0 in padding.
        doc_ids: number of the slice in its row, from 0; `NO_DOCUMENT` in padding.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    doc_ids: np.ndarray

    @property
    def loss_mask(self) -> np.ndarray:
        """Which positions have a label (bool [n, seq_len])."""
        return self.labels != IGNORE


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenRows:
    """Training rows as the store holds them. Slices are in the order of rows and of their place in the row.

    Attributes:
        input_ids: tokens in the store's dtype, uint16 or uint32 [n, seq_len]; 0 in padding.
        slice_row: row in which each slice stands (int64 [n_slices]).
        slice_begin: where in the flattened rows each slice begins (int64 [n_slices]).
        slice_length: tokens in each slice (int64 [n_slices]).
        next_ids: label of each slice's last position, in the store's dtype; 0 where it has none [n_slices].
        has_next: whether it has one (bool [n_slices]).
        document_mask: False: the rows are to be seen as one text each.
    """

    input_ids: np.ndarray
    slice_row: np.ndarray
    slice_begin: np.ndarray
    slice_length: np.ndarray
    next_ids: np.ndarray
    has_next: np.ndarray
    document_mask: bool

    def segments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The flattened rows as runs that attention must not cross: slices and padding, or whole rows.

        Returns:
            Where each begins, its length, and its number in its row, `NO_DOCUMENT` for padding (int64).
        """
        n, seq_len = self.input_ids.shape
        if not self.document_mask:
            return np.arange(n) * seq_len, np.full(n, seq_len), np.zeros(n, np.int64)
        number = np.arange(self.slice_row.size) - np.searchsorted(self.slice_row, self.slice_row)
        used = self.used()
        padded = np.flatnonzero(used < seq_len)
        if not padded.size:
            return self.slice_begin, self.slice_length, number
        begin = np.concatenate([self.slice_begin, padded * seq_len + used[padded]])
        length = np.concatenate([self.slice_length, seq_len - used[padded]])
        number = np.concatenate([number, np.full(padded.size, NO_DOCUMENT)])
        order = np.argsort(begin, kind="stable")
        return begin[order], length[order], number[order]

    def cu_seqlens(self, *, size: int | None = None) -> np.ndarray:
        """Borders of the segments in the flattened rows, from 0 to n * seq_len, as attention over parts takes them.

        Args:
            size: entries to give back, the last border repeated: a fixed shape for compilers that want one.

        Returns:
            int32 [segments + 1] or [size].

        Raises:
            DataError: there are more borders than `size`.
        """
        begin, _, _ = self.segments()
        borders = np.append(begin, self.input_ids.size).astype(np.int32)
        if size is None:
            return borders
        if borders.size > size:
            raise DataError(f"size={size}: these rows have {borders.size} borders; give a larger size")
        return np.append(borders, np.full(size - borders.size, self.input_ids.size, np.int32))

    def widen(self) -> Rows:
        """The same rows as int32 arrays."""
        n, seq_len = self.input_ids.shape
        input_ids = self.input_ids.astype(np.int32)
        labels = np.empty_like(input_ids)
        labels[:, :-1] = input_ids[:, 1:]
        ends = self.slice_begin + self.slice_length
        labels.reshape(-1)[ends - 1] = np.where(self.has_next, self.next_ids.astype(np.int32), IGNORE)
        used = self.used()
        for row in np.flatnonzero(used < seq_len).tolist():
            labels[row, int(used[row]) :] = IGNORE
        begin, length, number = self.segments()
        doc_ids = np.repeat(number.astype(np.int32), length)
        position_ids = np.arange(n * seq_len, dtype=np.int32) - np.repeat(begin.astype(np.int32), length)
        if self.document_mask:
            position_ids[doc_ids == NO_DOCUMENT] = 0
        return Rows(input_ids, labels, position_ids.reshape(n, seq_len), doc_ids.reshape(n, seq_len))

    def used(self) -> np.ndarray:
        """Positions of each row that hold a token (int64 [n])."""
        n = self.input_ids.shape[0]
        return np.bincount(self.slice_row, weights=self.slice_length, minlength=n).astype(np.int64)


class RowReader:
    """Reads the rows of one pack of one store.

    Args:
        store: the tokens.
        pack: the index.
        document_mask: True: documents are kept apart (`Rows`). False: a row is one text, so `doc_ids` are all 0 and
            `position_ids` run from 0 to seq_len - 1.

    Attributes:
        valid: positions with a label in each row (int32 [n_rows]).
        fingerprint: what these rows are, in words: store, pack and mask. Two readers with one fingerprint give the
            same rows.

    Raises:
        DataError: the pack belongs to another store.
    """

    def __init__(self, store: TokenStore, pack: PackIndex, *, document_mask: bool = True) -> None:
        if pack.store_fingerprint != store.manifest.fingerprint:
            raise DataError(
                f"the pack {pack.mode}-{pack.seq_len} was made for another store than {store.path}: make it again with "
                f"lt data pack {store.path} --seq-len {pack.seq_len} --mode {pack.mode}"
            )
        if pack.buckets is not None and len(pack.buckets) > 1:
            raise DataError("the pack has rows of several lengths: read it with lt_data.Buckets, or give one `bucket`")
        self.store = store
        self.pack = pack
        self.document_mask = document_mask
        self.valid: np.ndarray = pack.valid
        self.fingerprint: str = " ".join(
            (
                f"store:{pack.store_fingerprint[:16]}",
                f"pack:{pack.mode}-{pack.seq_len}:{pack.fingerprint[:16]}",
                f"document_mask:{'on' if document_mask else 'off'}",
            )
        )

    @property
    def n_rows(self) -> int:
        """Rows in the pack."""
        return self.pack.n_rows

    @property
    def seq_len(self) -> int:
        """Tokens in a row."""
        return self.pack.seq_len

    def fingerprint_at(self, position: int) -> str:
        """The fingerprint, which is the same at every position of the sequence."""
        assert position >= 0
        return self.fingerprint

    def rows_at(self, position: int, count: int, *, seed: int, shuffle: bool) -> np.ndarray:
        """Numbers of the rows at some positions of the endless sequence: epoch after epoch (int64 [count])."""
        return shuffled_rows(np.arange(position, position + count), self.n_rows, str(seed) if shuffle else None)

    def epochs_at(self, position: int, count: int) -> np.ndarray:
        """Which pass over the pack each of the rows that `rows_at` gives belongs to, from 0 (int64)."""
        return np.arange(position, position + count) // self.n_rows

    def locate(self, row: int) -> tuple["RowReader", int]:
        """The reader that has a row, and its number there."""
        return self, row

    def labels_in(self, rows: np.ndarray) -> int:
        """Positions with a label in some rows together."""
        return int(self.valid[rows].sum(dtype=np.int64))

    def gather(self, rows: np.ndarray) -> Rows:
        """The rows of these numbers (integers [n], repeats allowed), in this order, as int32 arrays."""
        return self.compact(rows).widen()

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        """Only the ids of some rows, in the dtype of the store [n, seq_len]; 0 in padding."""
        rows = self._checked(rows)
        if self.pack.mode == "concat":  # a row is one piece of the store: no slice needs to be looked at
            start = rows * self.seq_len
            length = np.minimum(self.store.n_tokens - start, self.seq_len)
            return self._copied(np.arange(rows.size), start, length, rows.size)
        slices, row = self._slices(rows)
        return self._copied(row, self.pack.start[slices], self.pack.length[slices].astype(np.int64), rows.size)

    def compact(self, rows: np.ndarray) -> TokenRows:
        """The rows of these numbers (integers [n], repeats allowed), in this order, as the store holds them."""
        rows = self._checked(rows)
        slices, row = self._slices(rows)
        start, length = self.pack.start[slices], self.pack.length[slices].astype(np.int64)
        has_next = self.pack.labels[slices] == length
        input_ids = self.tokens(rows) if self.pack.mode == "concat" else self._copied(row, start, length, rows.size)
        begin = _place(row, length, self.seq_len)
        next_ids = np.zeros(slices.size, self.store.dtype)
        # The token behind a slice stands in this row too where the next slice goes on with it.
        follows = np.zeros(slices.size, bool)
        follows[:-1] = has_next[:-1] & (row[1:] == row[:-1]) & (start[1:] == start[:-1] + length[:-1])
        next_ids[follows] = input_ids.reshape(-1)[(begin + length)[follows]]
        elsewhere = np.flatnonzero(has_next & ~follows)
        next_ids[elsewhere] = self._tokens_at(start[elsewhere] + length[elsewhere])
        return TokenRows(
            input_ids=input_ids,
            slice_row=row,
            slice_begin=begin,
            slice_length=length,
            next_ids=next_ids,
            has_next=has_next,
            document_mask=self.document_mask,
        )

    def _checked(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, np.int64)
        if rows.ndim != 1 or (rows.size and not (rows.min() >= 0 and rows.max() < self.n_rows)):
            raise IndexError(f"rows must be one-dimensional and in 0..{self.n_rows - 1}")
        return rows

    def _slices(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slices of some rows, as numbers in the pack, and which of the rows each stands in (int64)."""
        first = self.pack.row_offsets[rows]
        n_slices = self.pack.row_offsets[rows + 1] - first
        return np.repeat(first, n_slices) + counted(n_slices), np.repeat(np.arange(rows.size), n_slices)

    def _copied(self, row: np.ndarray, start: np.ndarray, length: np.ndarray, n: int) -> np.ndarray:
        """Rows of runs of the store, each with its row (in order), global offset and length; the rest is 0."""
        if length.size == n and (rows := self._one_run_each(start, length)) is not None:
            return rows
        return self._joined(row, start, length, n)

    def _joined(self, row: np.ndarray, start: np.ndarray, length: np.ndarray, n: int) -> np.ndarray:
        """As `_copied`, piece by piece."""
        used = np.bincount(row, weights=length, minlength=n).astype(np.int64)
        padding = self.seq_len - used
        item = self.store.dtype.itemsize
        parts: list[Any] = list(self._runs(start, length))
        if padding.any():
            # A run that crosses shards is several parts.
            of_parts = row if len(parts) == row.size else np.repeat(row, self._shards_of(start, length))
            ends = np.searchsorted(of_parts, np.arange(n), side="right")
            zeros = memoryview(bytes(int(padding.max()) * item))
            for i in np.flatnonzero(padding)[::-1].tolist():
                parts.insert(int(ends[i]), zeros[: int(padding[i]) * item])
        return np.frombuffer(bytearray().join(parts), self.store.dtype).reshape(n, self.seq_len)

    def _one_run_each(self, start: np.ndarray, length: np.ndarray) -> np.ndarray | None:
        """Rows that are one run each, most of them full and in one local shard: one loop of copies, in C."""
        borders = self.store.shard_borders
        shard = np.searchsorted(borders, start, side="right") - 1
        whole = (length == self.seq_len) & (start + self.seq_len <= borders[shard + 1])
        others = np.flatnonzero(~whole)
        if 2 * others.size >= start.size or (found := self.store.mapped_together(shard[whole])) is None:
            return None
        ids, begin = found
        source = (start - borders[shard])[whole] + begin
        if others.size:  # something in their place, for now
            source = np.insert(source, others - np.arange(others.size), source[0])
        row = np.dtype((np.void, self.seq_len * ids.itemsize))
        # Every run of the shards as one item, which overlap; only those asked for are copied.
        runs = np.ndarray((ids.size - self.seq_len + 1,), row, ids.data, strides=(ids.itemsize,))
        touch = np.arange(0, self.seq_len, _TOUCH_BYTES // ids.itemsize)
        ids[(source[:, None] + touch).reshape(-1)]  # misses of memory and of pages for all rows at once, not in turn
        rows = runs[source].view(ids.dtype).reshape(source.size, self.seq_len)
        if others.size:
            rows[others] = self._joined(np.arange(others.size), start[others], length[others], others.size)
        return rows

    def _shards_of(self, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        """In how many shards each run lies."""
        borders = self.store.shard_borders
        first = np.searchsorted(borders, start, side="right")
        return np.searchsorted(borders, start + length - 1, side="right") - first + 1

    def _runs(self, start: np.ndarray, length: np.ndarray) -> Iterable[Any]:
        """The bytes of each run, one part for each shard that it lies in."""
        borders = self.store.shard_borders
        if start.size and not (start.min() >= 0 and start.max() < borders[-1]):
            raise DataError(f"a pack of {self.store.path} has rows outside the store: lt data verify says which")
        shard = np.searchsorted(borders, start, side="right") - 1
        if (found := self.store.mapped_together(shard)) is None:
            return self._runs_of_any_kind(start, length)
        ids, begin = found
        crossing = np.flatnonzero(start + length > borders[shard + 1])
        source = start - borders[shard] + begin
        source[crossing] = begin[crossing]
        ends = source + length
        ends[crossing] = source[crossing]
        # Views of no more than each run, which copy nothing.
        parts = map(ids.data.__getitem__, map(slice, source.tolist(), ends.tolist()))
        if not crossing.size:
            return parts
        parts = list(parts)
        for i in crossing[::-1].tolist():
            parts[i : i + 1] = self._runs_of_any_kind(start[i : i + 1], length[i : i + 1])
        return parts

    def _runs_of_any_kind(self, start: np.ndarray, length: np.ndarray) -> Iterable[Any]:
        borders = self.store.shard_borders
        self.store.prefetch(start, length)
        for begin, n in zip(start.tolist(), length.tolist(), strict=True):
            number = int(np.searchsorted(borders, begin, side="right")) - 1
            while n > 0:
                source = begin - int(borders[number])
                part = self.store.read(number, source, min(source + n, int(borders[number + 1] - borders[number])))
                yield np.ascontiguousarray(part).data
                begin, n, number = begin + part.size, n - part.size, number + 1

    def _tokens_at(self, positions: np.ndarray) -> np.ndarray | list[int]:
        """Single tokens of the store."""
        borders = self.store.shard_borders
        shard = np.searchsorted(borders, positions, side="right") - 1
        place = positions - borders[shard]
        if (found := self.store.mapped_together(shard)) is not None:
            ids, begin = found
            return ids[place + begin]
        columns = zip(shard.tolist(), place.tolist(), strict=True)
        return [int(self.store.read(number, one, one + 1)[0]) for number, one in columns]


def _place(row: np.ndarray, length: np.ndarray, seq_len: int) -> np.ndarray:
    """Where each slice begins in the flat batch, from the row it stands in and its length; rows in order (int64)."""
    before = np.cumsum(length) - length
    return row * seq_len + before - before[np.searchsorted(row, row)]
