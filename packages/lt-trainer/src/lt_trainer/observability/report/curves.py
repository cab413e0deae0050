"""Pure functions for chart lines and axes: smoothing, downsampling, range, ticks. Cost: O(points)."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]

MIN_POINTS_FOR_SMOOTHING = 20
MIN_RANGE = 1e-290
"""Values closer than this are drawn as one: steps between them would not be numbers any more."""
SMOOTHING_FRACTION = 40
"""The smoothing window is 1 / SMOOTHING_FRACTION of all points, at least 5."""


def smooth_points(points: Sequence[Point]) -> list[Point]:
    """Return the centered moving average, which has no lag.

    The window shrinks towards the ends: first and last value are unchanged. Non-finite points are ignored. Empty if
    there are fewer than MIN_POINTS_FOR_SMOOTHING points.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if len(finite) < MIN_POINTS_FOR_SMOOTHING:
        return []
    half = max(5, len(finite) // SMOOTHING_FRACTION) // 2
    sums = [0.0]
    for _, y in finite:
        sums.append(sums[-1] + y)
    smoothed = []
    for i, (x, _) in enumerate(finite):
        reach = min(half, i, len(finite) - 1 - i)
        smoothed.append((x, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return smoothed


def downsample(points: Sequence[Point], max_points: int) -> list[Point]:
    """Return about `max_points` points at most: minimum and maximum of each bucket, in order.

    Keeps every spike; drops non-finite points.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if len(finite) <= max_points:
        return finite
    size = math.ceil(2 * len(finite) / max_points)
    kept: list[Point] = []
    for start in range(0, len(finite), size):
        bucket = finite[start : start + size]
        ys = [y for _, y in bucket]
        indices = {ys.index(min(ys)), ys.index(max(ys))}
        if start == 0:
            indices.add(0)
        if start + size >= len(finite):
            indices.add(len(bucket) - 1)
        kept += [bucket[i] for i in sorted(indices)]
    return kept


def value_range(values: Sequence[float], *, log: bool = False, from_zero: bool = False) -> tuple[float, float]:
    """Return the lowest and highest value of an axis for finite values (positive if `log`).

    If a few outliers lie far above the rest, the axis ends above the rest; the caller reports how many are cut off.
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
    if high - low <= max(abs(high), abs(low)) * 1e-12 or high - low < MIN_RANGE:
        pad = abs(high) / 2 if abs(high) > MIN_RANGE else 1.0
        return low - (0.0 if from_zero and low == 0 else pad), high + pad
    room = (high - low) * 0.04
    return low - (0.0 if from_zero and low == 0 else room), high + room


def ticks(low: float, high: float, max_ticks: int = 5) -> list[float]:
    """Return about `max_ticks` round numbers in [low, high]: multiples of 1, 2 or 5 x 10^n."""
    rough = (high - low) / max_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def log_ticks(low: float, high: float, max_ticks: int = 6) -> list[float]:
    """Return powers of ten in [low, high]; also 2 and 5 times them if few, every n-th if many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    values = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    values = [value for value in values if low * 0.999 <= value <= high * 1.001]
    return values[:: math.ceil(len(values) / max_ticks)] if values else [low, high]


def format_short(value: float) -> str:
    """Format an axis label: 0.0005, 2.5, 1,200, 45k, 3.2M, 1e-06."""
    if value == 0:
        return "0"
    size = abs(value)
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= factor * 0.99999:
            return f"{value / (1e3 if prefix == 'k' else factor):.4g}{prefix}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
