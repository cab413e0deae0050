"""The recipe: all sections of a run as one value, and what must hold between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lt_trainer.errors import RecipeError
from lt_trainer.sections.batch import BatchOptions
from lt_trainer.sections.checkpoint import CheckpointOptions
from lt_trainer.sections.data import DataOptions
from lt_trainer.sections.guard import GuardOptions
from lt_trainer.sections.metrics import MetricsOptions
from lt_trainer.sections.model import ModelOptions
from lt_trainer.sections.optimizer import OptimizerOptions
from lt_trainer.sections.parallel import ParallelOptions
from lt_trainer.sections.run import RunOptions
from lt_trainer.sections.schedule import ScheduleOptions


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run. Made by `load`, or in Python from its sections."""

    run: RunOptions = field(default_factory=RunOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    guard: GuardOptions = field(default_factory=GuardOptions)
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Options by engine name: that engine's options dataclass, or a raw table where its package is not installed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine", dict(self.engine))
        if self.schedule.kind != "constant" and self.schedule.min_lr > self.optimizer.lr:
            raise RecipeError(
                "the final learning rate is above the highest one",
                values={"schedule.min_lr": self.schedule.min_lr, "optimizer.lr": self.optimizer.lr},
                remedy=f"set schedule.min_lr (MIN_LR) to at most {self.optimizer.lr!r}; a tenth of it is usual",
            )
        if self.metrics.eval_interval and not (self.data.validation or self.data.validation_sets):
            raise RecipeError(
                "there is nothing to evaluate on",
                values={"metrics.eval_interval": self.metrics.eval_interval, "data.validation": self.data.validation},
                remedy="set data.validation to a token store, or leave metrics.eval_interval out",
            )
        if self.data.kind in ("synthetic", "loader") and not self.model.vocab_size:
            raise RecipeError(
                f"no store says how many ids there are with data.{self.data.kind}",
                values={"model.vocab_size": 0, f"data.{self.data.kind}": getattr(self.data, self.data.kind)},
                remedy="set model.vocab_size (VOCAB_SIZE)",
            )
        if self.batch.ramp.start and self.data.pack == "buckets":
            raise RecipeError(
                "buckets are read in steps of one size, since a step takes all its rows from one of them",
                values={"batch.ramp.start": self.batch.ramp.start, "data.pack": self.data.pack},
                remedy="leave batch.ramp out, or set data.pack to bfd",
            )
        longest = self.model.max_position_embeddings
        if longest and longest < self.data.seq_len:
            raise RecipeError(
                "rows are longer than the longest context of the model",
                values={"data.seq_len": self.data.seq_len, "model.max_position_embeddings": longest},
                remedy=f"set data.seq_len (SEQ_LEN) to at most {longest}, or model.max_position_embeddings to 0",
            )

    def accumulation(self, world: int) -> int:
        """Micro-batches that one rank runs for each update when there are `world` ranks.

        Raises:
            RecipeError: the degrees do not make up `world`, or the batch does not divide.
        """
        ranks = self.parallel.data_parallel(world)
        rows = self.batch.micro_batch * ranks
        if self.batch.global_batch % rows:
            raise RecipeError(
                f"{ranks} data parallel ranks take {rows} rows at a time, which does not divide the global batch",
                values={"batch.global_batch": self.batch.global_batch, "batch.micro_batch": self.batch.micro_batch},
                remedy=f"set batch.global_batch (GLOBAL_BATCH_SIZE) to a multiple of {rows}, or micro_batch lower",
            )
        if self.batch.unit % rows:
            raise RecipeError(
                f"{ranks} data parallel ranks take {rows} rows at a time, which does not divide every step's batch",
                values={
                    "batch.ramp.start": self.batch.ramp.start,
                    "batch.ramp.increment": self.batch.ramp_increment,
                    "batch.micro_batch": self.batch.micro_batch,
                },
                remedy=f"set them to multiples of {rows}",
            )
        return self.batch.global_batch // rows
