"""Setup of `[metrics]`: option checks before the start, and sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lt_trainer.config.recipe import to_dict
from lt_trainer.errors import RecipeError
from lt_trainer.observability.sinks import Sinks, check_sinks_installed, open_sinks
from lt_trainer.run_directory.jsonl import read_jsonl

if TYPE_CHECKING:
    from lt_trainer.config.sections import Recipe
    from lt_trainer.engine import EngineSpec, World
    from lt_trainer.run_directory.run_dir import RunDir

REQUIRED_CAPABILITIES = {
    "profile_steps": "profile",
    "memory_snapshot_step": "memory_snapshot",
    "memory_snapshot_on_oom": "memory_snapshot",
}
"""Required engine capability by field of `[metrics]`."""


def check_metrics_options(recipe: Recipe, spec: EngineSpec, world: World) -> None:
    """Check `[metrics]` against the engine's capabilities, the run length and the installed libraries.

    Raises:
        RecipeError: unsupported by the engine, beyond the last step or rank, or a sink's library is not installed.
    """
    options, last = recipe.metrics, recipe.schedule.max_steps
    profile_end = options.profile_start_step + options.profile_steps - 1 if options.profile_steps else 0
    checks = [
        (
            capability not in spec.capabilities and getattr(options, name),
            name,
            f"the {spec.name} engine does not support this",
        )
        for name, capability in REQUIRED_CAPABILITIES.items()
    ]
    ends = f"the run ends before step {max(options.memory_snapshot_step, profile_end)}"
    checks += [
        (options.memory_snapshot_step > last, "memory_snapshot_step", ends),
        (profile_end > last, "profile_steps", ends),
        (
            profile_end and max(options.profile_ranks) >= world.size,
            "profile_ranks",
            f"ranks must be between 0 and {world.size - 1}",
        ),
    ]
    for is_wrong, name, problem in checks:
        if is_wrong:
            raise RecipeError(
                problem,
                values={f"metrics.{name}": getattr(options, name), "schedule.max_steps": last},
                remedy=f"change or remove metrics.{name}",
            )
    check_sinks_installed(options.sinks)


def open_run_sinks(recipe: Recipe, run_dir: RunDir) -> tuple[Sinks, dict[str, str]]:
    """Open the recipe's sinks.

    Returns:
        The open sinks, and the errors of the others by name.

    Raises:
        TrainerError: a sink needs user action.
    """
    records = read_jsonl(run_dir.metrics) if run_dir.metrics.exists() else []
    step = max((record["step"] for record in records if "loss" in record), default=0)
    return open_sinks(recipe.metrics.sinks, run_dir.path, recipe=to_dict(recipe), step=step)
