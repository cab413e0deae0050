"""Weights that change: phases of turns, each shared out by its own weights (lt_data.streaming.apportion).

Within a phase no count is ever off by a whole turn. A phase that lasts a multiple of its period ends on exactly its
shares; any other leaves less than a turn per source behind, since the next one begins afresh.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lt_data.errors import DataError
from lt_data.streaming.apportion import Turns, Weight, shares_of, turns_of


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Weights from a row of the global sequence on.

    Attributes:
        weights: by source (a name, or the length of a bucket's rows); a source that is not named has 0.
        from_row: position of the first row; for step S of batches of B rows it is S * B.
    """

    weights: Mapping[str, Weight] | Mapping[int, Weight]
    from_row: int = 0

    def __post_init__(self) -> None:
        if type(self.from_row) is not int or self.from_row < 0:
            raise DataError(f"from_row={self.from_row!r} of a phase: give a whole number of rows, 0 or more")


class PhasedTurns:
    """Endless turns of named sources.

    Args:
        names: of the sources.
        phases: the first from row 0, in order.
        rows_per_turn: rows that a turn takes; phases must begin with a turn.
        at_least_one: as in `shares_of`.

    Raises:
        DataError: a phase or a weight is wrong.
    """

    def __init__(
        self, names: Sequence[str], phases: Sequence[Phase], *, rows_per_turn: int = 1, at_least_one: bool = False
    ) -> None:
        self._names = tuple(names)
        starts = [phase.from_row for phase in phases]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise DataError(f"phases begin at rows {starts}: the first must begin at 0, each later than the one before")
        if wrong := [start for start in starts if start % rows_per_turn]:
            raise DataError(f"a phase begins at row {wrong[0]}: give a multiple of the global batch, {rows_per_turn}")
        self._starts = [start // rows_per_turn for start in starts]
        self._turns: list[Turns] = []
        self._given: list[list[int]] = [[0] * len(names)]  # turns of each source before each phase
        for i, phase in enumerate(phases):
            weights = {str(name): weight for name, weight in phase.weights.items()}
            if unknown := [name for name in weights if name not in self._names]:
                raise DataError(f"weights: no source {unknown[0]!r}; the sources are {', '.join(self._names)}")
            shares = shares_of(
                [weights.get(name, 0) for name in self._names], names=self._names, at_least_one=at_least_one
            )
            self._turns.append(turns_of(shares))
            if i:
                more = self._turns[i - 1].counts(self._starts[i] - self._starts[i - 1])
                self._given.append([a + b for a, b in zip(self._given[-1], more, strict=True)])

    @property
    def shares(self) -> list[dict[str, int]]:
        """The parts of each source in each phase, as whole numbers: what the weights were rounded to."""
        return [dict(zip(self._names, turns.shares, strict=True)) for turns in self._turns]

    def at(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Whose each of some turns is, and how many turns that source had before (int64 [count] each)."""
        sources: list[np.ndarray] = []
        numbers: list[np.ndarray] = []
        end = first + count
        while first < end:
            i = self._phase(first)
            last = min([end, *self._starts[i + 1 : i + 2]])
            source, number = self._turns[i].at(np.arange(first, last) - self._starts[i])
            sources.append(source)
            numbers.append(number + np.array(self._given[i])[source])
            first = last
        none = [np.zeros(0, np.int64)]
        return np.concatenate(sources or none), np.concatenate(numbers or none)

    def counts(self, turns: int) -> dict[str, int]:
        """How many of the first `turns` turns each source has."""
        i = self._phase(turns)
        more = self._turns[i].counts(turns - self._starts[i])
        return dict(zip(self._names, (a + b for a, b in zip(self._given[i], more, strict=True)), strict=True))

    def words(self, turns: int) -> list[str]:
        """The phases that the first `turns` turns are made of (at least the first), `weights@START:NAME=PARTS,...`."""
        return [
            f"weights@{start}:" + ",".join(f"{name}={part}" for name, part in shares.items() if part)
            for start, shares in zip(self._starts, self.shares, strict=True)
            if start == 0 or start < turns
        ]

    def used(self, turns: int) -> set[str]:
        """The sources that those phases give turns to."""
        begun = [shares for start, shares in zip(self._starts, self.shares, strict=True) if start == 0 or start < turns]
        return {name for shares in begun for name, part in shares.items() if part}

    def _phase(self, turn: int) -> int:
        return max(i for i, start in enumerate(self._starts) if start <= turn)
