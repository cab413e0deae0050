"""The training loop, the same for every engine and without torch.

At each step boundary, in this order: take the next batch, step the engine, agree with all ranks whether to stop, then,
where due, read the numbers, validate, save. Numbers are read only at logging steps, so a device runs ahead of the host
in between. A stop is always a save. Saves may be written in the background: then the agreement on a stop also tells
whether one has failed.

A step whose loss or gradient norm is not finite leaves no trace in the engine; the loop learns of it when it reads. Too
many of them, and the run goes back to its newest checkpoint and jumps over every row read since: the rows before the
first bad step led there too (as PaLM's authors did, https://arxiv.org/abs/2204.02311, section 5.1). They are counted
until a whole stretch between two checkpoints is free of them.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from lt_data import StreamState
from lt_trainer.batches import Batches
from lt_trainer.engine import Engine, StepBatch
from lt_trainer.errors import TrainerError
from lt_trainer.recipe import Recipe
from lt_trainer.schedule import lr as learning_rate
from lt_trainer.stop import StopSignals

SAVE_FAILED = 1 << 8
"""Added to the number of the signal that a rank has received; signals have smaller numbers."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One finished step: `step` counts from 1; numbers are equal on every rank."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    valid_tokens: int
    rows: int
    """Of the whole run; shorter ones count as rows of data.seq_len with as many positions."""
    row_length: int = 0
    """Positions of a row, where it is not data.seq_len."""


class TrainingError(TrainerError):
    """Training cannot go on; what was saved before is untouched."""


class NothingToGoBackTo(Exception):
    """No checkpoint was saved yet."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """A set to validate on."""

    name: str
    text_bytes: int
    batches: Callable[[], Iterable[StepBatch]]
    """All of it, as many batches on every rank."""


class Journal(Protocol):
    """Who hears what happens; on ranks other than 0 a silent one."""

    def steps(self, records: list[StepRecord], memory_bytes: int, times: Mapping[str, float]) -> None:
        """The steps since the last call, read just now, and where the time since then went (see `timing.py`)."""
        ...

    def validation(self, step: int, name: str, loss_sum: float, tokens: int, text_bytes: int) -> None:
        """The loss over a whole validation set after `step`: its sum in nats over `tokens` tokens with a label.

        Args:
            step: Updates done.
            name: The set's; "" for data.validation.
            loss_sum: In nats.
            tokens: Positions with a label.
            text_bytes: UTF-8 bytes of the set's text.
        """
        ...

    def skipped(self, record: StepRecord, count: int) -> None:
        """A step that the engine skipped; the run goes back when `count` exceeds guard.max_skipped."""
        ...

    def view(self, path: Path) -> None:
        """A file that shows some steps closely is done: a profiler's trace, a history of memory."""
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


class Watch(Protocol):
    """Who looks after a rank that may hang."""

    def mark(self, stage: str, step: int) -> None:
        """What begins now, in this order in each step: data, step, agree, read, evaluate, save."""
        ...


class Saves(Protocol):
    """How checkpoints are made."""

    def save(self, position: StreamState, *, wait: bool) -> None:
        """Save the engine's state at this position of the data; with `wait` the checkpoint is there on return.

        Raises CheckpointError on every rank, also for a save before.
        """
        ...

    def look(self) -> bool:
        """Whether a save has failed on this rank while training went on."""
        ...

    def finish(self, *, give_up: bool = False) -> None:
        """Wait for the save in flight, or end it; raises CheckpointError on every rank when it has failed on one."""
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
    watch: Watch
    saves: Saves
    go_back: Callable[[Batches], None]
    """Restores the newest checkpoint into the engine, and takes the batches to its step and behind the rows that were
    read since; raises NothingToGoBackTo when there is none."""
    validation: Sequence[Validation] = ()
    _skipped: int = field(default=0, init=False)
    """Steps, since two checkpoints had none between them."""
    _clean: bool = field(default=True, init=False)
    """No step was skipped since the newest checkpoint."""
    _rewinds: int = field(default=0, init=False)

    def run(self, *, stop_at_step: int = 0, shadow_steps: int = 0) -> Outcome:
        """Train.

        Args:
            stop_at_step: raise SIGTERM in this process after that step, 0 for never.
            shadow_steps: steps to run after the save of that stop; their numbers go to the journal, their weights
            nowhere.

        Raises:
            TrainingError: too many steps were not finite, and going back did not help or was not possible.
            PeerError: another rank is gone.
        """
        recipe, max_steps = self.recipe, self.recipe.schedule.max_steps
        step = self.batches.state.step
        stopped_by = self.engine.control.all_max(self.stop.received)  # while everything was loaded
        if stopped_by:
            return Outcome(step=step, stopped_by=stopped_by)
        waiting: list[tuple[StepRecord, object]] = []
        while step < max_steps:
            waiting.append(self._step(step))
            step += 1
            if step == stop_at_step:
                signal.raise_signal(signal.SIGTERM)
            stopped_by = self._agree(step)
            last = step == max_steps
            save = bool(stopped_by) or last or _due(step, recipe.checkpoint.interval)
            # A stop has to be quick: its step is validated no more.
            evaluate = bool(self.validation) and (last or (_due(step, recipe.metrics.eval_interval) and not stopped_by))
            if save or evaluate or _due(step, recipe.metrics.log_interval):
                self._read(waiting, step)
                waiting = []
                if self._skipped > recipe.guard.max_skipped and not stopped_by:
                    step = self._rewind(step)
                    continue
            if save or evaluate:
                self.journal.pause()
                if evaluate:
                    self.engine.stopwatch.lap("validation")
                    self._evaluate(step)
                if save:
                    self.engine.stopwatch.lap("checkpoint")
                    self.watch.mark("save", step)
                    self.saves.save(self.batches.saved(), wait=bool(stopped_by) or last)
                    self._forget_skipped()
                self.engine.stopwatch.lap("rest")
                self.journal.proceed()
            if stopped_by and not last:
                if step == stop_at_step:
                    for shadow in range(step, min(step + shadow_steps, max_steps)):
                        self.journal.shadow(self._finish(*self._step(shadow)))
                return Outcome(step=step, stopped_by=stopped_by)
        self._boundary(step + 1)
        return Outcome(step=step, stopped_by=0)

    def _agree(self, step: int) -> int:
        """The signal that stops the run, 0 if none; ends it when a save has failed on any rank."""
        self.watch.mark("agree", step)
        told = self.engine.control.all_max(self.stop.received + SAVE_FAILED * self.saves.look())
        if told >= SAVE_FAILED:
            self.watch.mark("save", step)
            self.saves.finish(give_up=True)
            raise AssertionError("a save had failed, and finishing it did not say so")
        return told

    def _step(self, step: int) -> tuple[StepRecord, object]:
        """Start step number `step` (from 0); the record's loss and norm are filled in when it is read."""
        self._boundary(step + 1)
        self.watch.mark("data", step + 1)
        self.engine.stopwatch.lap("data")
        batch = self.batches.next_batch()
        lr = learning_rate(step, self.recipe.schedule, self.recipe.optimizer.lr)
        self.watch.mark("step", step + 1)
        pending = self.engine.step(batch, lr)
        self.engine.stopwatch.lap("rest")
        length, seq_len = batch.input_ids.shape[-1], self.recipe.data.seq_len
        return StepRecord(
            step=step + 1,
            loss=math.nan,
            grad_norm=math.nan,
            learning_rate=lr,
            valid_tokens=batch.valid_tokens,
            rows=batch.input_ids.size // seq_len * self.engine.topology.dp_size,
            row_length=length,
        ), pending

    def _boundary(self, step: int) -> None:
        for path in self.engine.boundary(step):
            self.journal.view(path)

    def _read(self, waiting: list[tuple[StepRecord, object]], step: int) -> None:
        self.watch.mark("read", step)
        numbers = self.engine.read([pending for _, pending in waiting])
        records = [
            replace(record, loss=n.loss, grad_norm=n.grad_norm) for (record, _), n in zip(waiting, numbers, strict=True)
        ]
        self.journal.steps(records, self.engine.memory_bytes(), self.engine.stopwatch.times())
        for record, found in zip(records, numbers, strict=True):
            if not found.finite:
                self._skipped += 1
                self._clean = False
                self.journal.skipped(record, self._skipped)

    def _forget_skipped(self) -> None:
        """After a save: count anew when no step was skipped since the one before, else they would never add up."""
        if self._clean:
            self._skipped = 0
        self._clean = True

    def _rewind(self, step: int) -> int:
        """Go back to the newest checkpoint; returns its step."""
        guard = self.recipe.guard
        what = f"{self._skipped} steps up to step {step} had a loss or a gradient norm that is not finite"
        advice = (
            "what was saved is good. Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the rows of those "
            "steps (lt data inspect)"
        )
        if self._rewinds == guard.max_rewinds:
            times = f"after going back {self._rewinds} times (guard.max_rewinds)" if self._rewinds else ""
            raise TrainingError(f"{what} {times}".strip() + f": training has diverged; {advice}")
        self._rewinds += 1
        self.watch.mark("restore", step)
        self.engine.stopwatch.lap("checkpoint")
        self.journal.pause()
        self.saves.finish()
        try:
            self.go_back(self.batches)
        except NothingToGoBackTo as exc:
            raise TrainingError(f"{what}, and {exc}: training has diverged; {advice}") from exc
        self.engine.stopwatch.lap("rest")
        self.journal.proceed()
        self._skipped, self._clean = 0, True
        return self.batches.state.step

    def _finish(self, record: StepRecord, pending: object) -> StepRecord:
        (numbers,) = self.engine.read([pending])
        return replace(record, loss=numbers.loss, grad_norm=numbers.grad_norm)

    def _evaluate(self, step: int) -> None:
        def watched(batches: Iterable[StepBatch]) -> Iterable[StepBatch]:
            for batch in batches:
                self.watch.mark("evaluate", step)
                yield batch

        for one in self.validation:
            loss_sum, tokens = self.engine.evaluate(watched(one.batches()))
            self.journal.validation(step, one.name, loss_sum, tokens, one.text_bytes)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
