"""A run or its check in this process, as the command starts it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lt_test_helpers.run_files import read_events, read_losses
from lt_trainer.config.recipe import ResolvedRecipe, load
from lt_trainer.engine import World
from lt_trainer.resilience.stop_signals import StopSignals
from lt_trainer.training.check import check_run
from lt_trainer.training.loop import train
from lt_trainer.training.run import open_run


def run(
    resolved: ResolvedRecipe,
    *,
    environ: Mapping[str, str] | None = None,
    stop: StopSignals | None = None,
    **options: Any,
) -> int:
    """Train; return the exit code."""
    with open_run(resolved, World.from_env(os.environ if environ is None else environ), stop=stop) as opened:
        return train(opened, **options)


def run_recipe(base: Mapping[str, Any], overrides: Sequence[str] = (), stop_after_step: int = 0) -> int:
    """Train in a rank, which loads this file and not that of a test, with all that it imports."""
    return run(load(base=base, overrides=overrides), stop_after_step=stop_after_step)


def check(resolved: ResolvedRecipe, *, environ: Mapping[str, str] | None = None) -> None:
    """Check a run."""
    check_run(resolved, World.from_env(os.environ if environ is None else environ))


def start(base: Mapping[str, Any], *overrides: str, **options: Any) -> int:
    """Train with the fake engine of lt-trainer's tests."""
    return run(load(base=base, overrides=["run.engine=fake", *overrides]), environ={}, **options)


def losses(base: Mapping[str, Any]) -> dict[int, float]:
    """Return the losses of a recipe's run by step."""
    return read_losses(Path(base["run"]["dir"]))


def events(base: Mapping[str, Any], *kinds: str) -> list[dict[str, Any]]:
    """Return the events of these kinds of a recipe's run."""
    return read_events(Path(base["run"]["dir"]), *kinds)
