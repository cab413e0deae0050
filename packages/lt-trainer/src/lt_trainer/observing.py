"""What a recipe's `[metrics]` wants of engine, machine and libraries: refused before anything starts, or opened."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from lt_trainer.engine import Engine, EngineSpec, World
from lt_trainer.errors import RecipeError
from lt_trainer.jsonl import read_jsonl
from lt_trainer.monitor import NodeMonitor
from lt_trainer.recipe import Recipe, to_dict
from lt_trainer.sinks import Sinks, open_sinks, require_sinks
from lt_trainer.sinks.sink import About

if TYPE_CHECKING:
    from lt_trainer.journal import RankLog
    from lt_trainer.rundir import RunDir

NEEDS = {
    "profile_steps": "profile",
    "memory_snapshot_step": "memory_snapshot",
    "memory_snapshot_on_oom": "memory_snapshot",
}
"""Fields of `[metrics]` and the capability that an engine needs for them."""


def require_observable(recipe: Recipe, spec: EngineSpec, world: World) -> None:
    """Refuse what the engine cannot show, sinks whose library is missing, and windows that never come.

    Raises:
        RecipeError: naming field, value and remedy.
    """
    options = recipe.metrics
    for field, capability in NEEDS.items():
        if getattr(options, field) and capability not in spec.capabilities:
            raise RecipeError(
                f"the engine {spec.name} has no such view",
                values={f"metrics.{field}": getattr(options, field)},
                remedy=f"leave metrics.{field} out, or choose another engine with run.engine",
            )
    last_steps = {"memory_snapshot_step": options.memory_snapshot_step}
    if options.profile_steps:
        last_steps["profile_start_step profile_steps"] = options.profile_start_step + options.profile_steps - 1
    for fields, step in last_steps.items():
        if step > recipe.schedule.max_steps:
            values = {f"metrics.{field}": getattr(options, field) for field in fields.split()}
            raise RecipeError(
                f"the run ends before update {step}",
                values=values | {"schedule.max_steps": recipe.schedule.max_steps},
                remedy="look at earlier updates, or at none",
            )
    if options.profile_steps and max(options.profile_ranks) >= world.size:
        raise RecipeError(
            f"the run has {world.size} rank(s), counted from 0",
            values={"metrics.profile_ranks": options.profile_ranks},
            remedy="name ranks that there are",
        )
    require_sinks(options.sinks)


def node_monitor(
    recipe: Recipe, *, world: World, attempt: str, engine: Engine, log: RankLog
) -> AbstractContextManager[NodeMonitor | None]:
    """The monitor of this node, on its local rank 0 and where the recipe wants one."""
    if world.local_rank != 0 or not recipe.metrics.monitor_interval_s:
        return nullcontext()
    return NodeMonitor(
        Path(recipe.run.out),
        world=world,
        attempt=attempt,
        interval_s=recipe.metrics.monitor_interval_s,
        log=log,
        gpus=engine.device.kind == "cuda",
        environ=os.environ,
    )


def run_sinks(recipe: Recipe, run_dir: RunDir) -> tuple[Sinks, dict[str, str]]:
    """The sinks that the recipe names, opened, and what went wrong with some, by name.

    Raises:
        TrainerError: one of them needs a person.
    """
    if not recipe.metrics.sinks:
        return Sinks(), {}
    about = About(
        run=run_dir.path,
        recipe=to_dict(recipe),
        toml=(run_dir.path / "recipe.toml").read_text(encoding="utf-8"),
        step=max((record["step"] for record in read_jsonl(run_dir.metrics) if "loss" in record), default=0)
        if run_dir.metrics.exists()
        else 0,
    )
    return open_sinks(recipe.metrics.sinks, about)
