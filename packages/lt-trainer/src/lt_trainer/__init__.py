"""Training runs of lt: recipe, loop, checkpoints, metrics, run directory. Imports nothing heavy."""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.config import Recipe as Recipe
    from lt_trainer.config import ResolvedRecipe as ResolvedRecipe
    from lt_trainer.config import load as load
    from lt_trainer.engine import Engine as Engine
    from lt_trainer.engine import EngineSpec as EngineSpec
    from lt_trainer.engine import StepBatch as StepBatch
    from lt_trainer.engine import World as World
    from lt_trainer.engine import engine_spec as engine_spec
    from lt_trainer.errors import RecipeError as RecipeError
    from lt_trainer.errors import TrainerError as TrainerError
    from lt_trainer.training import run as run
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "config": "Recipe ResolvedRecipe load",
            "engine": "Engine EngineSpec StepBatch World engine_spec",
            "errors": "RecipeError TrainerError",
            "training": "run",
        },
    )
