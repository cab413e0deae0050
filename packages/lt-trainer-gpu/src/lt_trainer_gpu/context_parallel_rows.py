"""Head-tail split of rows over context-parallel ranks, and the keys that each rank's queries see.

A row is cut into 2n chunks of equal length; rank r has chunks r and 2n-1-r, one behind the other. Under a causal mask
the later of the two sees as much more as the earlier sees less, so rows of one document are balanced exactly; rows of
many documents nearly, as attention is then a small part of the work.

A query segment is a run of this rank's queries that lie in one chunk and in one document. Its keys are one run of the
row: from the document's first token to the segment's last. So attention within a segment is causal with the triangle
aligned to the last key ("bottom right"), whatever the documents, and no key is listed that no query of it sees.

Ranks gather keys as [n, B, T/n]; `key_index` addresses that order, so nothing is reordered in between.

Cost: on the host, a few passes over the B * T positions of a micro-batch.

Shapes: B rows, T positions of a row, n ranks, S query segments, P keys of all segments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lt_model.documents import DocumentBoundaries


def rank_positions(array: np.ndarray, cp: int, cp_rank: int) -> np.ndarray:
    """Return this rank's positions of `array` [..., T]: chunks `cp_rank` and 2 cp - 1 - `cp_rank`."""
    if cp == 1:
        return array
    chunk = array.shape[-1] // (2 * cp)
    head, tail = cp_rank * chunk, (2 * cp - 1 - cp_rank) * chunk
    return np.concatenate((array[..., head : head + chunk], array[..., tail : tail + chunk]), axis=-1)


@dataclass(frozen=True, eq=False)
class QuerySegments(DocumentBoundaries):
    """Boundaries of one rank's query segments, and their keys.

    `cu_seqlens` and `seq_len` are those of this rank's own positions.

    Attributes:
        key_starts: int32 [S], on the host: each segment's first key, as a position in the rows laid end to end.
        cu_seqlens_k: int32 [S + 1], on the CPU: where each segment's keys begin among those of all.
        cp: number of ranks.
        n_keys: P, or a bound on it that is the same for every batch.
    """

    key_starts: np.ndarray
    cu_seqlens_k: Tensor
    cp: int
    n_keys: int

    @property
    def row_length(self) -> int:
        """Positions of a row on all ranks."""
        return self.seq_len * self.cp

    def within(self, window: int) -> QuerySegments:
        """Return the segments with the keys that a query of each sees in a window of so many; 0: the same."""
        if not window:
            return self
        counts = self.cu_seqlens_k.diff().numpy()
        kept = np.minimum(counts, self.cu_seqlens.diff().numpy() + window - 1)
        bounds = torch.from_numpy(np.append(0, np.cumsum(kept)).astype(np.int32))
        n_keys = self.n_keys if self.n_keys > counts.sum() else int(bounds[-1])
        return replace(self, key_starts=self.key_starts + counts - kept, cu_seqlens_k=bounds, n_keys=n_keys)

    def key_index(self) -> Tensor:
        """Return each key's place among the gathered ones, int64 [P].

        Beyond the last segment it is the number of gathered keys.
        """
        counts = self.cu_seqlens_k.diff().numpy()
        positions = np.repeat(self.key_starts - self.cu_seqlens_k[:-1].numpy(), counts)
        positions += np.arange(positions.size)
        order = gathered_order(self.n_rows, self.seq_len, self.cp)
        index = np.full(self.n_keys, order.size, np.int64)
        index[: positions.size] = order[positions]
        return torch.from_numpy(index)

    def visible_keys(self) -> tuple[Tensor, Tensor]:
        """Return the first and the last position in its row that each query sees, int64 [B, T/n] each."""
        queries, keys = self.cu_seqlens.numpy().astype(np.int64), self.cu_seqlens_k.numpy()
        counts = np.diff(queries)
        ends = self.key_starts + np.diff(keys)
        first = np.repeat(self.key_starts, counts)
        last = np.repeat(ends - queries[1:], counts) + np.arange(first.size)
        row_starts = np.repeat(np.arange(self.n_rows) * (self.seq_len * self.cp), self.seq_len)
        shape = (self.n_rows, self.seq_len)
        return torch.from_numpy((first - row_starts).reshape(shape)), torch.from_numpy(
            (last - row_starts).reshape(shape)
        )


def split_boundaries(
    boundaries: DocumentBoundaries, cp: int, cp_rank: int, *, fixed_length: bool = False
) -> QuerySegments:
    """Return the query segments of a rank.

    Args:
        boundaries: of whole rows; their length is a multiple of 2 `cp`.
        cp: number of ranks.
        cp_rank: this rank's index.
        fixed_length: pad with empty segments and unused keys, so that shapes depend on those of `boundaries` only.
    """
    n_rows, seq_len = boundaries.n_rows, boundaries.seq_len
    cu_seqlens, n_tokens = boundaries.cu_seqlens.numpy(), n_rows * seq_len
    chunk = seq_len // (2 * cp)
    documents = cu_seqlens[: np.searchsorted(cu_seqlens, n_tokens)]  # padding ends there
    begins = np.zeros(n_tokens, bool)
    begins[documents] = True
    positions = rank_positions(np.arange(n_tokens).reshape(n_rows, seq_len), cp, cp_rank).ravel()
    begins = begins[positions]
    begins[::chunk] = True
    first = np.flatnonzero(begins)
    queries = np.append(first, positions.size)
    key_starts = documents[np.searchsorted(documents, positions[first], side="right") - 1]
    keys = np.append(0, np.cumsum(positions[queries[1:] - 1] + 1 - key_starts))
    n_keys = int(keys[-1])
    if fixed_length:
        n_padding = cu_seqlens.size - 1 + 2 * n_rows - first.size
        queries, keys = (np.pad(bounds, (0, n_padding), mode="edge") for bounds in (queries, keys))
        key_starts = np.pad(key_starts, (0, n_padding))
        n_keys = n_rows * (2 * cp + 1) * chunk  # of a rank's two chunks, the one has what the other lacks
    return QuerySegments(
        cu_seqlens=torch.from_numpy(queries.astype(np.int32)),
        n_rows=n_rows,
        seq_len=2 * chunk,
        key_starts=key_starts.astype(np.int64),
        cu_seqlens_k=torch.from_numpy(keys.astype(np.int32)),
        cp=cp,
        n_keys=n_keys,
    )


@lru_cache(maxsize=8)
def gathered_order(n_rows: int, rank_seq_len: int, cp: int) -> np.ndarray:
    """Return the place of each position of the rows laid end to end among gathered ones, int64 [B * T].

    Gathered positions are [n, B, T/n], a rank behind the other.
    """
    numbers = np.arange(cp * n_rows * rank_seq_len).reshape(cp, n_rows, 2, rank_seq_len // 2)
    heads, tails = numbers[:, :, 0], numbers[::-1, :, 1]
    order = np.concatenate((heads, tails)).transpose(1, 0, 2).ravel()
    order.flags.writeable = False
    return order
