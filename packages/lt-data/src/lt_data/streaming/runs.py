"""Copies of runs of a store, which are ranges of its tokens, into rows.

A plain loop over the memory maps of the shards: a run is copied in one piece for each place that it is in, of a shard
or around documents that are left out. Of a store in S3 all pieces are fetched first, at the same time.

Cost: about a microsecond a piece plus memory bandwidth, for any number of shards.
"""

import numpy as np

from lt_data.store.token_store import TokenStore


def copy_runs(
    store: TokenStore, row: np.ndarray, start: np.ndarray, length: np.ndarray, *, n: int, seq_len: int
) -> np.ndarray:
    """Copy runs into zeroed rows.

    Args:
        store: the token store.
        row: row of each run, in order (int64); the runs of a row fit in it.
        start: global offset of each run, which must be in the store (int64).
        length: tokens in each run, at least 1 (int64).
        n: number of rows.
        seq_len: tokens in a row.

    Returns:
        The rows, in the store's dtype [n, seq_len].

    Raises:
        DataError: a shard cannot be read.
    """
    run, shard, begin, end = store.split_runs(start, length)
    store.prefetch(shard, begin, end)
    row, length = row[run], end - begin
    before = np.cumsum(length) - length
    at = row * seq_len + before - before[np.searchsorted(row, row)]  # after the pieces before it in its row
    ids = np.zeros(n * seq_len, store.dtype)
    for to, number, first, size in zip(at.tolist(), shard.tolist(), begin.tolist(), length.tolist(), strict=True):
        ids[to : to + size] = store.read(number, first, first + size)
    return ids.reshape(n, seq_len)


def tokens_at(store: TokenStore, positions: np.ndarray) -> np.ndarray:
    """Return single tokens by their global offsets (int64 [n]), in the store's dtype [n]."""
    one = np.ones_like(positions)
    return copy_runs(store, np.arange(positions.size), positions, one, n=positions.size, seq_len=1).reshape(-1)
