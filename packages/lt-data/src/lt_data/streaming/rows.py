"""Rows of a pack as arrays: ids, labels, positions and document numbers, for any rows in any order.

There are two forms. `TokenRows` holds the ids in the store's dtype (2 or 4 bytes) and the bounds of each slice, so that
nothing wider is made before the device. `Rows` holds four int32 arrays, made by `TokenRows.to_int32`.

Labels are shifted here and nowhere else: a position's label is the next token. In a `bfd` pack that is the
next token of the same document, even if it is in another row, and a document's last token has no label. In a `concat`
pack documents are concatenated, so only the last token of the store has no label.

Cost: that of lt_data.streaming.runs, with a run for each slice that does not continue the one before it. `to_int32`: a
few nanoseconds per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lt_data.errors import DataError
from lt_data.packing.algorithms import concat_aranges
from lt_data.packing.pack_index import PackIndex
from lt_data.store.token_store import TokenStore
from lt_data.streaming.permutation import shuffle_positions
from lt_data.streaming.runs import copy_runs, tokens_at

IGNORE_INDEX = -100  # label of positions without a label
PADDING_DOC_ID = -1  # document number of padding


@dataclass(frozen=True, eq=False)
class Rows:
    """Training rows, each array int32 [n, seq_len]; the four may be parts of one block of memory.

        >>> bool((rows[:4].labels[:, :-1] == rows[:4].input_ids[:, 1:])[rows[:4].loss_mask[:, :-1]].all())
        True

    Attributes:
        input_ids: tokens; 0 in padding.
        labels: the token to predict at each position, `IGNORE_INDEX` where there is none.
        position_ids: position in the slice; 0 in padding.
        doc_ids: index of the slice in its row, from 0; `PADDING_DOC_ID` in padding.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    doc_ids: np.ndarray

    @property
    def loss_mask(self) -> np.ndarray:
        """True at positions with a label (bool [n, seq_len])."""
        return self.labels != IGNORE_INDEX


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenRows:
    """Training rows in the store's dtype. Slices are sorted by row and position in the row.

        >>> rows.read_token_rows(np.arange(4)).input_ids.itemsize
        2

    Attributes:
        input_ids: tokens in the store's dtype, uint16 or uint32 [n, seq_len]; 0 in padding.
        slice_row: row of each slice (int64 [n_slices]).
        slice_begin: begin of each slice in the flattened rows (int64 [n_slices]).
        slice_length: tokens in each slice (int64 [n_slices]).
        next_ids: label of each slice's last position, in the store's dtype; 0 if it has no label [n_slices].
        has_next: whether the last position has a label (bool [n_slices]).
        document_mask: False: attention spans the whole row.
        max_segments_per_row: bound on the segments (`segments`) of any row of the source.
    """

    input_ids: np.ndarray
    slice_row: np.ndarray
    slice_begin: np.ndarray
    slice_length: np.ndarray
    next_ids: np.ndarray
    has_next: np.ndarray
    document_mask: bool
    max_segments_per_row: int

    def segments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the segments of the flattened rows that bound attention: slices and padding, or rows.

        Returns:
            Where each begins, its length, and its number in its row, `PADDING_DOC_ID` for padding (int64).
        """
        n, seq_len = self.input_ids.shape
        if not self.document_mask:
            return np.arange(n) * seq_len, np.full(n, seq_len), np.zeros(n, np.int64)
        number = np.arange(self.slice_row.size) - np.searchsorted(self.slice_row, self.slice_row)
        used = self.tokens_per_row()
        padded = np.flatnonzero(used < seq_len)
        if not padded.size:
            return self.slice_begin, self.slice_length, number
        begin = np.concatenate([self.slice_begin, padded * seq_len + used[padded]])
        length = np.concatenate([self.slice_length, seq_len - used[padded]])
        number = np.concatenate([number, np.full(padded.size, PADDING_DOC_ID)])
        order = np.argsort(begin, kind="stable")
        return begin[order], length[order], number[order]

    def cu_seqlens(self, *, size: int | None = None) -> np.ndarray:
        """Return the segment boundaries in the flattened rows, from 0 to n * seq_len, for varlen attention.

        Args:
            size: length of the result, padded with the last boundary; a fixed shape for compilers.

        Returns:
            int32 [segments + 1] or [size].

        Raises:
            DataError: there are more boundaries than `size`.
        """
        begin, _, _ = self.segments()
        boundaries = np.append(begin, self.input_ids.size).astype(np.int32)
        if size is None:
            return boundaries
        if boundaries.size > size:
            raise DataError(f"size = {size}: these rows have {boundaries.size} boundaries; give a larger size")
        return np.append(boundaries, np.full(size - boundaries.size, self.input_ids.size, np.int32))

    def to_int32(self) -> Rows:
        """Convert the rows to int32 arrays."""
        n, seq_len = self.input_ids.shape
        # one block, so that the C library keeps its memory for the next call; pages of four small ones go back to the
        # kernel, which clears them again: that took 5/6 of the time
        input_ids, labels, position_ids, doc_ids = np.empty((4, n, seq_len), np.int32)
        input_ids[:] = self.input_ids
        labels[:, :-1] = input_ids[:, 1:]
        ends = self.slice_begin + self.slice_length
        labels.reshape(-1)[ends - 1] = np.where(self.has_next, self.next_ids.astype(np.int32), IGNORE_INDEX)
        used = self.tokens_per_row()
        for row in np.flatnonzero(used < seq_len).tolist():
            labels[row, int(used[row]) :] = IGNORE_INDEX
        begin, length, number = self.segments()
        doc_ids.reshape(-1)[:] = np.repeat(number.astype(np.int32), length)
        np.subtract(
            np.arange(n * seq_len, dtype=np.int32),
            np.repeat(begin.astype(np.int32), length),
            out=position_ids.reshape(-1),
        )
        if self.document_mask:
            position_ids[doc_ids == PADDING_DOC_ID] = 0
        return Rows(input_ids, labels, position_ids, doc_ids)

    def tokens_per_row(self) -> np.ndarray:
        """Return the number of tokens of each row, padding excluded (int64 [n])."""
        n = self.input_ids.shape[0]
        return np.bincount(self.slice_row, weights=self.slice_length, minlength=n).astype(np.int64)


def join_rows(parts: Sequence[TokenRows], places: Sequence[np.ndarray]) -> TokenRows:
    """Join the rows of several sources to one batch.

    Args:
        parts: rows of each source, also of one with none.
        places: rows of the batch, ascending, that each part fills (int64).

    Returns:
        The batch; its bound on segments is the largest of the sources.
    """
    seq_len = parts[0].input_ids.shape[1]
    input_ids = np.empty((sum(place.size for place in places), seq_len), parts[0].input_ids.dtype)
    for place, part in zip(places, parts, strict=True):
        input_ids[place] = part.input_ids
    row = np.concatenate([place[part.slice_row] for place, part in zip(places, parts, strict=True)])
    begin_in_row = np.concatenate([part.slice_begin - part.slice_row * seq_len for part in parts])
    order = np.argsort(row, kind="stable")
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])[order]
        for name in ("slice_length", "next_ids", "has_next")
    }
    return TokenRows(
        input_ids=input_ids,
        slice_row=row[order],
        slice_begin=(row * seq_len + begin_in_row)[order],
        document_mask=parts[0].document_mask,
        max_segments_per_row=max(part.max_segments_per_row for part in parts),
        **columns,
    )


class RowReader:
    """Reader of the rows of one pack: a sequence of rows in the order of the pack.

        >>> rows = RowReader(store, pack(store, seq_len=64))
        >>> rows.read_rows(np.arange(8)).input_ids.shape
        (8, 64)
        >>> len(rows), rows[-1].input_ids.shape, rows[2:5].input_ids.shape
        (514, (1, 64), (3, 64))

    Args:
        store: the token store.
        pack: its pack.
        document_mask: True: documents are separate (`Rows`). False: a row is one text, so `doc_ids` are all 0 and
            `position_ids` run from 0 to seq_len - 1.

    Attributes:
        valid: labels of each row (int32 [n_rows]).
        max_segments_per_row: bound on the segments of a row: slices and padding, or 1 without `document_mask`.
        fingerprint: store, pack and mask. Readers with equal fingerprints read the same rows.

    Raises:
        DataError: the pack belongs to another store.
    """

    def __init__(self, store: TokenStore, pack: PackIndex, *, document_mask: bool = True) -> None:
        if pack.store_fingerprint != store.manifest.fingerprint:
            raise DataError(
                f"pack {pack.mode}-{pack.seq_len}: made for another store than {store.path}; make it again with "
                f"lt data pack {store.path} --seq-len {pack.seq_len} --mode {pack.mode}"
            )
        self.store = store
        self.pack = pack
        self.document_mask = document_mask
        self.valid: np.ndarray = pack.valid
        self.max_segments_per_row: int = pack.max_slices_per_row + 1 if document_mask else 1  # plus padding
        self.fingerprint = {
            "store": pack.store_fingerprint[:16],
            "pack": f"{pack.mode}-{pack.seq_len}:{pack.fingerprint[:16]}",
            "document_mask": "on" if document_mask else "off",
        }

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, index: int | slice) -> Rows:
        """Return some rows, or one as the only one of its arrays.

        Raises:
            IndexError: there is no such row; iteration ends with it.
        """
        found = range(self.n_rows)[index]
        return self.read_rows(np.array(found, np.int64).reshape(-1))

    @property
    def n_rows(self) -> int:
        """Rows in the pack."""
        return self.pack.n_rows

    @property
    def seq_len(self) -> int:
        """Tokens in a row."""
        return self.pack.seq_len

    def fingerprint_at(self, position: int) -> dict[str, str]:
        """Return the fingerprint, which is the same at every position."""
        assert position >= 0
        return self.fingerprint

    def rows_at(self, position: int, count: int, *, seed: int, shuffle: bool) -> np.ndarray:
        """Return the row indices at `count` positions of the endless sequence (int64 [count])."""
        return shuffle_positions(np.arange(position, position + count), self.n_rows, str(seed) if shuffle else None)

    def epochs_at(self, position: int, count: int) -> np.ndarray:
        """Return the epoch, from 0, of each row that `rows_at` returns (int64)."""
        return np.arange(position, position + count) // self.n_rows

    def locate(self, row: int) -> tuple[str, "RowReader", int]:
        """Return the source of a row, which has no name here, its reader, and the row index there."""
        return "", self, row

    def count_labels(self, rows: np.ndarray) -> int:
        """Return the total number of labels in some rows."""
        return int(self.valid[rows].sum(dtype=np.int64))

    def read_rows(self, rows: np.ndarray) -> Rows:
        """Read the given rows (integers [n], repeats allowed), in this order, as int32 arrays."""
        return self.read_token_rows(rows).to_int32()

    def read_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Read only the ids of some rows, in the store's dtype [n, seq_len]; 0 in padding."""
        rows = self._check_rows(rows)
        _, row, start, length = self._slices(rows)
        return self._copy(row, start, length, _continues(row, start, length), rows.size)

    def _copy(
        self, row: np.ndarray, start: np.ndarray, length: np.ndarray, continues: np.ndarray, n: int
    ) -> np.ndarray:
        first = np.flatnonzero(~continues)
        length = np.add.reduceat(length, first)
        return copy_runs(self.store, row[first], start[first], length, n=n, seq_len=self.seq_len)

    def read_token_rows(self, rows: np.ndarray) -> TokenRows:
        """Read the given rows (integers [n], repeats allowed), in this order, in the store's dtype."""
        rows = self._check_rows(rows)
        slices, row, start, length = self._slices(rows)
        has_next = self.pack.labels(slices, rows[row]) == length
        continues = _continues(row, start, length)
        input_ids = self._copy(row, start, length, continues, rows.size)
        before = np.cumsum(length) - length
        begin = row * self.seq_len + before - before[np.searchsorted(row, row)]
        next_ids = np.zeros(slices.size, self.store.dtype)
        # the token after a slice is in the same row if the next slice continues it
        follows = has_next & np.append(continues[1:], False)
        next_ids[follows] = input_ids.reshape(-1)[(begin + length)[follows]]
        elsewhere = np.flatnonzero(has_next & ~follows)
        after = start[elsewhere] + length[elsewhere]
        self._check_inside(after, 1)
        next_ids[elsewhere] = tokens_at(self.store, after)
        return TokenRows(
            input_ids=input_ids,
            slice_row=row,
            slice_begin=begin,
            slice_length=length,
            next_ids=next_ids,
            has_next=has_next,
            document_mask=self.document_mask,
            max_segments_per_row=self.max_segments_per_row,
        )

    def _check_rows(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, np.int64)
        if rows.ndim != 1 or (rows.size and not (rows.min() >= 0 and rows.max() < self.n_rows)):
            raise IndexError(f"rows must be one-dimensional and in 0..{self.n_rows - 1}")
        return rows

    def _slices(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return of the slices of some rows: index in the pack, row, global offset and length (int64)."""
        first = self.pack.row_offsets[rows]
        n_slices = self.pack.row_offsets[rows + 1] - first
        slices = np.repeat(first, n_slices) + concat_aranges(n_slices)
        start, length = self.pack.start[slices], self.pack.length[slices].astype(np.int64)
        self._check_inside(start, length)
        return slices, np.repeat(np.arange(rows.size), n_slices), start, length

    def _check_inside(self, start: np.ndarray, length: np.ndarray | int) -> None:
        """Raise DataError if the pack is damaged: what it asks for must be in the store."""
        if start.min(initial=0) < 0 or (length > self.store.n_tokens - start).any():
            raise DataError(f"a pack of {self.store.path} has rows outside the store: find it with lt data verify")


def _continues(row: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return whether each slice goes on in the store where the one before it in its row ends (bool [n_slices])."""
    continues = np.zeros(row.size, bool)
    continues[1:] = (row[1:] == row[:-1]) & (start[1:] == start[:-1] + length[:-1])
    return continues
