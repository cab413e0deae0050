"""Weighted interleaving: never off by one, in closed form, for any weights."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError
from lt_data.streaming.interleave import MAX_PERIOD, build_schedule, quantize_weights

SHARES = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 300)), min_size=1, max_size=9).filter(any)


def quantize(weights: list) -> tuple[int, ...]:
    return quantize_weights({f"s{i}": weight for i, weight in enumerate(weights)})


@given(SHARES)
def test_no_count_is_ever_off_by_one(weights):
    shares = quantize(weights)
    turns = build_schedule(shares)
    period = sum(shares)
    assert turns.source.size == period
    taken = np.zeros((period, len(shares)), np.int64)
    taken[np.arange(period), turns.source] = 1
    after = np.cumsum(taken, axis=0)
    ideal_times_period = np.arange(1, period + 1)[:, None] * np.array(shares)
    assert (np.abs(after * period - ideal_times_period) < period).all()
    assert after[-1].tolist() == list(shares)


@given(SHARES, st.lists(st.integers(0, 10**15), min_size=1, max_size=8))
def test_any_turn_alone_is_that_of_the_whole(weights, asked):
    shares = quantize(weights)
    turns = build_schedule(shares)
    source, number = turns.lookup(np.array(asked))
    for turn, whose, before in zip(asked, source.tolist(), number.tolist(), strict=True):
        assert turns.counts(turn)[whose] == before
        after = turns.counts(turn + 1)
        assert after[whose] == before + 1
        assert sum(after) == turn + 1


def test_fixed_turns():
    """The mixtures of every run depend on these: they must never change."""
    assert build_schedule((7, 2, 1)).source.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 2]
    assert build_schedule((1, 1, 1)).source.tolist() == [0, 1, 2]
    assert build_schedule((3, 0, 2)).source.tolist() == [0, 2, 0, 0, 2]


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
def test_weights_with_few_decimals_are_exact(weights, shares):
    assert quantize(weights) == shares


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=6))
def test_fine_weights_are_rounded_to_ten_thousandths(weights):
    shares = quantize(weights)
    assert sum(shares) <= MAX_PERIOD
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share / sum(shares) - weight / sum(weights)) < 1.0001 / MAX_PERIOD


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -0.5], "weight of s1: -0.5; give a finite number, 0 or more"),
        ([float("nan"), 1], "weight of s0: nan; give a finite number"),
        ([1, float("inf")], "weight of s1: inf; give a finite number"),
        ([True, 1], "weight of s0: True"),
        (["1", 1], "weight of s0: '1'"),
        ([0, 0.0], "the weights of s0, s1 are all 0"),
        ([1, 1e-9], "weight of s1: 1e-09 of the sum, less than 1/10000"),
    ],
)
def test_wrong_weights(weights, message):
    with pytest.raises(DataError, match=message):
        quantize(weights)
