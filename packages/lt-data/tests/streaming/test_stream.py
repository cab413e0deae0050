"""One global sequence of rows, whatever the ranks, the batch and the stops."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import DataError, Document, RowReader, Stream, TokenStore, pack, prepare
from lt_data.packing.pack_index import build_index
from lt_data.streaming.permutation import permute
from lt_data.streaming.ramp import BatchRamp
from lt_data.streaming.stream import StreamState


@pytest.fixture(scope="session")
def make_reader(counting_store) -> Callable[..., RowReader]:
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


@pytest.fixture(scope="session")
def mixed_reader(counting_store) -> RowReader:
    """Rows with several documents, cut ones and padding: 13 rows of 16 positions from 6 shards."""
    store = counting_store([5, 40, 1, 16, 7, 7, 30, 2, 3, 11, 16, 9, 25, 6, 1, 15])
    index = build_index(store.lengths, seq_len=16, mode="bfd", store_fingerprint=store.manifest.fingerprint)
    assert index.n_rows == 13
    return RowReader(store, index)


ARRAYS = ("input_ids", "labels", "position_ids", "doc_ids")


@settings(max_examples=60)
@given(
    dp_sizes=st.permutations([4, 2, 1, 8]),
    steps=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    skips=st.lists(st.one_of(st.just(0), st.integers(0, 30)), min_size=4, max_size=4),
    batches=st.lists(st.sampled_from([8, 16, 24]), min_size=4, max_size=4),
    seed=st.integers(0, 2**63),
)
def test_ranks_come_and_go_and_the_sequence_is_that_of_one_rank(mixed_reader, dp_sizes, steps, skips, batches, seed):
    """Four parts of a run, each with other ranks, from the saved state of the part before; one rank does the same."""
    reader, n_rows = mixed_reader, mixed_reader.n_rows
    state: StreamState | None = None
    skipped: list[int] = []
    read: list[int] = []
    rows: list[int] = []
    alone = Stream(reader, global_batch_size=8, seed=seed)
    for dp_size, n_steps, skip, batch in zip(dp_sizes, steps, skips, batches, strict=True):
        alone = Stream(reader, global_batch_size=batch, seed=seed, state=alone.state)
        ranks = [
            Stream(reader, global_batch_size=batch, dp_rank=rank, dp_size=dp_size, seed=seed, state=state)
            for rank in range(dp_size)
        ]
        skipped += range(alone.state.row, alone.state.row + skip)
        for stream in (alone, *ranks):
            stream.skip(skip)
        for _ in range(n_steps):
            read += range(alone.state.row, alone.state.row + batch)
            expected = alone.next()
            rows += expected.row_ids.tolist()
            parts = [stream.next() for stream in ranks]
            assert np.concatenate([part.row_ids for part in parts]).tolist() == expected.row_ids.tolist()
            for name in ARRAYS:
                together = np.concatenate([getattr(part.rows, name) for part in parts])
                assert np.array_equal(together, getattr(expected.rows, name)), name
            assert {(part.state, part.valid_tokens, part.step) for part in parts} == {
                (expected.state, expected.valid_tokens, expected.step)
            }
        states = {StreamState.from_dict(json.loads(json.dumps(stream.state.to_dict()))) for stream in ranks}
        assert states == {alone.state}
        (state,) = states
    assert state is not None
    assert sorted(read + skipped) == list(range(state.row))
    assert [position for begin, end in state.skipped for position in range(begin, end)] == skipped
    assert state.step == sum(steps)
    # By the definition of the sequence, whatever was skipped.
    epochs = [
        permute(np.arange(n_rows), n_rows, f"{seed}/{epoch}".encode()).tolist()
        for epoch in range(state.row // n_rows + 1)
    ]
    assert rows == [epochs[position // n_rows][position % n_rows] for position in read]
    for epoch in range(state.row // n_rows):
        inside = range(epoch * n_rows, (epoch + 1) * n_rows)
        left_out = [epochs[epoch][position % n_rows] for position in skipped if position in inside]
        got = [row for position, row in zip(read, rows, strict=True) if position in inside]
        assert sorted(got + left_out) == list(range(n_rows)), "each row once in an epoch"


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_rows_are_dealt_micro_step_by_micro_step(make_reader, dp_size):
    ramp = BatchRamp(start=4, final=12, increment=4, steps=4)
    options = {"global_batch_size": 12, "ramp": ramp, "seed": 3, "dp_size": dp_size, "micro_batch_size": 4 // dp_size}
    streams = [Stream(make_reader(7), dp_rank=rank, **options) for rank in range(dp_size)]
    alone = Stream(make_reader(7), global_batch_size=12, ramp=ramp, seed=3)
    for _ in range(6):
        batches = [stream.next() for stream in streams]
        micro_steps = [batch.row_ids.reshape(-1, 4 // dp_size) for batch in batches]
        assert np.concatenate(micro_steps, axis=1).flatten().tolist() == alone.next().row_ids.tolist()
        assert {batch.state for batch in batches} == {alone.state}
    with pytest.raises(DataError, match=r"with a multiple of dp_size = 4 x micro_batch_size = 2 rows in each step"):
        Stream(make_reader(7), **options | {"dp_size": 4, "micro_batch_size": 2, "global_batch_size": 16})
    with pytest.raises(DataError, match=r"global_batch_size = 12: must be a positive multiple of dp_size = 1 x micro"):
        Stream(make_reader(7), global_batch_size=12, micro_batch_size=5)


def test_the_order_is_the_one_that_is_documented(make_reader):
    stream = Stream(make_reader(7), global_batch_size=10, seed=3)
    first, second = (permute(np.arange(7), 7, f"3/{epoch}".encode()).tolist() for epoch in (0, 1))
    assert stream.next().row_ids.tolist() == [*first, *second[:3]]
    assert first != second
    assert Stream(make_reader(7), global_batch_size=7, seed=4).next().row_ids.tolist() != first


def test_without_shuffle(make_reader):
    stream = Stream(make_reader(5), global_batch_size=3, shuffle=False)
    assert [stream.next().row_ids.tolist() for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_steps_states_and_valid_tokens(make_reader):
    stream = Stream(make_reader(5), global_batch_size=2, shuffle=False)
    assert (stream.steps_per_epoch, stream.epoch_remainder) == (2, 1)
    assert stream.state == StreamState(step=0, row=0, seed=0, fingerprint=stream.state.fingerprint)
    batches = [stream.next() for _ in range(3)]
    assert [batch.step for batch in batches] == [0, 1, 2]
    assert [(batch.state.step, batch.state.row) for batch in batches] == [(1, 2), (2, 4), (3, 6)]
    # Documents of 4 tokens have 3 labels, the last one of 3 has 2.
    assert [batch.valid_tokens for batch in batches] == [6, 6, 5]
    assert stream.state == batches[-1].state


def parts_named(error: DataError) -> set[str]:
    """What an error about a state says has changed."""
    listed = str(error).partition("(")[2].partition("): ")[0]
    assert all(" before, " in part and part.endswith(" now") for part in listed.split("; ")), listed
    return {part.partition(":")[0] for part in listed.split("; ")}


def test_each_change_of_a_real_store_is_refused_by_its_name(tmp_path, documents, tokenizer):
    def reader(name: str, texts: list[Document], seq_len: int = 64, mode: str = "bfd", **options: bool) -> RowReader:
        if not (tmp_path / name).exists():
            prepare(texts, tokenizer=tokenizer, out=tmp_path / name, **options)
        store = TokenStore(tmp_path / name)
        return RowReader(store, pack(store, seq_len=seq_len, mode=mode))  # pyright: ignore[reportArgumentType]

    before = reader("store", documents)
    state = Stream(before, global_batch_size=4, seed=1).next().state
    swapped = [replace(documents[0], text=documents[0].text[::-1]), *documents[1:]]
    again = reader("again", documents)  # the same text once more is the same data
    Stream(again, global_batch_size=4, seed=1, state=state)
    store = before.store
    cases: list[tuple[RowReader, dict[str, object], set[str]]] = [
        (reader("text", swapped), {}, {"store", "pack"}),
        (reader("order", documents[::-1]), {}, {"store", "pack"}),
        (reader("no eos", documents, eos=False), {}, {"store", "pack"}),
        (reader("store", documents, seq_len=48), {}, {"pack"}),
        (reader("store", documents, mode="concat"), {}, {"pack"}),
        (RowReader(store, before.pack, document_mask=False), {}, {"document_mask"}),
        (before, {"seed": 2}, {"seed"}),
        (before, {"shuffle": False}, {"order"}),
        (RowReader(store, before.pack, document_mask=False), {"seed": 2}, {"seed", "document_mask"}),
    ]
    for now, options, names in cases:
        with pytest.raises(DataError, match="belongs to another sequence of rows") as caught:
            Stream(now, global_batch_size=4, state=state, **{"seed": 1, **options})  # pyright: ignore[reportArgumentType]
        assert parts_named(caught.value) == names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 6, "dp_size": 4}, r"global_batch_size = 6: must be a positive multiple of dp_size = 4"),
        ({"global_batch_size": 0}, "global_batch_size = 0"),
        ({"global_batch_size": 4, "dp_size": 2, "dp_rank": 2}, "dp_rank = 2: from 0 to dp_size - 1 = 1"),
        ({"global_batch_size": 4, "dp_size": 2, "dp_rank": -1}, "dp_rank = -1"),
    ],
)
def test_bad_division(make_reader, options, message):
    with pytest.raises(DataError, match=message):
        Stream(make_reader(3), **options)


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"row": 1.5},
        {"row": True},
        {"row": 2**62},
        {"skipped": [[1]]},
        {"skipped": [[1, "2"]]},
        {"skipped": [3]},
        {"skipped": 3},
        {"skipped": None},
        {"extra": 1},
        {"seed": "0"},
        {"fingerprint": 3},
        {"fingerprint": {"store": 1}},
    ],
)
def test_broken_state(change):
    values = StreamState(step=1, row=2, seed=3, fingerprint={"store": "x"}, skipped=((0, 1),)).to_dict()
    assert StreamState.from_dict(values).to_dict() == values
    with pytest.raises(DataError, match="not the state of a stream"):
        StreamState.from_dict({**values, **change})


def test_a_stream_iterates(make_reader):
    one, other = (Stream(make_reader(5), global_batch_size=2, seed=3) for _ in range(2))
    found = [batch.row_ids.tolist() for batch in islice(one, 4)]
    assert found == [other.next().row_ids.tolist() for _ in range(4)]
    assert one.state == other.state
