"""Scorer interface of evaluation, implemented by engines and by a model on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lt_trainer.control import Control
from lt_trainer.engine import StepBatch, Topology
from lt_trainer.errors import TrainerError
from lt_trainer.evaluation.position_scores import PositionScores


class EvaluationError(TrainerError):
    """Task, store or model that cannot be evaluated; the message names it and the remedy."""


class Scorer(Protocol):
    """Model of one rank that scores labels; `lt_trainer.engine.Engine` is one."""

    @property
    def topology(self) -> Topology:
        """Place of this rank in the run."""
        ...

    @property
    def control(self) -> Control:
        """Control collectives of the ranks."""
        ...

    def score(self, batch: StepBatch) -> PositionScores:
        """Return the scores of a batch's labels; see `Engine.score`."""
        ...


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Shape of every batch of an evaluation, [1, B, T]: the same as in training, so that no graph is new."""

    micro_batch_size: int
    seq_len: int
    document_mask: bool = True
    """Several sequences may share a row."""


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Metrics of a task, a group of tasks or a validation set, and the records of its items."""

    task: str
    n_items: int
    metrics: dict[str, float]
    """By name, with NAME_stderr where a standard error is known."""
    items: Sequence[dict[str, Any]] = ()

    @property
    def file_stem(self) -> str:
        """Name of a file for the items, which stays in its folder whatever the task is called."""
        return self.task.replace("/", "_")
