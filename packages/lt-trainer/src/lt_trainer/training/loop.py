"""Training loop, for every engine and without torch.

At each step boundary, in this order: take the next batch, step the engine, synchronize stops over all ranks; then, if
due, fetch metrics, validate, evaluate, save. Metrics are fetched only at logging steps, so a device runs ahead of the
host in between. A stop always saves. With asynchronous saves, the stop synchronization includes whether one has failed.

A step without any label is not given to the engine, on no rank, as its batch says on all: weights, optimizer state and
step count stay, while the schedule and the data go on.

The engine skips a step whose loss or gradient norm is not finite; the loop learns of it when it fetches metrics. After
too many, the run rolls back to its newest checkpoint and skips all rows read since: the rows before the first bad step
may have contributed (as in PaLM, https://arxiv.org/abs/2204.02311, section 5.1). The count is reset once no step was
skipped between two checkpoints.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lt_trainer.checkpointing.mirror import StopRequested
from lt_trainer.checkpointing.resume import restore_or_start, rollback
from lt_trainer.config.lr_schedule import learning_rate
from lt_trainer.constants import EXIT_DONE, EXIT_REQUEUE
from lt_trainer.data.training_data import ValidationSet, validation_batches
from lt_trainer.errors import TrainerError
from lt_trainer.run_directory.records import StepRecord
from lt_trainer.training.garbage_collection import YOUNG_GENERATION, no_automatic_collection

if TYPE_CHECKING:
    from lt_trainer.engine import StepBatch
    from lt_trainer.training.run import Run

SAVE_FAILED_FLAG = 1 << 8
"""Added to the number of the received signal; signals have smaller numbers."""


class TrainingError(TrainerError):
    """Training cannot continue; saved checkpoints are intact."""


def train(run: Run, *, stop_after_step: int = 0) -> int:
    """Train from the newest checkpoint, or the start, to the last step or a stop.

    Args:
        run: Open run.
        stop_after_step: Raise SIGTERM in this process after this step; 0 for never.

    Returns:
        0 if all steps are done; 75 if stopped and saved. With a mirror that misses the last checkpoint also 75, or 64
        if the upload needs user action.

    Raises:
        TrainingError: too many skipped steps, and a rollback did not help or was impossible.
        PeerError: another rank exited.
    """
    step, mirror_code = 0, EXIT_DONE
    try:
        run.engine.stopwatch.begin("checkpoint")
        with run.log.pause("restoring"):
            restore_or_start(run)
        if run.run_dir is not None:
            run.run_dir.record_recipe()
        run.engine.stopwatch.begin("rest")
        run.mirror.start()
        loop = TrainingLoop(run)
        stop_signal = loop.train(stop_after_step)
        step, mirror_code = loop.step, run.mirror.finish()
    except StopRequested as exc:
        stop_signal = exc.args[0]
    if stop_signal:
        name = signal.Signals(stop_signal).name
        run.log.log_event("stop", step=step, signal=name)
        run.log.log_message(f"stopped by {name} after step {step}; rerun to resume")
        return EXIT_REQUEUE
    run.log.log_event("completed", step=step)
    run.log.log_message(f"training completed at step {step}")
    return mirror_code


class TrainingLoop:
    """Loop over the steps of an open run."""

    def __init__(self, run: Run) -> None:
        self.step = run.batches.state.step
        """Completed steps."""
        self._run, self._recipe, self._engine, self._log = run, run.recipe, run.engine, run.log
        self._batches = run.batches
        self._pending: list[tuple[StepRecord, Any]] = []
        """Steps whose metrics have not been fetched, with the engine's handle; None of a step without labels."""
        self._had_labels = run.has_trained
        self._n_skipped = 0
        """Skipped steps, reset once none was skipped between two checkpoints."""
        self._no_skips_since_save = True
        self._n_rollbacks = 0

    def train(self, stop_after_step: int) -> int:
        """Train to the last step or a stop; return the signal that stopped the loop, 0 if all steps are done."""
        recipe, last, gc_interval = self._recipe, self._recipe.schedule.max_steps, self._recipe.run.gc_interval
        validates, evaluates = bool(self._run.data.validation), bool(self._run.evaluation)
        stop_signal = self._engine.control.all_reduce_max(self._run.stop.received)  # received during the start
        if stop_signal and self.step < last:  # a run that is done needs no rerun
            return stop_signal
        with no_automatic_collection(gc_interval):
            while self.step < last:
                self._pending.append(self._start_step(self.step + 1))
                self.step += 1
                if self.step == stop_after_step:
                    signal.raise_signal(signal.SIGTERM)
                if _is_due(self.step, gc_interval):
                    gc.collect(YOUNG_GENERATION)
                stop_signal, is_last = self._sync_stop(), self.step == last
                if is_last and not self._had_labels:
                    raise TrainingError(
                        f"no step up to {last} had a label, so the weights are the initial ones; look at the labels "
                        "of data.loader: -100 is none"
                    )
                save = bool(stop_signal) or is_last or _is_due(self.step, recipe.checkpoint.interval)
                pauses = is_last or not stop_signal  # a stop must be quick: no validation, no evaluation
                validate = pauses and validates and (is_last or _is_due(self.step, recipe.metrics.validation_interval))
                evaluate = pauses and evaluates and (is_last or _is_due(self.step, recipe.evaluation.interval))
                if save or validate or evaluate or _is_due(self.step, recipe.metrics.log_interval):
                    self._fetch_metrics()
                    if self._n_skipped > recipe.fault_tolerance.max_skipped_steps and not stop_signal:
                        self._rollback()
                        continue
                if save or validate or evaluate:
                    self._pause(save, validate, evaluate, wait=bool(stop_signal) or is_last)
                    if gc_interval:
                        gc.collect()
                if stop_signal and not is_last:
                    return stop_signal
        self._begin_step(last + 1)
        return 0

    def _begin_step(self, number: int) -> None:
        for path in self._engine.on_step_begin(number):
            self._log.log_artifact(path)

    def _start_step(self, number: int) -> tuple[StepRecord, Any]:
        """Start step `number` (from 1); loss and gradient norm of the record are filled in when fetched."""
        watchdog, stopwatch = self._run.watchdog, self._engine.stopwatch
        self._begin_step(number)
        watchdog.mark("data", number)
        stopwatch.begin("data")
        batch = self._batches.next_batch()
        lr = learning_rate(number - 1, self._recipe.schedule, self._recipe.optimizer.lr)
        watchdog.mark("step", number)
        pending = None
        if batch.valid_tokens:
            pending = self._engine.step(batch, lr)
            self._had_labels = True
        stopwatch.begin("rest")
        return StepRecord(
            step=number,
            loss=None,
            grad_norm=None,
            learning_rate=lr,
            valid_tokens=batch.valid_tokens,
            rows=batch.n_micro_batches * self._recipe.batch.micro_batch_size * self._engine.topology.dp_size,
            document_length=batch.document_length,
        ), pending

    def _sync_stop(self) -> int:
        """Return the signal that stops the run, or 0; raise if a save has failed on any rank."""
        watchdog, checkpoints = self._run.watchdog, self._run.checkpoints
        watchdog.mark("sync_stop", self.step)
        if self._recipe.checkpoint.mirror_url:
            self._run.mirror.log_progress()
        has_failed = self._recipe.checkpoint.async_save and checkpoints.poll()
        value = self._engine.control.all_reduce_max(self._run.stop.received + SAVE_FAILED_FLAG * has_failed)
        if value >= SAVE_FAILED_FLAG:
            watchdog.mark("save", self.step)
            checkpoints.finish(cancel=True)
            raise AssertionError("finishing a failed save raises")
        return value

    def _fetch_metrics(self) -> None:
        """Wait for the pending steps and log them."""
        self._run.watchdog.mark("fetch_metrics", self.step)
        metrics = iter(self._engine.fetch_metrics([handle for _, handle in self._pending if handle is not None]))
        records = []
        for record, handle in self._pending:
            records.append(record if handle is None else replace(record, **vars(next(metrics))))
        self._pending = []
        self._log.log_steps(records, self._engine.peak_memory_bytes(), self._engine.stopwatch.pop_times())
        for record in records:
            if not record.valid_tokens:
                self._log.log_step_without_labels(record)
            elif record.was_skipped:
                self._n_skipped, self._no_skips_since_save = self._n_skipped + 1, False
                self._log.log_skipped_step(record, self._n_skipped)

    def _pause(self, save: bool, validate: bool, evaluate: bool, *, wait: bool) -> None:
        """Validate, evaluate and save after a step; the time does not count as training."""
        run, stopwatch = self._run, self._engine.stopwatch
        stopwatch.begin("validation")
        for dataset in run.data.validation if validate else ():
            with self._log.pause(f"step {self.step}, validation {dataset.name}".rstrip()):
                loss_sum, tokens = self._engine.validate(self._validation_batches(dataset))
            self._log.log_validation(self.step, dataset.name, loss_sum, tokens, dataset.text_bytes)
        if evaluate:
            with self._log.pause(f"step {self.step}, evaluation"):
                for result in run.evaluation.results(self._engine, run.data, self._on_evaluation_batch):
                    self._log.log_evaluation(self.step, result)
        if save:
            stopwatch.begin("checkpoint")
            run.watchdog.mark("save", self.step)
            with self._log.pause(f"step {self.step}, saving a checkpoint"):
                run.checkpoints.save(run.batches.checkpoint_state(), wait=wait)
            if self._no_skips_since_save:
                self._n_skipped = 0
            self._no_skips_since_save = True
        stopwatch.begin("rest")

    def _validation_batches(self, dataset: ValidationSet) -> Iterator[StepBatch]:
        batch_size, topology = self._recipe.batch.micro_batch_size, self._engine.topology
        total = -(-len(dataset.rows) // (batch_size * topology.dp_size))
        for done, batch in enumerate(validation_batches(dataset.reader, topology, batch_size, dataset.rows)):
            self._run.watchdog.mark("validate", self.step)
            self._log.show_progress(done, total)
            yield batch

    def _on_evaluation_batch(self, task: str, done: int, total: int) -> None:
        self._run.watchdog.mark("evaluate", self.step)
        self._log.show_progress(done, total, of=task)

    def _rollback(self) -> None:
        """Roll back to the newest checkpoint."""
        times = f" after {self._n_rollbacks} rollbacks (fault_tolerance.max_rollbacks)" if self._n_rollbacks else ""
        problem = f"{self._n_skipped} steps up to step {self.step} had a non-finite loss or gradient norm"
        diagnosis = (
            "training has diverged; saved checkpoints are intact. Lower optimizer.lr, lengthen schedule.warmup_steps, "
            "or inspect the rows of these steps (lt train inspect)"
        )
        if self._n_rollbacks == self._recipe.fault_tolerance.max_rollbacks:
            raise TrainingError(f"{problem}{times}: {diagnosis}")
        self._n_rollbacks += 1
        self._run.watchdog.mark("restore", self.step)
        self._engine.stopwatch.begin("checkpoint")
        with self._log.pause("rolling back"):
            self._run.checkpoints.finish()
            if not rollback(self._run):
                raise TrainingError(f"{problem}, and there is no checkpoint yet: {diagnosis}")
        self._engine.stopwatch.begin("rest")
        self._n_skipped, self._no_skips_since_save = 0, True
        self.step = self._run.batches.state.step


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
