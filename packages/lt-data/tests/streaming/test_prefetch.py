"""Prefetching changes no batch, no state, and hides no error."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from lt_data import DataError, RowReader, Stream, TokenStore
from lt_data.packing.pack_index import build_index
from lt_data.streaming.prefetch import Prefetcher
from lt_data.streaming.stream import StreamBatch


@pytest.fixture(scope="module")
def reader(counting_store: Callable[..., TokenStore]) -> RowReader:
    store = counting_store([5] * 23)
    index = build_index(store.lengths, seq_len=5, mode="bfd", store_fingerprint=store.manifest.fingerprint)
    return RowReader(store, index)


@pytest.fixture(autouse=True)
def no_thread_left() -> object:
    yield
    assert [thread.name for thread in threading.enumerate() if "lt-data prefetch" in thread.name] == []


def itself(batch: StreamBatch) -> StreamBatch:
    return batch


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_the_same_batches_and_states(reader: RowReader, depth: int) -> None:
    plain = Stream(reader, global_batch_size=4, seed=1)
    with Prefetcher(Stream(reader, global_batch_size=4, seed=1), itself, depth=depth) as ahead:
        assert ahead.state == plain.state
        for _ in range(20):
            expected, found = plain.next(), ahead.next()
            assert found.row_ids.tolist() == expected.row_ids.tolist()
            assert np.array_equal(found.rows.input_ids, expected.rows.input_ids)
            assert found.state == expected.state == ahead.state == plain.state


def test_it_makes_no_more_than_its_depth_ahead(reader: RowReader, wait_for: Callable[..., None]) -> None:
    stream = Stream(reader, global_batch_size=4)
    with Prefetcher(stream, itself, depth=3) as ahead:
        wait_for(lambda: stream.state.step == 3)
        ahead.next()
        wait_for(lambda: stream.state.step == 4)
        assert ahead.state.step == 1


def test_closing_puts_the_stream_behind_the_last_batch_handed_out(reader: RowReader) -> None:
    stream = Stream(reader, global_batch_size=4)
    ahead = Prefetcher(stream, itself, depth=4)
    last = [ahead.next() for _ in range(3)][-1]
    ahead.close()
    ahead.close()
    assert stream.state == ahead.state == last.state
    with pytest.raises(DataError, match="this prefetcher is closed"):
        ahead.next()
    assert stream.next().step == 3


def test_what_work_makes_is_handed_out(reader: RowReader) -> None:
    def work(batch: StreamBatch) -> tuple[int, str]:
        return batch.step, threading.current_thread().name

    with Prefetcher(Stream(reader, global_batch_size=4), work) as ahead:
        found = [ahead.next() for _ in range(3)]
        also = next(iter(ahead))
    assert [step for step, _ in [*found, also]] == [0, 1, 2, 3]
    assert {name for _, name in found} == {"lt-data prefetch_0"}


def test_an_error_comes_in_the_place_of_its_batch(reader: RowReader, wait_for: Callable[..., None]) -> None:
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


def test_an_exit_in_the_thread_does_not_leave_the_caller_waiting(reader: RowReader) -> None:
    def work(_: StreamBatch) -> None:
        raise SystemExit(3)

    with Prefetcher(Stream(reader, global_batch_size=4), work) as ahead, pytest.raises(SystemExit):
        ahead.next()


def test_depth_below_one(reader: RowReader) -> None:
    with pytest.raises(DataError, match="depth = 0"):
        Prefetcher(Stream(reader, global_batch_size=4), itself, depth=0)
