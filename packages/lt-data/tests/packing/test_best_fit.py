"""Best fit on a histogram gives what the plain algorithm gives."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lt_data.packing.best_fit import best_fit


def plain_best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Spaces of the bins, by the definition: longest first, into the smallest sufficient space."""
    spaces: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [i for i, space in enumerate(spaces) if space >= size]
        if fitting:
            spaces[min(fitting, key=lambda i: spaces[i])] -= size
        else:
            spaces.append(capacity - size)
    return spaces


@given(st.data(), st.integers(1, 60))
def test_same_spaces_as_the_plain_algorithm(data: st.DataObject, capacity: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, capacity), max_size=120))
    order, bins = best_fit(np.array(sizes, np.int64), capacity)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    filled = np.bincount(bins, weights=np.array(sizes, np.int64)[order])
    assert sorted(capacity - filled) == sorted(plain_best_fit(sizes, capacity))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=50))
def test_longest_first_and_equal_ones_in_order(sizes: list[int]) -> None:
    order, _ = best_fit(np.array(sizes), 20)
    assert order.tolist() == sorted(range(len(sizes)), key=lambda i: -sizes[i])


def test_exact_placement() -> None:
    order, bins = best_fit(np.array([3, 7, 2, 5, 3, 1]), 10)
    # 7 opens bin 0 (3 left), 5 opens bin 1 (5 left), 3 fills bin 0, 3 goes to bin 1 (2 left), 2 fills it, 1 opens 2.
    assert order.tolist() == [1, 3, 0, 4, 2, 5]
    assert bins.tolist() == [0, 1, 0, 1, 1, 2]


def test_groups_of_equal_items_move_together() -> None:
    order, bins = best_fit(np.array([4] * 7), 10)
    assert bins.tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert order.tolist() == list(range(7))


def test_capacity_beyond_sixteen_bits() -> None:
    sizes = np.array([70_000, 1, 65_536, 30_000, 4_464, 99_999])
    order, bins = best_fit(sizes, 100_000)
    assert sizes[order].tolist() == [99_999, 70_000, 65_536, 30_000, 4_464, 1]
    assert bins.tolist() == [0, 1, 2, 1, 2, 0]


def test_nothing() -> None:
    order, bins = best_fit(np.zeros(0, np.int64), 8)
    assert order.size == bins.size == 0
