"""Search for the fastest setting: what changes the speed of a run, and not what it learns.

Candidates are every micro-batch that divides a rank's part of the global batch, the recomputation modes, compiled or
not, and the tokens whose logits exist at a time. The global batch, sequence length, dtypes and degrees of parallelism
stay the recipe's.

The time of a step over the micro-batch size falls while launches and messages are shared by more rows, and rises
again, if at all, where memory runs out; kernels add bumps of a few per cent. So on each line (a mode of recomputation,
compiled or not) the search walks from the best micro-batch known so far to larger ones, up to one that fails, and to
smaller ones, and stops in a direction after `PATIENCE` settings in a row that are slower than the best of the line.
Last, the sizes of the loss's chunks are tried with the best setting: they change the time of the head alone.

Cost: two thirds of a grid in the mean of the generated ones of `tests/test_tuning.py`, in all of which what is found is
within 3 % of the fastest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer.planning.layout import engine_table

MODES = ("none", "selective", "full")
"""Recomputation modes, the one with the most memory first."""
LOSS_CHUNK_TOKENS = (256, 1024, 4096, 16384)
"""Tried beside the recipe's value, as far as a micro-batch has more tokens."""
PATIENCE = 2


@dataclass(frozen=True, kw_only=True)
class TunedSetting:
    """One candidate."""

    micro_batch_size: int
    activation_checkpointing: str
    compile: str | bool
    loss_chunk_tokens: int = 0

    def to_set_options(self) -> list[str]:
        """Return the recipe fields as values of `--set`."""
        engine = {name: value for name, value in vars(self).items() if name != "micro_batch_size"}
        values: dict[str, Any] = {"batch.micro_batch_size": self.micro_batch_size}
        values |= {f"engine.gpu.{name}": value for name, value in engine.items()}
        return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]


@dataclass(frozen=True, kw_only=True)
class SettingGrid:
    """All candidates of a recipe, and the one to begin with."""

    micro_batch_sizes: Sequence[int]
    """Ascending."""
    compile: Sequence[str | bool]
    start: TunedSetting
    tokens_per_row: int = 0
    """Positions of a row on a rank; 0: chunks of the loss are not tried."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, world_size: int) -> SettingGrid:
        """Return the candidates of a recipe on a number of ranks; the first is the recipe itself.

        Raises:
            RecipeError: run.engine is not "gpu", or the recipe lets the compiler choose what is recomputed.
        """
        options = engine_table(recipe)
        mode, compiled = options.get("activation_checkpointing", MODES[0]), options.get("compile", "auto")
        if mode not in MODES:
            raise RecipeError(
                "tuning tries none, selective and full",
                values={"engine.gpu.activation_checkpointing": mode},
                remedy="tune with --set engine.gpu.activation_checkpointing=none",
            )
        is_eager = compiled == "auto" and options.get("device", "auto") == "cpu"  # there auto does not compile
        rows = recipe.batch.micro_batch_size * recipe.accumulation_steps(world_size)
        return cls(
            micro_batch_sizes=[size for size in range(1, rows + 1) if rows % size == 0],
            compile=(compiled,) if is_eager else (compiled, compiled is False),
            start=TunedSetting(
                micro_batch_size=recipe.batch.micro_batch_size,
                activation_checkpointing=mode,
                compile=compiled,
                loss_chunk_tokens=options.get("loss_chunk_tokens", 0),
            ),
            tokens_per_row=recipe.data.seq_len // recipe.parallel.cp,
        )


def find_fastest(grid: SettingGrid, measure: Callable[[TunedSetting], float | None]) -> TunedSetting | None:
    """Return the fastest setting that was measured; None if none worked.

    Args:
        grid: candidates.
        measure: returns the seconds of a step, or None if the setting does not work here; called once per setting.
    """
    seconds: dict[TunedSetting, float] = {}
    best = grid.start
    for compiled in grid.compile:
        for mode in sorted(MODES, key=lambda mode: mode != grid.start.activation_checkpointing):
            line = replace(best, activation_checkpointing=mode, compile=compiled)
            seconds |= _walk(line, grid.micro_batch_sizes, measure)
            best = min(seconds, key=lambda setting: seconds[setting], default=grid.start)
    for tokens in LOSS_CHUNK_TOKENS if seconds else ():
        if tokens < best.micro_batch_size * grid.tokens_per_row and tokens != best.loss_chunk_tokens:
            setting = replace(best, loss_chunk_tokens=tokens)
            if (value := measure(setting)) is not None:
                seconds[setting] = value
    return min(seconds, key=lambda setting: seconds[setting], default=None)


def _walk(
    start: TunedSetting, sizes: Sequence[int], measure: Callable[[TunedSetting], float | None]
) -> dict[TunedSetting, float]:
    """Return the seconds of the settings of a line, walking from `start` to larger and to smaller micro-batches."""
    line: dict[TunedSetting, float] = {}
    at = sizes.index(start.micro_batch_size)
    for is_up, direction in ((True, sizes[at:]), (False, sizes[:at][::-1])):
        n_slower = 0
        for size in direction:
            setting = replace(start, micro_batch_size=size)
            value = measure(setting)
            if value is not None:
                n_slower = n_slower + 1 if line and value >= min(line.values()) else 0
                line[setting] = value
            if n_slower == PATIENCE or (value is None and is_up):
                break  # larger ones need more memory than one that failed; smaller ones follow
    return line
