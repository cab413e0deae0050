"""Whose turn is it? Turns shared out by weights so evenly that no count is ever off by one.

Weights become whole parts: source s has a_s of D turns. Its j-th turn must lie in the window [floor(j D / a_s),
ceil((j + 1) D / a_s)), which says that after any i turns it has had more than i a_s / D - 1 and fewer than
i a_s / D + 1. Taking at each turn the open window that closes first keeps every window (Tijdeman, "The chairman
assignment problem", 1980; in scheduling: Baruah, Cohen, Plaxton and Varvel, "Proportionate progress", 1996).
After D turns all counts are exact, so one period of at most `PARTS` turns is the whole table.

Cost: about a microsecond per turn of the period, once; then O(1) for any turns anywhere.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, isfinite, lcm

import numpy as np

from lt_data.errors import DataError

PARTS = 10_000  # the longest period: finer weights are rounded to ten-thousandths of their sum

Weight = int | float | Fraction


@dataclass(frozen=True, eq=False)
class Turns:
    """Endless turns of some sources.

    Attributes:
        shares: turns of each source in one period.
        source: whose turn it is (uint16 [period]).
        rank: how many turns that source had in the period before (int32 [period]).
    """

    shares: tuple[int, ...]
    source: np.ndarray
    rank: np.ndarray

    @property
    def period(self) -> int:
        """Turns after which every count is exactly its share."""
        return self.source.size

    def at(self, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whose each of some turns is, and how many turns that source had before (int64 [n] each)."""
        periods, places = np.divmod(turns, self.period)
        source = self.source[places].astype(np.int64)
        return source, periods * np.array(self.shares, np.int64)[source] + self.rank[places]

    def counts(self, turns: int) -> list[int]:
        """How many of the first `turns` turns each source has."""
        periods, rest = divmod(turns, self.period)
        begun = np.bincount(self.source[:rest], minlength=len(self.shares)).tolist()
        return [periods * share + more for share, more in zip(self.shares, begun, strict=True)]


def shares_of(weights: Sequence[Weight], *, names: Sequence[str], at_least_one: bool = False) -> tuple[int, ...]:
    """Weights as whole parts without a common divisor, exact where their sum has at most `PARTS` parts.

    Floats count as the decimals they are written with: 0.7, 0.2 and 0.1 are 7, 2 and 1 parts.

    Args:
        weights: at least 0, not all 0.
        names: of the sources, for errors.
        at_least_one: a positive weight below a part is rounded up to one, instead of refused.

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
        raise DataError(f"the weights of {', '.join(names)} are all 0: one must be more")
    scale = lcm(*(weight.denominator for weight in exact))
    parts = [int(weight * scale) for weight in exact]
    parts = [part // gcd(*parts) for part in parts]
    if sum(parts) <= PARTS:
        return tuple(parts)
    ideal = [weight / total * PARTS for weight in exact]
    parts = [max(int(part), int(at_least_one and part > 0)) for part in ideal]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - ideal[i], i))
    for i in by_remainder[: max(PARTS - sum(parts), 0)]:
        parts[i] += 1
    for name, part, weight in zip(names, parts, exact, strict=True):
        if weight and not part:
            raise DataError(
                f"weight of {name}: {float(weight / total):.3g} of the sum, less than one part in {PARTS}; give it "
                "more, or leave the source out"
            )
    return tuple(part // gcd(*parts) for part in parts)


@lru_cache(maxsize=64)
def turns_of(shares: tuple[int, ...]) -> Turns:
    """The turns of sources with these shares of a period."""
    period = sum(shares)
    number = np.arange(period) - np.repeat(np.cumsum(shares) - shares, shares)  # of each turn of its source
    source = np.repeat(np.arange(len(shares)), shares)
    share = np.array(shares)[source]
    opens = number * period // share
    closes = -(-(number + 1) * period // share)
    order = np.lexsort((source, closes, opens))
    waiting = iter(zip(*(column[order].tolist() for column in (opens, closes, source, number)), strict=True))
    following = next(waiting, None)
    open_windows: list[tuple[int, int, int]] = []
    turns: list[tuple[int, int]] = []
    for turn in range(period):
        while following is not None and following[0] <= turn:
            heapq.heappush(open_windows, following[1:])
            following = next(waiting, None)
        closing, whose, rank = heapq.heappop(open_windows)
        assert closing > turn
        turns.append((whose, rank))
    table = np.array(turns, np.int64).reshape(period, 2)
    return Turns(shares, table[:, 0].astype(np.uint16), table[:, 1].astype(np.int32))
