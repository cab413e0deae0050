"""Batch ramp: its closed form against a step-by-step simulation, and streams that use it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError, Mixture, Phase, RowReader, Stream, TokenStore, open_pack
from lt_data.streaming.ramp import BatchRamp
from lt_data.streaming.stream import StreamState


@st.composite
def ramps(draw: st.DrawFn) -> BatchRamp:
    start, increment, levels = draw(st.integers(1, 9)), draw(st.integers(1, 7)), draw(st.integers(1, 9))
    length = draw(st.integers(1, 60))
    counted = {"steps": length} if draw(st.booleans()) else {"rows": length * 5}
    return BatchRamp(start=start, final=start + increment * levels, increment=increment, **counted)


@given(ramp=ramps())
def test_it_is_what_walking_there_gives(ramp):
    n = ramp.n_levels
    read = level = 0
    for step in range(120):
        if ramp.steps:
            level = min(n, step * n // ramp.steps)
        else:  # a level ends with the first step that has read its part
            while level < n and read * n >= (level + 1) * ramp.rows:
                level += 1
        assert ramp.batch_size_at(step) == ramp.start + level * ramp.increment
        assert ramp.rows_before(step) == read
        read += ramp.batch_size_at(step)


def test_known_values():
    ramp = BatchRamp(start=2, final=8, increment=2, steps=6)
    assert [ramp.batch_size_at(step) for step in range(9)] == [2, 2, 4, 4, 6, 6, 8, 8, 8]
    assert ramp.rows_before(10**9) == 2 * (2 + 4 + 6) + 8 * (10**9 - 6)
    ramp = BatchRamp(start=2, final=8, increment=2, rows=30)  # until 10, 20 and 30 rows are read
    assert [ramp.batch_size_at(step) for step in range(11)] == [2, 2, 2, 2, 2, 4, 4, 4, 6, 6, 8]
    assert [ramp.rows_before(step) for step in (5, 8, 10)] == [10, 22, 34]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"start": 8, "final": 8, "increment": 1, "steps": 5}, "ramp from 8 to 8 rows"),
        ({"start": 0, "final": 8, "increment": 1, "steps": 5}, "ramp from 0 to 8 rows"),
        ({"start": 2, "final": 8, "increment": 4, "steps": 5}, "an increment that divides 6"),
        ({"start": 2, "final": 8, "increment": 2}, "steps = 0 and rows = 0: give exactly one"),
        ({"start": 2, "final": 8, "increment": 2, "steps": 1, "rows": 1}, "give exactly one"),
        ({"start": 2, "final": 8, "increment": 2.0, "steps": 1}, "not a batch ramp"),
        ({"start": 2, "final": 8}, "not a batch ramp"),
    ],
)
def test_refusals(values, message):
    with pytest.raises(DataError, match=message):
        BatchRamp.from_dict(values)


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> RowReader:
    from lt_data import Document, Tokenizer, pack, prepare

    texts = [f"document {i} of a little store " * (i % 5 + 1) for i in range(40)]
    tokenizer = Tokenizer.train(iter(texts), vocab_size=280)
    out = tmp_path_factory.mktemp("ramp") / "store"
    prepare((Document(text=text, source=str(i)) for i, text in enumerate(texts)), tokenizer=tokenizer, out=out)
    store = TokenStore(out)
    pack(store, seq_len=16)
    return RowReader(store, open_pack(store, seq_len=16))


@given(
    ramp=ramps(),
    stop=st.integers(0, 12),
    ranks=st.sampled_from([(1, 1), (1, 2), (3, 1), (2, 3)]),
    skip=st.integers(0, 9),
    mixed=st.booleans(),
)
def test_elastic_resume_and_skips_read_each_position_once(reader, ramp, stop, ranks, skip, mixed):
    """Of one pack, or of a mixture whose weights change on the way; after some steps other ranks go on.

    Each batch is a multiple of 6 rows, which all these ranks can share.
    """
    phases = (Phase(weights={"a": 2, "b": 1}), Phase(weights={"a": 1, "b": 3}, from_row=37))
    source = Mixture({"a": reader, "b": reader}, phases) if mixed else reader
    by = 6
    ramp = BatchRamp(
        start=ramp.start * by,
        final=ramp.final * by,
        increment=ramp.increment * by,
        steps=ramp.steps,
        rows=ramp.rows * by,
    )

    def read(state: StreamState | None, size: int, steps: int) -> tuple[list[list[int]], StreamState]:
        streams = [
            Stream(source, global_batch_size=ramp.final, ramp=ramp, dp_rank=rank, dp_size=size, seed=3, state=state)
            for rank in range(size)
        ]
        rows: list[list[int]] = []
        for _ in range(steps):
            batches = [stream.next() for stream in streams]
            rows.append([int(row) for batch in batches for row in batch.row_ids])
            valid = source.count_labels(np.array(rows[-1]))
            assert all(batch.valid_tokens == valid for batch in batches)
        assert all(stream.state == streams[0].state for stream in streams)
        return rows, streams[0].state

    first, state = read(None, ranks[0], stop)
    assert (state.step, state.row) == (stop, ramp.rows_before(stop))
    moved = Stream(source, global_batch_size=ramp.final, ramp=ramp, seed=3, state=state)
    assert moved.state_after(4).row - state.row == ramp.rows_before(stop + 4) - ramp.rows_before(stop)
    moved.skip(skip)
    second, end = read(moved.state, ranks[1], 4)
    assert [len(rows) for rows in first + second] == [ramp.batch_size_at(step) for step in range(stop + 4)]
    whole = source.rows_at(0, end.row, seed=3, shuffle=True).tolist()
    assert [row for rows in first for row in rows] == whole[: state.row]
    assert [row for rows in second for row in rows] == whole[state.row + skip :]


def test_a_batch_that_the_ranks_cannot_share_is_refused(reader):
    ramp = BatchRamp(start=2, final=8, increment=2, steps=4)
    with pytest.raises(DataError, match="a multiple of dp_size = 4"):
        Stream(reader, global_batch_size=8, dp_size=4, ramp=ramp)
    with pytest.raises(DataError, match="must end at global_batch_size"):
        Stream(reader, global_batch_size=16, ramp=ramp)


def test_epochs_of_positions_are_told_by_every_source(reader):
    """Of a mixture, by counting how often each row has come; each source gives a row once in each of its epochs."""
    mixture = Mixture({"a": reader, "b": reader}, {"a": 3, "b": 1})
    rows = mixture.rows_at(0, 100, seed=1, shuffle=True).tolist()
    assert mixture.epochs_at(0, 100).tolist() == [rows[:i].count(row) for i, row in enumerate(rows)]
    assert mixture.epochs_at(60, 7).tolist() == mixture.epochs_at(0, 100).tolist()[60:67]
    n = reader.n_rows
    assert reader.epochs_at(n - 2, 4).tolist() == [0, 0, 1, 1]
    assert np.array_equal(reader.epochs_at(0, 3 * n), np.arange(3 * n) // n)
