"""Batches of documents, rows or tokens of a store, for exports.

Three forms, each in the order of the store or of the pack, with memory for one batch (about a million tokens; a longer
document is a batch of its own):

- `document_batches`: whole documents, for formats with document boundaries.
- `row_batches`: the rows of a pack with labels, for formats of samples (lt_data.streaming.rows).
- `block_batches`: all documents concatenated and cut into blocks, for formats without document boundaries.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lt_data.store.token_store import TokenStore
from lt_data.streaming.rows import RowReader, Rows

BATCH_TOKENS = 1 << 20


@dataclass(frozen=True, eq=False)
class DocumentBatch:
    """Consecutive documents: index of the first, length of each (int64 [n]), and their concatenated ids."""

    first: int
    lengths: np.ndarray
    tokens: np.ndarray


def document_batches(store: TokenStore, first: int, last: int) -> Iterator[DocumentBatch]:
    """Yield the documents [first, last) of a store."""
    offsets = store.offsets
    while first < last:
        end = int(np.searchsorted(offsets, offsets[first] + BATCH_TOKENS, side="right")) - 1
        end = min(max(end, first + 1), last)
        begin = int(offsets[first])
        yield DocumentBatch(first, np.diff(offsets[first : end + 1]), store.tokens(begin, int(offsets[end]) - begin))
        first = end


def row_batches(reader: RowReader, first: int, last: int) -> Iterator[Rows]:
    """Yield the rows [first, last) of a pack."""
    step = max(1, BATCH_TOKENS // reader.seq_len)
    for begin in range(first, last, step):
        yield reader.read_rows(np.arange(begin, min(begin + step, last)))


def block_batches(store: TokenStore, first: int, last: int, pad_id: int) -> Iterator[np.ndarray]:
    """Yield the tokens [first, last) of the store, padded with `pad_id` past its end."""
    for begin in range(first, last, BATCH_TOKENS):
        n = min(BATCH_TOKENS, last - begin)
        tokens = store.tokens(min(begin, store.n_tokens), min(n, max(0, store.n_tokens - begin)))
        yield tokens if tokens.size == n else np.append(tokens, np.full(n - tokens.size, pad_id, tokens.dtype))


def split_by_size(sizes: np.ndarray, max_size: int) -> np.ndarray:
    """Split items of these sizes into runs of at most `max_size` each (a larger item is a run of its own).

    Returns:
        The boundaries: item indices 0, ..., n (int64).
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    boundaries = [0]
    while boundaries[-1] < sizes.size:
        first = boundaries[-1]
        before = int(ends[first - 1]) if first else 0
        boundaries.append(max(first + 1, int(np.searchsorted(ends, before + max_size, side="right"))))
    return np.array(boundaries, np.int64)
