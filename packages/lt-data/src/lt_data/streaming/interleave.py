"""Weighted interleaving of sources in which no count is ever off by one.

Weights are quantized to integers: source s has a_s of D slots. Its j-th slot must lie in the window [floor(j D / a_s),
ceil((j + 1) D / a_s)), so after any i slots it has had more than i a_s / D - 1 and fewer than i a_s / D + 1. Choosing
at each slot the open window that closes first satisfies every window (Tijdeman, "The chairman assignment problem",
1980; in scheduling: Baruah, Cohen, Plaxton and Varvel, "Proportionate progress", 1996). After D slots all counts are
exact, so the table is one period of at most `MAX_PERIOD` slots.

Cost: about a microsecond per slot of the period, once; then O(1) for any slot.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, isfinite, lcm

import numpy as np

from lt_data.errors import DataError

MAX_PERIOD = 10_000  # finer weights are rounded to ten-thousandths of their sum

Weight = int | float | Fraction


@dataclass(frozen=True, eq=False)
class InterleaveSchedule:
    """Periodic schedule of slots over sources.

    Attributes:
        shares: slots of each source in one period.
        source: source of each slot (uint16 [period]).
        occurrence: earlier slots of that source in the period (int32 [period]).
    """

    shares: tuple[int, ...]
    source: np.ndarray
    occurrence: np.ndarray

    @property
    def period(self) -> int:
        """Slots after which every count is exactly its share."""
        return self.source.size

    def lookup(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each slot, and how many earlier slots that source had (int64 [n] each)."""
        periods, rest = np.divmod(slots, self.period)
        source = self.source[rest].astype(np.int64)
        return source, periods * np.array(self.shares, np.int64)[source] + self.occurrence[rest]

    def counts(self, slots: int) -> list[int]:
        """Return how many of the first `slots` slots each source has."""
        periods, rest = divmod(slots, self.period)
        partial = np.bincount(self.source[:rest], minlength=len(self.shares)).tolist()
        return [periods * share + more for share, more in zip(self.shares, partial, strict=True)]


def quantize_weights(weights: Sequence[Weight], *, names: Sequence[str], at_least_one: bool = False) -> tuple[int, ...]:
    """Convert weights to coprime integers, exact if these sum to at most `MAX_PERIOD`.

    Floats are read as decimals: 0.7, 0.2 and 0.1 become 7, 2 and 1.

    Args:
        weights: at least 0, not all 0.
        names: names of the sources, for errors.
        at_least_one: round a positive weight below one part up to one, instead of raising.

    Raises:
        DataError: a weight is negative or not finite, all are 0, or one is too small.
    """
    for name, weight in zip(names, weights, strict=True):
        if isinstance(weight, bool) or not isinstance(weight, int | float | Fraction) or not isfinite(weight):
            raise DataError(f"weight of {name}: {weight!r}; give a finite number")
        if weight < 0:
            raise DataError(f"weight of {name}: {weight!r}; give 0 or more")
    exact = [Fraction(repr(weight)) if isinstance(weight, float) else Fraction(weight) for weight in weights]
    total = sum(exact)
    if not total:
        raise DataError(f"the weights of {', '.join(names)} are all 0: at least one must be positive")
    scale = lcm(*(weight.denominator for weight in exact))
    parts = [int(weight * scale) for weight in exact]
    parts = [part // gcd(*parts) for part in parts]
    if sum(parts) <= MAX_PERIOD:
        return tuple(parts)
    ideal = [weight / total * MAX_PERIOD for weight in exact]
    parts = [max(int(part), int(at_least_one and part > 0)) for part in ideal]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - ideal[i], i))
    for i in by_remainder[: max(MAX_PERIOD - sum(parts), 0)]:
        parts[i] += 1
    for name, part, weight in zip(names, parts, exact, strict=True):
        if weight and not part:
            raise DataError(
                f"weight of {name}: {float(weight / total):.3g} of the sum, less than 1/{MAX_PERIOD}; increase it or "
                "leave the source out"
            )
    return tuple(part // gcd(*parts) for part in parts)


@lru_cache(maxsize=64)
def build_schedule(shares: tuple[int, ...]) -> InterleaveSchedule:
    """Return the schedule of sources with these shares of a period."""
    period = sum(shares)
    number = np.arange(period) - np.repeat(np.cumsum(shares) - shares, shares)  # of each slot of its source
    source = np.repeat(np.arange(len(shares)), shares)
    share = np.array(shares)[source]
    opens = number * period // share
    closes = -(-(number + 1) * period // share)
    order = np.lexsort((source, closes, opens))
    windows = iter(zip(*(column[order].tolist() for column in (opens, closes, source, number)), strict=True))
    next_window = next(windows, None)
    open_windows: list[tuple[int, int, int]] = []
    slots: list[tuple[int, int]] = []
    for slot in range(period):
        while next_window is not None and next_window[0] <= slot:
            heapq.heappush(open_windows, next_window[1:])
            next_window = next(windows, None)
        end, index, occurrence = heapq.heappop(open_windows)
        assert end > slot
        slots.append((index, occurrence))
    table = np.array(slots, np.int64).reshape(period, 2)
    return InterleaveSchedule(shares, table[:, 0].astype(np.uint16), table[:, 1].astype(np.int32))
