"""Weighted interleaving of sources in which no count is ever off by one, with weights that may change over time.

Weights are quantized to integers: source s has a_s of D slots. Its j-th slot must lie in the window [floor(j D / a_s),
ceil((j + 1) D / a_s)), so after any i slots it has had more than i a_s / D - 1 and fewer than i a_s / D + 1. Choosing
at each slot the open window that closes first satisfies every window (Tijdeman, "The chairman assignment problem",
1980; in scheduling: Baruah, Cohen, Plaxton and Varvel, "Proportionate progress", 1996). After D slots all counts are
exact, so the table is one period of at most `MAX_PERIOD` slots. A phase, whose weights begin at a row, begins a period.

Cost: about ten microseconds per slot of the period, once; then O(1) for any slot.
"""

from collections.abc import Mapping, Sequence
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
        shares: slots of each source in one period (int64 [sources]).
        source: source of each slot (int64 [period]).
        occurrence: earlier slots of that source in the period (int64 [period]).
    """

    shares: np.ndarray
    source: np.ndarray
    occurrence: np.ndarray

    def lookup(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each slot, and how many earlier slots that source had (int64 [n] each)."""
        periods, rest = np.divmod(slots, self.source.size)
        source = self.source[rest]
        return source, periods * self.shares[source] + self.occurrence[rest]

    def counts(self, slots: int) -> np.ndarray:
        """Return how many of the first `slots` slots each source has (int64 [sources])."""
        periods, rest = divmod(slots, self.source.size)
        return periods * self.shares + np.bincount(self.source[:rest], minlength=self.shares.size)


def quantize_weights(weights: Mapping[str, Weight]) -> tuple[int, ...]:
    """Convert the weights of sources to coprime integers, exact if these sum to at most `MAX_PERIOD`.

    Floats are read as decimals: 0.7, 0.2 and 0.1 become 7, 2 and 1.

    Raises:
        DataError: a weight is negative or not finite, all are 0, or one is too small.
    """
    for name, weight in weights.items():
        number = isinstance(weight, int | float | Fraction) and not isinstance(weight, bool)
        if not number or not isfinite(weight) or weight < 0:
            raise DataError(f"weight of {name}: {weight!r}; give a finite number, 0 or more")
    exact = [Fraction(repr(weight)) if isinstance(weight, float) else Fraction(weight) for weight in weights.values()]
    total = sum(exact)
    if not total:
        raise DataError(f"the weights of {', '.join(weights)} are all 0: at least one must be positive")
    scale = lcm(*(weight.denominator for weight in exact))
    parts = [int(weight * scale) for weight in exact]
    if sum(parts) // gcd(*parts) > MAX_PERIOD:
        ideal = [weight / total * MAX_PERIOD for weight in exact]
        parts = [int(part) for part in ideal]
        by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - ideal[i], i))
        for i in by_remainder[: MAX_PERIOD - sum(parts)]:
            parts[i] += 1
    for name, part, weight in zip(weights, parts, exact, strict=True):
        if weight and not part:
            raise DataError(
                f"weight of {name}: {float(weight / total):.3g} of the sum, less than 1/{MAX_PERIOD}; increase it or "
                "leave the source out"
            )
    return tuple(part // gcd(*parts) for part in parts)


@lru_cache(maxsize=64)
def build_schedule(shares: tuple[int, ...]) -> InterleaveSchedule:
    """Return the schedule of sources with these shares of a period."""
    period, share = sum(shares), np.array(shares)
    number = np.zeros(len(shares), np.int64)  # slots that each source has had
    source, occurrence = np.empty((2, period), np.int64)
    divisor = np.maximum(share, 1)
    for slot in range(period):
        is_open = (number < share) & (number * period // divisor <= slot)
        closes = np.where(is_open, -(-(number + 1) * period // divisor), period + 1)
        chosen = int(closes.argmin())
        assert slot < closes[chosen] <= period
        source[slot], occurrence[slot] = chosen, number[chosen]
        number[chosen] += 1
    return InterleaveSchedule(share, source, occurrence)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Weights of the sources from a row of the global sequence on.

        >>> phases = [Phase(weights={"web": 1}), Phase(weights={"web": 1, "code": 1}, from_row=80)]
        >>> Mixture({"web": rows, "code": rows}, phases).counts(100)
        {'web': 90, 'code': 10}

    Attributes:
        weights: weight by source; 0 for sources that are not named.
        from_row: position of the first row; S * B for step S of batches of B rows.
    """

    weights: Mapping[str, Weight]
    from_row: int = 0


class PhasedSchedule:
    """Schedule of named sources over several phases.

    Within a phase no count is ever off by a whole row. A phase that lasts a multiple of its period ends with exact
    shares; any other ends with an error below one row per source, since the next phase starts a new period.

    Args:
        names: names of the sources.
        phases: in order, the first from row 0.

    Raises:
        DataError: an invalid phase or weight.
    """

    def __init__(self, names: Sequence[str], phases: Sequence[Phase]) -> None:
        starts = [phase.from_row for phase in phases]
        if not all(type(start) is int for start in starts) or starts[:1] != [0] or sorted(set(starts)) != starts:
            raise DataError(f"phases begin at rows {starts}: the first must begin at 0, and they must increase")
        self._names, self._starts = tuple(names), starts
        self._schedules: list[InterleaveSchedule] = []
        self._counts_before = [np.zeros(len(names), np.int64)]  # rows of each source before each phase
        for phase, end in zip(phases, [*starts[1:], None], strict=True):
            if unknown := [name for name in phase.weights if name not in self._names]:
                raise DataError(f"weights: no source {unknown[0]!r}; the sources are {', '.join(names)}")
            shares = quantize_weights({name: phase.weights.get(name, 0) for name in names})
            self._schedules.append(build_schedule(shares))
            if end is not None:
                self._counts_before.append(self._counts_before[-1] + self._schedules[-1].counts(end - phase.from_row))

    def lookup(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each row, and how many earlier rows that source had (int64 [count] each)."""
        rows = np.arange(first, first + count)
        phase = np.searchsorted(self._starts, rows, side="right") - 1
        source, number = np.empty((2, count), np.int64)
        for i in np.unique(phase).tolist():
            chosen = phase == i
            source[chosen], within = self._schedules[i].lookup(rows[chosen] - self._starts[i])
            number[chosen] = within + self._counts_before[i][source[chosen]]
        return source, number

    def counts(self, rows: int) -> dict[str, int]:
        """Return how many of the first rows each source has."""
        i = int(np.searchsorted(self._starts, rows, side="right")) - 1
        counts = self._counts_before[i] + self._schedules[i].counts(rows - self._starts[i])
        return dict(zip(self._names, counts.tolist(), strict=True))

    def shares(self, rows: int) -> dict[int, dict[str, int]]:
        """Return the positive shares by source, by first row, of the phases that begin within the first rows."""
        return {
            start: {name: part for name, part in zip(self._names, schedule.shares.tolist(), strict=True) if part}
            for start, schedule in zip(self._starts, self._schedules, strict=True)
            if start == 0 or start < rows
        }
