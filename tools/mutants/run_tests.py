"""Run tests in a sandbox until one fails, or hangs, or the time is up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox import TOOL, Sandbox
from selection import CoveringTest

LIMIT_S = 60.0
HANG_S = 20.0
"""A test hangs that takes this much and ten times its duration."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first test that failed, and how."""

    test: str
    message: str
    hangs: bool = False


def run_tests(box: Sandbox, tests: Sequence[CoveringTest], limit_s: float = LIMIT_S) -> Failure | None:
    """Run tests in a sandbox; return the first failure, or None if there is none within the limit."""
    if not tests:
        return None
    with tempfile.TemporaryDirectory(prefix="lt-mutants-run-", ignore_cleanup_errors=True) as folder:
        selection, events = Path(folder) / "selection", Path(folder) / "events"
        selection.write_text("\n".join(test.name for test in tests))
        events.touch()
        files = list(dict.fromkeys(test.file for test in tests))
        command, environment = box.pytest(["-x", "-p", "pytest_selected", f"--basetemp={folder}/t", *files])
        variables = {"MUTANTS_SELECTION": str(selection), "MUTANTS_EVENTS": str(events), "PYTHONPATH": str(TOOL)}
        with (Path(folder) / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=box.root,
                env={**environment, **variables},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                return watch(process, events, {test.name: test.seconds_alone for test in tests}, limit_s)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kill_descendants(f"MUTANTS_EVENTS={events}")


def kill_descendants(variable: str) -> None:
    """Kill what a run has left in sessions of its own, such as daemons that a test had started: by a variable of it."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def watch(process: subprocess.Popen[bytes], path: Path, seconds: Mapping[str, float], limit_s: float) -> Failure | None:
    """Wait for a run of pytest; return what failed, or hangs.

    A test that is running when the time is up has half of it again to prove that it hangs.
    """
    start = time.monotonic()
    while True:
        has_ended = process.poll() is not None
        events = read_events(path)
        for event in events:
            if event["event"] == "failed":
                return Failure(test=event["test"], message=event["message"])
        running = events[-1] if events and events[-1]["event"] == "starts" else None
        if has_ended:
            if process.returncode == 0:
                return None
            name = running["test"] if running else "pytest"
            return Failure(test=name, message=f"pytest ended with {process.returncode}")
        age = time.monotonic() - start
        if running and age > limit_s:
            duration = time.time() - running["time"]
            if duration > HANG_S + 10 * seconds.get(running["test"], 0.0):
                message = f"hangs: still running after {duration:.0f} s"
                return Failure(test=running["test"], message=message, hangs=True)
        if age > 1.5 * limit_s or (age > limit_s and not running):
            return None
        time.sleep(0.1)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events so far; a line that is being written is left for later."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
