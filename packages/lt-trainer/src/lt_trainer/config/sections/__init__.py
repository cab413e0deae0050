"""Recipe sections: frozen dataclasses; each field has a description, a unit and a hyperparameter name.

Each section validates its own fields on construction and raises `RecipeError`; constraints between sections are in
`recipe`. An option without effect is an error, because its author expected one.

Upper-case names (`hyperparameter`) are those of the Litespark training algorithm on SageMaker.
"""

from lt_trainer.config.sections.batch import BatchOptions, RampOptions
from lt_trainer.config.sections.checkpoint import CheckpointOptions
from lt_trainer.config.sections.data import BucketOptions, DataOptions, SourceOptions, ValidationOptions
from lt_trainer.config.sections.evaluation import WHOLE_VALIDATION, EvaluationOptions
from lt_trainer.config.sections.fault_tolerance import FaultToleranceOptions
from lt_trainer.config.sections.metrics import MetricsOptions
from lt_trainer.config.sections.model import ModelOptions, RopeScalingOptions
from lt_trainer.config.sections.optimizer import OptimizerOptions
from lt_trainer.config.sections.parallel import ParallelOptions
from lt_trainer.config.sections.recipe import Recipe
from lt_trainer.config.sections.run import RunOptions
from lt_trainer.config.sections.schedule import ScheduleOptions
from lt_trainer.config.sections.validators import field_error, require_at_least, require_positive

__all__ = [
    "WHOLE_VALIDATION",
    "BatchOptions",
    "BucketOptions",
    "CheckpointOptions",
    "DataOptions",
    "EvaluationOptions",
    "FaultToleranceOptions",
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
    "field_error",
    "require_at_least",
    "require_positive",
]
