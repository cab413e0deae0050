"""Turns by weights: never off by one, in closed form, whatever the weights."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError
from lt_data.streaming.apportion import PARTS, shares_of, turns_of

SHARES = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 300)), min_size=1, max_size=9).filter(any)


def names_of(weights: list) -> list[str]:
    return [f"s{i}" for i in range(len(weights))]


@given(SHARES)
def test_no_count_is_ever_off_by_one(weights: list[int]) -> None:
    shares = shares_of(weights, names=names_of(weights))
    turns = turns_of(shares)
    period = sum(shares)
    assert turns.period == period
    taken = np.zeros((period, len(shares)), np.int64)
    taken[np.arange(period), turns.source] = 1
    after = np.cumsum(taken, axis=0)
    ideal_times_period = np.arange(1, period + 1)[:, None] * np.array(shares)
    assert (np.abs(after * period - ideal_times_period) < period).all()
    assert after[-1].tolist() == list(shares)


@given(SHARES, st.lists(st.integers(0, 10**15), min_size=1, max_size=8))
def test_any_turn_alone_is_that_of_the_whole(weights: list[int], asked: list[int]) -> None:
    shares = shares_of(weights, names=names_of(weights))
    turns = turns_of(shares)
    source, number = turns.at(np.array(asked))
    for turn, whose, before in zip(asked, source.tolist(), number.tolist(), strict=True):
        assert turns.counts(turn)[whose] == before
        after = turns.counts(turn + 1)
        assert after[whose] == before + 1
        assert sum(after) == turn + 1


def test_fixed_turns() -> None:
    """The mixtures of every run depend on these: they must never change."""
    assert turns_of((7, 2, 1)).source.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 2]
    assert turns_of((1, 1, 1)).source.tolist() == [0, 1, 2]
    assert turns_of((3, 0, 2)).source.tolist() == [0, 2, 0, 0, 2]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([1, 2], (1, 2)),
        ([Fraction(1, 3), Fraction(1, 3), 0], (1, 1, 0)),
        ([1e-3, 0.999], (1, 999)),
        ([50, 50.0], (1, 1)),
        ([9999, 1], (9999, 1)),
        ([5], (1,)),
    ],
)
def test_weights_with_few_decimals_are_exact(weights: list, shares: tuple[int, ...]) -> None:
    assert shares_of(weights, names=names_of(weights)) == shares


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=6))
def test_fine_weights_are_rounded_to_ten_thousandths(weights: list[float]) -> None:
    shares = shares_of(weights, names=names_of(weights))
    assert sum(shares) <= PARTS
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share / sum(shares) - weight / sum(weights)) < 1.0001 / PARTS


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -0.5], "weight of s1: -0.5; give 0 or more"),
        ([float("nan"), 1], "weight of s0: nan; give a finite number"),
        ([1, float("inf")], "weight of s1: inf; give a finite number"),
        ([True, 1], "weight of s0: True"),
        (["1", 1], "weight of s0: '1'"),
        ([0, 0.0], "the weights of s0, s1 are all 0"),
        ([1, 1e-9], "weight of s1: 1e-09 of the sum, less than one part in 10000"),
    ],
)
def test_wrong_weights(weights: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        shares_of(weights, names=names_of(weights))


def test_small_weights_may_be_rounded_up() -> None:
    assert shares_of([10**9, 1, 0], names=["a", "b", "c"], at_least_one=True) == (9_999, 1, 0)
