"""The interval of a number by table, against a binary search."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data.store.interval_lookup import IntervalLookup

SIZES = st.one_of(
    st.lists(st.integers(0, 30), max_size=60),
    st.lists(st.sampled_from([0, 1, 2, 1000, 10**9]), max_size=60),
    st.builds(lambda size, n, last: [size] * n + [last], st.integers(1, 2**40), st.integers(0, 200), st.integers(0, 9)),
)


def _check(sizes: list[int], positions: list[int]) -> None:
    boundaries = np.cumsum([0, *sizes], dtype=np.int64)
    found = IntervalLookup(boundaries).find(np.array(positions, np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == [int(np.searchsorted(boundaries, p, side="right")) - 1 for p in positions]


@given(SIZES, st.data())
def test_the_interval_of_a_number_is_that_of_a_binary_search(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    near = [p for end in np.cumsum(sizes).tolist() for p in (end - 1, end) if 0 <= p < total]
    elsewhere = data.draw(st.lists(st.integers(0, total - 1), max_size=20)) if total else []
    _check(sizes, [*near, *elsewhere])


@pytest.mark.parametrize("sizes", [[10**6] * 5000, [10**6] * 999 + [1], [1] * 1000 + [10**6]])
def test_many_intervals_even_and_uneven(sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    _check(sizes, rng.integers(0, sum(sizes), 2000).tolist())


def test_so_many_intervals_that_a_table_would_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_data.store.interval_lookup._MAX_INTERVALS", 9)
    _check([7] * 10, [*range(70)])
