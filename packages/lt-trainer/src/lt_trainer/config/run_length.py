"""Run lengths in words: `schedule.max_steps = "3 epochs"`, `schedule.warmup_steps = "1%"`.

They are converted to steps when the recipe is resolved, so a recipe that was written out has numbers. Epochs are
counted in the pack: rows are never dropped, so n epochs of R rows in steps of B rows are floor(n R / B) steps, and
n R mod B rows at the end are not read; the origin of the value says how many. A percentage of the run is rounded to the
nearest step, and at least one.

Cost: the store's manifest and the pack's header for epochs; nothing otherwise.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from lt_trainer.config.data_section import DataOptions
from lt_trainer.config.section import Given, build, inside
from lt_trainer.config.sections import BatchOptions, ScheduleOptions
from lt_trainer.errors import RecipeError

MAX_STEPS, WARMUP_STEPS = "schedule.max_steps", "schedule.warmup_steps"
UNCOUNTED_STEPS = 10**9
"""Steps of a number of epochs where the data is not read: more than any other field of a recipe asks for."""
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)\s*"
_PATTERNS = {MAX_STEPS: re.compile(_NUMBER + "epochs?"), WARMUP_STEPS: re.compile(_NUMBER + "%")}


def steps_from_words(given: Mapping[str, Given], *, reads_data: bool = True) -> dict[str, Given]:
    """Return the run lengths in words among a recipe's values as steps.

    Args:
        given: values by dotted name.
        reads_data: count epochs in the data; else they are `UNCOUNTED_STEPS`.

    Raises:
        RecipeError: epochs that cannot be counted.
    """
    epochs, share = (parse_run_length(name, given[name].value) if name in given else None for name in _PATTERNS)
    steps: dict[str, Given] = {}
    if epochs is not None and not reads_data:
        steps[MAX_STEPS] = Given(UNCOUNTED_STEPS, f"{given[MAX_STEPS].source}: epochs of data that is not read")
    elif epochs is not None:
        data = build(DataOptions, inside(given, "data"), "data")
        batch = build(BatchOptions, inside(given, "batch"), "batch")
        number, text = steps_from_epochs(epochs, data, batch)
        steps[MAX_STEPS] = Given(number, f"{given[MAX_STEPS].source}: {text}")
    if share is not None:
        schedule = inside({**given, **steps, WARMUP_STEPS: Given(0, "")}, "schedule")
        max_steps = build(ScheduleOptions, schedule, "schedule").max_steps
        text = f"{given[WARMUP_STEPS].source}: {float(100 * share):g} % of {max_steps:,}"
        steps[WARMUP_STEPS] = Given(steps_from_fraction(share, max_steps), text)
    return steps


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
    match = _PATTERNS[name].fullmatch(value.strip()) if isinstance(value, str) else None
    return None if match is None else Fraction(match[1]) / (100 if name == WARMUP_STEPS else 1)


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
        RecipeError: rows that are not from one store, a batch ramp, or data that is not here.
    """
    shown, remedy = {"data.store": data.store}, "set schedule.max_steps (MAX_STEPS) to a number"
    if not data.store or batch.ramp.start:
        problem = "epochs need a single data.store and a constant batch size"
        raise RecipeError(problem, values=shown | {"batch.ramp.start": batch.ramp.start}, remedy=remedy)
    if not Path(data.store).exists():
        raise RecipeError("epochs are counted in the store, which does not exist here", values=shown, remedy=remedy)
    from lt_data import TokenStore, open_pack

    rows = open_pack(TokenStore(data.store, packs=data.packs), seq_len=data.seq_len, mode=data.packing).n_rows
    steps, left = divmod(int(epochs * rows), batch.global_batch_size)
    words = f"{float(epochs):g} epoch{'s' * (epochs != 1)} of {rows:,} rows"
    if not steps:
        shown["batch.global_batch_size"] = str(batch.global_batch_size)
        raise RecipeError(f"{words} are less than one step", values=shown)
    return steps, f"{words}, {batch.global_batch_size:,} per step; {left:,} rows left over"
