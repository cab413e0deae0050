"""Document boundaries of micro-batches as `cu_seqlens`, the form that attention kernels take.

They come from the slices of a pack (`TokenRows.segments`). Only a custom loader's rows, of which no more than
`doc_ids` is known, are scanned for them, once and where they enter.

Shapes: M micro-batches, B rows per micro-batch, T positions per row, S a bound on the documents of a micro-batch.
"""

import numpy as np


def micro_batch_cu_seqlens(starts: np.ndarray, *, n_micro: int, n_tokens: int, max_documents: int) -> np.ndarray:
    """Return the boundaries of each micro-batch, int32 [M, S + 1]: 0, ..., B * T, padded with B * T.

    Args:
        starts: first positions of the documents in the flattened rows of all micro-batches, ascending; each row begins
            with one.
        n_micro: M.
        n_tokens: B * T.
        max_documents: S.
    """
    micro, offset = np.divmod(starts, n_tokens)
    column = np.arange(starts.size) - np.searchsorted(micro, micro)
    assert column.max() < max_documents, (int(column.max()) + 1, max_documents)
    cu_seqlens = np.full((n_micro, max_documents + 1), n_tokens, np.int32)
    cu_seqlens[micro, column] = offset
    return cu_seqlens


def find_document_starts(doc_ids: np.ndarray) -> np.ndarray:
    """Return at which positions of rows of document numbers [n, T] a document begins (bool [n, T]).

    Raises:
        ValueError: a row returns to a document that it has left; the argument is the row's index.
    """
    starts = np.ones(doc_ids.shape, bool)
    starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    n_distinct = 1 + np.count_nonzero(np.diff(np.sort(doc_ids, axis=1), axis=1), axis=1)
    returning = np.flatnonzero(starts.sum(axis=1) != n_distinct)
    if returning.size:
        raise ValueError(int(returning[0]))
    return starts
