"""Search for the fastest setting: what changes the speed of a run, and not what it learns.

Candidates are every micro-batch that divides a rank's part of the global batch, the recomputation modes, compiled or
not. The global batch, sequence length, dtypes and degrees of parallelism stay the recipe's.

The time of a step over the micro-batch size falls while launches and messages are shared by more rows, and rises
again, if at all, where memory runs out; kernels add bumps of a few per cent. So on each line (a mode of recomputation,
compiled or not) the search walks from the best micro-batch known so far to larger ones, up to one that fails, and to
smaller ones, and stops in a direction after `PATIENCE` settings in a row that are slower than the best of the line.

Cost: two thirds of a grid in the mean of the generated ones of `tests/test_tuning.py`, in all of which what is found is
within 4 % of the fastest.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer.planning.layout import engine_table

MODES = ("none", "selective", "full")
"""Recomputation modes."""
PATIENCE = 2


class TunedSetting(NamedTuple):
    """One candidate."""

    micro_batch_size: int
    activation_checkpointing: str
    compile: str | bool

    @property
    def values(self) -> dict[str, Any]:
        """The recipe's fields by dotted name."""
        size, mode, compiled = self
        return {
            "batch.micro_batch_size": size,
            "engine.gpu.activation_checkpointing": mode,
            "engine.gpu.compile": compiled,
        }

    def to_set_options(self) -> list[str]:
        """Return the recipe fields as values of `--set`."""
        return [
            f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in self.values.items()
        ]


class SettingGrid(NamedTuple):
    """All candidates of a recipe, and the one to begin with."""

    micro_batch_sizes: Sequence[int]
    """Ascending."""
    compile: Sequence[str | bool]
    start: TunedSetting


def candidates(recipe: Recipe, *, world_size: int) -> SettingGrid:
    """Return the candidates of a recipe on a number of ranks; the first is the recipe itself.

    Raises:
        RecipeError: run.engine is not "gpu", or the recipe lets the compiler choose what is recomputed.
    """
    options = engine_table(recipe)
    mode, compiled = options.get("activation_checkpointing", MODES[0]), options.get("compile", "auto")
    if mode not in MODES:
        remedy = "tune with --set engine.gpu.activation_checkpointing=none"
        shown = {"engine.gpu.activation_checkpointing": mode}
        raise RecipeError("tuning tries none, selective and full", values=shown, remedy=remedy)
    is_eager = compiled == "auto" and options.get("device", "auto") == "cpu"  # there auto does not compile
    rows = recipe.batch.micro_batch_size * recipe.accumulation_steps(world_size)
    return SettingGrid(
        [size for size in range(1, rows + 1) if rows % size == 0],
        (compiled,) if is_eager else (compiled, compiled is False),
        TunedSetting(recipe.batch.micro_batch_size, mode, compiled),
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
            line: dict[TunedSetting, float] = {}
            at = grid.micro_batch_sizes.index(best.micro_batch_size)
            for is_up, sizes in ((True, grid.micro_batch_sizes[at:]), (False, grid.micro_batch_sizes[:at][::-1])):
                n_slower = 0
                for size in sizes:
                    setting = TunedSetting(size, mode, compiled)
                    value = measure(setting)
                    if value is not None:
                        n_slower = n_slower + 1 if line and value >= min(line.values()) else 0
                        line[setting] = value
                    if n_slower == PATIENCE or (value is None and is_up):
                        break  # larger ones need more memory than one that failed; smaller ones follow
            seconds |= line
            best = min(seconds, key=lambda setting: seconds[setting], default=grid.start)
    return best if seconds else None
