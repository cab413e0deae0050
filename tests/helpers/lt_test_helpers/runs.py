"""A run or its check in this process, as the command starts it."""

import os
from collections.abc import Mapping
from typing import Any

from lt_trainer.config.recipe import ResolvedRecipe
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


def check(resolved: ResolvedRecipe, *, environ: Mapping[str, str] | None = None) -> None:
    """Check a run."""
    check_run(resolved, World.from_env(os.environ if environ is None else environ))
