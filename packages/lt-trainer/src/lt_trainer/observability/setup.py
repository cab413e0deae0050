"""Setup of `[metrics]`: option checks before the start, node monitor and sinks."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from lt_trainer.config.recipe import to_dict
from lt_trainer.config.sections.recipe import Recipe
from lt_trainer.engine import Engine, EngineSpec, World
from lt_trainer.errors import RecipeError
from lt_trainer.files import read_text
from lt_trainer.observability.monitor.node import NodeMonitor
from lt_trainer.observability.sinks.group import SinkGroup
from lt_trainer.observability.sinks.registry import check_sinks, check_sinks_installed, open_sinks
from lt_trainer.observability.sinks.sink import RunInfo
from lt_trainer.run_directory.typed_records import read_metrics

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
    recipe: Recipe, *, world: World, attempt: str, engine: Engine, log: RankLog
) -> AbstractContextManager[NodeMonitor | None]:
    """Return the monitor of this node on local rank 0, if enabled in the recipe."""
    if world.local_rank != 0 or not recipe.metrics.monitor_interval_s:
        return nullcontext()
    return NodeMonitor(
        Path(recipe.run.dir),
        world=world,
        attempt=attempt,
        interval_s=recipe.metrics.monitor_interval_s,
        log=log,
        gpus=engine.device.kind == "cuda",
        environ=os.environ,
    )


def open_run_sinks(recipe: Recipe, run_dir: RunDir) -> tuple[SinkGroup, dict[str, str]]:
    """Open the recipe's sinks.

    Returns:
        The open sinks, and the errors of the others by name.

    Raises:
        TrainerError: a sink needs user action.
    """
    if not recipe.metrics.sinks:
        return SinkGroup(), {}
    info = RunInfo(
        run=run_dir.path,
        recipe=to_dict(recipe),
        toml=read_text(run_dir.path / "recipe.toml"),
        step=_highest_step(run_dir.metrics),
    )
    return open_sinks(recipe.metrics.sinks, info)


def check_run_sinks(recipe: Recipe) -> None:
    """Check that the recipe's sinks can be opened, writing nothing; for `lt train check`.

    Raises:
        TrainerError: a sink needs user action.
    """
    if recipe.metrics.sinks:
        folder = Path(recipe.run.dir)
        _highest_step(folder / "metrics.jsonl")
        check_sinks(recipe.metrics.sinks, folder)


def _highest_step(metrics: Path) -> int:
    """Return the highest step in a metrics file; 0 if there is none."""
    if not metrics.exists():
        return 0
    return max((record["step"] for record in read_metrics(metrics) if "loss" in record), default=0)
