"""Training loop, for every engine and without torch.

At each step boundary, in this order: take the next batch, step the engine, synchronize stops over all ranks; then, if
due, fetch metrics, validate, evaluate, save. Metrics are fetched only at logging steps, so a device runs ahead of the
host in between. A stop always saves. With asynchronous saves, the stop synchronization includes whether one has failed.

The engine skips a step whose loss or gradient norm is not finite; the loop learns of it when it fetches metrics. After
too many, the run rolls back to its newest checkpoint and skips all rows read since: the rows before the first bad step
may have contributed (as in PaLM, https://arxiv.org/abs/2204.02311, section 5.1). The count is reset once no step was
skipped between two checkpoints.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from lt_data import StreamState
from lt_trainer.config.lr_schedule import learning_rate
from lt_trainer.config.sections import Recipe
from lt_trainer.data.batches import Batches
from lt_trainer.engine import Engine, StepBatch
from lt_trainer.errors import NoCheckpointError, TrainerError
from lt_trainer.evaluation.store_losses import StoreResult
from lt_trainer.evaluation.tasks import TaskResult
from lt_trainer.resilience.stop_signals import StopSignals
from lt_trainer.run_directory.records import StepRecord
from lt_trainer.training.garbage_collection import GarbageCollection

SAVE_FAILED_FLAG = 1 << 8
"""Added to the number of the received signal; signals have smaller numbers."""


class TrainingError(TrainerError):
    """Training cannot continue; saved checkpoints are intact."""


@dataclass(frozen=True, kw_only=True)
class ValidationTask:
    """Validation set."""

    name: str
    text_bytes: int
    batches: Callable[[], Iterable[StepBatch]]
    """All batches of this rank; equally many on every rank."""


@dataclass(frozen=True, kw_only=True)
class EvaluationTask:
    """Task or validation set of `[evaluation]`."""

    name: str
    evaluate: Callable[[Callable[[int, int], None]], TaskResult | StoreResult]
    """Scores the task on the engine, collectively; its argument is called for every batch."""


class RunLogger(Protocol):
    """Logger of the loop; a no-op on ranks other than 0."""

    def log_steps(self, records: list[StepRecord], memory_bytes: int, times: Mapping[str, float]) -> None:
        """Log the steps since the last call, and the time since then by part (see `timing`)."""
        ...

    def log_validation(self, step: int, name: str, loss_sum: float, tokens: int, text_bytes: int) -> None:
        """Log the loss over a validation set after `step`.

        Args:
            step: Completed steps.
            name: Name of the set; "" for data.validation.
            loss_sum: Sum of the loss in nats.
            tokens: Positions with a label.
            text_bytes: UTF-8 bytes of the set's text.
        """
        ...

    def log_evaluation(self, step: int, result: TaskResult | StoreResult) -> None:
        """Log the metrics of a task and its items after `step`."""
        ...

    def evaluation_progress(self, step: int, task: str) -> Callable[[int, int], None]:
        """Return what is called for each batch of a task with the number done and of all."""
        ...

    def log_skipped_step(self, record: StepRecord, count: int) -> None:
        """Log a skipped step; a `count` above fault_tolerance.max_skipped_steps leads to a rollback."""
        ...

    def log_artifact(self, path: Path) -> None:
        """Log a completed profiler trace or memory snapshot."""
        ...

    def log_resume_check_step(self, record: StepRecord) -> None:
        """Log a step beyond the last save, to compare with the resumed run."""
        ...

    def pause(self) -> None:
        """Exclude the following time (save, validation) from the training rates."""
        ...

    def unpause(self) -> None:
        """Include the following time in the training rates."""
        ...


class StageTracker(Protocol):
    """Hang watchdog of this rank."""

    def mark(self, stage: str, step: int) -> None:
        """Record a stage: data, step, sync_stop, fetch_metrics, validate, evaluate, save."""
        ...


class Checkpointer(Protocol):
    """Checkpointer of the loop."""

    def save(self, position: StreamState, *, wait: bool) -> None:
        """Save the engine state at this position; with `wait`, block until it is committed.

        Raises:
            CheckpointError: on all ranks, also for an earlier save.
        """
        ...

    def has_failed(self) -> bool:
        """Return True if an asynchronous save has failed on this rank."""
        ...

    def finish(self, *, cancel: bool = False) -> None:
        """Wait for the save in flight; with `cancel`, end it.

        Raises:
            CheckpointError: on all ranks, if it has failed on one.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """Last completed step, and the signal that stopped the loop (0: all steps are done)."""

    step: int
    stop_signal: int


@dataclass(kw_only=True)
class TrainingLoop:
    """Training loop over the components of a run."""

    recipe: Recipe
    engine: Engine
    batches: Batches
    logger: RunLogger
    stop: StopSignals
    watchdog: StageTracker
    checkpointer: Checkpointer
    rollback: Callable[[Batches], None]
    """Restores the newest checkpoint into the engine and moves the batches to its step.

    The batches continue after the rows already read. Raises NoCheckpointError without a checkpoint.
    """
    validation: Sequence[ValidationTask] = ()
    evaluation: Sequence[EvaluationTask] = ()
    _n_skipped: int = field(default=0, init=False)
    """Skipped steps, reset once none was skipped between two checkpoints."""
    _no_skips_since_save: bool = field(default=True, init=False)
    """No step was skipped since the newest checkpoint."""
    _n_rollbacks: int = field(default=0, init=False)

    def run(self, *, stop_after_step: int = 0, verify_resume_steps: int = 0) -> LoopResult:
        """Train from the batches' position to the last step or a stop.

        Args:
            stop_after_step: raise SIGTERM in this process after this step; 0 for never.
            verify_resume_steps: steps to run after the save of such a stop; they are logged, but not saved.

        Raises:
            TrainingError: too many skipped steps, and a rollback did not help or was impossible.
            PeerError: another rank exited.
        """
        recipe, max_steps = self.recipe, self.recipe.schedule.max_steps
        step = self.batches.state.step
        stop_signal = self.engine.control.all_reduce_max(self.stop.received)  # received during the start
        if stop_signal and step < max_steps:  # a run that is done needs no rerun
            return LoopResult(step=step, stop_signal=stop_signal)
        with GarbageCollection(recipe.run.gc_interval) as garbage:
            return self._run(step, max_steps, garbage, stop_after_step, verify_resume_steps)

    def _run(
        self, step: int, max_steps: int, garbage: GarbageCollection, stop_after_step: int, verify_resume_steps: int
    ) -> LoopResult:
        recipe = self.recipe
        pending: list[tuple[StepRecord, object]] = []
        while step < max_steps:
            pending.append(self._step(step))
            step += 1
            if step == stop_after_step:
                signal.raise_signal(signal.SIGTERM)
            garbage.on_step_end(step)
            stop_signal = self._sync_stop(step)
            is_last = step == max_steps
            save = bool(stop_signal) or is_last or _is_due(step, recipe.checkpoint.interval)
            # A stop must be quick: no validation, no evaluation.
            validate = bool(self.validation) and (
                is_last or (_is_due(step, recipe.metrics.validation_interval) and not stop_signal)
            )
            evaluate = bool(self.evaluation) and (
                is_last or (_is_due(step, recipe.evaluation.interval) and not stop_signal)
            )
            if save or validate or evaluate or _is_due(step, recipe.metrics.log_interval):
                self._fetch_metrics(pending, step)
                pending = []
                if self._n_skipped > recipe.fault_tolerance.max_skipped_steps and not stop_signal:
                    step = self._rollback(step)
                    continue
            if save or validate or evaluate:
                self.logger.pause()
                self.engine.stopwatch.begin("validation")
                if validate:
                    self._validate(step)
                if evaluate:
                    self._evaluate(step)
                if save:
                    self.engine.stopwatch.begin("checkpoint")
                    self.watchdog.mark("save", step)
                    self.checkpointer.save(self.batches.checkpoint_state(), wait=bool(stop_signal) or is_last)
                    self._reset_skipped()
                self.engine.stopwatch.begin("rest")
                garbage.on_pause()
                self.logger.unpause()
            if stop_signal and not is_last:
                if step == stop_after_step:
                    for number in range(step, min(step + verify_resume_steps, max_steps)):
                        self.logger.log_resume_check_step(self._with_metrics(*self._step(number)))
                return LoopResult(step=step, stop_signal=stop_signal)
        self._begin_step(step + 1)
        return LoopResult(step=step, stop_signal=0)

    def _sync_stop(self, step: int) -> int:
        """Return the signal that stops the run, or 0; raise if a save has failed on any rank."""
        self.watchdog.mark("sync_stop", step)
        value = self.stop.received + SAVE_FAILED_FLAG * self.checkpointer.has_failed()
        value = self.engine.control.all_reduce_max(value)
        if value >= SAVE_FAILED_FLAG:
            self.watchdog.mark("save", step)
            self.checkpointer.finish(cancel=True)
            raise AssertionError("finishing a failed save raises")
        return value

    def _step(self, step: int) -> tuple[StepRecord, object]:
        """Start step `step` (from 0); loss and gradient norm of the record are filled in when fetched."""
        self._begin_step(step + 1)
        self.watchdog.mark("data", step + 1)
        self.engine.stopwatch.begin("data")
        batch = self.batches.next_batch()
        lr = learning_rate(step, self.recipe.schedule, self.recipe.optimizer.lr)
        self.watchdog.mark("step", step + 1)
        pending = self.engine.step(batch, lr)
        self.engine.stopwatch.begin("rest")
        length, seq_len = batch.input_ids.shape[-1], self.recipe.data.seq_len
        return StepRecord(
            step=step + 1,
            loss=math.nan,
            grad_norm=math.nan,
            learning_rate=lr,
            valid_tokens=batch.valid_tokens,
            rows=batch.input_ids.size // seq_len * self.engine.topology.dp_size,
            row_length=length,
            document_length=_mean_document_length(batch),
        ), pending

    def _begin_step(self, step: int) -> None:
        for path in self.engine.on_step_begin(step):
            self.logger.log_artifact(path)

    def _fetch_metrics(self, pending: list[tuple[StepRecord, object]], step: int) -> None:
        self.watchdog.mark("fetch_metrics", step)
        metrics = self.engine.fetch_metrics([handle for _, handle in pending])
        records = [
            replace(record, loss=m.loss, grad_norm=m.grad_norm) for (record, _), m in zip(pending, metrics, strict=True)
        ]
        self.logger.log_steps(records, self.engine.peak_memory_bytes(), self.engine.stopwatch.pop_times())
        for record, values in zip(records, metrics, strict=True):
            if not values.is_finite:
                self._n_skipped += 1
                self._no_skips_since_save = False
                self.logger.log_skipped_step(record, self._n_skipped)

    def _reset_skipped(self) -> None:
        """Reset the count after a save if no step was skipped since the previous one."""
        if self._no_skips_since_save:
            self._n_skipped = 0
        self._no_skips_since_save = True

    def _rollback(self, step: int) -> int:
        """Roll back to the newest checkpoint; return its step."""
        problem = f"{self._n_skipped} steps up to step {step} had a non-finite loss or gradient norm"
        diagnosis = (
            "training has diverged; saved checkpoints are intact. Lower optimizer.lr, lengthen schedule.warmup_steps, "
            "or inspect the rows of these steps (lt data inspect)"
        )
        if self._n_rollbacks == self.recipe.fault_tolerance.max_rollbacks:
            if self._n_rollbacks:
                problem = f"{problem} after {self._n_rollbacks} rollbacks (fault_tolerance.max_rollbacks)"
            raise TrainingError(f"{problem}: {diagnosis}")
        self._n_rollbacks += 1
        self.watchdog.mark("restore", step)
        self.engine.stopwatch.begin("checkpoint")
        self.logger.pause()
        self.checkpointer.finish()
        try:
            self.rollback(self.batches)
        except NoCheckpointError as exc:
            raise TrainingError(f"{problem}, and {exc}: {diagnosis}") from exc
        self.engine.stopwatch.begin("rest")
        self.logger.unpause()
        self._n_skipped, self._no_skips_since_save = 0, True
        return self.batches.state.step

    def _with_metrics(self, record: StepRecord, pending: object) -> StepRecord:
        (metrics,) = self.engine.fetch_metrics([pending])
        return replace(record, loss=metrics.loss, grad_norm=metrics.grad_norm)

    def _validate(self, step: int) -> None:
        def mark_each(batches: Iterable[StepBatch]) -> Iterable[StepBatch]:
            for batch in batches:
                self.watchdog.mark("validate", step)
                yield batch

        for task in self.validation:
            loss_sum, tokens = self.engine.validate(mark_each(task.batches()))
            self.logger.log_validation(step, task.name, loss_sum, tokens, task.text_bytes)

    def _evaluate(self, step: int) -> None:
        for task in self.evaluation:
            self.watchdog.mark("evaluate", step)
            report = self.logger.evaluation_progress(step, task.name)

            def on_batch(done: int, total: int, report: Callable[[int, int], None] = report) -> None:
                self.watchdog.mark("evaluate", step)
                report(done, total)

            self.logger.log_evaluation(step, task.evaluate(on_batch))


def _mean_document_length(batch: StepBatch) -> float:
    """Return the length of a position's document, averaged over the positions of this rank."""
    lengths = np.diff(batch.cu_seqlens.astype(np.int64))
    return float(np.square(lengths).sum() / lengths.sum())


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
