"""Phased schedules: interleaving whose weights change over time (lt_data.streaming.interleave).

Within a phase no count is ever off by a whole slot. A phase that lasts a multiple of its period ends with exact shares;
any other ends with an error below one slot per source, since the next phase starts a new period.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lt_data.errors import DataError
from lt_data.streaming.interleave import InterleaveSchedule, Weight, build_schedule, quantize_weights


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Weights of the sources from a row of the global sequence on.

    Attributes:
        weights: weight by source (a name, or the row length of a bucket); 0 for sources that are not named.
        from_row: position of the first row; S * B for step S of batches of B rows.
    """

    weights: Mapping[str, Weight] | Mapping[int, Weight]
    from_row: int = 0

    def __post_init__(self) -> None:
        if type(self.from_row) is not int or self.from_row < 0:
            raise DataError(f"from_row = {self.from_row!r} of a phase: give an integer, 0 or more")


class PhasedSchedule:
    """Schedule of named sources over several phases.

    Args:
        names: names of the sources.
        phases: in order, the first from row 0.
        rows_per_slot: rows of a slot; phases must begin at a slot boundary.
        at_least_one: as in `quantize_weights`.

    Raises:
        DataError: an invalid phase or weight.
    """

    def __init__(
        self, names: Sequence[str], phases: Sequence[Phase], *, rows_per_slot: int = 1, at_least_one: bool = False
    ) -> None:
        self._names = tuple(names)
        starts = [phase.from_row for phase in phases]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise DataError(f"phases begin at rows {starts}: the first must begin at 0, and they must increase")
        if wrong := [start for start in starts if start % rows_per_slot]:
            raise DataError(f"a phase begins at row {wrong[0]}: give a multiple of global_batch_size, {rows_per_slot}")
        self._starts = [start // rows_per_slot for start in starts]
        self._schedules: list[InterleaveSchedule] = []
        self._counts_before: list[list[int]] = [[0] * len(names)]  # slots of each source before each phase
        for i, phase in enumerate(phases):
            weights = {str(name): weight for name, weight in phase.weights.items()}
            if unknown := [name for name in weights if name not in self._names]:
                raise DataError(f"weights: no source {unknown[0]!r}; the sources are {', '.join(self._names)}")
            shares = quantize_weights(
                [weights.get(name, 0) for name in self._names], names=self._names, at_least_one=at_least_one
            )
            self._schedules.append(build_schedule(shares))
            if i:
                more = self._schedules[i - 1].counts(self._starts[i] - self._starts[i - 1])
                self._counts_before.append([a + b for a, b in zip(self._counts_before[-1], more, strict=True)])

    @property
    def shares(self) -> list[dict[str, int]]:
        """Quantized weights of each phase, by source."""
        return [dict(zip(self._names, schedule.shares, strict=True)) for schedule in self._schedules]

    def lookup(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each slot, and how many earlier slots that source had (int64 [count] each)."""
        sources: list[np.ndarray] = []
        numbers: list[np.ndarray] = []
        end = first + count
        while first < end:
            i = self._phase_index(first)
            last = min([end, *self._starts[i + 1 : i + 2]])
            source, number = self._schedules[i].lookup(np.arange(first, last) - self._starts[i])
            sources.append(source)
            numbers.append(number + np.array(self._counts_before[i])[source])
            first = last
        empty = [np.zeros(0, np.int64)]
        return np.concatenate(sources or empty), np.concatenate(numbers or empty)

    def counts(self, slots: int) -> dict[str, int]:
        """Return how many of the first `slots` slots each source has."""
        i = self._phase_index(slots)
        more = self._schedules[i].counts(slots - self._starts[i])
        return dict(zip(self._names, (a + b for a, b in zip(self._counts_before[i], more, strict=True)), strict=True))

    def fingerprint_words(self, slots: int) -> list[str]:
        """Return `weights@START:NAME=PARTS,...` of each phase that begins within the first `slots` slots."""
        return [
            f"weights@{start}:" + ",".join(f"{name}={part}" for name, part in shares.items() if part)
            for start, shares in zip(self._starts, self.shares, strict=True)
            if start == 0 or start < slots
        ]

    def active_sources(self, slots: int) -> set[str]:
        """Return the sources with slots in the phases that begin within the first `slots` slots."""
        begun = [shares for start, shares in zip(self._starts, self.shares, strict=True) if start == 0 or start < slots]
        return {name for shares in begun for name, part in shares.items() if part}

    def _phase_index(self, slot: int) -> int:
        return max(i for i, start in enumerate(self._starts) if start <= slot)
