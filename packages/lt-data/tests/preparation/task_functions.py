"""What the tasks of test_tasks.py do, importable in other processes."""

import os
import signal
import time
from pathlib import Path

from lt_data import DataError


def write_pid(task: int, work: Path) -> Path:
    """Result of a task: the process that did it."""
    path = work / "result"
    path.write_text(str(os.getpid()), encoding="utf-8")
    return path


def die(task: int, work: Path) -> Path:
    """Kill the process at task 3, as the kernel does when memory runs out; at task 4 the first time."""
    if task == 3 or (task == 4 and not (work.parent / "was-killed").exists()):
        with (work.parent / ("attempts" if task == 3 else "was-killed")).open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    return write_pid(task, work)


def fail(task: int, work: Path) -> Path:
    """Fail at each second task."""
    if task % 2:
        raise DataError(f"reason {task}")
    return write_pid(task, work)


def wait_for_others(task: int, work: Path) -> Path:
    """Take very long at task 2, which another machine finishes meanwhile."""
    if task == 2:
        (work.parent / "waits").touch()
        time.sleep(60)
        (work.parent / "has-waited").touch()
    return write_pid(task, work)
