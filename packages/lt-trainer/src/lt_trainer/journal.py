"""What a run tells while it goes on: lines on standard output and in logs/, metrics.jsonl and events.jsonl.

Rank 0 tells; every rank has a log in the run directory, and leaves the error there that ended it.

A logging step's record holds the loss and the gradient norm of exactly that step (no average over the window), so
that two runs can be compared digit by digit; rates look back over the last records.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from lt_trainer.engine import Device
from lt_trainer.errors import RunDirError
from lt_trainer.loop import StepRecord
from lt_trainer.metrics import JsonlSink, LogFile, MetricsRecord, Throughput, ValidationRecord, as_dict, line
from lt_trainer.rundir import RunDir
from lt_trainer.sinks.fan import Sinks

GIB = 2**30
JOULES_PER_KWH = 3.6e6
SHADOW = "shadow.jsonl"
MOST_NATS = 700.0
"""exp of more is no longer a float."""


class RankLog:
    """A rank's own log file in the run directory; an error that ends the context goes into it, with its traceback.

    Raises:
        RunDirError: the file cannot be written.
    """

    def __init__(self, run: Path, rank: int) -> None:
        self.path = run / "logs" / f"rank{rank:05}.log"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise RunDirError(
                f"cannot make {self.path.parent}: {exc.strerror}; free space or mend its permissions, then start again"
            ) from exc
        self._file = LogFile(self.path)

    def write(self, text: str) -> None:
        """Append lines, each with the time in UTC."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._file.write("".join(f"{now} {line}\n" for line in text.splitlines()))

    def __enter__(self) -> RankLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with suppress(RunDirError):  # the error itself goes on and matters more
                self.write("".join(traceback.format_exception(error)))
        self._file.close()


@dataclass(frozen=True, kw_only=True)
class Work:
    """What rows cost, for the rates; how many an update has may change from step to step."""

    micro_batch: int
    """Rows of a micro-batch."""
    seq_len: int
    """Positions of a row."""
    flops_per_token: float
    recomputed_flops_per_token: float = 0.0
    """Of these, done a second time; nan where that is not known."""
    flops_by_length: Mapping[int, float] = field(default_factory=dict)
    """`flops_per_token` in rows of another length, whose attention sees less."""

    def share(self, record: StepRecord) -> float:
        """What a token of a step costs, in parts of one in a row of seq_len."""
        return self.flops_by_length.get(record.row_length, self.flops_per_token) / self.flops_per_token


class Monitor(Protocol):
    """Who looks at the machines; asked by the main thread, which must not wait for it."""

    def joules(self) -> float | None:
        """Energy of the run's GPUs since its first start; None where nobody counts it."""
        ...

    def scalars(self) -> dict[str, float]:
        """The newest numbers of this node by tag, for the sinks."""
        ...

    def problems(self) -> list[str]:
        """What went wrong since this was last asked."""
        ...


class SilentJournal:
    """The journal of every rank but 0."""

    def say(self, text: str) -> None:
        """Nothing is told."""

    def event(self, kind: str, **values: object) -> None:
        """Nothing is told."""

    def steps(self, records: list[StepRecord], memory_bytes: int, times: Mapping[str, float]) -> None:
        """Nothing is told."""

    def validation(self, step: int, name: str, loss_sum: float, tokens: int, text_bytes: int) -> None:
        """Nothing is told."""

    def skipped(self, record: StepRecord, count: int) -> None:
        """Nothing is told."""

    def saved(self, step: int, path: Path) -> None:
        """Nothing is told."""

    def view(self, path: Path) -> None:
        """Nothing is told."""

    def shadow(self, record: StepRecord) -> None:
        """Nothing is told."""

    def pause(self) -> None:
        """Nothing is measured."""

    def proceed(self) -> None:
        """Nothing is measured."""


class RunJournal:
    """The journal of rank 0; closes its files with the context."""

    def __init__(
        self,
        run_dir: RunDir,
        log: RankLog,
        device: Device,
        work: Work,
        *,
        sinks: Sinks | None = None,
        monitor: Monitor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sinks, self._monitor = sinks or Sinks(), monitor
        self._tokens = 0
        self._joules = self._first_joules = None if monitor is None else monitor.joules()
        self._run_dir, self._device, self._work, self._clock = run_dir, device, work, clock
        self._log, self._shown = log, True
        self._metrics = JsonlSink(run_dir.metrics)
        self._throughput = Throughput(devices=device.count, peak_flops=device.peak_flops, clock=clock)
        self._start = clock()

    def say(self, text: str) -> None:
        """A sentence for the person who watches, also noted as an event."""
        self._show(f"# {text}")
        self._log.write(f"# {text}")
        self._run_dir.event("note", text=text)

    def event(self, kind: str, **values: object) -> None:
        """Note something that happened."""
        self._run_dir.event(kind, **values)

    def steps(self, records: list[StepRecord], memory_bytes: int, times: Mapping[str, float]) -> None:
        """Write the record of the last of these steps; all of them count for the rates."""
        if not records:
            return
        work, rows = self._work, sum(record.rows for record in records)
        tokens = rows * work.seq_len
        weighed = sum(record.rows * work.share(record) for record in records) * work.seq_len
        self._throughput.update(
            batches=rows / work.micro_batch,
            samples=rows,
            tokens=tokens,
            flops=weighed * work.flops_per_token,
            again=weighed * work.recomputed_flops_per_token,
        )
        rates, last = self._throughput.rates(), records[-1]
        self._write(
            MetricsRecord(
                step=last.step,
                loss=last.loss,
                learning_rate=last.learning_rate,
                grad_norm=last.grad_norm,
                batches_per_sec=rates.batches_per_sec,
                samples_per_sec=rates.samples_per_sec,
                tokens_per_sec=rates.tokens_per_sec,
                flops_per_sec=rates.flops_per_sec,
                mfu=rates.mfu,
                memory_gib=memory_bytes / GIB,
                valid_tokens=last.valid_tokens,
                elapsed_s=self._clock() - self._start,
                hfu=rates.hfu,
                **{f"{part}_s": seconds for part, seconds in times.items()},
                **self._energy(tokens),
            )
        )
        for text in [] if self._monitor is None else self._monitor.problems():
            self.say(f"monitor: {text}")

    def _energy(self, tokens: int) -> dict[str, float]:
        """Energy since the last record and of the whole run, where somebody counts it."""
        joules = None if self._monitor is None else self._monitor.joules()
        if joules is None:
            return {}
        before, self._joules = self._joules, joules
        found = {"energy_kwh": joules / JOULES_PER_KWH}
        if before is None or self._first_joules is None:  # the first look begins the count
            self._first_joules = joules
            return found
        self._tokens += tokens
        return {"joules_per_token": (joules - before) / tokens, **found}

    def validation(self, step: int, name: str, loss_sum: float, tokens: int, text_bytes: int) -> None:
        """Write what the loss over a validation set comes to (see `loop.Journal`)."""
        loss = loss_sum / tokens
        self._write(
            ValidationRecord(
                step=step,
                val_loss=loss,
                val_tokens=tokens,
                elapsed_s=self._clock() - self._start,
                val_perplexity=math.exp(loss) if loss < MOST_NATS else math.inf,
                val_bits_per_byte=loss_sum / math.log(2) / text_bytes if text_bytes else None,
                val_set=name or None,
            )
        )

    def skipped(self, record: StepRecord, count: int) -> None:
        """Note a step that left no trace in the weights."""
        self._run_dir.event("skipped", step=record.step, loss=record.loss, grad_norm=record.grad_norm)
        self.say(
            f"step {record.step} was skipped: loss {record.loss:g}, grad_norm {record.grad_norm:g} "
            f"({count} skipped; above guard.max_skipped the run goes back to its newest checkpoint)"
        )

    def saved(self, step: int, path: Path) -> None:
        """Note a committed checkpoint."""
        self._run_dir.event("checkpoint", step=step, path=str(path))

    def view(self, path: Path) -> None:
        """Note a trace or a memory history."""
        self._run_dir.event("view", path=str(path))
        self.say(f"written: {path}")

    def shadow(self, record: StepRecord) -> None:
        """Append a shadow step's numbers to a file of their own: they are no part of the run."""
        with JsonlSink(self._run_dir.path / SHADOW) as sink:
            sink.write(record)

    def pause(self) -> None:
        """Time from here on is not training."""
        self._throughput.pause()

    def proceed(self) -> None:
        """Training goes on."""
        self._throughput.proceed()

    def _write(self, record: MetricsRecord | ValidationRecord) -> None:
        self._show(line(record))
        self._log.write(line(record))
        values = as_dict(record)
        self._metrics.write(values)
        beside = self._monitor.scalars() if self._monitor is not None and "loss" in values else {}
        self.sinks_lost(self._sinks.write(values, beside))

    def sinks_lost(self, lost: Mapping[str, str]) -> None:
        """Note the sinks that have failed; the run goes on without them."""
        for name, error in lost.items():
            self.say(f"warning: the sink {name} has failed and gets no more records in this start: {error}")
            self._run_dir.event("sink_failed", sink=name, error=error)

    def _show(self, text: str) -> None:
        """A line on standard output, as long as there is one: a closed terminal must not end a run of weeks."""
        if not self._shown:
            return
        try:
            print(text, flush=True)  # noqa: T201
        except OSError as exc:
            self._shown = False
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())  # else flushing what is left fails once more at the exit
            os.close(nowhere)
            self._log.write(f"# standard output is gone ({exc.strerror}); what is told from here on stands only here")
            self._run_dir.event("stdout_lost", error=exc.strerror)

    def close(self) -> None:
        """Note the energy of this start, close the sinks and the metrics file."""
        if self._monitor is not None and self._first_joules is not None and self._tokens:
            self._joules = self._monitor.joules() or self._first_joules
            spent = self._joules - self._first_joules
            self._run_dir.event(
                "energy", joules=spent, joules_per_token=spent / self._tokens, run_kwh=self._joules / JOULES_PER_KWH
            )
        self.sinks_lost(self._sinks.close())
        self._metrics.close()

    def __enter__(self) -> RunJournal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
