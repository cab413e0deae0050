"""Setup of `[metrics]`: option checks before the start, node monitor and sinks."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from lt_trainer.config.recipe import to_dict
from lt_trainer.config.sections import Recipe
from lt_trainer.engine import Engine, EngineSpec, World
from lt_trainer.errors import RecipeError
from lt_trainer.observability.gpu_sampler import load_nvml
from lt_trainer.observability.monitor import NodeMonitor
from lt_trainer.observability.sinks import Sinks, check_sinks_installed, open_sinks
from lt_trainer.run_directory.jsonl import read_jsonl

if TYPE_CHECKING:
    from lt_trainer.run_directory.rank_log import RankLog
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
    options = recipe.metrics
    for field, capability in REQUIRED_CAPABILITIES.items():
        if getattr(options, field) and capability not in spec.capabilities:
            raise RecipeError(
                f"the {spec.name} engine does not support this",
                values={f"metrics.{field}": getattr(options, field)},
                remedy=f"remove metrics.{field}, or choose another engine with run.engine",
            )
    last_steps = {"memory_snapshot_step": options.memory_snapshot_step}
    if options.profile_steps:
        last_steps["profile_start_step profile_steps"] = options.profile_start_step + options.profile_steps - 1
    for fields, step in last_steps.items():
        if step > recipe.schedule.max_steps:
            values = {f"metrics.{field}": getattr(options, field) for field in fields.split()}
            raise RecipeError(
                f"the run ends before step {step}",
                values=values | {"schedule.max_steps": recipe.schedule.max_steps},
                remedy="choose earlier steps, or 0 for none",
            )
    if options.profile_steps and max(options.profile_ranks) >= world.size:
        raise RecipeError(
            f"ranks must be between 0 and {world.size - 1}",
            values={"metrics.profile_ranks": options.profile_ranks},
            remedy="choose existing ranks",
        )
    check_sinks_installed(options.sinks)


def create_node_monitor(
    recipe: Recipe, *, world: World, engine: Engine, log: RankLog
) -> AbstractContextManager[NodeMonitor | None]:
    """Return the monitor of this node on local rank 0, if enabled in the recipe; collective."""
    if not recipe.metrics.monitor_interval_s:
        return nullcontext()
    pids = dict(enumerate(engine.control.all_gather(os.getpid())))
    if world.local_rank != 0:
        return nullcontext()
    return NodeMonitor(
        Path(recipe.run.dir),
        world=world,
        pids={rank: pids[rank] for rank in range(world.rank, world.rank + world.local_size)},
        interval_s=recipe.metrics.monitor_interval_s,
        log=log.write,
        nvml=load_nvml if engine.device.kind == "cuda" else None,
    )


def open_run_sinks(recipe: Recipe, run_dir: RunDir) -> tuple[Sinks, dict[str, str]]:
    """Open the recipe's sinks.

    Returns:
        The open sinks, and the errors of the others by name.

    Raises:
        TrainerError: a sink needs user action.
    """
    records = read_jsonl(run_dir.metrics) if recipe.metrics.sinks and run_dir.metrics.exists() else []
    step = max((record["step"] for record in records if "loss" in record), default=0)
    return open_sinks(recipe.metrics.sinks, run_dir.path, recipe=to_dict(recipe), step=step)
