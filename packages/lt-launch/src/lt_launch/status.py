"""`lt launch status`, `list` and `nodes`: tables for people, JSON for programs.

A row is a stage. States come from the launch's target, what training says of itself from its run directory. A folder
that is a run directory without a launch is shown as well.
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

from lt_launch.backend import Launch, StageStatus, backend
from lt_launch.errors import LaunchError
from lt_launch.record import find, known, open_launch
from lt_launch.training import MARKER, Progress, progress, progress_of_lines

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["duration", "list_known", "list_target", "rows_of", "show", "show_nodes"]

COLOURS = {
    "waiting": "yellow",
    "running": "cyan",
    "done": "green",
    "skipped": "green",
    "failed": "bold red",
    "lost": "bold red",
    "requeued": "magenta",
    "cancelled": "dim",
    "unknown": "dim",
}
PLAIN_WIDTH = 200
NONE_MADE = "no launch was made on this machine yet; lt launch run RUN.toml makes one"
MOST_ROWS = 12
"""Elements of an array that are listed one by one; of a larger one those that are neither done nor waiting."""


def show(runs: Sequence[str], *, as_json: bool) -> None:
    """Print how launches stand."""
    folders: list[str | Path] = list(runs) or list(known())
    if not folders:
        raise LaunchError(f"{NONE_MADE}; or give the folder of a run")
    rows = []
    for folder in folders:
        try:
            rows += rows_of(folder)
        except LaunchError as exc:
            if runs:  # that one was asked for
                raise
            sys.stderr.write(f"# {exc}\n")
    if as_json:
        sys.stdout.write(json.dumps([_plain(row) for row in rows], indent=1) + "\n")
        return
    _print(_table(rows, time.time()))
    for row in rows:
        if row["status"].reason and row["status"].state in ("failed", "lost", "requeued"):
            _note(row)


def rows_of(folder: str | Path) -> list[dict[str, Any]]:
    """One row for each stage of a launch: run, status, progress.

    Raises:
        LaunchError: the folder holds neither a launch nor a run.
    """
    path = Path(folder)
    if (path / MARKER).exists() and not (path / "launch" / "launch.json").exists():
        return [{"run": path.name, "status": _bare(path), "progress": progress(path), "on": ""}]
    launch = open_launch(find(folder))
    rows = []
    for status in _brief(backend(launch.backend).status(launch)):
        trained = _progress(launch, status)
        rows.append({"run": launch.directory.parent.name, "status": status, "progress": trained, "on": launch.backend})
    return rows


def _progress(launch: Launch, status: StageStatus) -> Progress | None:
    stages = {stage.name: stage for stage in launch.pipeline.stages}
    stage = stages.get(status.stage)
    if stage is None or not stage.job.trains or status.state in ("waiting", "skipped"):
        return None
    if status.said:
        return progress_of_lines(status.said, stage.job)
    return progress(_run_dir(launch, stage.job.cwd, stage.job.run_dir))


def _run_dir(launch: Launch, cwd: str, run_dir: str) -> Path:
    """Where a job's run directory is; a relative one counts from the folder in which the launch was made."""
    made = json.loads((launch.directory / "launch.json").read_bytes())
    return Path(made["cwd"]) / cwd / run_dir


def _bare(path: Path) -> StageStatus:
    """The state of a run that was started without lt-launch."""
    from lt_trainer.errors import RunDirError
    from lt_trainer.rundir import RunDir

    try:
        RunDir.look(path)
        running = False
    except RunDirError:
        running = True
    found = progress(path)
    event = found.last_event if found else ""
    state: Any = "running" if running else {"done": "done", "stop": "requeued", "start": "lost"}.get(event, "unknown")
    return StageStatus(stage="train", state=state, since=found.updated if found else 0.0)


def _brief(statuses: Sequence[StageStatus]) -> list[StageStatus]:
    """Large arrays as one row for each state that says little, and the others one by one."""
    groups: dict[str, list[StageStatus]] = {}
    for status in statuses:
        stem, dot, index = status.stage.rpartition(".")
        groups.setdefault(stem if dot and index.isdecimal() else status.stage, []).append(status)
    found: list[StageStatus] = []
    for name, group in groups.items():
        if len(group) <= MOST_ROWS:
            found += group
            continue
        for state in ("done", "skipped", "waiting"):
            same = [status for status in group if status.state == state]
            if same:
                newest = max(status.since for status in same)
                text = f"{name}[{len(same)} of {len(group)}]"
                found.append(dataclasses.replace(same[0], stage=text, since=newest, nodes=()))
        found += [status for status in group if status.state not in ("done", "skipped", "waiting")]
    return found


def _table(rows: Iterable[dict[str, Any]], now: float) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("RUN", "ON", "STAGE", "STATE"):
        table.add_column(name, no_wrap=True)
    for name in ("AGE", "STEP", "LOSS", "TOKENS/S", "MFU", "ETA"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("WHERE", overflow="ellipsis", no_wrap=True)
    for row in rows:
        status, trained = row["status"], row["progress"] or Progress()
        attempt = f" x{status.attempt + 1}" if status.attempt else ""
        colour = COLOURS[status.state]
        table.add_row(
            escape(row["run"]),
            row["on"],
            escape(status.stage),
            f"[{colour}]{status.state}{attempt}[/]",
            duration(now - status.since) if status.since else "",
            _step(trained) if row["progress"] else "",
            "" if math.isnan(trained.loss) else f"{trained.loss:.4f}",
            "" if math.isnan(trained.tokens_per_sec) else _amount(trained.tokens_per_sec),
            "" if math.isnan(trained.mfu) else f"{100 * trained.mfu:.1f}%",
            duration(trained.eta_s) if status.state == "running" and not math.isnan(trained.eta_s) else "",
            escape(_where(status)),
        )
    return table


def _step(trained: Progress) -> str:
    if not trained.steps:
        return str(trained.step)
    return f"{trained.step}/{trained.steps} {100 * trained.step // trained.steps:>3}%"


def _where(status: StageStatus) -> str:
    hosts = ", ".join(status.nodes[:3]) + (f" and {len(status.nodes) - 3} more" if len(status.nodes) > 3 else "")
    return " ".join(text for text in (status.id, hosts) if text)


def _note(row: dict[str, Any]) -> None:
    from rich.markup import escape

    status = row["status"]
    colour = COLOURS[status.state]
    name = row["run"] if status.stage == row["run"] else f"{row['run']} {status.stage}"
    text = escape(f"{name}: {status.reason}")
    _print(f"[{colour}]{text}[/]", soft_wrap=True)


def duration(seconds: float) -> str:
    """A span of time in its two largest units.

    Example:
        >>> duration(59), duration(3700), duration(100000)
        ('59s', '1h01m', '1d03h')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def _amount(value: float) -> str:
    """A large number in three digits.

    Example:
        >>> _amount(1234567), _amount(999.6), _amount(12)
        ('1.23M', '1k', '12')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def list_known() -> None:
    """The launches that were made on this machine, newest last."""
    from rich.markup import escape
    from rich.table import Table

    directories = known()
    if not directories:
        sys.stderr.write(f"# {NONE_MADE}\n")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("RUN", "ON", "STATE", "MADE", "FOLDER"):
        table.add_column(name, no_wrap=True)
    for directory in directories:
        try:
            launch = open_launch(directory)
        except LaunchError as exc:
            sys.stderr.write(f"# {exc}\n")
            continue
        values = json.loads((directory / "launch.json").read_bytes())
        state = overall([status.state for status in backend(launch.backend).status(launch)])
        age = duration(time.time() - values["made"])
        colour = COLOURS[state]
        table.add_row(
            escape(directory.parent.name),
            launch.backend,
            f"[{colour}]{state}[/]",
            f"{age} ago",
            escape(str(directory.parent)),
        )
    _print(table)


def overall(states: Sequence[str]) -> str:
    """One state for all stages: the worst that needs a person, else what goes on, else done."""
    for state in ("failed", "lost", "running", "requeued", "cancelled", "waiting", "unknown"):
        if state in states:
            return state
    return "done"


def list_target(on: str, profile: Path | None) -> None:
    """What a target knows of this person's jobs."""
    from lt_launch.profile import load_profile

    rows = [
        {"run": "", "status": status, "progress": None, "on": on} for status in backend(on).list(load_profile(profile))
    ]
    _print(_table(rows, time.time()))


def show_nodes(on: str, profile: Path | None, hostfile: Path | None) -> None:
    """The machines of a target."""
    from rich.markup import escape
    from rich.table import Table

    from lt_launch.profile import load_profile

    mine = load_profile(profile).with_hostfile(hostfile)
    table = Table(box=None, pad_edge=False, header_style="bold")
    found = list(backend(on).nodes(mine))
    filled = {"PARTITION": any(node.partition for node in found), "REASON": any(node.reason for node in found)}
    for name in ("NODE", "PARTITION", "STATE", "DEVICES", "REASON"):
        if filled.get(name, True):
            table.add_column(name, no_wrap=name != "REASON")
    for node in found:
        bad = any(word in node.state.lower() for word in ("down", "drain", "unreachable", "fail"))
        free = node.state.lower().startswith(("idle", "up", "here"))
        colour = "red" if bad else "green" if free else "cyan"
        cells = {
            "NODE": escape(node.name),
            "PARTITION": escape(node.partition),
            "STATE": f"[{colour}]{escape(node.state)}[/]",
            "DEVICES": escape(node.devices),
            "REASON": escape(node.reason),
        }
        table.add_row(*(text for name, text in cells.items() if filled.get(name, True)))
    _print(table)


def _print(what: Any, *, soft_wrap: bool = False) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    console.print(what, soft_wrap=soft_wrap)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    trained = dataclasses.asdict(row["progress"]) if row["progress"] else None
    if trained:
        trained = {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in trained.items()}
    status = dataclasses.asdict(row["status"])
    status.pop("said")
    return {"run": row["run"], "on": row["on"], **status, "progress": trained}
