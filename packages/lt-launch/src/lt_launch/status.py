"""`lt launch status`: a table for people, JSON for programs.

A row is a stage, or what is alike in a large array. States come from the launch's target, training progress from the
run directory, or from the log that a target hands out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lt_ckpt.terminal_text import echo, echo_error, escape_controls
from lt_data.display.progress_bars import format_si
from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline
from lt_launch.launch_dir import list_launch_dirs, load_launch
from lt_launch.policy import read_table
from lt_launch.progress import Progress, parse_progress, read_progress
from lt_launch.target import Launch, StageStatus, get_target

COLUMNS = ("RUN", "ON", "STAGE", "STATE", "AGE", "STEP", "LOSS", "TOKENS/S", "MFU", "ETA", "WHERE")
MAX_ARRAY_ROWS = 12
"""Largest array whose elements are all listed; of a larger one, only those neither completed nor pending."""


def show_status(runs: Sequence[str], *, as_json: bool) -> None:
    """Print the status of launches: those named, else all of this machine.

    Raises:
        LaunchError: there is none; a named one cannot be read.
    """
    found = list(runs) or list(list_launch_dirs())
    if not found:
        raise LaunchError("no launch on this machine yet; start one with lt launch run RUN.toml")
    rows: list[dict[str, Any]] = []
    for run in found:
        try:
            rows += status_rows(run)
        except LaunchError as exc:
            if runs:
                raise
            echo_error(f"# {exc}")
    if as_json:
        sys.stdout.write(json.dumps([_json_row(**row) for row in rows], indent=1) + "\n")
        return
    lines = [COLUMNS, *(_cells(**row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    for line in lines:
        echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for row in rows:
        if row["status"].reason and row["status"].state in ("failed", "lost", "requeued"):
            echo(escape_controls(f"{row['run']} {row['status'].stage}: {row['status'].reason}", keep=""))


def status_rows(run: str | Path) -> list[dict[str, Any]]:
    """Return one row per stage of a launch: run, on, status, progress.

    Raises:
        LaunchError: there is no such launch.
    """
    launch = load_launch(run)
    statuses = _collapse_arrays(launch.pipeline, get_target(launch.target).status(launch))
    name = launch.directory.parent.name
    return [
        {"run": name, "on": launch.target, "status": status, "progress": _stage_progress(launch, status)}
        for status in statuses
    ]


def _stage_progress(launch: Launch, status: StageStatus) -> Progress | None:
    job = next((stage.job for stage in launch.pipeline.stages if stage.name == status.stage), None)
    if job is None or not job.recipe or status.state == "pending":
        return None
    if status.log_tail:
        return parse_progress(status.log_tail, job)
    launched_in = (read_table(launch.directory / "launch.json") or {})["cwd"]
    return read_progress(job, Path(launched_in) / job.cwd / job.run_dir)


def _collapse_arrays(pipeline: Pipeline, statuses: Sequence[StageStatus]) -> Iterator[StageStatus]:
    """Yield completed and pending elements of large arrays as one row per state, before the other elements."""
    array_of = {f"{stage.name}.{index}": stage.name for stage in pipeline.stages for index in range(stage.array)}
    groups: dict[str, list[StageStatus]] = {}
    for status in statuses:
        groups.setdefault(array_of.get(status.stage, status.stage), []).append(status)
    for name, group in groups.items():
        alike = ("completed", "pending") if len(group) > MAX_ARRAY_ROWS else ()
        for state in alike:
            if same := [status for status in group if status.state == state]:
                newest = max(same, key=lambda status: status.since)
                yield dataclasses.replace(newest, stage=f"{name}[{len(same)} of {len(group)}]", nodes=())
        yield from (status for status in group if status.state not in alike)


def _cells(run: str, on: str, status: StageStatus, progress: Progress | None) -> list[str]:
    attempt = f" x{status.attempt + 1}" if status.attempt else ""
    age = _duration(time.time() - status.since) if status.since else ""
    more = f" and {len(status.nodes) - 3} more" if len(status.nodes) > 3 else ""
    where = " ".join(word for word in (status.job_id, ", ".join(status.nodes[:3]) + more) if word)
    step = loss = speed = mfu = eta = ""
    if progress:
        step = f"{progress.step}/{progress.max_steps} {100 * progress.step // progress.max_steps}%"
        loss = _known(progress.loss, f"{progress.loss:.4f}")
        speed = _known(progress.tokens_per_sec, format_si(progress.tokens_per_sec))
        mfu = _known(progress.mfu, f"{100 * progress.mfu:.1f}%")
        eta = _known(progress.eta_s, _duration(progress.eta_s)) if status.state == "running" else ""
    cells = [run, on, status.stage, status.state + attempt, age, step, loss, speed, mfu, eta, where]
    return [escape_controls(cell, keep="") for cell in cells]


def _known(value: float, text: str) -> str:
    return "" if math.isnan(value) else text


def _duration(seconds: float) -> str:
    return "" if math.isnan(seconds) else str(timedelta(seconds=max(0, round(seconds))))


def _json_row(run: str, on: str, status: StageStatus, progress: Progress | None) -> dict[str, Any]:
    values = dataclasses.asdict(status)
    del values["log_tail"]
    known = dataclasses.asdict(progress) if progress else None
    if known:
        known = {name: None if math.isnan(value) else value for name, value in known.items()}
    return {"run": run, "on": on, **values, "progress": known}
