"""Run loggers: standard output, logs/, metrics.jsonl and events.jsonl.

Only rank 0 reports; every rank has a log file in the run directory, which also receives the error that ends the rank.

A metrics record holds loss and gradient norm of exactly one step (no average over the logging interval), so two runs
can be compared digit by digit; rates are averages over the last records.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lt_data.display.progress_bars import SECONDS_BETWEEN_LINES, format_progress
from lt_data.display.terminal import escape_controls
from lt_trainer.constants import GIB
from lt_trainer.engine import Device
from lt_trainer.observability.monitor import NodeMonitor
from lt_trainer.observability.sinks import Sinks
from lt_trainer.observability.throughput import Throughput
from lt_trainer.run_directory.jsonl import JsonlWriter
from lt_trainer.run_directory.rank_log import RankLog
from lt_trainer.run_directory.records import (
    EvaluationRecord,
    MetricsRecord,
    StepRecord,
    ValidationRecord,
    format_record,
    record_to_dict,
)
from lt_trainer.run_directory.run_dir import RunDir

JOULES_PER_KWH = 3.6e6
RESUME_CHECK_FILE = "resume_check.jsonl"
MAX_LOSS_FOR_EXP = 700.0
"""Above this, exp overflows a float."""


@dataclass(frozen=True, kw_only=True)
class ComputeCost:
    """Tokens and FLOPs per row, for the rates; the number of rows per step may vary."""

    micro_batch_size: int
    """Rows of a micro-batch."""
    seq_len: int
    """Positions of a row."""
    flops_per_token: float
    recomputed_flops_per_token: float = 0.0
    """Recomputed FLOPs per token; nan if unknown."""
    flops_by_length: Mapping[int, float] = field(default_factory=dict)
    """`flops_per_token` by row length, for rows shorter than seq_len."""
    attention_flops: float = math.nan
    """FLOPs per token and position of its document; those of `flops_per_token` are seq_len times as many."""

    def relative_cost(self, record: StepRecord) -> float:
        """Return FLOPs per token of a step relative to rows of seq_len."""
        return self.flops_by_length.get(record.row_length, self.flops_per_token) / self.flops_per_token

    def document_flops(self, record: StepRecord) -> float:
        """Return the FLOPs of a step with attention counted within documents only; nan if unknown."""
        length = math.nan if record.document_length is None else record.document_length
        return record.rows * self.seq_len * (self.flops_per_token - self.attention_flops * (self.seq_len - length))


class EvaluationResult(Protocol):
    """Result of a task (`lt_trainer.evaluation.TaskResult`)."""

    @property
    def task(self) -> str:
        """Name of the task."""
        ...

    @property
    def n_items(self) -> int:
        """Number of items."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics by name, such as acc."""
        ...

    @property
    def items(self) -> Sequence[Mapping[str, Any]]:
        """Records of the items."""
        ...


class NullLogger:
    """No-op logger of all ranks except 0."""

    def log_message(self, text: str) -> None:
        """Do nothing."""

    def log_event(self, kind: str, **values: object) -> None:
        """Do nothing."""

    def log_steps(self, records: list[StepRecord], memory_bytes: int, times: Mapping[str, float]) -> None:
        """Do nothing."""

    def log_validation(self, step: int, name: str, loss_sum: float, tokens: int, text_bytes: int) -> None:
        """Do nothing."""

    def log_evaluation(self, step: int, result: EvaluationResult) -> None:
        """Do nothing."""

    def evaluation_progress(self, step: int, task: str) -> Callable[[int, int], None]:
        """Return what does nothing."""
        return lambda done, total: None

    def log_skipped_step(self, record: StepRecord, count: int) -> None:
        """Do nothing."""

    def log_checkpoint(self, step: int, path: Path) -> None:
        """Do nothing."""

    def log_artifact(self, path: Path) -> None:
        """Do nothing."""

    def log_resume_check_step(self, record: StepRecord) -> None:
        """Do nothing."""

    def pause(self) -> None:
        """Do nothing."""

    def unpause(self) -> None:
        """Do nothing."""


class Rank0Logger:
    """Logger of rank 0; a context manager that closes its files."""

    def __init__(
        self,
        run_dir: RunDir,
        log: RankLog,
        device: Device,
        cost: ComputeCost,
        *,
        sinks: Sinks | None = None,
        monitor: NodeMonitor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sinks, self._monitor = sinks or Sinks(), monitor
        self._tokens = 0
        self._joules = self._first_joules = None if monitor is None else monitor.energy_joules()
        self._run_dir, self._device, self._cost, self._clock = run_dir, device, cost, clock
        self._log, self._stdout_open = log, True
        self._metrics = JsonlWriter(run_dir.metrics)
        self._throughput = Throughput(devices=device.count, peak_flops=device.peak_flops, clock=clock)
        self._start = clock()

    def log_message(self, text: str) -> None:
        """Print a message, and log it as a `note` event."""
        self._show(text)
        self._run_dir.append_event("note", text=text)

    def _show(self, text: str) -> None:
        line = escape_controls(f"# {text}")
        self._print(line)
        self._log.write(line)

    def log_event(self, kind: str, **values: object) -> None:
        """Append an event to events.jsonl."""
        self._run_dir.append_event(kind, **values)

    def log_steps(self, records: list[StepRecord], memory_bytes: int, times: Mapping[str, float]) -> None:
        """Write a metrics record of the last step; the rates include all steps."""
        if not records:
            return
        cost, rows = self._cost, sum(record.rows for record in records)
        tokens = rows * cost.seq_len
        weighted_tokens = sum(record.rows * cost.relative_cost(record) for record in records) * cost.seq_len
        self._throughput.update(
            batches=rows / cost.micro_batch_size,
            samples=rows,
            tokens=tokens,
            flops=weighted_tokens * cost.flops_per_token,
            recomputed_flops=weighted_tokens * cost.recomputed_flops_per_token,
            document_flops=sum(map(cost.document_flops, records)),
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
                mfu_documents=None if last.document_length is None else rates.mfu_documents,
                **{f"{part}_s": seconds for part, seconds in times.items()},
                **self._energy_fields(tokens),
            )
        )

    def _energy_fields(self, tokens: int) -> dict[str, float]:
        """Return the energy per token since the last record and that of the whole run, if measured."""
        joules = None if self._monitor is None else self._monitor.energy_joules()
        if joules is None:
            return {}
        previous, self._joules = self._joules, joules
        fields = {"energy_kwh": joules / JOULES_PER_KWH}
        if previous is None or self._first_joules is None:  # the first reading is the baseline
            self._first_joules = joules
            return fields
        self._tokens += tokens
        return {"joules_per_token": (joules - previous) / tokens, **fields}

    def log_validation(self, step: int, name: str, loss_sum: float, tokens: int, text_bytes: int) -> None:
        """Write the validation record of a set (arguments: see `RunLogger`)."""
        loss = loss_sum / tokens
        self._write(
            ValidationRecord(
                step=step,
                val_loss=loss,
                val_tokens=tokens,
                elapsed_s=self._clock() - self._start,
                val_perplexity=math.exp(loss) if loss < MAX_LOSS_FOR_EXP else math.inf,
                val_bits_per_byte=loss_sum / math.log(2) / text_bytes if text_bytes else None,
                val_set=name or None,
            )
        )

    def evaluation_progress(self, step: int, task: str) -> Callable[[int, int], None]:
        """Return what prints a line every ten seconds: batches done, their rate, and the time left."""
        began = shown = self._clock()

        def report(done: int, total: int) -> None:
            nonlocal shown
            now = self._clock()
            if done < total and now - shown >= SECONDS_BETWEEN_LINES:
                shown = now
                progress = format_progress(done, total, "batches", now - began)
                self._show(f"step {step}, evaluation of {escape_controls(task, keep='')}: {progress}")

        return report

    def log_evaluation(self, step: int, result: EvaluationResult) -> None:
        """Write the record of a task, and its items to evaluation/step-N/TASK.jsonl."""
        folder = self._run_dir.path / "evaluation" / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{result.task}.jsonl"
        path.unlink(missing_ok=True)  # of a start that reached this step before
        with JsonlWriter(path) as items:
            for item in result.items:
                items.write(item)
        self._write(
            EvaluationRecord(
                step=step,
                eval_task=result.task,
                eval_items=result.n_items,
                elapsed_s=self._clock() - self._start,
                **{f"eval_{name}": value for name, value in result.metrics.items()},
            )
        )

    def log_skipped_step(self, record: StepRecord, count: int) -> None:
        """Log a step that did not change the weights."""
        self._run_dir.append_event("step_skipped", step=record.step, loss=record.loss, grad_norm=record.grad_norm)
        self.log_message(
            f"step {record.step} was skipped: loss {record.loss:g}, grad_norm {record.grad_norm:g} "
            f"({count} skipped; above fault_tolerance.max_skipped_steps the run rolls back to its newest checkpoint)"
        )

    def log_checkpoint(self, step: int, path: Path) -> None:
        """Log a committed checkpoint."""
        self._run_dir.append_event("checkpoint", step=step, path=str(path))

    def log_artifact(self, path: Path) -> None:
        """Log a profiler trace or memory snapshot."""
        self._run_dir.append_event("artifact", path=str(path))
        self.log_message(f"written: {path}")

    def log_resume_check_step(self, record: StepRecord) -> None:
        """Append a resume-check step to its own file: it is not part of the run."""
        with JsonlWriter(self._run_dir.path / RESUME_CHECK_FILE) as sink:
            sink.write(record)

    def pause(self) -> None:
        """Stop counting training time."""
        self._throughput.pause()

    def unpause(self) -> None:
        """Continue counting training time."""
        self._throughput.unpause()

    def _write(self, record: MetricsRecord | ValidationRecord | EvaluationRecord) -> None:
        self._print(format_record(record))
        self._log.write(format_record(record))
        values = record_to_dict(record)
        self._metrics.write(values)
        node_scalars = self._monitor.scalars() if self._monitor is not None and "loss" in values else {}
        self.log_sink_failures(self._sinks.log(values, node_scalars))

    def log_sink_failures(self, errors: Mapping[str, str]) -> None:
        """Log failed sinks; the run continues without them."""
        for name, error in errors.items():
            self.log_message(f"warning: sink {name} failed and is disabled for this start: {error}")
            self._run_dir.append_event("sink_failed", sink=name, error=error)

    def _print(self, text: str) -> None:
        """Print a line until standard output is closed: losing the terminal must not end the run."""
        if not self._stdout_open:
            return
        try:
            print(text, flush=True)  # noqa: T201
        except OSError as exc:
            self._stdout_open = False
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())  # otherwise the flush at exit fails again
            os.close(null)
            self._log.write(f"# standard output is closed ({exc.strerror}); further messages are written only here")
            self._run_dir.append_event("stdout_lost", error=exc.strerror)

    def close(self) -> None:
        """Log the energy of this start; close the sinks and the metrics file."""
        if self._monitor is not None and self._first_joules is not None and self._tokens:
            self._joules = self._monitor.energy_joules() or self._first_joules
            spent = self._joules - self._first_joules
            self._run_dir.append_event(
                "energy", joules=spent, joules_per_token=spent / self._tokens, run_kwh=self._joules / JOULES_PER_KWH
            )
        self.log_sink_failures(self._sinks.close())
        self._metrics.close()

    def __enter__(self) -> Rank0Logger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
