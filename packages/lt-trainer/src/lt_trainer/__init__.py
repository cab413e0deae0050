"""Training runs of lt: recipe, loop, checkpoints, metrics, run directory."""

from lt_trainer.config.recipe import load as load
from lt_trainer.config.sections import Recipe as Recipe
from lt_trainer.engine import Engine as Engine
from lt_trainer.engine import EngineSpec as EngineSpec
from lt_trainer.engine import StepBatch as StepBatch
from lt_trainer.engine import World as World
from lt_trainer.errors import RecipeError as RecipeError
from lt_trainer.errors import TrainerError as TrainerError
