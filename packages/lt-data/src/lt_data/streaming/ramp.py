"""A batch that grows: how many rows each step reads, and how many were read before it.

The batch begins with `start` rows and grows in levels of `increment` rows to `final` ones (batch size warm-up, as in
"Language Models are Few-Shot Learners", https://arxiv.org/abs/2005.14165, appendix B). Where the levels end is counted
in steps (step s of `steps` has level floor(s K / steps) of K) or in rows (level j of K lasts until (j + 1) / K of
`rows` were read, in whole steps). Both make a table of at most K + 1 entries, in which the batch of any step, and the
rows before it, are found without walking there. Neither depends on how many ranks share the rows.

Cost: K entries once, then a binary search.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lt_data.errors import DataError


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """Rows of each step of a run whose batch grows.

    Attributes:
        start: rows of the first step.
        final: rows of a step when the batch has grown.
        increment: rows that each level has more than the one before.
        steps: steps until then; 0: see `rows`.
        rows: rows until then, made whole steps; 0: see `steps`.

    Raises:
        DataError: the levels do not lead from `start` to `final`, or not one of `steps` and `rows` is given.
    """

    start: int
    final: int
    increment: int
    steps: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.start < self.final:
            raise DataError(f"a batch that grows from {self.start} to {self.final} rows: give 1 or more, and then more")
        if self.increment < 1 or (self.final - self.start) % self.increment:
            raise DataError(
                f"a batch that grows from {self.start} to {self.final} rows by {self.increment}: give an increment "
                f"that divides {self.final - self.start}"
            )
        if min(self.steps, self.rows) < 0 or bool(self.steps) == bool(self.rows):
            raise DataError(f"a batch that grows in steps={self.steps} or rows={self.rows}: give one of the two")

    @property
    def levels(self) -> int:
        """How often the batch grows."""
        return (self.final - self.start) // self.increment

    @cached_property
    def _table(self) -> tuple[list[int], list[int]]:
        """For each level the step that it begins with, and the rows read before that step."""
        n = self.levels
        first_step, first_row = [0], [0]
        for level in range(n):
            batch, step, row = self.start + level * self.increment, first_step[-1], first_row[-1]
            if self.steps:
                lasts = -(-(level + 1) * self.steps // n) - step
            else:
                lasts = max(0, -(-(-(-(level + 1) * self.rows // n) - row) // batch))
            first_step.append(step + lasts)
            first_row.append(row + lasts * batch)
        return first_step, first_row

    def rows_of(self, step: int) -> int:
        """Rows of a step, counted from 0."""
        return self.start + self._level(step) * self.increment

    def rows_before(self, step: int) -> int:
        """Rows of all steps before a step."""
        level = self._level(step)
        first_step, first_row = self._table
        return first_row[level] + (step - first_step[level]) * (self.start + level * self.increment)

    def _level(self, step: int) -> int:
        assert step >= 0, step
        return bisect_right(self._table[0], step) - 1

    def to_json(self) -> dict[str, int]:
        """The ramp as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "BatchRamp":
        """Read what `to_json` gave.

        Raises:
            DataError: it is something else.
        """
        try:
            ramp = cls(**values)
        except TypeError as exc:
            raise DataError(f"not a batch that grows: {dict(values)!r}") from exc
        if not all(type(value) is int for value in values.values()):
            raise DataError(f"not a batch that grows: {dict(values)!r}")
        return ramp
