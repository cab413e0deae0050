"""`lt launch status`, `list` and `nodes`: tables for people, JSON for programs.

A row is a stage. States come from the launch's target, training progress from the run directory. A run directory
without a launch is shown as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_ckpt.terminal_text import echo_error
from lt_launch.errors import LaunchError
from lt_launch.launch_dir import find_launch_dir, list_launch_dirs, load_launch
from lt_launch.markup import escape
from lt_launch.policy import read_table
from lt_launch.progress import RUN_DIR_MARKER, Progress, parse_progress, read_progress
from lt_launch.target import Launch, StageStatus, get_target

if TYPE_CHECKING:
    from rich.table import Table

STATE_COLORS = {
    "pending": "yellow",
    "running": "cyan",
    "completed": "green",
    "skipped": "green",
    "failed": "bold red",
    "lost": "bold red",
    "requeued": "magenta",
    "cancelled": "dim",
    "unknown": "dim",
}
NON_TTY_WIDTH = 200
NO_LAUNCHES_MESSAGE = "no launch on this machine yet; start one with lt launch run RUN.toml"
MAX_ARRAY_ROWS = 12
"""Largest array whose elements are all listed; of a larger one, only those neither completed nor pending."""


def show_status(runs: Sequence[str], *, as_json: bool) -> None:
    """Print the status of launches."""
    folders: list[str | Path] = list(runs) or list(list_launch_dirs())
    if not folders:
        raise LaunchError(f"{NO_LAUNCHES_MESSAGE}; or give the folder of a run")
    rows = []
    for folder in folders:
        try:
            rows += status_rows(folder)
        except LaunchError as exc:
            if runs:  # named explicitly
                raise
            echo_error(f"# {exc}")
    if as_json:
        sys.stdout.write(json.dumps([_row_to_dict(row) for row in rows], indent=1) + "\n")
        return
    _print(_status_table(rows, time.time()))
    for row in rows:
        if row["status"].reason and row["status"].state in ("failed", "lost", "requeued"):
            _print_reason(row)


def status_rows(folder: str | Path) -> list[dict[str, Any]]:
    """Return one row per stage of a launch: run, status, progress.

    Raises:
        LaunchError: the folder has neither a launch nor a run.
    """
    path = Path(folder)
    if (path / RUN_DIR_MARKER).exists() and not (path / "launch" / "launch.json").exists():
        return [{"run": path.name, "status": _run_dir_status(path), "progress": read_progress(path), "on": ""}]
    launch = load_launch(find_launch_dir(folder))
    rows = []
    for status in _collapse_arrays(get_target(launch.target).status(launch)):
        progress = _stage_progress(launch, status)
        rows.append({"run": launch.directory.parent.name, "status": status, "progress": progress, "on": launch.target})
    return rows


def _stage_progress(launch: Launch, status: StageStatus) -> Progress | None:
    stages = {stage.name: stage for stage in launch.pipeline.stages}
    stage = stages.get(status.stage)
    if stage is None or not stage.job.is_training or status.state in ("pending", "skipped"):
        return None
    if status.log_tail:
        return parse_progress(status.log_tail, stage.job)
    return read_progress(_run_dir(launch, stage.job.cwd, stage.job.run_dir))


def _run_dir(launch: Launch, cwd: str, run_dir: str) -> Path:
    """Return a job's run directory; a relative one is resolved in the folder the launch was made in."""
    launched_in = (read_table(launch.directory / "launch.json") or {}).get("cwd")
    return Path(launched_in if isinstance(launched_in, str) else "") / cwd / run_dir


def _run_dir_status(path: Path) -> StageStatus:
    """Return the status of a run started without lt-launch."""
    from lt_trainer.errors import RunDirError
    from lt_trainer.run_directory.run_dir import RunDir

    try:
        RunDir.check(path)
        running = False
    except RunDirError:
        running = True
    progress = read_progress(path)
    event = progress.last_event if progress else ""
    state: Any = (
        "running" if running else {"completed": "completed", "stop": "requeued", "start": "lost"}.get(event, "unknown")
    )
    return StageStatus(stage="train", state=state, since=progress.updated_at if progress else 0.0)


def _collapse_arrays(statuses: Sequence[StageStatus]) -> list[StageStatus]:
    """Collapse completed, skipped and pending elements of large arrays into one row per state."""
    groups: dict[str, list[StageStatus]] = {}
    for status in statuses:
        stem, dot, index = status.stage.rpartition(".")
        groups.setdefault(stem if dot and index.isdecimal() else status.stage, []).append(status)
    collapsed: list[StageStatus] = []
    for name, group in groups.items():
        if len(group) <= MAX_ARRAY_ROWS:
            collapsed += group
            continue
        for state in ("completed", "skipped", "pending"):
            same = [status for status in group if status.state == state]
            if same:
                newest = max(status.since for status in same)
                text = f"{name}[{len(same)} of {len(group)}]"
                collapsed.append(dataclasses.replace(same[0], stage=text, since=newest, nodes=()))
        collapsed += [status for status in group if status.state not in ("completed", "skipped", "pending")]
    return collapsed


def _status_table(rows: Iterable[dict[str, Any]], now: float) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("RUN", "ON", "STAGE", "STATE"):
        table.add_column(name, no_wrap=True)
    for name in ("AGE", "STEP", "LOSS", "TOKENS/S", "MFU", "ETA"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("WHERE", overflow="ellipsis", no_wrap=True)
    for row in rows:
        status, progress = row["status"], row["progress"] or Progress()
        attempt = f" x{status.attempt + 1}" if status.attempt else ""
        color = STATE_COLORS[status.state]
        table.add_row(
            escape(row["run"]),
            escape(row["on"]),
            escape(status.stage),
            f"[{color}]{status.state}{attempt}[/]",
            format_duration(now - status.since) if status.since else "",
            _format_step(progress) if row["progress"] else "",
            "" if math.isnan(progress.loss) else f"{progress.loss:.4f}",
            "" if math.isnan(progress.tokens_per_sec) else _format_quantity(progress.tokens_per_sec),
            "" if math.isnan(progress.mfu) else f"{100 * progress.mfu:.1f}%",
            format_duration(progress.eta_s) if status.state == "running" and not math.isnan(progress.eta_s) else "",
            escape(_format_location(status)),
        )
    return table


def _format_step(progress: Progress) -> str:
    if not progress.max_steps:
        return str(progress.step)
    return f"{progress.step}/{progress.max_steps} {100 * progress.step // progress.max_steps:>3}%"


def _format_location(status: StageStatus) -> str:
    hosts = ", ".join(status.nodes[:3]) + (f" and {len(status.nodes) - 3} more" if len(status.nodes) > 3 else "")
    return " ".join(text for text in (status.job_id, hosts) if text)


def _print_reason(row: dict[str, Any]) -> None:
    status = row["status"]
    color = STATE_COLORS[status.state]
    name = row["run"] if status.stage == row["run"] else f"{row['run']} {status.stage}"
    text = escape(f"{name}: {status.reason}")
    _print(f"[{color}]{text}[/]", soft_wrap=True)


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units.

    Example:
        >>> format_duration(59), format_duration(3700), format_duration(100000)
        ('59s', '1h01m', '1d03h')
    """
    rounded = max(0, round(seconds))
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02}s"
    if rounded < 86400:
        return f"{rounded // 3600}h{rounded % 3600 // 60:02}m"
    return f"{rounded // 86400}d{rounded % 86400 // 3600:02}h"


def _format_quantity(value: float) -> str:
    """Format a large number with three digits.

    Example:
        >>> _format_quantity(1234567), _format_quantity(999.6), _format_quantity(12)
        ('1.23M', '1k', '12')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def show_launches() -> None:
    """Print the launches made on this machine, newest last."""
    from rich.table import Table

    directories = list_launch_dirs()
    if not directories:
        echo_error(f"# {NO_LAUNCHES_MESSAGE}")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("RUN", "ON", "STATE", "CREATED", "JOBS", "FOLDER"):
        table.add_column(name, no_wrap=True)
    for directory in directories:
        try:
            launch = load_launch(directory)
            state = overall_state([status.state for status in get_target(launch.target).status(launch)])
        except LaunchError as exc:
            echo_error(f"# {exc}")
            continue
        created_at = (read_table(directory / "launch.json") or {}).get("created_at")
        age = f"{format_duration(time.time() - created_at)} ago" if created_at else ""
        color = STATE_COLORS[state]
        table.add_row(
            escape(directory.parent.name),
            escape(launch.target),
            f"[{color}]{state}[/]",
            age,
            escape(" ".join(launch.job_ids.values())),
            escape(str(directory.parent)),
        )
    _print(table)


def overall_state(states: Sequence[str]) -> str:
    """Return one state for all stages: the worst failure, else an active state, else completed."""
    for state in ("failed", "lost", "running", "requeued", "cancelled", "pending", "unknown"):
        if state in states:
            return state
    return "completed"


def show_target_jobs(on: str, profile: Path | None) -> None:
    """Print this user's jobs on a target."""
    from lt_launch.profile import load_profile

    rows = [
        {"run": "", "status": status, "progress": None, "on": on}
        for status in get_target(on).list(load_profile(profile))
    ]
    _print(_status_table(rows, time.time()))


def show_nodes(on: str, profile: Path | None, hostfile: Path | None) -> None:
    """Print the machines of a target."""
    from rich.table import Table

    from lt_launch.profile import load_profile

    full_profile = load_profile(profile).with_hostfile(hostfile)
    table = Table(box=None, pad_edge=False, header_style="bold")
    found_nodes = list(get_target(on).nodes(full_profile))
    filled = {
        "PARTITION": any(node.partition for node in found_nodes),
        "REASON": any(node.reason for node in found_nodes),
    }
    for name in ("NODE", "PARTITION", "STATE", "DEVICES", "REASON"):
        if filled.get(name, True):
            table.add_column(name, no_wrap=name != "REASON")
    for node in found_nodes:
        is_down = any(word in node.state.lower() for word in ("down", "drain", "unreachable", "fail"))
        is_free = node.state.lower().startswith(("idle", "up", "here"))
        color = "red" if is_down else "green" if is_free else "cyan"
        cells = {
            "NODE": escape(node.name),
            "PARTITION": escape(node.partition),
            "STATE": f"[{color}]{escape(node.state)}[/]",
            "DEVICES": escape(node.devices),
            "REASON": escape(node.reason),
        }
        table.add_row(*(text for name, text in cells.items() if filled.get(name, True)))
    _print(table)


def _print(content: Any, *, soft_wrap: bool = False) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=NON_TTY_WIDTH)
    console.print(content, soft_wrap=soft_wrap)


def _row_to_dict(row: dict[str, Any]) -> dict[str, Any]:
    progress = dataclasses.asdict(row["progress"]) if row["progress"] else None
    if progress:
        progress = {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in progress.items()}
    status = dataclasses.asdict(row["status"])
    status.pop("log_tail")
    return {"run": row["run"], "on": row["on"], **status, "progress": progress}
