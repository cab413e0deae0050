"""Progress of a training job: the last metrics in its run directory, or those that rank 0 has printed.

Cost: the last 64 KiB of metrics.jsonl, or the given lines.
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


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a training run; what is unknown is nan."""

    step: int
    max_steps: int
    loss: float
    tokens_per_sec: float
    """Of all devices."""
    mfu: float
    eta_s: float
    """Remaining time at that speed."""


def read_progress(job: Job, run_dir: Path) -> Progress | None:
    """Return the progress that a run directory tells; None before the first step."""
    try:
        with open(run_dir / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:  # the first of the tail begins in the middle
            continue
        if isinstance(row, dict) and "loss" in row:
            return _progress(job, row)
    return None


def parse_progress(lines: Sequence[str], job: Job) -> Progress | None:
    """Return the progress by the last metrics in lines of rank 0's output, newest last; None without any."""
    for text in reversed(lines):
        row = dict(METRIC_PATTERN.findall(text))
        if row.keys() >= {"step", "loss"} and re.fullmatch("[0-9]{1,18}", row["step"]):
            return _progress(job, row)
    return None


def _progress(job: Job, row: Mapping[str, Any]) -> Progress:
    recipe = tomllib.loads(job.recipe)
    steps, step = recipe["schedule"]["max_steps"], int(row["step"])
    speed = _number(row.get("tokens_per_sec")) * job.world_size
    tokens = (steps - step) * recipe["batch"]["global_batch_size"] * recipe["data"]["seq_len"]
    return Progress(
        step=step,
        max_steps=steps,
        loss=_number(row["loss"]),
        tokens_per_sec=speed,
        mfu=_number(row.get("mfu")),
        eta_s=tokens / speed if speed > 0 else math.nan,
    )


def _number(value: Any) -> float:
    """Return a number of a metrics record; non-finite numbers are stored as text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
