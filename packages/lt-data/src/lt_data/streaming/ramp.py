"""Batch size ramp-up: rows of each step, and rows read before it.

The batch grows from `start` rows in levels of `increment` rows to `final` rows (as in "Language Models are Few-Shot
Learners", https://arxiv.org/abs/2005.14165, appendix B). Levels are counted in steps (step s of `steps` has level
floor(s K / steps) of K) or in rows (level j of K lasts until (j + 1) / K of `rows` were read, in whole steps). Both
give a table of at most K + 1 entries, from which the batch size of any step, and the rows before it, are looked up.
Neither depends on the number of ranks.

Cost: K entries once, then a binary search.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lt_data import strict_json
from lt_data.errors import DataError


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """Batch size schedule of a ramp-up.

    Attributes:
        start: rows of the first step.
        final: rows of a step after the ramp.
        increment: rows by which the batch grows per level.
        steps: steps of the ramp; 0: given by `rows`.
        rows: rows of the ramp, rounded up to whole steps; 0: given by `steps`.

    Raises:
        DataError: the levels do not lead from `start` to `final`, or not exactly one of `steps` and `rows` is given.
    """

    start: int
    final: int
    increment: int
    steps: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.start < self.final:
            raise DataError(f"batch ramp from {self.start} to {self.final} rows: give 1 <= start < final")
        if self.increment < 1 or (self.final - self.start) % self.increment:
            raise DataError(
                f"batch ramp from {self.start} to {self.final} rows by {self.increment}: give an increment "
                f"that divides {self.final - self.start}"
            )
        if min(self.steps, self.rows) < 0 or bool(self.steps) == bool(self.rows):
            raise DataError(f"batch ramp with steps = {self.steps} and rows = {self.rows}: give exactly one of them")

    @property
    def n_levels(self) -> int:
        """Number of times the batch grows."""
        return (self.final - self.start) // self.increment

    @cached_property
    def _table(self) -> tuple[list[int], list[int]]:
        """First step of each level, and the rows read before that step."""
        n = self.n_levels
        first_step, first_row = [0], [0]
        for level in range(n):
            batch, step, row = self.start + level * self.increment, first_step[-1], first_row[-1]
            if self.steps:
                n_steps = -(-(level + 1) * self.steps // n) - step
            else:
                n_steps = max(0, -(-(-(-(level + 1) * self.rows // n) - row) // batch))
            first_step.append(step + n_steps)
            first_row.append(row + n_steps * batch)
        return first_step, first_row

    def batch_size_at(self, step: int) -> int:
        """Return the rows of a step, counted from 0."""
        return self.start + self._level(step) * self.increment

    def rows_before(self, step: int) -> int:
        """Return the rows of all steps before a step."""
        level = self._level(step)
        first_step, first_row = self._table
        return first_row[level] + (step - first_step[level]) * (self.start + level * self.increment)

    def _level(self, step: int) -> int:
        assert step >= 0, step
        return bisect_right(self._table[0], step) - 1

    def to_dict(self) -> dict[str, int]:
        """Return the ramp as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BatchRamp":
        """Restore a ramp from the values of `to_dict`.

        Raises:
            DataError: the values are invalid.
        """
        return strict_json.parse(cls, values, "not a batch ramp", "give what to_dict returned")
