"""Work that is done ahead of its turn: in order, and never more of it than was asked for."""

from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_ckpt.executors import iter_in_order


class Recorder:
    """A pool that does a task at once, and knows how large all are that were begun."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.begun = sizes, 0

    def submit(self, task):
        done: Future[int] = Future()
        done.set_result(task())
        self.begun += 1
        return done


@given(sizes=st.lists(st.integers(1, 30), max_size=30), ahead=st.integers(1, 40))
def test_results_come_in_order_and_little_is_held(sizes: list[int], ahead: int) -> None:
    pool = Recorder(sizes)
    taken = 0
    for result in iter_in_order(
        cast(Executor, pool), [lambda i=i: i for i in range(len(sizes))], max_in_flight=ahead, sizes=sizes
    ):
        assert result == taken
        held = sizes[taken : pool.begun]
        assert sum(held[:-1]) < ahead, "the last one may go beyond it, the others not"
        if pool.begun < len(sizes):
            assert sum(held) >= ahead, "the next one could have begun"
        taken += 1
    assert taken == len(sizes)


def test_without_sizes_tasks_are_counted() -> None:
    pool = Recorder([])
    found = iter_in_order(cast(Executor, pool), [lambda i=i: i for i in range(5)], max_in_flight=3)
    assert next(found) == 0
    assert pool.begun == 3
    assert list(found) == [1, 2, 3, 4]


def test_an_error_comes_where_its_result_is_due() -> None:
    def fail() -> int:
        raise OSError("the disk")

    with ThreadPoolExecutor(2) as pool:
        found = iter_in_order(pool, [lambda: 1, fail, lambda: 3], max_in_flight=3)
        assert next(found) == 1
        with pytest.raises(OSError, match="the disk"):
            next(found)
