"""Run logger: standard output, logs/, metrics.jsonl and events.jsonl.

Only rank 0 reports; every rank has a log file in the run directory, which also receives the error that ends the rank.

A metrics record holds loss and gradient norm of exactly one step (no average over the logging interval), so two runs
can be compared digit by digit. Its rates are those of the steps since the last record, per device: a *batch* is a
micro-batch, a *sample* a row, a *token* a position of a row (padding included). MFU is flops_per_sec over the peak of
one device; HFU also counts recomputed FLOPs; document MFU counts attention within documents only. Pauses (restoring,
validation, evaluation, saving) count in no rate.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_data.display.progress_bars import SECONDS_BETWEEN_LINES, format_progress
from lt_data.display.terminal import escape_controls
from lt_trainer.constants import GIB
from lt_trainer.engine import Device, EngineSpec, World
from lt_trainer.errors import RecipeError
from lt_trainer.observability.monitor import NodeMonitor
from lt_trainer.observability.run_display import RunDisplay
from lt_trainer.observability.sinks import Sinks, check_sinks_installed
from lt_trainer.run_directory.jsonl import JsonlWriter, RankLog, format_record
from lt_trainer.run_directory.records import StepRecord
from lt_trainer.run_directory.run_dir import RunDir

if TYPE_CHECKING:
    from lt_model import ModelConfig
    from lt_trainer.config.sections import Recipe
    from lt_trainer.evaluation.scorer import TaskResult

JOULES_PER_KWH = 3.6e6
FLOPS_CONVENTION = "full"
"""6 FLOPs per parameter and token plus full attention, as in torchtitan and NeMo."""


CAPABILITIES = {
    "profile_steps": "profile",
    "memory_snapshot_step": "memory_snapshot",
    "memory_snapshot_on_oom": "memory_snapshot",
}
"""Required engine capability by field of `[metrics]`."""


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
    attention_flops: Callable[[float], float] = lambda length: math.nan
    """Length of its document → FLOPs of a token's attention, of which windows bound the number of positions."""

    @staticmethod
    def of_recipe(recipe: Recipe, model: ModelConfig, recomputed_flops_per_token: float) -> ComputeCost:
        """Return the cost of a recipe's rows."""
        from lt_model.costs import attention_flops_per_token, flops_per_token

        return ComputeCost(
            micro_batch_size=recipe.batch.micro_batch_size,
            seq_len=recipe.data.seq_len,
            flops_per_token=flops_per_token(model, recipe.data.seq_len, FLOPS_CONVENTION),
            attention_flops=lambda length: attention_flops_per_token(model, length, FLOPS_CONVENTION),
            recomputed_flops_per_token=recomputed_flops_per_token,
        )

    def amounts(self, records: list[StepRecord]) -> tuple[float, ...]:
        """Return micro-batches, rows, tokens, FLOPs, those with recomputation, and those within documents of steps."""
        rows = sum(record.rows for record in records)
        per_token = self.flops_per_token
        flops = rows * self.seq_len * per_token
        without_attention = per_token - self.attention_flops(self.seq_len)
        document_flops = self.seq_len * sum(
            record.rows * (without_attention + self.attention_flops(record.document_length)) for record in records
        )
        with_recomputed = flops * (1 + self.recomputed_flops_per_token / per_token)
        return rows / self.micro_batch_size, rows, rows * self.seq_len, flops, with_recomputed, document_flops


class RunLogger:
    """Logger of a run, a context; without a run directory (on ranks other than 0) it writes nothing."""

    def __init__(
        self,
        run_dir: RunDir | None,
        log: RankLog,
        device: Device,
        cost: ComputeCost,
        *,
        last_step: int = 0,
        sinks: Sinks | None = None,
        monitor: NodeMonitor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._run_dir, self._log, self._device, self._cost, self._clock = run_dir, log, device, cost, clock
        self._last_step, self._sinks, self._monitor = last_step, sinks, monitor
        self._energy = monitor if monitor is not None and monitor.has_gpus else None
        self._joules = None if self._energy is None else self._energy.energy_joules()
        """Energy at the last record."""
        self._metrics = None if run_dir is None else JsonlWriter(run_dir.metrics)
        self._prints = run_dir is not None
        """False also once standard output is closed."""
        is_terminal = self._prints and sys.stdout.isatty() and find_spec("rich") is not None
        self._display = RunDisplay(last_step) if is_terminal else None
        self._seconds_left = math.nan
        self._start = clock()
        self._since: float | None = None
        """Time from which training counts; None before the first step and in a pause."""
        self._trained_s = 0.0
        """Seconds of training since the last record, up to `_since`."""
        self._n_steps, self._paused_s = 0, 0.0
        """Steps and seconds of pauses of this start."""
        self._pause_name, self._pause_began, self._shown_at = "", 0.0, 0.0

    def log_message(self, text: str) -> None:
        """Print a message, and log it as a `note` event."""
        self._print_note(text)
        self.log_event("note", text=text)

    def _print_note(self, text: str) -> None:
        if self._run_dir is not None:
            line = escape_controls(f"# {text}")
            self._on_stdout(print if self._display is None else self._display.print, line)
            self._log.write(line)

    def log_event(self, kind: str, **values: object) -> None:
        """Append an event to events.jsonl."""
        if self._run_dir is not None:
            self._run_dir.append_event(kind, **values)

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Exclude the time of the block from the rates, and show a moving line on a terminal meanwhile."""
        self._pause_name, self._pause_began = name, self._clock()
        self._shown_at, has_begun = self._pause_began, self._since is not None
        if self._since is not None:
            self._trained_s += self._pause_began - self._since
        self._since = None
        self._on_display(RunDisplay.start_moving, name)
        try:
            yield
        finally:
            self._on_display(RunDisplay.stop_moving)
            self._since = self._clock()
            if has_begun:
                self._paused_s += self._since - self._pause_began
            else:
                self._on_display(RunDisplay.start_moving, "first steps")

    def show_progress(self, done: int, total: int, of: str = "") -> None:
        """Show how far the present pause is: in the moving line, or every ten seconds a line."""
        now, name = self._clock(), self._pause_name + (f" of {escape_controls(of, keep='')}" if of else "")
        if self._display is not None:
            self._display.move(done, total, name)
        elif 0 < done < total and now - self._shown_at >= SECONDS_BETWEEN_LINES:
            self._shown_at = now
            self._print_note(f"{name}: {format_progress(done, total, 'batches', now - self._pause_began)}")

    def log_steps(self, records: list[StepRecord], memory_bytes: int, times: Mapping[str, float]) -> None:
        """Write a metrics record of the last of the steps since the last call, with their rates.

        Args:
            records: Steps in order.
            memory_bytes: Peak memory since the last call.
            times: Seconds since the last call by part (see `timing`).
        """
        if not records or self._run_dir is None:
            return
        now, last = self._clock(), records[-1]
        seconds = self._trained_s + now - (now if self._since is None else self._since)
        self._trained_s, self._since = 0.0, now
        amounts = self._cost.amounts([record for record in records if record.valid_tokens])
        rates = [amount / seconds / self._device.count if seconds > 0 else math.nan for amount in amounts]
        peak = self._device.peak_flops or math.nan
        n_done = last.step - records[0].step + 1
        self._n_steps += n_done
        self._seconds_left = (self._last_step - last.step) * (seconds / n_done + self._paused_s / self._n_steps)
        rate_names = ("batches_per_sec", "samples_per_sec", "tokens_per_sec", "flops_per_sec")
        record: dict[str, Any] = {name: getattr(last, name) for name in ("step", "loss", "learning_rate", "grad_norm")}
        has_trained = amounts[0] > 0
        if has_trained:
            record |= dict(zip(rate_names, rates[:4], strict=True)) | {"mfu": rates[3] / peak}
        record |= {"memory_gib": memory_bytes / GIB, "valid_tokens": last.valid_tokens}
        record["elapsed_s"] = now - self._start
        if has_trained:
            record |= {"hfu": rates[4] / peak, "mfu_documents": rates[5] / peak}
        if last.experts is not None:
            record |= {f"expert_{name}": list(values) for name, values in vars(last.experts).items()}
        record |= {f"{part}_s": seconds for part, seconds in times.items()}
        joules = None if self._energy is None else self._energy.energy_joules()
        if joules is not None:
            if self._joules is not None and has_trained:  # the first reading is the baseline
                record["joules_per_token"] = (joules - self._joules) / amounts[2]
            record["energy_kwh"] = joules / JOULES_PER_KWH
        self._joules = joules
        self._write(record)

    def log_validation(self, step: int, name: str, loss_sum: float, tokens: int, text_bytes: int) -> None:
        """Write the validation record of a set.

        Args:
            step: Completed steps.
            name: Name of the set; "" for data.validation.
            loss_sum: Sum of the loss in nats.
            tokens: Positions with a label.
            text_bytes: UTF-8 bytes of the set's text.
        """
        loss = loss_sum / tokens
        record: dict[str, Any] = {"step": step, "val_loss": loss, "val_tokens": tokens}
        record |= {"elapsed_s": self._clock() - self._start, "val_perplexity": math.exp(min(loss, 700.0))}
        if text_bytes:
            record["val_bits_per_byte"] = loss_sum / math.log(2) / text_bytes
        if name:
            record["val_set"] = name
        self._write(record)

    def log_evaluation(self, step: int, result: TaskResult) -> None:
        """Write the record of a task, and its items to evaluation/step-N/TASK.jsonl."""
        if self._run_dir is None:
            return
        path = self._run_dir.path / "evaluation" / f"step-{step:08d}" / f"{result.file_stem}.jsonl"
        path.unlink(missing_ok=True)  # of a start that reached this step before
        with JsonlWriter(path) as items:
            for item in result.items:
                items.write(item)
        record = {"step": step, "eval_task": result.task, "eval_items": result.n_items}
        record |= {"elapsed_s": self._clock() - self._start}
        self._write(record | {f"eval_{name}": value for name, value in result.metrics.items()})

    def log_step_without_labels(self, record: StepRecord) -> None:
        """Log a step that had nothing to predict."""
        self.log_event("step_without_labels", step=record.step)
        self.log_message(f"step {record.step} has no labels: nothing was trained, weights and optimizer are unchanged")

    def log_skipped_step(self, record: StepRecord, count: int) -> None:
        """Log a step that did not change the weights."""
        self.log_event("step_skipped", step=record.step, loss=record.loss, grad_norm=record.grad_norm)
        self.log_message(
            f"step {record.step} was skipped: loss {record.loss:g}, grad_norm {record.grad_norm:g} "
            f"({count} skipped; above fault_tolerance.max_skipped_steps the run rolls back to its newest checkpoint)"
        )

    def log_artifact(self, path: Path) -> None:
        """Log a profiler trace or memory snapshot."""
        self.log_event("artifact", path=str(path))
        self.log_message(f"written: {path}")

    def log_sink_failures(self, errors: Mapping[str, str]) -> None:
        """Log failed sinks; the run continues without them."""
        for name, error in errors.items():
            self.log_message(f"warning: sink {name} failed and is disabled for this start: {error}")
            self.log_event("sink_failed", sink=name, error=error)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._metrics is None:
            return
        line = format_record(record)
        if self._display is None:
            self._on_stdout(print, line)
        else:
            self._on_stdout(self._display.print_record, record, self._seconds_left)
        self._log.write(line)
        self._metrics.write(record)
        if self._sinks is not None:
            node_scalars = self._monitor.scalars() if self._monitor and "loss" in record else {}
            self.log_sink_failures(self._sinks.log(record, node_scalars))

    def _on_display(self, action: Callable[..., None], *arguments: object) -> None:
        """Call a method of the display, if there is one."""
        if self._display is not None:
            self._on_stdout(action, self._display, *arguments)

    def _on_stdout(self, action: Callable[..., None], *arguments: object) -> None:
        """Show something, until standard output is closed: losing the terminal must not end a run."""
        if not self._prints:
            return
        try:
            action(*arguments)
            sys.stdout.flush()
        except OSError as exc:
            self._prints, self._display = False, None
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())  # otherwise the flush at exit fails again
            os.close(null)
            self._log.write(f"# standard output is closed ({exc.strerror}); further messages are written only here")
            self.log_event("stdout_lost", error=exc.strerror)

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._on_display(RunDisplay.stop_moving)
        self.log_sink_failures({} if self._sinks is None else self._sinks.close())
        if self._metrics is not None:
            self._metrics.close()


def check_metrics_options(recipe: Recipe, spec: EngineSpec, world: World) -> None:
    """Check `[metrics]` against the engine's capabilities, the run length and the installed libraries.

    Raises:
        RecipeError: unsupported by the engine, beyond the last step or rank, or a sink's library is not installed.
    """
    options, last = recipe.metrics, recipe.schedule.max_steps
    problems = {
        name: f"the {spec.name} engine does not support this"
        for name, capability in CAPABILITIES.items()
        if capability not in spec.capabilities and getattr(options, name)
    }
    if options.memory_snapshot_step > last:
        problems["memory_snapshot_step"] = f"the run ends before step {options.memory_snapshot_step}"
    if options.profile_steps:
        profile_end = options.profile_start_step + options.profile_steps - 1
        if profile_end > last:
            problems["profile_steps"] = f"the run ends before step {profile_end}"
        if max(options.profile_ranks) >= world.size:
            problems["profile_ranks"] = f"ranks must be between 0 and {world.size - 1}"
    for name, problem in problems.items():
        values = {f"metrics.{name}": getattr(options, name), "schedule.max_steps": last}
        raise RecipeError(problem, values=values, remedy=f"change or remove metrics.{name}")
    check_sinks_installed(options.sinks)
