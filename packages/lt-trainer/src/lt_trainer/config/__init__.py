"""Recipe: sections, sources of values, resolution, TOML, learning-rate schedule."""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.config.architecture import as_recipe_error as as_recipe_error
    from lt_trainer.config.architecture import read_architecture as read_architecture
    from lt_trainer.config.fields import Leaf as Leaf
    from lt_trainer.config.fields import build as build
    from lt_trainer.config.fields import check_types as check_types
    from lt_trainer.config.fields import flatten as flatten
    from lt_trainer.config.fields import leaf_values as leaf_values
    from lt_trainer.config.fields import leaves as leaves
    from lt_trainer.config.fields import named_section_tables as named_section_tables
    from lt_trainer.config.fields import option as option
    from lt_trainer.config.fields import suggest as suggest
    from lt_trainer.config.hyperparameters import hyperparameter_leaves as hyperparameter_leaves
    from lt_trainer.config.hyperparameters import read_hyperparameters as read_hyperparameters
    from lt_trainer.config.lr_schedule import learning_rate as learning_rate
    from lt_trainer.config.recipe import ResolvedRecipe as ResolvedRecipe
    from lt_trainer.config.recipe import engine_options as engine_options
    from lt_trainer.config.recipe import from_dict as from_dict
    from lt_trainer.config.recipe import llama_config as llama_config
    from lt_trainer.config.recipe import load as load
    from lt_trainer.config.recipe import to_dict as to_dict
    from lt_trainer.config.recipe import to_toml as to_toml
    from lt_trainer.config.sections import WHOLE_VALIDATION as WHOLE_VALIDATION
    from lt_trainer.config.sections import BatchOptions as BatchOptions
    from lt_trainer.config.sections import BucketOptions as BucketOptions
    from lt_trainer.config.sections import CheckpointOptions as CheckpointOptions
    from lt_trainer.config.sections import DataOptions as DataOptions
    from lt_trainer.config.sections import EvaluationOptions as EvaluationOptions
    from lt_trainer.config.sections import FaultToleranceOptions as FaultToleranceOptions
    from lt_trainer.config.sections import MetricsOptions as MetricsOptions
    from lt_trainer.config.sections import ModelOptions as ModelOptions
    from lt_trainer.config.sections import OptimizerOptions as OptimizerOptions
    from lt_trainer.config.sections import ParallelOptions as ParallelOptions
    from lt_trainer.config.sections import RampOptions as RampOptions
    from lt_trainer.config.sections import Recipe as Recipe
    from lt_trainer.config.sections import RopeScalingOptions as RopeScalingOptions
    from lt_trainer.config.sections import RunOptions as RunOptions
    from lt_trainer.config.sections import ScheduleOptions as ScheduleOptions
    from lt_trainer.config.sections import SourceOptions as SourceOptions
    from lt_trainer.config.sections import ValidationOptions as ValidationOptions
    from lt_trainer.config.sections import field_error as field_error
    from lt_trainer.config.sections import require_at_least as require_at_least
    from lt_trainer.config.sections import require_positive as require_positive
    from lt_trainer.config.sources import Assignment as Assignment
    from lt_trainer.config.sources import coerce_assignments as coerce_assignments
    from lt_trainer.config.sources import read_toml as read_toml
    from lt_trainer.config.toml import dump as dump
    from lt_trainer.config.toml import format_value as format_value
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "architecture": "as_recipe_error read_architecture",
            "fields": "Leaf build check_types flatten leaf_values leaves named_section_tables option suggest",
            "hyperparameters": "hyperparameter_leaves read_hyperparameters",
            "lr_schedule": "learning_rate",
            "recipe": "ResolvedRecipe engine_options from_dict llama_config load to_dict to_toml",
            "sections": (
                "WHOLE_VALIDATION BatchOptions BucketOptions CheckpointOptions DataOptions EvaluationOptions "
                "FaultToleranceOptions "
                "MetricsOptions ModelOptions OptimizerOptions ParallelOptions RampOptions Recipe RopeScalingOptions "
                "RunOptions ScheduleOptions SourceOptions ValidationOptions field_error require_at_least "
                "require_positive"
            ),
            "sources": "Assignment coerce_assignments read_toml",
            "toml": "dump format_value",
        },
    )
