"""Runs of gpu.py and gpus.py: tasks within a time budget, each in processes of its own, and the report they continue.

A run works through its tasks in order and starts none that the rest of its time may not suffice for. The report is one
JSON, written through a rename after every result and continued by the next run, only with the same torch on the same
device. A crash, too little memory or a timeout is a result as well. What hangs is interrupted, then killed with its
process group; torchrun is asked to end instead, since its ranks have sessions that only it knows.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lt_trainer.tuning.probe import OUT_OF_MEMORY

ROOT = Path(__file__).resolve().parents[2]
FORMAT = 3
PACKAGES = ("lt-model", "lt-data", "lt-ckpt", "lt-trainer", "lt-trainer-gpu")
REMAINS_EXIT_CODE = 3
"""Exit code of a run that has left something for the next one."""
START_S, RESERVE_S = 80.0, 5.0
"""Seconds of a run that may pass before its first task, and that are kept for writing the report."""
INTERRUPT_S, KILL_S, TORCHRUN_SHUTDOWN_S = 15.0, 30.0, 5
"""Seconds until an interrupted command is killed, until a killed one is left, and of torchrun for its ranks."""
KEPT_CHARACTERS = 3000
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

    Raises:
        SystemExit: the file is of another benchmark, torch or device.
    """

    def __init__(self, path: Path | None, head: dict[str, Any], machine: dict[str, Any]) -> None:
        self._path = path
        self.content = {"format": FORMAT, **head, "machine": machine, "complete": False, "rows": []}
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            if (found.get("benchmark"), found.get("format")) != (head["benchmark"], FORMAT):
                raise SystemExit(f"--out {path}: not a report of this version of {head['benchmark']}; name another")
            now, then = ({name: facts.get(name) for name in SAME_MACHINE} for facts in (machine, found["machine"]))
            if now != then:
                raise SystemExit(f"--out {path}: measured elsewhere, on {then}, not on {now}; name another file")
            self.content = found

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Results so far."""
        return self.content["rows"]

    def find(self, stage: str, name: str) -> dict[str, Any] | None:
        """Return the row of a task, or None."""
        return next((row for row in self.rows if (row["stage"], row["case"]) == (stage, name)), None)

    def run(self, tasks: Sequence[Task], limit_s: float, *, retry: bool = False) -> list[str]:
        """Run the tasks without a result while there is time; return the names of those that remain.

        Args:
            tasks: What is to be done, in this order.
            limit_s: Seconds of this run, counted from here.
            retry: Forget crashes and timeouts first, so that they run again.
        """
        if retry:
            self.content["rows"] = [row for row in self.rows if row["status"] not in ("crashed", "timed_out")]
        end, remaining = time.monotonic() + limit_s - RESERVE_S, []
        for task in tasks:
            if self.find(task.stage, task.name):
                continue
            name, left_s = f"{task.stage}: {task.name}", end - time.monotonic()
            if left_s < task.limit_s:
                log(f"{name} waits for the next run: {left_s:.0f} s are left, it may take {task.limit_s:.0f} s")
                remaining.append(name)
                continue
            log(f"{name} starts, at most {task.limit_s:.0f} s")
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            self.rows.append({"stage": task.stage, "case": task.name, "date": date, **task.run(task.limit_s)})
            self.write()
            log(f"{name}: {self.rows[-1]['status']}")
        return remaining

    def write(self) -> None:
        """Write the file, if one is named, so that there is always a whole one."""
        if self._path is not None:
            new = self._path.with_name(self._path.name + ".new")
            new.write_text(json.dumps(self.content, indent=1) + "\n")
            new.replace(self._path)


def limit_of_tries(one_s: float, tries: int, run_s: float) -> float:
    """Return the most seconds of a task with several tries: those of all if a whole run has them, at least of one."""
    return max(one_s, min(one_s * tries, run_s - START_S))


def software_versions(commit: str | None) -> dict[str, Any]:
    """Return versions of the packages, and the commit."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    with suppress(FileNotFoundError):
        commit = commit or subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {name: version(name) for name in PACKAGES} | {"commit": commit or None}


def describe_machine(machine: dict[str, Any]) -> str:
    """Return torch, CUDA, driver and GPU in a line, as every figure names them."""
    parts = [f"{name} {machine[name]}" for name in ("torch", "cuda", "driver") if machine.get(name)]
    return ", ".join([*parts, f"{machine['devices']} x {machine['device']}"])


def log(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def exit_on_sigterm() -> None:
    """Make SIGTERM an exception, so that it ends the running command too."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)


def run_with_timeout(command: list[str], limit_s: float, *, is_torchrun: bool = False) -> tuple[int | None, str]:
    """Run a command; return its exit code, or None after a timeout, and the end of its output."""
    shutdown = dict.fromkeys(("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"), str(TORCHRUN_SHUTDOWN_S))
    env = {"OMP_NUM_THREADS": "1"} | os.environ | shutdown
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, process_group=0)
        try:
            code: int | None = process.wait(timeout=max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            terminate(process, is_torchrun=is_torchrun)
        output.seek(0)
        return code, output.read().decode(errors="replace")[-200_000:]


def terminate(process: subprocess.Popen[bytes], *, is_torchrun: bool = False) -> None:
    """End a process and its group; does nothing if they have ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if is_torchrun:
                process.terminate()
            else:
                os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=INTERRUPT_S + is_torchrun * TORCHRUN_SHUTDOWN_S)
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=KILL_S)


def run_for_result(
    script: str, spec: dict[str, Any], folder: Path, limit_s: float, *, ranks: int = 0
) -> dict[str, Any]:
    """Run a script of this folder that reads spec.json and writes result.json in `folder`, its argument.

    Args:
        script: Name of the file.
        spec: What it reads.
        folder: Of the two files.
        limit_s: Most seconds.
        ranks: Run it under torchrun on that many ranks; 0 for one process without.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *torchrun, str(Path(__file__).with_name(script)), str(folder)]
    (folder / "spec.json").write_text(json.dumps(spec | {"limit_s": limit_s}))
    begin = time.monotonic()
    code, output = run_with_timeout(command, limit_s, is_torchrun=ranks > 0)
    seconds = {"seconds": time.monotonic() - begin}
    result = folder / "result.json"
    if code == 0 and result.exists():
        return json.loads(result.read_text()) | seconds
    status = "timed_out" if code is None else "out_of_memory" if OUT_OF_MEMORY.search(output) else "crashed"
    log(f"{status}, exit code {code}: {' '.join(command)}\n{output[-KEPT_CHARACTERS:]}")
    return {"status": status, "exit_code": code, "output_end": output[-KEPT_CHARACTERS:]} | seconds
