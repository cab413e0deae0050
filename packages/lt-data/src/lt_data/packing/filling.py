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
        row_offsets: first slice of each row, and the end of the last (int64 [n_rows + 1]); no row is empty.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    labels: np.ndarray
    row_offsets: np.ndarray


def fill_best_fit(offsets: np.ndarray, seq_len: int) -> Slices:
    """Rows of `seq_len` tokens; `offsets` as for `fill_buckets`."""
    # Memory that is touched for the first time is what costs here: there is no array of all pieces but those that are
    # given back, and these are filled in place.
    n_documents = offsets.size - 1
    lengths = np.empty(n_documents, np.int32)
    np.subtract(offsets[1:], offsets[:-1], out=lengths, casting="unsafe")
    n_full = lengths // seq_len
    rest = lengths - n_full * seq_len
    ends = np.cumsum(n_full, dtype=np.int64)  # of each document's full pieces among all of them
    full = int(ends[-1]) if n_documents else 0
    short = np.flatnonzero(rest)
    document = np.empty(full + short.size, np.uint32 if n_documents <= 2**32 else np.int64)
    start = np.empty(document.size, np.int64)
    length = np.full(document.size, seq_len, np.int32)
    # Full pieces are the longest and fill the first rows in their order, which needs no search. From one to the next it
    # is `seq_len` tokens, or more where a document begins.
    cut = np.flatnonzero(n_full)
    n_cut = n_full[cut]
    document[:full] = np.repeat(cut.astype(document.dtype), n_cut)
    start[:full] = seq_len
    step = offsets[cut]
    step[1:] -= step[:-1] + (n_cut[:-1] - 1).astype(np.int64) * seq_len
    start[ends[cut] - n_cut] = step
    np.cumsum(start[:full], out=start[:full])
    # The rest of each document ends with it.
    order, bins = best_fit(rest[short], seq_len)
    counts = np.bincount(bins)
    short = short[order[np.argsort(bins, kind="stable")]]
    document[full:] = short
    length[full:] = rest[short]
    np.subtract(offsets[1:][short], length[full:], out=start[full:])
    labels = length.copy()
    labels[full:] -= 1
    labels[ends[rest == 0] - 1] -= 1  # documents that end with a full piece
    return Slices(document, start, length, labels, _row_offsets(full, counts))


def _row_offsets(alone: int, counts: np.ndarray) -> np.ndarray:
    """Where rows begin: first rows of one slice, then rows of so many."""
    offsets = np.ones(alone + counts.size + 1, np.int64)
    offsets[0] = 0
    offsets[alone + 1 :] = counts
    return np.cumsum(offsets, out=offsets)


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
    return Slices(document, start, length, labels, _row_offsets(0, np.bincount(row)))


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
    parts: list[tuple[np.ndarray, ...]] = []
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
        parts.append((document, start, np.full(document.size, length), labels))
        counts.append(document.size)
    rest = (end - begin) % shortest
    document = np.flatnonzero(rest)
    order, bins = best_fit(rest[document], shortest)
    document = document[order[np.argsort(bins, kind="stable")]]
    length = rest[document]
    parts.append((document, end[document] - length, length, length - 1))
    joined = np.bincount(bins)
    row_offsets = _row_offsets(sum(counts), joined)
    counts[-1] += joined.size
    document, start, length, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Slices(document, start, length, labels, row_offsets), counts


def counted(counts: np.ndarray) -> np.ndarray:
    """0, 1, ..., counts[0] - 1, then 0, 1, ..., counts[1] - 1, and so on (int64)."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
