"""Query segments of context-parallel ranks against a mask over whole rows, for any documents."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_model.documents import DocumentBoundaries
from lt_trainer_gpu.context_parallel_rows import QuerySegments, gathered_order, rank_positions, split_boundaries


def boundaries_of(doc_ids: np.ndarray) -> DocumentBoundaries:
    return DocumentBoundaries.from_doc_ids(torch.from_numpy(doc_ids))


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, np.ndarray]:
    """Number of ranks and document numbers [B, T]; documents may be as short as a token and as long as a row."""
    cp = draw(st.integers(2, 5))
    shape = draw(st.integers(1, 3)), 2 * cp * draw(st.integers(1, 5))
    begins = draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    rare = draw(st.integers(1, 4))
    return cp, (np.array(begins).reshape(shape).cumsum(axis=1) // rare).astype(np.int64)


def whole_mask(doc_ids: np.ndarray) -> np.ndarray:
    """Which keys [B, T] each query sees, [B, T, T]."""
    same = doc_ids[:, :, None] == doc_ids[:, None, :]
    return same & np.tri(doc_ids.shape[1], dtype=bool)


def mask_of_segments(segments: QuerySegments, n_rows: int, seq_len: int) -> np.ndarray:
    """The same mask for a rank's queries, [B, T/n, T], as a kernel with a bottom-right triangle would see it."""
    places = {place: position for position, place in enumerate(gathered_order(n_rows, segments.seq_len, segments.cp))}
    keys = [places.get(int(place)) for place in segments.key_index()]
    queries, bounds = segments.cu_seqlens.tolist(), segments.cu_seqlens_k.tolist()
    assert all(key is None for key in keys[bounds[-1] :])
    seen = np.zeros((n_rows * segments.seq_len, n_rows * seq_len), bool)
    for q, q_end, k, k_end in zip(queries[:-1], queries[1:], bounds[:-1], bounds[1:], strict=True):
        for query in range(q, q_end):
            seen[query, keys[k : k_end - (q_end - 1 - query)]] = True
    rows = seen.reshape(n_rows, segments.seq_len, n_rows, seq_len)
    assert all(not rows[i, :, j].any() for i in range(n_rows) for j in range(n_rows) if i != j)
    return np.stack([rows[i, :, i] for i in range(n_rows)])


@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans())
def test_each_query_sees_what_it_sees_in_the_whole_row(case: tuple[int, np.ndarray], fixed_length: bool) -> None:
    cp, doc_ids = case
    n_rows, seq_len = doc_ids.shape
    wanted = whole_mask(doc_ids)
    for rank in range(cp):
        segments = split_boundaries(boundaries_of(doc_ids), cp, rank, fixed_length=fixed_length)
        own = rank_positions(np.arange(seq_len), cp, rank)
        assert (segments.n_rows, segments.seq_len) == (n_rows, seq_len // cp)
        assert (mask_of_segments(segments, n_rows, seq_len) == wanted[:, own]).all()
        first, last = (x.numpy()[..., None] for x in segments.visible_keys())
        keys = np.arange(seq_len)
        assert (((keys >= first) & (keys <= last)) == wanted[:, own]).all()
        lengths = segments.cu_seqlens.diff().numpy()
        assert (lengths[lengths > 0] <= seq_len // (2 * cp)).all()


@settings(max_examples=30, deadline=None)
@given(cases())
def test_ranks_hold_each_position_once_and_gather_them_in_known_places(case: tuple[int, np.ndarray]) -> None:
    cp, doc_ids = case
    numbers = np.arange(doc_ids.size).reshape(doc_ids.shape)
    held = [rank_positions(numbers, cp, rank) for rank in range(cp)]
    gathered = np.concatenate([part.ravel() for part in held])
    assert (gathered[gathered_order(len(doc_ids), held[0].shape[1], cp)] == numbers.ravel()).all()


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(0, 4))
def test_compiled_blocks_get_shapes_that_documents_do_not_change(case: tuple[int, np.ndarray], n_padding: int) -> None:
    """Boundaries come padded to a bound on the number of documents."""
    cp, doc_ids = case
    cu_seqlens, (n_rows, seq_len) = boundaries_of(doc_ids).cu_seqlens, doc_ids.shape
    padded = torch.cat((cu_seqlens, cu_seqlens.new_full((n_padding,), doc_ids.size)))
    for rank in range(cp):
        segments = split_boundaries(DocumentBoundaries(padded, n_rows, seq_len), cp, rank, fixed_length=True)
        assert len(segments.cu_seqlens) == len(segments.cu_seqlens_k) == len(padded) + 2 * n_rows
        assert segments.key_index().shape == (n_rows * (seq_len + seq_len // (2 * cp)),)
        exact = split_boundaries(DocumentBoundaries(padded, n_rows, seq_len), cp, rank)
        n_segments = len(exact.cu_seqlens)
        assert torch.equal(segments.cu_seqlens[:n_segments], exact.cu_seqlens)
        assert torch.equal(segments.key_index()[: exact.n_keys], exact.key_index())


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_rows_of_one_document_are_the_same_work_for_all_ranks(cp: int) -> None:
    doc_ids = np.zeros((2, 16 * cp), np.int64)
    pairs = [
        int(mask_of_segments(split_boundaries(boundaries_of(doc_ids), cp, rank), *doc_ids.shape).sum())
        for rank in range(cp)
    ]
    assert len(set(pairs)) == 1


def test_short_documents_need_no_keys_of_other_ranks() -> None:
    doc_ids = np.arange(64)[None] // 4
    for rank in range(4):
        segments = split_boundaries(boundaries_of(doc_ids), 4, rank)
        assert segments.n_keys == 16
        assert segments.key_index().tolist() == list(range(16 * rank, 16 * rank + 16))
