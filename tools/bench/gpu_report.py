"""Report of gpu.py and gpus.py: one JSON, written after every result, and continued by the next run.

A run works through its tasks in order and starts none that the remaining time may not suffice for. Results are written
through a rename, so that a run may end anywhere; they are continued only with the same torch on the same device, since
figures of two versions must not share a file. A crash or a timeout is a result as well: `retry` repeats it.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_processes import ROOT, Budget, log

FORMAT = 2
PACKAGES = ("lt-model", "lt-data", "lt-ckpt", "lt-trainer", "lt-trainer-gpu")
REMAINS_EXIT_CODE = 3
"""Exit code of a run that has left something for the next one."""
START_S = 80.0
"""Seconds of a run that may pass before its first task."""
SAME_MACHINE = ("torch", "cuda", "device", "devices")


@dataclass(frozen=True, kw_only=True)
class Task:
    """Unit of work with one result.

    Attributes:
        stage: name of its stage.
        name: name of its row, unique in the stage.
        limit_s: most seconds that it takes; it does not start with less time left.
        run: takes these seconds, returns the row with its `status`.
    """

    stage: str
    name: str
    limit_s: float
    run: Callable[[float], dict[str, Any]]


class Report:
    """Report of one benchmark on one machine; continues the file if there is one.

    Args:
        path: file; None keeps nothing.
        head: values of a new report, among them `benchmark`.
        machine: facts of the machine.

    Raises:
        SystemExit: the file is of another benchmark, torch or device.
    """

    def __init__(self, path: Path | None, head: dict[str, Any], machine: dict[str, Any]) -> None:
        self._path = path
        self.content = {"format": FORMAT, "date": _now(), **head, "machine": machine, "complete": False, "rows": []}
        if path is not None and path.exists():
            self.content = _checked(path, json.loads(path.read_text()), head["benchmark"], machine)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Results so far."""
        return self.content["rows"]

    def find(self, stage: str, name: str) -> dict[str, Any] | None:
        """Return the row of a task, or None."""
        return next((row for row in self.rows if (row["stage"], row["case"]) == (stage, name)), None)

    def forget_failures(self) -> None:
        """Forget crashes and timeouts, so that they are run again."""
        self.content["rows"] = [row for row in self.rows if row["status"] not in ("crashed", "timed_out")]

    def add(self, task: Task, row: dict[str, Any]) -> None:
        """Add the result of a task; write the file."""
        self.rows.append({"stage": task.stage, "case": task.name, "date": _now(), **row})
        self.write()

    def write(self) -> None:
        """Write the file, if one is named, so that there is always a whole one."""
        if self._path is not None:
            new = self._path.with_name(self._path.name + ".new")
            new.write_text(json.dumps(self.content, indent=1) + "\n")
            new.replace(self._path)


def run_tasks(report: Report, tasks: Sequence[Task], budget: Budget) -> list[str]:
    """Run the tasks that have no result yet while there is time; return the names of those that remain."""
    remaining = []
    for task in tasks:
        if report.find(task.stage, task.name):
            continue
        left_s, name = budget.remaining_s(), f"{task.stage}: {task.name}"
        if left_s < task.limit_s:
            log(f"{name} waits for the next run: {left_s:.0f} s are left, it may take {task.limit_s:.0f} s")
            remaining.append(name)
            continue
        log(f"{name} starts, at most {task.limit_s:.0f} s")
        report.add(task, task.run(task.limit_s))
        log(f"{name}: {report.rows[-1]['status']}")
    return remaining


def limit_of_tries(one_s: float, tries: int, run_s: float) -> float:
    """Return the most seconds of a task with several tries: those of all if a whole run has them, at least of one."""
    return max(one_s, min(one_s * tries, run_s - START_S))


def software_versions(commit: str | None) -> dict[str, Any]:
    """Return versions of interpreter and packages, and the commit."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = done.stdout.strip() if done.returncode == 0 else ""
    except FileNotFoundError:
        found = ""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "commit": commit or found or None,
    }


def describe_machine(machine: dict[str, Any]) -> str:
    """Return torch, CUDA, driver and GPU in a line, as every figure names them."""
    devices = f" x {machine['devices']}" if machine.get("devices", 1) > 1 else ""
    parts = [f"torch {machine['torch']}"]
    parts += [f"{name} {machine[key]}" for name, key in (("CUDA", "cuda"), ("driver", "driver")) if machine.get(key)]
    return ", ".join([*parts, f"{machine['device']}{devices}"])


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _checked(path: Path, found: dict[str, Any], benchmark: str, machine: dict[str, Any]) -> dict[str, Any]:
    """Return a report that may be continued here."""
    if found.get("benchmark") != benchmark or found.get("format") != FORMAT:
        raise SystemExit(f"--out {path}: not a report of this version of {benchmark}; name another file")
    changed = {
        name: (found["machine"].get(name), machine.get(name))
        for name in SAME_MACHINE
        if found["machine"].get(name) != machine.get(name)
    }
    if changed:
        raise SystemExit(f"--out {path}: measured elsewhere, {changed} (then, now); name another file")
    return found
