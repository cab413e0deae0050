"""Smoothing, thinning, axes and ticks: exact on cases made by hand, and their laws on cases that hypothesis makes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_trainer.observability.report.curves import (
    MIN_POINTS_FOR_SMOOTHING,
    downsample,
    format_short,
    log_ticks,
    smooth_points,
    ticks,
    value_range,
)

VALUES = st.floats(-1e6, 1e6)


def points(values: list[float]) -> list[tuple[float, float]]:
    return [(float(step), value) for step, value in enumerate(values, start=1)]


def test_smoothing_is_the_mean_to_both_sides_and_shrinks_at_the_ends() -> None:
    values = [float(i * i) for i in range(20)]
    made = [y for _, y in smooth_points(points(values))]
    assert made[0] == 0.0
    assert made[1] == pytest.approx((0 + 1 + 4) / 3)
    assert made[10] == pytest.approx(sum(values[8:13]) / 5)
    assert made[18] == pytest.approx(sum(values[17:20]) / 3)
    assert made[19] == values[19]


def test_few_points_are_not_smoothed() -> None:
    assert smooth_points(points([1.0] * (MIN_POINTS_FOR_SMOOTHING - 1))) == []
    assert len(smooth_points(points([1.0] * MIN_POINTS_FOR_SMOOTHING))) == MIN_POINTS_FOR_SMOOTHING


def test_the_window_grows_with_the_points() -> None:
    values = [0.0] * 1000
    values[500] = 1.0
    reached = [x for x, y in smooth_points(points(values)) if y > 1e-9]
    assert reached == [float(step) for step in range(501 - 12, 501 + 13)]  # 1000 / 40 = 25 points


@given(st.integers(20, 300), VALUES, st.floats(-10, 10))
def test_a_straight_line_stays_as_it_is(n: int, start: float, slope: float) -> None:
    line = points([start + slope * i for i in range(n)])
    for (x, y), (same, made) in zip(line, smooth_points(line), strict=True):
        assert x == same
        assert made == pytest.approx(y, rel=1e-6, abs=1e-4)


def test_what_is_not_finite_is_left_out_of_means() -> None:
    values = [1.0] * 30
    values[10] = math.nan
    values[11] = math.inf
    made = smooth_points(points(values))
    assert [y for _, y in made] == pytest.approx([1.0] * 28)
    assert 11.0 not in [x for x, _ in made]


@given(st.lists(VALUES, min_size=1, max_size=500), st.integers(4, 100))
def test_thinning_keeps_ends_and_extremes(values: list[float], most: int) -> None:
    whole = points(values)
    kept = downsample(whole, most)
    assert set(kept) <= set(whole)
    assert kept == sorted(kept)
    assert len(kept) <= most + 4
    assert (kept[0], kept[-1]) == (whole[0], whole[-1])
    assert min(y for _, y in kept) == min(values)
    assert max(y for _, y in kept) == max(values)


def test_thinning_keeps_every_spike() -> None:
    values = [1.0] * 10_000
    for at in range(50, 10_000, 500):
        values[at] = 9.0
    assert [x - 1 for x, y in downsample(points(values), 200) if y == 9.0] == list(range(50, 10_000, 500))


def test_the_axis_ends_above_what_is_common() -> None:
    values = [2.0 + i / 100 for i in range(100)]
    low, high = value_range([*values, 5000.0])
    assert 1.9 < low < 2.0
    assert 2.9 < high < 4.0
    assert value_range([10.4, *values])[1] > 10.4  # a beginning that is three times as high is no spike


def test_axes_of_one_value_of_none_and_from_zero() -> None:
    assert value_range([3.0, 3.0]) == (1.5, 4.5)
    assert value_range([0.0], from_zero=True)[0] == 0.0
    assert value_range([5.0, 9.0], from_zero=True)[0] == 0.0
    assert value_range([]) == (0.0, 1.0)
    low, high = value_range([2.0], log=True)
    assert low < 2.0 < high


@given(st.lists(VALUES, min_size=1, max_size=60), st.booleans())
def test_an_axis_has_room_for_all_but_spikes(values: list[float], from_zero: bool) -> None:
    low, high = value_range(values, from_zero=from_zero)
    assert low < high
    assert low <= min(values)
    assert sum(value > high for value in values) <= len(values) // 50 + 1


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_inside_and_evenly_far_apart(low: float, length: float) -> None:
    found = ticks(low, low + length)
    if low + length == low:
        return
    slack = 1e-6 * max(length, abs(low))
    assert all(low - slack <= value <= low + length + slack for value in found)
    assert 2 <= len(found) <= 7 or abs(low) > 1e5 * length


def test_ticks_of_usual_axes() -> None:
    assert ticks(0, 400) == [0, 100, 200, 300, 400]
    assert ticks(1.7, 9.6) == [2, 4, 6, 8]
    assert ticks(0, 0.00104) == [0, 0.0005, 0.001]
    assert log_ticks(0.25, 3.4) == [0.5, 1, 2]
    assert log_ticks(1e-6, 1e6) == [1e-6, 1e-3, 1, 1e3, 1e6]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0005, "0.0005"),
        (2.5, "2.5"),
        (1200, "1,200"),
        (45000, "45k"),
        (3.2e6, "3.2M"),
        (6.5e12, "6.5T"),
        (1e-6, "1e-06"),
        (-12345, "-12.35k"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_short(value) == text
