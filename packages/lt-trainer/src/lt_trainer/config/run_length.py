"""Run lengths in words: `schedule.max_steps = "3 epochs"`, `schedule.warmup_steps = "1%"`.

They are converted to steps when the recipe is resolved, so a recipe that was written out has numbers. Epochs are
counted in the pack: rows are never dropped, so n epochs of R rows in steps of B rows are floor(n R / B) steps, and
n R mod B rows at the end are not read; the origin of the value says how many. A percentage of the run is rounded to the
nearest step, and at least one.

Cost: the store's manifest and the pack's header for epochs; nothing otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from lt_trainer.errors import RecipeError

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
    match = pattern.fullmatch(value.strip().strip('"')) if pattern is not None and isinstance(value, str) else None
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


def steps_from_epochs(epochs: Fraction, values: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number of steps in some epochs, and a description of the calculation.

    Args:
        epochs: number of epochs; may be fractional.
        values: typed values of the recipe by dotted name; missing ones have their defaults.

    Raises:
        RecipeError: rows that are not from one store and of one length, a batch ramp, or data that is not here.
    """
    from lt_trainer.config.sections.batch import BatchOptions
    from lt_trainer.config.sections.data import DataOptions

    def value(section: type, name: str) -> Any:
        dotted = f"{'data' if section is DataOptions else 'batch'}.{name}"
        return values.get(dotted, getattr(section, name))

    store, packs, seq_len, mode = (value(DataOptions, name) for name in ("store", "packs", "seq_len", "packing"))
    remedy = "set schedule.max_steps (MAX_STEPS) to a number"
    if not store or mode == "buckets" or any(name.startswith("batch.ramp.") for name in values):
        raise RecipeError(
            "epochs need a single data.store with rows of one length and a constant batch size",
            values={"data.store": store, "data.packing": mode},
            remedy=f"{remedy}; lt data steps-per-epoch counts rows per length",
        )
    if not Path(store).exists():
        raise RecipeError(
            "epochs are counted in the store, which does not exist here",
            values={"data.store": store},
            remedy=f"{remedy}, or resolve the recipe on a machine with the data",
        )
    from lt_data import TokenStore, open_pack

    rows = open_pack(TokenStore.open(store, packs=packs), seq_len=seq_len, mode=mode).n_rows
    batch = value(BatchOptions, "global_batch_size")
    steps, left = divmod(int(epochs * rows), batch)
    if not steps:
        raise RecipeError(
            f"{float(epochs):g} epochs of {rows:,} rows are less than one step",
            values={"batch.global_batch_size": batch, "data.store": store},
            remedy=f"set batch.global_batch_size (GLOBAL_BATCH_SIZE) to at most {max(1, int(epochs * rows))}",
        )
    plural = "s" * (epochs != 1)
    return steps, f"{float(epochs):g} epoch{plural} of {rows:,} rows, {batch:,} per step; {left:,} rows left over"
