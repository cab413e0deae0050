"""What a run directory of lt-trainer, or what rank 0 writes, tells about a run that goes on; reads, never writes.

Step, loss, speed, time left. Cost: the last 64 KiB of two files, or the lines that are given.
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

__all__ = ["Progress", "progress", "progress_of_lines"]

TAIL = 1 << 16
PAIR = re.compile(r"(?:^|\s)(step|loss|tokens_per_sec|mfu)=(\S+)")
"""Of a line of metrics as `lt_trainer.records.line` writes it."""
MARKER = ".lt-run"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a training run stands."""

    step: int = 0
    steps: int = 0
    loss: float = math.nan
    tokens_per_sec: float = math.nan
    """Of the whole run, over its last records."""
    mfu: float = math.nan
    eta_s: float = math.nan
    """At that speed; nan where it is not known."""
    updated: float = 0.0
    """When the last record was written, in seconds since 1970."""
    last_event: str = ""
    """start, stop or done: what rank 0 noted last."""


def progress(run_dir: str | Path) -> Progress | None:
    """Where the run of a run directory stands; None where there is no run."""
    folder = Path(run_dir)
    if not (folder / MARKER).exists():
        return None
    events = [row for row in _tail(folder / "events.jsonl") if row.get("event") in ("start", "stop", "done")]
    metrics = [row for row in _tail(folder / "metrics.jsonl") if "loss" in row]
    sizes = _sizes(folder)
    last_event = str(events[-1]["event"]) if events else ""
    if not metrics:
        return Progress(steps=sizes[0], last_event=last_event)
    last = metrics[-1]
    starts = [row for row in events if row["event"] == "start"]
    devices = int(starts[-1].get("world", 1)) if starts else 1
    speed = _number(last.get("tokens_per_sec")) * devices
    left = (sizes[0] - int(last["step"])) * sizes[1]
    return Progress(
        step=int(last["step"]),
        steps=sizes[0],
        loss=_number(last["loss"]),
        tokens_per_sec=speed,
        mfu=_number(last.get("mfu")),
        eta_s=left / speed if speed > 0 and last_event == "start" else math.nan,
        updated=(folder / "metrics.jsonl").stat().st_mtime,
        last_event=last_event,
    )


def progress_of_lines(lines: Sequence[str], job: Job) -> Progress | None:
    """Where a run stands by the last metrics that rank 0 has shown; None where it has shown none.

    Args:
        lines: the newest last.
        job: with its resolved recipe.
    """
    recipe = tomllib.loads(job.recipe)
    steps = recipe["schedule"]["max_steps"]
    for text in reversed(lines):
        found = dict(PAIR.findall(text))
        if found.keys() >= {"step", "loss"}:
            speed = _number(found.get("tokens_per_sec")) * job.world
            left = (steps - int(found["step"])) * recipe["batch"]["global_batch"] * recipe["data"]["seq_len"]
            return Progress(
                step=int(found["step"]),
                steps=steps,
                loss=_number(found["loss"]),
                tokens_per_sec=speed,
                mfu=_number(found.get("mfu")),
                eta_s=left / speed if speed > 0 else math.nan,
            )
    return None


def _sizes(folder: Path) -> tuple[int, int]:
    """Steps of the run and tokens of a step."""
    try:
        recipe = json.loads((folder / "recipe.json").read_bytes())["recipe"]
        return recipe["schedule"]["max_steps"], recipe["batch"]["global_batch"] * recipe["data"]["seq_len"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0


def _number(value: Any) -> float:
    """A number of a metrics record; those that are not finite are written as text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _tail(path: Path) -> list[Mapping[str, Any]]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            data = file.read()
    except OSError:
        return []
    rows = data.split(b"\n")[1 if size > TAIL else 0 : -1]
    found = []
    for row in rows:
        try:
            values = json.loads(row)
        except ValueError:
            continue
        if isinstance(values, dict):
            found.append(values)
    return found
