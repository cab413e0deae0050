"""One global sequence of rows, whatever the ranks, the batch and the stops."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import IGNORE, DataError, KeyedPermutation, RowReader, Stream, StreamState, TokenStore
from lt_data.packing import build_index


@pytest.fixture(scope="session")
def make_reader(counting_store: Callable[..., TokenStore]) -> Callable[..., RowReader]:
    cache: dict[tuple, RowReader] = {}

    def make(n_rows: int, mode: str = "bfd", document_mask: bool = True, seq_len: int = 4) -> RowReader:
        """A reader of that many rows, each one document that fills it but for the last, which is shorter."""
        key = (n_rows, mode, document_mask, seq_len)
        if key not in cache:
            store = counting_store([seq_len] * (n_rows - 1) + [seq_len - 1])
            fingerprint = store.manifest.fingerprint
            index = build_index(store.lengths, seq_len=seq_len, mode=mode, store_fingerprint=fingerprint)
            assert index.n_rows == n_rows
            cache[key] = RowReader(store, index, document_mask=document_mask)
        return cache[key]

    return make


def global_batch(reader: RowReader, state: StreamState | None, batch: int, dp_size: int, **options: int) -> tuple:
    """The rows that all ranks together get in one step, the valid tokens and the state after it."""
    streams = [
        Stream(reader, global_batch=batch, dp_rank=rank, dp_size=dp_size, state=state, **options)
        for rank in range(dp_size)
    ]
    batches = [stream.next() for stream in streams]
    assert len({batch.state for batch in batches}) == 1
    assert len({batch.valid_tokens for batch in batches}) == 1
    ids = np.concatenate([batch.row_ids for batch in batches])
    expected = reader.gather(ids)
    for name in ("input_ids", "labels", "position_ids", "doc_ids"):
        together = np.concatenate([getattr(batch.rows, name) for batch in batches])
        assert np.array_equal(together, getattr(expected, name))
    assert batches[0].valid_tokens == int((expected.labels != IGNORE).sum())
    return ids, batches[0].state


@settings(max_examples=40)
@given(
    n_rows=st.integers(3, 30),
    seed=st.integers(0, 2**63),
    runs=st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.integers(0, 4)), max_size=6),
)
def test_any_ranks_batches_and_stops_give_one_sequence(
    make_reader: Callable[..., RowReader], n_rows: int, seed: int, runs: list[tuple[int, int, int]]
) -> None:
    """Runs of some steps each with other dp_size and global batch, each going on from the saved state of the last."""
    reader = make_reader(n_rows)
    state: StreamState | None = None
    seen: list[int] = []
    steps = 0
    for dp_size, per_rank, n_steps in [(4, 1, 1), *runs, (2, 3, 1), (1, 2, 2), (8, 1, 3)]:
        for _ in range(n_steps):
            ids, state = global_batch(reader, state, dp_size * per_rank, dp_size, seed=seed)
            seen += ids.tolist()
            steps += 1
            state = StreamState.from_json(json.loads(json.dumps(state.to_json())))
    assert state is not None
    assert (state.step, state.row) == (steps, len(seen))
    fresh = Stream(reader, global_batch=1, seed=seed)
    assert fresh.global_rows(fresh.state, len(seen)).tolist() == seen
    for epoch in range(len(seen) // n_rows):
        assert sorted(seen[epoch * n_rows : (epoch + 1) * n_rows]) == list(range(n_rows))


def test_the_order_is_the_one_that_is_documented(make_reader: Callable[..., RowReader]) -> None:
    stream = Stream(make_reader(7), global_batch=10, seed=3)
    first, second = (KeyedPermutation(7, f"3/{epoch}".encode())(np.arange(7)).tolist() for epoch in (0, 1))
    assert stream.next().row_ids.tolist() == [*first, *second[:3]]
    assert first != second
    assert Stream(make_reader(7), global_batch=7, seed=4).next().row_ids.tolist() != first


def test_ranks_take_consecutive_parts(make_reader: Callable[..., RowReader]) -> None:
    reader = make_reader(12)
    whole = Stream(reader, global_batch=6).next().row_ids
    for rank in range(3):
        part = Stream(reader, global_batch=6, dp_rank=rank, dp_size=3).next()
        assert part.row_ids.tolist() == whole[2 * rank : 2 * rank + 2].tolist()
        assert part.rows.input_ids.shape == (2, 4)


def test_without_shuffle(make_reader: Callable[..., RowReader]) -> None:
    stream = Stream(make_reader(5), global_batch=3, shuffle=False)
    assert [stream.next().row_ids.tolist() for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_steps_states_and_valid_tokens(make_reader: Callable[..., RowReader]) -> None:
    stream = Stream(make_reader(5), global_batch=2, shuffle=False)
    assert (stream.steps_per_epoch, stream.epoch_remainder) == (2, 1)
    assert stream.state == StreamState(step=0, row=0, seed=0, fingerprint=stream.state.fingerprint)
    batches = [stream.next() for _ in range(3)]
    assert [batch.step for batch in batches] == [0, 1, 2]
    assert [(batch.state.step, batch.state.row) for batch in batches] == [(1, 2), (2, 4), (3, 6)]
    # Documents of 4 tokens have 3 labels, the last one of 3 has 2.
    assert [batch.valid_tokens for batch in batches] == [6, 6, 5]
    assert stream.state == batches[-1].state


def test_looking_ahead_changes_nothing(make_reader: Callable[..., RowReader]) -> None:
    stream = Stream(make_reader(9), global_batch=4)
    stream.next()
    ahead = stream.global_rows(stream.state, 8).tolist()
    assert [*stream.next().row_ids.tolist(), *stream.next().row_ids.tolist()] == ahead
    assert stream.global_rows(stream.state, 0).tolist() == []


def test_batch_larger_than_the_pack(make_reader: Callable[..., RowReader]) -> None:
    ids = Stream(make_reader(3), global_batch=8).next().row_ids.tolist()
    assert sorted(ids[:3]) == sorted(ids[3:6]) == [0, 1, 2]


def test_skipping_is_noted_and_leaves_the_sequence_as_it_is(make_reader: Callable[..., RowReader]) -> None:
    reader = make_reader(10)
    plain = Stream(reader, global_batch=1)
    sequence = plain.global_rows(plain.state, 20).tolist()
    stream = Stream(reader, global_batch=2)
    first = stream.next().row_ids.tolist()
    stream.skip(3)
    stream.skip(0)
    stream.skip(2)
    resumed = Stream(reader, global_batch=2, state=StreamState.from_json(stream.state.to_json()))
    second = resumed.next().row_ids.tolist()
    resumed.skip(1)
    assert (first, second) == (sequence[:2], sequence[7:9])
    assert resumed.state.skipped == ((2, 7), (9, 10))
    assert (resumed.state.step, resumed.state.row) == (2, 10)
    with pytest.raises(DataError, match="n_rows=-1"):
        stream.skip(-1)


def test_state_of_other_data_is_refused_and_what_differs_is_named(make_reader: Callable[..., RowReader]) -> None:
    state = Stream(make_reader(10), global_batch=2, seed=1).next().state
    cases = [
        ({"reader": make_reader(11), "seed": 1}, r"store: \w+ before, \w+ now; pack: bfd-4:\w+ before"),
        ({"reader": make_reader(10, mode="concat"), "seed": 1}, r"pack: bfd-4:\w+ before, concat-4:\w+ now"),
        ({"reader": make_reader(10, document_mask=False), "seed": 1}, "document_mask: on before, off now"),
        ({"reader": make_reader(10), "seed": 2}, "seed: 1 before, 2 now"),
        ({"reader": make_reader(10), "seed": 1, "shuffle": False}, "order: shuffled-1 before, pack now"),
    ]
    for options, message in cases:
        with pytest.raises(DataError, match=message):
            Stream(global_batch=2, state=state, **options)
    Stream(make_reader(10), global_batch=6, dp_rank=2, dp_size=3, seed=1, state=state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 6, "dp_size": 4}, r"global_batch=6 over dp_size=4 ranks: give a multiple"),
        ({"global_batch": 0}, "global_batch=0"),
        ({"global_batch": 4, "dp_size": 2, "dp_rank": 2}, "dp_rank=2: from 0 to dp_size - 1 = 1"),
        ({"global_batch": 4, "dp_size": 2, "dp_rank": -1}, "dp_rank=-1"),
    ],
)
def test_bad_division(make_reader: Callable[..., RowReader], options: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Stream(make_reader(3), **options)


@pytest.mark.parametrize(
    "change",
    [{"step": -1}, {"row": 1.5}, {"row": True}, {"skipped": [[1]]}, {"skipped": 3}, {"extra": 1}, {"seed": "0"}],
)
def test_broken_state(change: dict[str, object]) -> None:
    values = StreamState(step=1, row=2, seed=3, fingerprint="x", skipped=((0, 1),)).to_json()
    assert StreamState.from_json(values).to_json() == values
    with pytest.raises(DataError, match="not the state of a stream"):
        StreamState.from_json({**values, **change})
    with pytest.raises(DataError, match="not the state of a stream"):
        StreamState.from_json({"step": 1})
