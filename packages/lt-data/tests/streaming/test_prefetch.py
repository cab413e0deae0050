"""Prefetching changes no batch, no state, and hides no error."""

import threading

import numpy as np
import pytest

from lt_data import DataError, RowReader, Stream
from lt_data.packing.pack_index import build_index
from lt_data.streaming.prefetch import Prefetcher
from lt_data.streaming.stream import StreamBatch


@pytest.fixture(scope="module")
def reader(counting_store) -> RowReader:
    store = counting_store([5] * 23)
    index = build_index(store.lengths, seq_len=5, mode="bfd", store_fingerprint=store.manifest.fingerprint)
    return RowReader(store, index)


@pytest.fixture(autouse=True)
def no_thread_left() -> object:
    yield
    assert [thread.name for thread in threading.enumerate() if "lt-data prefetch" in thread.name] == []


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_the_same_batches_and_states(reader, depth):
    plain = Stream(reader, global_batch_size=4, seed=1)
    with Prefetcher(Stream(reader, global_batch_size=4, seed=1), lambda batch: batch, depth=depth) as ahead:
        assert ahead.state == plain.state
        for _ in range(20):
            expected, found = plain.next(), ahead.next()
            assert found.row_ids.tolist() == expected.row_ids.tolist()
            assert np.array_equal(found.rows.input_ids, expected.rows.input_ids)
            assert found.state == expected.state == ahead.state == plain.state


def test_it_makes_no_more_than_its_depth_ahead(reader, wait_for):
    stream = Stream(reader, global_batch_size=4)
    with Prefetcher(stream, lambda batch: batch, depth=3) as ahead:
        wait_for(lambda: stream.state.step == 3)
        ahead.next()
        wait_for(lambda: stream.state.step == 4)
        assert ahead.state.step == 1


def test_closing_puts_the_stream_behind_the_last_batch_handed_out(reader):
    stream = Stream(reader, global_batch_size=4)
    ahead = Prefetcher(stream, lambda batch: batch, depth=4)
    last = [ahead.next() for _ in range(3)][-1]
    ahead.close()
    ahead.close()
    assert stream.state == ahead.state == last.state
    with pytest.raises(DataError, match="this prefetcher is closed"):
        ahead.next()
    assert stream.next().step == 3


def test_an_error_comes_in_the_place_of_its_batch(reader, wait_for):
    def work(batch: StreamBatch) -> int:
        if batch.step == 2:
            raise RuntimeError("no third batch")
        return batch.step

    stream = Stream(reader, global_batch_size=4)
    with Prefetcher(stream, work, depth=5) as ahead:
        wait_for(lambda: stream.state.step == 5)
        assert [ahead.next(), ahead.next()] == [0, 1]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no third batch"):
                ahead.next()
        assert ahead.state.step == 2
    assert stream.state.step == 2


def test_an_exit_in_the_thread_does_not_leave_the_caller_waiting(reader):
    def work(_: StreamBatch) -> None:
        raise SystemExit(3)

    with Prefetcher(Stream(reader, global_batch_size=4), work) as ahead, pytest.raises(SystemExit):
        ahead.next()
