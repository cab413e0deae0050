"""Packing algorithms: document offsets in the store to slices of documents in rows, as arrays.

- `fill_best_fit`: a document longer than a row is cut into full rows and a remainder; all slices are packed into rows
  by best-fit decreasing (lt_data.packing.best_fit), so no document that fits a row is cut.
- `fill_concat`: the documents are concatenated in order and cut every `seq_len` tokens; the last row is padded.

Each position of a slice has a label, except the last position of a document (`concat`: of the store).
Cost: a few passes over the documents, plus two sorts for best fit.
"""

from typing import NamedTuple

import numpy as np

from lt_data.packing.best_fit import best_fit


class Slices(NamedTuple):
    """Slices of documents, sorted by row and position in the row; each array is [n_slices].

    Attributes:
        document: index of the document.
        start: token offset in the store (int64).
        length: tokens.
        labels: positions with a label.
        row_offsets: first slice of each row, and the end of the last (int64 [n_rows + 1]); no row is empty.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    labels: np.ndarray
    row_offsets: np.ndarray


def fill_best_fit(offsets: np.ndarray, seq_len: int) -> Slices:
    """Fill rows of `seq_len` tokens by best fit.

    Args:
        offsets: offset of each document in the store, and the end of the last (int64 [n + 1]).
        seq_len: tokens in a row.
    """
    # First-touch memory dominates the cost: the only arrays of all slices are the returned ones, filled in place.
    n_documents = offsets.size - 1
    lengths = np.empty(n_documents, np.int32)
    np.subtract(offsets[1:], offsets[:-1], out=lengths, casting="unsafe")
    n_full = lengths // seq_len
    rest = lengths - n_full * seq_len
    ends = np.cumsum(n_full, dtype=np.int64)  # of each document's full slices among all
    full = int(ends[-1]) if n_documents else 0
    short = np.flatnonzero(rest)
    document = np.empty(full + short.size, np.uint32 if n_documents <= 2**32 else np.int64)
    start = np.empty(document.size, np.int64)
    length = np.full(document.size, seq_len, np.int32)
    # Full slices are the longest and fill the first rows in order, without a search. The starts of two neighbors differ
    # by `seq_len`, or by more where a document begins.
    cut = np.flatnonzero(n_full)
    n_cut = n_full[cut]
    document[:full] = np.repeat(cut.astype(document.dtype), n_cut)
    start[:full] = seq_len
    step = offsets[cut]
    step[1:] -= step[:-1] + (n_cut[:-1] - 1).astype(np.int64) * seq_len
    start[ends[cut] - n_cut] = step
    np.cumsum(start[:full], out=start[:full])
    # the remainder of each document ends with it
    order, bins = best_fit(rest[short], seq_len)
    counts = np.bincount(bins)
    short = short[order[np.argsort(bins, kind="stable")]]
    document[full:] = short
    length[full:] = rest[short]
    np.subtract(offsets[1:][short], length[full:], out=start[full:])
    labels = length.copy()
    labels[full:] -= 1
    labels[ends[rest == 0] - 1] -= 1  # documents that end with a full slice
    return Slices(document, start, length, labels, _row_offsets(full, counts))


def _row_offsets(n_single: int, counts: np.ndarray) -> np.ndarray:
    """Return row offsets for `n_single` rows of one slice, then rows of `counts` slices."""
    offsets = np.ones(n_single + counts.size + 1, np.int64)
    offsets[0] = 0
    offsets[n_single + 1 :] = counts
    return np.cumsum(offsets, out=offsets)


def fill_concat(offsets: np.ndarray, seq_len: int) -> Slices:
    """Fill rows of `seq_len` tokens by concatenation; the arguments are those of `fill_best_fit`."""
    begin, end = offsets[:-1], offsets[1:]
    first_row = begin // seq_len
    n_slices = (end - 1) // seq_len - first_row + 1
    document = np.repeat(np.arange(begin.size), n_slices)
    row = np.repeat(first_row, n_slices) + concat_aranges(n_slices)
    start = np.maximum(begin[document], row * seq_len)
    length = np.minimum(end[document], (row + 1) * seq_len) - start
    labels = length.copy()
    labels[-1:] -= 1  # the last token of the store has no label
    return Slices(document, start, length, labels, _row_offsets(0, np.bincount(row)))


def concat_aranges(counts: np.ndarray) -> np.ndarray:
    """Return 0, 1, ..., counts[0] - 1, then 0, 1, ..., counts[1] - 1, and so on (int64)."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
