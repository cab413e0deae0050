"""The training loop, the same for every engine and without torch.

At each step boundary, in this order: take the next batch, step the engine, agree with all ranks whether to stop, then,
where due, read the numbers, validate, save. Numbers are read only at logging steps, so a device runs ahead of the host
in between. A stop is always a save; a save is always preceded by reading, so weights that are not finite are never
saved.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lt_data import StreamState
from lt_trainer.engine import Engine, StepBatch
from lt_trainer.errors import TrainerError
from lt_trainer.recipe import Recipe
from lt_trainer.schedule import lr as learning_rate
from lt_trainer.stop import StopSignals


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One finished step: `step` counts from 1; numbers are equal on every rank."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    valid_tokens: int


class TrainingError(TrainerError):
    """Training cannot go on; what was saved before is untouched."""


class Batches(Protocol):
    """Where the loop's batches come from."""

    @property
    def state(self) -> StreamState:
        """The position after the last batch."""
        ...

    def next_batch(self) -> StepBatch:
        """This rank's part of the next step."""
        ...


class Journal(Protocol):
    """Who hears what happens; on ranks other than 0 a silent one."""

    def steps(self, records: list[StepRecord], memory_bytes: int) -> None:
        """The steps since the last call, read just now."""
        ...

    def validation(self, step: int, loss_sum: float, tokens: int) -> None:
        """The loss over the whole validation set after `step`."""
        ...

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint was committed."""
        ...

    def shadow(self, record: StepRecord) -> None:
        """A step that was run after the last save, only to be compared with."""
        ...

    def pause(self) -> None:
        """What follows is not training: saving, validating."""
        ...

    def proceed(self) -> None:
        """Training goes on."""
        ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the loop ended: the last step done, and the signal that stopped it (0: all steps are done)."""

    step: int
    stopped_by: int


@dataclass(kw_only=True)
class Loop:
    """What a run is made of; `run` goes from the batches' position to the last step or to a stop."""

    recipe: Recipe
    engine: Engine
    batches: Batches
    journal: Journal
    stop: StopSignals
    save: Callable[[StreamState], Path]
    validation: Callable[[], Iterable[StepBatch]] | None = None

    def run(self, *, stop_at_step: int = 0, shadow_steps: int = 0) -> Outcome:
        """Train.

        Args:
            stop_at_step: raise SIGTERM in this process after that step, 0 for never.
            shadow_steps: steps to run after the save of that stop; their numbers go to the journal, their weights
            nowhere.

        Raises:
            TrainingError: the loss or the gradient norm is not finite; nothing of that step is saved.
        """
        recipe, max_steps = self.recipe, self.recipe.schedule.max_steps
        step = self.batches.state.step
        waiting: list[tuple[StepRecord, object]] = []
        while step < max_steps:
            waiting.append(self._step(step))
            step += 1
            if step == stop_at_step:
                signal.raise_signal(signal.SIGTERM)
            stopped_by = self.engine.control.all_max(self.stop.received)
            last = step == max_steps
            save = bool(stopped_by) or last or _due(step, recipe.checkpoint.interval)
            evaluate = self.validation is not None and (last or _due(step, recipe.metrics.eval_interval))
            if save or evaluate or _due(step, recipe.metrics.log_interval):
                self._read(waiting)
                waiting = []
            if save or evaluate:
                self.journal.pause()
                if evaluate:
                    self._evaluate(step)
                if save:
                    self.journal.saved(step, self.save(self.batches.state))
                self.journal.proceed()
            if stopped_by and not last:
                if step == stop_at_step:
                    for shadow in range(step, min(step + shadow_steps, max_steps)):
                        self.journal.shadow(self._finish(*self._step(shadow)))
                return Outcome(step=step, stopped_by=stopped_by)
        return Outcome(step=step, stopped_by=0)

    def _step(self, step: int) -> tuple[StepRecord, object]:
        """Start step number `step` (from 0); the record's loss and norm are filled in when it is read."""
        batch = self.batches.next_batch()
        lr = learning_rate(step, self.recipe.schedule, self.recipe.optimizer.lr)
        pending = self.engine.step(batch, lr)
        return StepRecord(
            step=step + 1, loss=math.nan, grad_norm=math.nan, learning_rate=lr, valid_tokens=batch.valid_tokens
        ), pending

    def _read(self, waiting: list[tuple[StepRecord, object]]) -> None:
        numbers = self.engine.read([pending for _, pending in waiting])
        records = [_with(record, n.loss, n.grad_norm) for (record, _), n in zip(waiting, numbers, strict=True)]
        self.journal.steps(records, self.engine.memory_bytes())
        for record in records:
            _require_finite(record)

    def _finish(self, record: StepRecord, pending: object) -> StepRecord:
        (numbers,) = self.engine.read([pending])
        return _with(record, numbers.loss, numbers.grad_norm)

    def _evaluate(self, step: int) -> None:
        assert self.validation is not None
        self.journal.validation(step, *self.engine.evaluate(self.validation()))


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _with(record: StepRecord, loss: float, grad_norm: float) -> StepRecord:
    return StepRecord(
        step=record.step,
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=record.learning_rate,
        valid_tokens=record.valid_tokens,
    )


def _require_finite(record: StepRecord) -> None:
    for name, value in (("loss", record.loss), ("grad_norm", record.grad_norm)):
        if not math.isfinite(value):
            raise TrainingError(
                f"{name} = {value} at step {record.step}: training has diverged and nothing of it was saved; the "
                "newest checkpoint is from before. "
                "Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the rows of that step"
            )
