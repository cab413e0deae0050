"""The sections of a recipe: frozen dataclasses whose fields say what they mean, in which unit, under which name.

Each section checks its own fields when it is made and raises `RecipeError`; what concerns several sections is checked
in `recipe.py`. An option that would have no effect is an error, because whoever wrote it expected one.

The upper-case names (`hp`) are the hyperparameters of the Litespark training algorithm on SageMaker.
"""

from lt_trainer.sections.batch import BatchOptions, RampOptions
from lt_trainer.sections.checkpoint import CheckpointOptions
from lt_trainer.sections.checks import above_zero, at_least, wrong
from lt_trainer.sections.data import BucketOptions, DataOptions, SourceOptions, ValidationOptions
from lt_trainer.sections.guard import GuardOptions
from lt_trainer.sections.metrics import MetricsOptions
from lt_trainer.sections.model import ModelOptions, RopeScalingOptions
from lt_trainer.sections.optimizer import OptimizerOptions
from lt_trainer.sections.parallel import ParallelOptions
from lt_trainer.sections.recipe import Recipe
from lt_trainer.sections.run import RunOptions
from lt_trainer.sections.schedule import ScheduleOptions

__all__ = [
    "BatchOptions",
    "BucketOptions",
    "CheckpointOptions",
    "DataOptions",
    "GuardOptions",
    "MetricsOptions",
    "ModelOptions",
    "OptimizerOptions",
    "ParallelOptions",
    "RampOptions",
    "Recipe",
    "RopeScalingOptions",
    "RunOptions",
    "ScheduleOptions",
    "SourceOptions",
    "ValidationOptions",
    "above_zero",
    "at_least",
    "wrong",
]
