"""What every lt training run shares.

Recipe, loop, metrics, signals, run directory. Importing this loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lt_trainer.engine import Engine, EngineSpec, StepBatch, World, engine_spec
    from lt_trainer.errors import RecipeError, TrainerError
    from lt_trainer.recipe import Recipe, Resolved, load
    from lt_trainer.run import run

_EXPORTS = {
    "Engine": "engine",
    "EngineSpec": "engine",
    "Recipe": "recipe",
    "RecipeError": "errors",
    "Resolved": "recipe",
    "StepBatch": "engine",
    "TrainerError": "errors",
    "World": "engine",
    "engine_spec": "engine",
    "load": "recipe",
    "run": "run",
}

__all__ = [
    "Engine",
    "EngineSpec",
    "Recipe",
    "RecipeError",
    "Resolved",
    "StepBatch",
    "TrainerError",
    "World",
    "engine_spec",
    "load",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return __all__
