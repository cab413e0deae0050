"""Lines for charts, as pure functions: smoothing, thinning, the range of an axis, its ticks. Cost: O(points)."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]

LEAST_FOR_SMOOTHING = 20
SMOOTHED_SHARE = 40
"""A smoothed value looks at one part in so many of all points, and at 5 at least."""


def smoothed(points: Sequence[Point]) -> list[Point]:
    """The mean over a window around each point, which is as long to both sides, so it never lags.

    Towards the ends the window shrinks: the first and the last value are the points' own. Empty where there are too few
    points to need it. What is not finite is left out of the means.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if len(finite) < LEAST_FOR_SMOOTHING:
        return []
    half = max(5, len(finite) // SMOOTHED_SHARE) // 2
    sums = [0.0]
    for _, y in finite:
        sums.append(sums[-1] + y)
    made = []
    for i, (x, _) in enumerate(finite):
        reach = min(half, i, len(finite) - 1 - i)
        made.append((x, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return made


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most about `most` points that look the same: of each stretch its lowest and its highest, in their order.

    No spike is lost. What is not finite is left out.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if len(finite) <= most:
        return finite
    size = math.ceil(2 * len(finite) / most)
    kept: list[Point] = []
    for at in range(0, len(finite), size):
        part = finite[at : at + size]
        ends = {min(range(len(part)), key=lambda i: part[i][1]), max(range(len(part)), key=lambda i: part[i][1])}
        if at == 0:
            ends.add(0)
        if at + size >= len(finite):
            ends.add(len(part) - 1)
        kept += [part[i] for i in sorted(ends)]
    return kept


def value_range(values: Sequence[float], *, log: bool = False, from_zero: bool = False) -> tuple[float, float]:
    """The lowest and the highest value that an axis shows, for finite values (above 0 where `log`).

    A few values far above all others would press the rest into a line: then the axis ends above the rest, and whoever
    draws says how many stand above it.
    """
    ordered = sorted(values)
    if not ordered:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = ordered[0], ordered[-1]
    if log:
        return (low, high) if high > low else (low / 2, high * 2)
    common_low, common_high = ordered[len(ordered) // 50], ordered[-1 - len(ordered) // 50]
    limit = common_high + 10 * (common_high - common_low)
    if common_high > common_low and high > limit:
        high = common_high + (common_high - common_low) / 2
    if from_zero:
        low = min(low, 0.0)
    if high == low:
        pad = abs(high) / 2 or 1.0
        return low - (0.0 if from_zero and low == 0 else pad), high + pad
    room = (high - low) * 0.04
    return low - (0.0 if from_zero and low == 0 else room), high + room


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most about `most` round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Powers of ten from `low` to `high`; 2 and 5 times them where these are few, every n-th where they are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    found = [value for value in found if low * 0.999 <= value <= high * 1.001]
    return found[:: math.ceil(len(found) / most)] if found else [low, high]


def short(value: float) -> str:
    """A number for an axis: 0.0005, 2.5, 1,200, 45k, 3.2M, 1e-06."""
    if value == 0:
        return "0"
    size = abs(value)
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= factor * 0.99999:
            return f"{value / (1e3 if prefix == 'k' else factor):.4g}{prefix}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
