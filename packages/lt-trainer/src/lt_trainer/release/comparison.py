"""Comparison of a repeated run with the released one: losses step by step, environments. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lt_trainer.config.fields import flatten

COMPARED = ("loss", "grad_norm")
PLACES = {
    "hostname",
    *(f"variables.{name}" for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "TRAINING_JOB_NAME")),
}
"""Entries of environment.json that say where a run was, which no result depends on."""


@dataclass(frozen=True, kw_only=True)
class LossComparison:
    """Losses of two runs.

    Attributes:
        n_steps: Steps that both logged, up to the last one that was asked for.
        missing: Steps that the release has and the repeated run has not.
        first_different: First step whose loss or gradient norm differs in any bit; None if all are equal.
        values: Name, released and repeated value at that step; empty if all are equal.
        max_relative_difference: Largest relative difference of a loss.
        tolerance: Stated tolerance of a loss.
    """

    n_steps: int
    missing: tuple[int, ...]
    first_different: int | None
    values: tuple[tuple[str, float, float], ...]
    max_relative_difference: float
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """True if there are steps, and each loss and gradient norm has the same bits."""
        return self.n_steps > 0 and not self.missing and self.first_different is None

    @property
    def is_within_tolerance(self) -> bool:
        """True if no loss differs by more than the stated tolerance."""
        return self.n_steps > 0 and not self.missing and self.max_relative_difference <= self.tolerance


def compare_losses(
    released: Sequence[Mapping[str, Any]], repeated: Sequence[Mapping[str, Any]], *, last_step: int, tolerance: float
) -> LossComparison:
    """Compare the training records of two runs, without superseded ones, up to a step."""
    ours = {int(record["step"]): record for record in repeated}
    wanted = [record for record in released if record["step"] <= last_step]
    first: int | None = None
    values: tuple[tuple[str, float, float], ...] = ()
    largest, n_steps = 0.0, 0
    for record in wanted:
        step = int(record["step"])
        if step not in ours:
            continue
        n_steps += 1
        different = tuple(
            (name, float(record[name]), float(ours[step][name]))
            for name in COMPARED
            if not _same_bits(float(record[name]), float(ours[step][name]))
        )
        if different and first is None:
            first, values = step, different
        largest = max(largest, _relative(float(record["loss"]), float(ours[step]["loss"])))
    return LossComparison(
        n_steps=n_steps,
        missing=tuple(int(record["step"]) for record in wanted if int(record["step"]) not in ours),
        first_different=first,
        values=values,
        max_relative_difference=largest,
        tolerance=tolerance,
    )


def _same_bits(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _relative(a: float, b: float) -> float:
    if _same_bits(a, b):
        return 0.0
    difference = abs(a - b) / max(abs(a), abs(b))
    return difference if math.isfinite(difference) else math.inf


def compare_environments(released: Mapping[str, Any], repeated: Mapping[str, Any]) -> list[str]:
    """Return the entries of environment.json that differ, but for filtered ones and mere places."""
    before, now = flatten(released), flatten(repeated)
    names = [name for name in {**before, **now} if name not in PLACES and before.get(name) != now.get(name)]
    return [
        f"{name}: {before.get(name, 'absent')} in the release, {now.get(name, 'absent')} here"
        for name in names
        if "<" not in str(before.get(name, ""))
    ]
