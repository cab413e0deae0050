"""Recipe: all sections of a run as one value, and constraints between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lt_trainer.config.sections.batch import BatchOptions
from lt_trainer.config.sections.checkpoint import CheckpointOptions
from lt_trainer.config.sections.data import DataOptions
from lt_trainer.config.sections.evaluation import WHOLE_VALIDATION, EvaluationOptions
from lt_trainer.config.sections.fault_tolerance import FaultToleranceOptions
from lt_trainer.config.sections.metrics import MetricsOptions
from lt_trainer.config.sections.model import ModelOptions
from lt_trainer.config.sections.optimizer import OptimizerOptions
from lt_trainer.config.sections.parallel import ParallelOptions
from lt_trainer.config.sections.run import RunOptions
from lt_trainer.config.sections.schedule import ScheduleOptions
from lt_trainer.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Recipe of a training run, from `load`, or constructed from its sections in Python."""

    run: RunOptions = field(default_factory=RunOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    fault_tolerance: FaultToleranceOptions = field(default_factory=FaultToleranceOptions)
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Options by engine name: its options dataclass, or a raw table if its package is not installed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine", dict(self.engine))
        if self.schedule.kind != "constant" and self.schedule.min_lr > self.optimizer.lr:
            raise RecipeError(
                "the final learning rate is above the peak",
                values={"schedule.min_lr": self.schedule.min_lr, "optimizer.lr": self.optimizer.lr},
                remedy=f"set schedule.min_lr (MIN_LR) to at most {self.optimizer.lr!r}; a tenth of it is typical",
            )
        if self.model.tie_word_embeddings and self.optimizer.lr_scale.head != 1:
            raise RecipeError(
                "a tied head is the embedding, whose learning rate has its own factor",
                values={"optimizer.lr_scale.head": self.optimizer.lr_scale.head, "model.tie_word_embeddings": True},
                remedy="set optimizer.lr_scale.embedding instead",
            )
        if self.metrics.validation_interval and not (self.data.validation or self.data.validation_sets):
            raise RecipeError(
                "there is no validation data",
                values={
                    "metrics.validation_interval": self.metrics.validation_interval,
                    "data.validation": self.data.validation,
                },
                remedy="set data.validation to a token store, or remove metrics.validation_interval",
            )
        if self.evaluation.stores and not (self.data.validation or self.data.validation_sets):
            raise RecipeError(
                "there is no validation data",
                values={"evaluation.stores": True, "data.validation": self.data.validation},
                remedy="set data.validation to a token store, or remove evaluation.stores",
            )
        taken = {*self.data.validation_sets} or {WHOLE_VALIDATION}
        if self.evaluation.stores and (same := taken & {*self.evaluation.tasks}):
            raise RecipeError(
                f"a task and a validation set are both called {min(same)!r}",
                values={"evaluation.tasks": self.evaluation.tasks},
                remedy="rename the task's file",
            )
        if self.evaluation.tasks and self.data.source_kind in ("synthetic", "loader") and not self.data.store_paths():
            raise RecipeError(
                "tasks are texts, and without a token store there is no tokenizer",
                values={
                    "evaluation.tasks": self.evaluation.tasks,
                    f"data.{self.data.source_kind}": getattr(self.data, self.data.source_kind),
                },
                remedy="set data.validation to a token store, or remove evaluation.tasks",
            )
        if self.data.source_kind in ("synthetic", "loader") and not self.model.vocab_size:
            raise RecipeError(
                f"data.{self.data.source_kind} needs a vocabulary size",
                values={
                    "model.vocab_size": 0,
                    f"data.{self.data.source_kind}": getattr(self.data, self.data.source_kind),
                },
                remedy="set model.vocab_size (VOCAB_SIZE)",
            )
        if self.batch.ramp.start and self.data.packing == "buckets":
            raise RecipeError(
                "buckets do not support a batch ramp, since all rows of a step come from one bucket",
                values={"batch.ramp.start": self.batch.ramp.start, "data.packing": self.data.packing},
                remedy="remove batch.ramp, or set data.packing to bfd",
            )
        max_length = self.model.max_position_embeddings
        if max_length and max_length < self.data.seq_len:
            raise RecipeError(
                "rows are longer than the model's maximum context",
                values={"data.seq_len": self.data.seq_len, "model.max_position_embeddings": max_length},
                remedy=f"set data.seq_len (SEQ_LEN) to at most {max_length}, or model.max_position_embeddings to 0",
            )

    def accumulation_steps(self, world: int) -> int:
        """Return the number of micro-batches per rank and step with `world` ranks.

        Raises:
            RecipeError: the degrees do not multiply to `world`, or the batch is not divisible.
        """
        ranks = self.parallel.data_parallel_size(world)
        rows = self.batch.micro_batch_size * ranks
        if self.batch.global_batch_size % rows:
            raise RecipeError(
                f"{ranks} data-parallel ranks need a multiple of {rows} rows",
                values={
                    "batch.global_batch_size": self.batch.global_batch_size,
                    "batch.micro_batch_size": self.batch.micro_batch_size,
                },
                remedy=f"set batch.global_batch_size (GLOBAL_BATCH_SIZE) to a multiple of {rows}, "
                "or lower micro_batch_size",
            )
        if self.batch.step_size_divisor % rows:
            raise RecipeError(
                f"{ranks} data-parallel ranks need a multiple of {rows} rows in every step",
                values={
                    "batch.ramp.start": self.batch.ramp.start,
                    "batch.ramp.increment": self.batch.ramp_increment,
                    "batch.micro_batch_size": self.batch.micro_batch_size,
                },
                remedy=f"set them to multiples of {rows}",
            )
        return self.batch.global_batch_size // rows
