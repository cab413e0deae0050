"""Lengths of a run that are written in words: `schedule.max_steps = "3 epochs"`, `schedule.warmup_steps = "1%"`.

They become whole numbers of updates while the recipe is resolved, so a recipe that was written out holds the numbers.
What an epoch is, is counted in the pack: rows are never dropped, so n epochs of R rows in updates of B rows are
floor(n R / B) updates, and n R mod B rows at the end are not read; the origin of the value says how many. A share of
the run is rounded to the nearest update, and is at least one.

Cost: the store's manifest and the pack's header, where epochs are asked for; nothing otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from lt_trainer.errors import RecipeError

__all__ = ["EPOCHS", "SHARE", "epoch_steps", "share_steps", "spelled"]

MAX_STEPS, WARMUP_STEPS = "schedule.max_steps", "schedule.warmup_steps"
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"
EPOCHS = re.compile(_NUMBER + r"\s*epochs?")
SHARE = re.compile(_NUMBER + r"\s*%")


def spelled(name: str, value: Any) -> Fraction | None:
    """The number in a length that is written in words; None where it is none, or not one that `name` can have.

    Example:
        >>> spelled("schedule.max_steps", "3 epochs"), spelled("schedule.warmup_steps", "0.5%")
        (Fraction(3, 1), Fraction(1, 200))
        >>> spelled("schedule.warmup_steps", "3 epochs") is None
        True
    """
    pattern = {MAX_STEPS: EPOCHS, WARMUP_STEPS: SHARE}.get(name)
    found = pattern.fullmatch(value.strip().strip('"')) if pattern is not None and isinstance(value, str) else None
    if found is None:
        return None
    return Fraction(found[1]) / (100 if name == WARMUP_STEPS else 1)


def share_steps(share: Fraction, max_steps: int) -> int:
    """Updates that make up a share of a run: the nearest whole number, halves up, and at least one.

    Example:
        >>> share_steps(Fraction(1, 100), 31800), share_steps(Fraction(1, 100), 20), share_steps(Fraction(0), 20)
        (318, 1, 0)
    """
    return max(1, int(share * max_steps + Fraction(1, 2))) if share else 0


def epoch_steps(epochs: Fraction, values: Mapping[str, Any]) -> tuple[int, str]:
    """Updates in so many epochs, and how they were counted.

    Args:
        epochs: how many; need not be whole.
        values: what the recipe gives, typed, by dotted name; what is missing has its default.

    Raises:
        RecipeError: rows that are not of one store of one length, a batch that grows, or data that is not here.
    """
    from lt_trainer.sections import BatchOptions, DataOptions

    def value(section: type, name: str) -> Any:
        dotted = f"{'data' if section is DataOptions else 'batch'}.{name}"
        return values.get(dotted, getattr(section, name))

    store, seq_len, mode = (value(DataOptions, name) for name in ("store", "seq_len", "pack"))
    remedy = "give schedule.max_steps (MAX_STEPS) as a number"
    if not store or mode == "buckets" or any(name.startswith("batch.ramp.") for name in values):
        raise RecipeError(
            "epochs are counted over the rows of one store, all of one length, in updates of one size",
            values={"data.store": store, "data.pack": mode},
            remedy=f"{remedy}; lt data steps-per-epoch counts each length of a pack",
        )
    if not Path(store).exists():
        raise RecipeError(
            "an epoch is counted in the store, which is not here",
            values={"data.store": store},
            remedy=f"{remedy}, or resolve the recipe where the data is",
        )
    from lt_data import TokenStore, open_pack

    rows = open_pack(TokenStore.open(store), seq_len=seq_len, mode=mode).n_rows
    batch = value(BatchOptions, "global_batch")
    steps, left = divmod(int(epochs * rows), batch)
    if not steps:
        raise RecipeError(
            f"{float(epochs):g} epochs of {rows:,} rows do not fill one update",
            values={"batch.global_batch": batch, "data.store": store},
            remedy=f"set batch.global_batch (GLOBAL_BATCH_SIZE) to at most {max(1, int(epochs * rows))}",
        )
    told = (
        f"{float(epochs):g} epoch{'s' * (epochs != 1)} of {rows:,} rows, {batch:,} an update; {left:,} rows left over"
    )
    return steps, told
