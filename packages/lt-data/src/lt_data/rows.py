"""Rows of a pack as arrays: ids, labels, positions and document numbers, for any rows in any order.

The labels are shifted here and nowhere else: a position's label is the token that follows it. In a `bfd` pack that is
the next token of the same document, also where the document goes on in another row, and a document's last token has
none. In a `concat` pack documents are simply joined, so only the last token of the store has none. Tokens are copied
slice by slice; all else is computed for whole batches. Cost: about one microsecond per slice and 10 ns per token.
"""

from dataclasses import dataclass

import numpy as np

from lt_data.errors import DataError
from lt_data.packing import PackIndex
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
        # Numbers in the pack of all slices of all rows, and their place in the batch.
        slices = _ranges(first, n_slices)
        length = self.pack.length[slices].astype(np.int64)
        end = np.cumsum(length) - np.repeat(_before(length, n_slices), n_slices)
        place = np.repeat(np.arange(rows.size), n_slices) * self.seq_len + end - length
        input_ids = np.zeros((rows.size, self.seq_len), np.int32)
        labels = np.full((rows.size, self.seq_len), IGNORE, np.int32)
        self._copy_tokens(slices, length, place, input_ids.reshape(-1), labels.reshape(-1))
        if self.document_mask:
            position_ids = np.zeros((rows.size, self.seq_len), np.int32)
            doc_ids = np.full((rows.size, self.seq_len), NO_DOCUMENT, np.int32)
            filled = _ranges(place, length)
            position_ids.reshape(-1)[filled] = _ranges(np.zeros_like(length), length)
            number = _ranges(np.zeros_like(n_slices), n_slices)
            doc_ids.reshape(-1)[filled] = np.repeat(number, length)
        else:
            position_ids = np.tile(np.arange(self.seq_len, dtype=np.int32), (rows.size, 1))
            doc_ids = np.zeros((rows.size, self.seq_len), np.int32)
        return Rows(input_ids, labels, position_ids, doc_ids)

    def _copy_tokens(
        self, slices: np.ndarray, length: np.ndarray, place: np.ndarray, input_ids: np.ndarray, labels: np.ndarray
    ) -> None:
        """Copy the tokens of each slice to its place in the flat `input_ids`, and the tokens after them to `labels`."""
        start = self.pack.start[slices]
        borders = self.store.shard_borders
        number = np.searchsorted(borders, start, side="right") - 1
        begin = start - borders[number]
        columns = (number, begin, length, self.pack.labels[slices], place, borders[number + 1] - borders[number])
        for shard, source, n, n_labels, target, size in zip(*(column.tolist() for column in columns), strict=True):
            tokens = self.store.shard(shard)
            input_ids[target : target + n] = tokens[source : source + n]
            following = tokens[source + 1 : source + 1 + n_labels]
            labels[target : target + following.size] = following
            if source + n_labels == size:  # joined documents: the last label is the first token of the next shard
                labels[target + n_labels - 1] = self.store.shard(shard + 1)[0]


def _ranges(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ... (count[0] of them), then those of first[1], and so on (int64)."""
    end = np.cumsum(count)
    total = int(end[-1]) if end.size else 0
    return np.arange(total) + np.repeat(first - (end - count), count)


def _before(length: np.ndarray, n_slices: np.ndarray) -> np.ndarray:
    """Tokens in the batch before each row."""
    tokens = np.zeros(length.size + 1, np.int64)
    np.cumsum(length, out=tokens[1:])
    return tokens[np.cumsum(n_slices) - n_slices]
