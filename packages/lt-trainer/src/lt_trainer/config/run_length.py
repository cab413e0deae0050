"""Run lengths in words: `schedule.max_steps = "3 epochs"`, `schedule.warmup_steps = "1%"`.

They are converted to steps when the recipe is resolved, so a recipe that was written out has numbers. Epochs are
counted in the pack: rows are never dropped, so n epochs of R rows in steps of B rows are floor(n R / B) steps, and
n R mod B rows at the end are not read; the origin of the value says how many. A percentage of the run is rounded to the
nearest step, and at least one.

Cost: the store's manifest and the pack's header for epochs; nothing otherwise.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_trainer.errors import RecipeError

if TYPE_CHECKING:
    from lt_trainer.config.data_section import DataOptions
    from lt_trainer.config.sections import BatchOptions

MAX_STEPS, WARMUP_STEPS = "schedule.max_steps", "schedule.warmup_steps"
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"
EPOCHS_PATTERN = re.compile(_NUMBER + r"\s*epochs?")
PERCENT_PATTERN = re.compile(_NUMBER + r"\s*%")


def parse_run_length(name: str, value: Any) -> Fraction | None:
    """Parse a run length in words; return None for other values, or a form that `name` does not allow.

    Example:
        >>> parse_run_length("schedule.max_steps", "3 epochs")
        Fraction(3, 1)
        >>> parse_run_length("schedule.warmup_steps", "0.5%")
        Fraction(1, 200)
        >>> parse_run_length("schedule.warmup_steps", "3 epochs") is None
        True
    """
    pattern = {MAX_STEPS: EPOCHS_PATTERN, WARMUP_STEPS: PERCENT_PATTERN}.get(name)
    match = pattern.fullmatch(value.strip()) if pattern is not None and isinstance(value, str) else None
    if match is None:
        return None
    return Fraction(match[1]) / (100 if name == WARMUP_STEPS else 1)


def steps_from_fraction(share: Fraction, max_steps: int) -> int:
    """Return a fraction of a run in steps, rounded to the nearest with halves up, and at least one.

    Example:
        >>> [steps_from_fraction(Fraction(share), steps) for share, steps in (("0.01", 31800), ("0.01", 20), ("0", 20))]
        [318, 1, 0]
    """
    return max(1, int(share * max_steps + Fraction(1, 2))) if share else 0


def steps_from_epochs(epochs: Fraction, data: DataOptions, batch: BatchOptions) -> tuple[int, str]:
    """Return the number of steps in some epochs, which may be fractional, and a description of the calculation.

    Raises:
        RecipeError: rows that are not from one store and of one length, a batch ramp, or data that is not here.
    """
    remedy = "set schedule.max_steps (MAX_STEPS) to a number"
    shown = {"data.store": data.store}
    if not data.store or data.packing == "buckets" or batch.ramp.start:
        problem = "epochs need a single data.store with rows of one length and a constant batch size"
        remedy = f"{remedy}; lt data steps-per-epoch counts rows per length"
        raise RecipeError(problem, values=shown | {"data.packing": data.packing}, remedy=remedy)
    if not Path(data.store).exists():
        problem = "epochs are counted in the store, which does not exist here"
        raise RecipeError(problem, values=shown, remedy=f"{remedy}, or resolve the recipe where the data is")
    from lt_data import TokenStore, open_pack

    rows = open_pack(TokenStore.open(data.store, packs=data.packs), seq_len=data.seq_len, mode=data.packing).n_rows
    steps, left = divmod(int(epochs * rows), batch.global_batch_size)
    if not steps:
        raise RecipeError(
            f"{float(epochs):g} epochs of {rows:,} rows are less than one step",
            values={"batch.global_batch_size": batch.global_batch_size, **shown},
            remedy=f"set batch.global_batch_size (GLOBAL_BATCH_SIZE) to at most {max(1, int(epochs * rows))}",
        )
    words = f"{float(epochs):g} epoch{'s' * (epochs != 1)} of {rows:,} rows"
    return steps, f"{words}, {batch.global_batch_size:,} per step; {left:,} rows left over"
