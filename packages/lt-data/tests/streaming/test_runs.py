"""Runs of stores that leave documents out, against the kept ids, on stores in which the token at offset t is t + 1."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lt_data import TokenStore
from lt_data.store.extents import Extents, extents_of_mask
from lt_data.streaming.runs import copy_runs, tokens_at

SEQ_LEN = 8


def _leave_out(store: TokenStore, kept: np.ndarray) -> np.ndarray:
    """Let a store have only some of its documents; return their ids."""
    lengths, bounds = store.lengths, np.cumsum([0, *store.manifest.shard_documents])
    shards = [extents_of_mask(kept[a:b], lengths[a:b]) for a, b in pairwise(bounds.tolist())]
    column = {name: np.concatenate([getattr(one, name) for one in shards]) for name in shards[0]._fields}
    numbers = np.repeat(np.arange(len(shards)), [one.document.size for one in shards])
    store.extents = Extents(
        first_token=np.cumsum([0, *column["tokens"]]),
        first_document=np.cumsum([0, *column["documents"]]),
        shard_token=np.append(column["token"], 0),
        shard_document=np.append(column["document"], 0).astype(np.uint32),
        shard=np.append(numbers, len(shards)).astype(np.uint32),
    )
    return 1 + np.flatnonzero(np.repeat(kept, lengths))


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 7, 60]), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 6),
    st.data(),
)
def test_runs_are_those_of_the_kept_ids(
    counting_store: Callable[..., TokenStore],
    documents: list[tuple[int, bool]],
    shard_documents: int,
    data: st.DataObject,
) -> None:
    """Full and short runs, over any extents, one of each row or several."""
    store = counting_store([length for length, _ in documents], shard_documents)
    ids = _leave_out(store, np.array([kept for _, kept in documents]))
    assert store.n_tokens == ids.size
    if not ids.size:
        return
    offsets = st.lists(st.integers(0, max(ids.size - SEQ_LEN, 0)), min_size=1, max_size=20)
    start = np.array(data.draw(offsets), np.int64)
    limit = st.sampled_from([SEQ_LEN, SEQ_LEN, data.draw(st.integers(1, SEQ_LEN))])
    length = np.minimum([data.draw(limit) for _ in start], ids.size - start)
    wanted = [[*ids[a : a + n].tolist(), *[0] * (SEQ_LEN - n)] for a, n in zip(start.tolist(), length, strict=True)]
    assert copy_runs(store, np.arange(start.size), start, length, n=start.size, seq_len=SEQ_LEN).tolist() == wanted
    assert tokens_at(store, start).tolist() == ids[start].tolist()
    row = np.repeat(np.arange(start.size), 2)  # each run in two halves
    half = np.stack([length // 2, length - length // 2], axis=1)
    halves = np.stack([start, start + half[:, 0]], axis=1)
    used = half.reshape(-1) > 0
    found = copy_runs(store, row[used], halves.reshape(-1)[used], half.reshape(-1)[used], n=start.size, seq_len=SEQ_LEN)
    assert found.tolist() == wanted


def test_a_run_over_three_extents_among_full_ones(counting_store: Callable[..., TokenStore]) -> None:
    store = counting_store([40, 5, 2, 5, 40], 5)
    ids = _leave_out(store, np.array([True, False, True, False, True]))
    start = np.array([0, 37, 8, 16, 38, 24, 60])
    found = copy_runs(store, np.arange(7), start, np.full(7, SEQ_LEN), n=7, seq_len=SEQ_LEN)
    assert found.tolist() == [ids[a : a + SEQ_LEN].tolist() for a in start.tolist()]
