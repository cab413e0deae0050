"""Rows of a pack as arrays: ids, labels, positions and document numbers, for any rows in any order.

The labels are shifted here and nowhere else: a position's label is the token that follows it. In a `bfd` pack that is
the next token of the same document, also where the document goes on in another row, and a document's last token has
none. In a `concat` pack documents are simply joined, so only the last token of the store has none. Tokens are copied
slice by slice from the mapped files. Cost: a few microseconds per slice and a few nanoseconds per token.
"""

from dataclasses import dataclass

import numpy as np

from lt_data.errors import DataError
from lt_data.packing import PackIndex, counted
from lt_data.store import TokenStore

IGNORE = -100  # the label of a position that has none
NO_DOCUMENT = -1  # the document number of padding


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

    def gather(self, rows: np.ndarray) -> Rows:
        """The rows of these numbers (integers [n], repeats allowed), in this order."""
        rows = np.asarray(rows, np.int64)
        if rows.ndim != 1 or (rows.size and not (rows.min() >= 0 and rows.max() < self.n_rows)):
            raise IndexError(f"rows must be one-dimensional and in 0..{self.n_rows - 1}")
        first = self.pack.row_offsets[rows]
        n_slices = self.pack.row_offsets[rows + 1] - first
        number = counted(n_slices)  # of each slice in its row
        slices = np.repeat(first, n_slices) + number  # in the pack
        length = self.pack.length[slices].astype(np.int64)
        row = np.repeat(np.arange(rows.size), n_slices)
        place = _place(row, length, self.seq_len)
        input_ids = np.zeros((rows.size, self.seq_len), np.int32)
        labels = np.full((rows.size, self.seq_len), IGNORE, np.int32)
        self._copy_tokens(slices, length, place, input_ids.reshape(-1), labels.reshape(-1))
        counting = np.arange(self.seq_len, dtype=np.int32)
        if not self.document_mask:
            return Rows(input_ids, labels, np.tile(counting, (rows.size, 1)), np.zeros_like(input_ids))
        position_ids = np.zeros_like(input_ids)
        doc_ids = np.full_like(input_ids, NO_DOCUMENT)
        flat_positions, flat_documents = position_ids.reshape(-1), doc_ids.reshape(-1)
        for begin, n, j in zip(place.tolist(), length.tolist(), number.tolist(), strict=True):
            flat_positions[begin : begin + n] = counting[:n]
            flat_documents[begin : begin + n] = j
        return Rows(input_ids, labels, position_ids, doc_ids)

    def _copy_tokens(
        self, slices: np.ndarray, length: np.ndarray, place: np.ndarray, input_ids: np.ndarray, labels: np.ndarray
    ) -> None:
        """Copy the tokens of each slice to its place in the flat `input_ids`, and those after them to `labels`."""
        borders = self.store.shard_borders
        shard = np.searchsorted(borders, self.pack.start[slices], side="right") - 1
        source = self.pack.start[slices] - borders[shard]
        # Where the label of the slice's last position is the first token of the next shard (joined documents).
        over = source + self.pack.labels[slices] == borders[shard + 1] - borders[shard]
        inside = self.pack.labels[slices] - over
        opened = {number: self.store.shard(number) for number in np.unique(shard).tolist()}
        columns = (shard, source, place, length, inside)
        for number, begin, to, n, n_labels in zip(*(column.tolist() for column in columns), strict=True):
            tokens = opened[number]
            input_ids[to : to + n] = tokens[begin : begin + n]
            labels[to : to + n_labels] = tokens[begin + 1 : begin + 1 + n_labels]
        for i in np.flatnonzero(over).tolist():
            labels[place[i] + inside[i]] = self.store.shard(int(shard[i]) + 1)[0]


def _place(row: np.ndarray, length: np.ndarray, seq_len: int) -> np.ndarray:
    """Where each slice begins in the flat batch, from the row it stands in and its length; rows in order (int64)."""
    before = np.cumsum(length) - length
    return row * seq_len + before - before[np.searchsorted(row, row)]
