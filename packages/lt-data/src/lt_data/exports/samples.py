"""What an export writes: the documents of a store one after the other, or rows of a fixed length, batch by batch.

Three shapes of the same tokens, each in the order of the store or of the pack, with memory for one batch (about a
million tokens; a longer document is a batch of its own):

- `document_batches`: whole documents, for formats that keep borders.
- `row_batches`: the rows of a pack with labels, for formats of samples (lt_data.streaming.rows).
- `block_batches`: all documents joined and cut every so many tokens, for formats that are one run of tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lt_data.store.token_store import TokenStore
from lt_data.streaming.rows import RowReader, Rows

BATCH_TOKENS = 1 << 20


@dataclass(frozen=True, eq=False)
class Documents:
    """Consecutive documents: number of the first, tokens of each (int64 [n]), and all their ids one after the other."""

    first: int
    lengths: np.ndarray
    tokens: np.ndarray


def document_batches(store: TokenStore, first: int, last: int) -> Iterator[Documents]:
    """The documents [first, last) of a store."""
    offsets = store.offsets
    while first < last:
        end = int(np.searchsorted(offsets, offsets[first] + BATCH_TOKENS, side="right")) - 1
        end = min(max(end, first + 1), last)
        begin = int(offsets[first])
        yield Documents(first, np.diff(offsets[first : end + 1]), store.tokens(begin, int(offsets[end]) - begin))
        first = end


def row_batches(reader: RowReader, first: int, last: int) -> Iterator[Rows]:
    """The rows [first, last) of a pack."""
    step = max(1, BATCH_TOKENS // reader.seq_len)
    for begin in range(first, last, step):
        yield reader.gather(np.arange(begin, min(begin + step, last)))


def block_batches(store: TokenStore, first: int, last: int, pad_id: int) -> Iterator[np.ndarray]:
    """The tokens [first, last) of all documents joined; those past the end of the store are `pad_id`."""
    for begin in range(first, last, BATCH_TOKENS):
        n = min(BATCH_TOKENS, last - begin)
        tokens = store.tokens(min(begin, store.n_tokens), min(n, max(0, store.n_tokens - begin)))
        yield tokens if tokens.size == n else np.append(tokens, np.full(n - tokens.size, pad_id, tokens.dtype))


def runs(sizes: np.ndarray, most: int) -> np.ndarray:
    """Cut items of these sizes into runs of at most `most` each (an item that is larger is a run of its own).

    Returns:
        The borders: item numbers 0, ..., n (int64).
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    borders = [0]
    while borders[-1] < sizes.size:
        first = borders[-1]
        before = int(ends[first - 1]) if first else 0
        borders.append(max(first + 1, int(np.searchsorted(ends, before + most, side="right"))))
    return np.array(borders, np.int64)
