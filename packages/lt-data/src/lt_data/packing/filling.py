"""How rows are filled: from where the documents lie in the store to slices of them in rows. Arrays in, arrays out.

- `fill_best_fit`: a document longer than a row is cut into full rows and a remainder; the pieces go into rows by
  best-fit decreasing over all of them (lt_data.packing.best_fit), so no document that fits a row is cut.
- `fill_concat`: the documents joined in order and cut every `seq_len` tokens; the last row is padded.
- `fill_buckets`: dataset decomposition (https://arxiv.org/abs/2405.13226): a document is cut into full rows and then,
  like its length in binary, into halves, quarters and so on down to the shortest rows, each a row of its own. What is
  shorter than those goes into rows of the shortest length by best-fit decreasing, so nothing is dropped.

A slice's labels are all its positions but one where it ends its document (`concat`: the store).
Cost: a few passes over the documents; best fit needs two sorts besides.
"""

from typing import NamedTuple

import numpy as np

from lt_data.packing.best_fit import best_fit


class Slices(NamedTuple):
    """Slices in the order of rows and of their place in the row, each array [n_slices].

    Attributes:
        document: number of the document.
        start: token offset in the store (int64).
        length: in tokens.
        labels: positions with a label.
        row: number of the row, ascending, none left out (int64).
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    labels: np.ndarray
    row: np.ndarray


def fill_best_fit(offsets: np.ndarray, seq_len: int) -> Slices:
    """Rows of `seq_len` tokens; `offsets` as for `fill_buckets`."""
    document, start, length, is_last = _pieces(offsets, seq_len)
    # Full pieces are the longest and fill the first rows in their order, which needs no search.
    full, short = np.flatnonzero(length == seq_len), np.flatnonzero(length < seq_len)
    order, bins = best_fit(length[short], seq_len)
    by_row = np.argsort(bins, kind="stable")
    slices = np.concatenate([full, short[order[by_row]]])
    bins = np.concatenate([np.arange(full.size), bins[by_row] + full.size])
    del order, by_row, full, short
    # Random access is what costs here, so each array is looked up once, and the mark of the last piece rides along.
    length = length[slices]
    start = (start * 2 + is_last)[slices]
    return Slices(document[slices], start >> 1, length, length - (start & 1).astype(np.int32), bins)


def _pieces(offsets: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Documents cut every `seq_len` tokens: document, start, length (int32) and being the last, of each piece."""
    n_documents = offsets.size - 1
    n_pieces = -(-(offsets[1:] - offsets[:-1]) // seq_len)
    last = np.cumsum(n_pieces) - 1
    n = int(last[-1]) + 1 if n_documents else 0
    document = np.repeat(np.arange(n_documents, dtype=np.uint32 if n_documents <= 2**32 else np.int64), n_pieces)
    start = np.repeat(offsets[:-1], n_pieces)
    is_last = np.zeros(n, bool)
    is_last[last] = True
    long = np.flatnonzero(n_pieces > 1)
    piece = counted(n_pieces[long])
    start[np.repeat(last[long] - n_pieces[long] + 1, n_pieces[long]) + piece] += piece * seq_len
    length = np.full(n, seq_len, np.int32)
    length[last] = offsets[1:] - start[last]
    return document, start, length, is_last


def fill_concat(offsets: np.ndarray, seq_len: int) -> Slices:
    """Rows of `seq_len` tokens; `offsets` as for `fill_buckets`."""
    begin, end = offsets[:-1], offsets[1:]
    first_row = begin // seq_len
    n_slices = (end - 1) // seq_len - first_row + 1
    document = np.repeat(np.arange(begin.size), n_slices)
    row = np.repeat(first_row, n_slices) + counted(n_slices)
    start = np.maximum(begin[document], row * seq_len)
    length = np.minimum(end[document], (row + 1) * seq_len) - start
    labels = length.copy()
    labels[-1:] -= 1  # nothing follows the last token of the store
    return Slices(document, start, length, labels, row)


def fill_buckets(offsets: np.ndarray, lengths: list[int]) -> tuple[Slices, list[int]]:
    """Rows of several lengths, those of the first length first.

    Args:
        offsets: where each document begins in the store, and the end of the last (int64 [n + 1]).
        lengths: of the rows, each half of the one before.

    Returns:
        The slices, and how many rows there are of each length.
    """
    longest, shortest = lengths[0], lengths[-1]
    begin, end = offsets[:-1], offsets[1:]
    parts: list[Slices] = []
    counts: list[int] = []
    full = (end - begin) // longest
    document = np.repeat(np.arange(begin.size), full)
    start = begin[document] + counted(full) * longest
    for length in lengths:
        if length < longest:
            rest = (end - begin) % (2 * length)
            document = np.flatnonzero(rest >= length)
            start = (end - rest)[document]
        labels = np.where(start + length == end[document], length - 1, length)
        rows = np.arange(document.size) + sum(counts)
        parts.append(Slices(document, start, np.full(document.size, length), labels, rows))
        counts.append(document.size)
    rest = (end - begin) % shortest
    document = np.flatnonzero(rest)
    order, bins = best_fit(rest[document], shortest)
    by_row = np.argsort(bins, kind="stable")
    document = document[order[by_row]]
    length = rest[document]
    rows = bins[by_row] + sum(counts)
    parts.append(Slices(document, end[document] - length, length, length - 1, rows))
    counts[-1] += int(bins.max()) + 1 if bins.size else 0
    return Slices(*(np.concatenate(column) for column in zip(*parts, strict=True))), counts


def counted(counts: np.ndarray) -> np.ndarray:
    """0, 1, ..., counts[0] - 1, then 0, 1, ..., counts[1] - 1, and so on (int64)."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
