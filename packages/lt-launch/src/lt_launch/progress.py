"""Progress of a running training job, read from its run directory or from the output of rank 0.

Step, loss, speed, remaining time. Cost: the last 64 KiB of two files, or the given lines.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_launch.job import Job

TAIL_BYTES = 1 << 16
METRIC_PATTERN = re.compile(r"(?:^|\s)(step|loss|tokens_per_sec|mfu)=(\S+)")
"""One field of a metrics line as `lt_trainer.run_directory.jsonl.format_record` writes it."""
STEP_PATTERN = re.compile(r"[0-9]{1,18}")
RUN_DIR_MARKER = ".lt-run"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a training run."""

    step: int = 0
    max_steps: int = 0
    loss: float = math.nan
    tokens_per_sec: float = math.nan
    """Throughput of the whole run over its last records."""
    mfu: float = math.nan
    eta_s: float = math.nan
    """Remaining time at that speed; nan if unknown."""
    updated_at: float = 0.0
    """Time of the last record, in seconds since 1970."""
    last_event: str = ""
    """start, stop or completed: the last event of rank 0."""


def read_progress(run_dir: str | Path) -> Progress | None:
    """Read the progress of a run directory; None if it has no run."""
    folder = Path(run_dir)
    if not (folder / RUN_DIR_MARKER).exists():
        return None
    events = [
        row for row in _read_jsonl_tail(folder / "events.jsonl") if row.get("event") in ("start", "stop", "completed")
    ]
    rows = _read_jsonl_tail(folder / "metrics.jsonl")
    metrics = [row for row in rows if "loss" in row]
    run_size = _read_run_size(folder)
    last_event = str(events[-1]["event"]) if events else ""
    if not metrics:
        return Progress(max_steps=run_size[0], last_event=last_event)
    last = metrics[-1]
    starts = [row for row in events if row["event"] == "start"]
    devices = starts[-1].get("world", 1) if starts else 1
    speed = _to_float(last.get("tokens_per_sec")) * devices
    remaining_tokens = (run_size[0] - last["step"]) * run_size[1]
    return Progress(
        step=last["step"],
        max_steps=run_size[0],
        loss=_to_float(last["loss"]),
        tokens_per_sec=speed,
        mfu=_to_float(last.get("mfu")),
        eta_s=_remaining_s(remaining_tokens, speed) if last_event == "start" else math.nan,
        updated_at=(folder / "metrics.jsonl").stat().st_mtime,
        last_event=last_event,
    )


def parse_progress(lines: Sequence[str], job: Job) -> Progress | None:
    """Parse the progress from the last metrics printed by rank 0; None if there are none.

    Args:
        lines: output lines, newest last.
        job: the job with its resolved recipe.
    """
    recipe = tomllib.loads(job.recipe)
    steps = recipe["schedule"]["max_steps"]
    for text in reversed(lines):
        metrics = dict(METRIC_PATTERN.findall(text))
        if metrics.keys() >= {"step", "loss"} and STEP_PATTERN.fullmatch(metrics["step"]):
            speed = _to_float(metrics.get("tokens_per_sec")) * job.world_size
            remaining_tokens = (
                (steps - int(metrics["step"])) * recipe["batch"]["global_batch_size"] * recipe["data"]["seq_len"]
            )
            return Progress(
                step=int(metrics["step"]),
                max_steps=steps,
                loss=_to_float(metrics["loss"]),
                tokens_per_sec=speed,
                mfu=_to_float(metrics.get("mfu")),
                eta_s=_remaining_s(remaining_tokens, speed),
            )
    return None


def _read_run_size(folder: Path) -> tuple[int, int]:
    """Return the run's number of steps and its tokens per step."""
    try:
        recipe = json.loads((folder / "recipe.json").read_bytes())["recipe"]
        sizes = recipe["schedule"]["max_steps"], recipe["batch"]["global_batch_size"], recipe["data"]["seq_len"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0
    return sizes[0], sizes[1] * sizes[2]


def _remaining_s(tokens: int, speed: float) -> float:
    """Return the remaining time; nan if the speed tells none."""
    return tokens / speed if speed > 0 else math.nan


def _to_float(value: Any) -> float:
    """Return a number of a metrics record; non-finite numbers are stored as text."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _read_jsonl_tail(path: Path) -> list[Mapping[str, Any]]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    rows = data.split(b"\n")[1 if size > TAIL_BYTES else 0 : -1]
    records = []
    for row in rows:
        try:
            values = json.loads(row)
        except ValueError:
            continue
        if isinstance(values, dict):
            records.append(values)
    return records
