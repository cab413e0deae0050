"""Tasks of a job that any number of processes take, each done once or more, with the same result.

    FOLDER/NAME            the result of a finished task, a file or folder
    FOLDER/NAME.claim      who began it first
    FOLDER/work-RANDOM/    what one process is building

A process takes tasks that nobody has claimed, in random order; then those that are claimed and not finished: their
process may be dead or slow. A result is published by renaming it, and all who do the task write the same bytes, so the
first one wins and a claim only saves work: there is no clock, no lock, and no process that others wait for. A killed
process costs the task that it was doing. Workers are those of lt_data.preparation.processes or of
lt_data.preparation.ray_workers.

Cost: the folder is listed once per task.
"""

import multiprocessing
import os
import pickle
import random
import secrets
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lt_data.errors import DataError
from lt_data.progress import Progress, no_progress
from lt_data.storage import fsync_folder, translate_os_errors

CLAIM = ".claim"
WORK = "work-"
_MAX_NAMED = 3
_REMOVED = "was removed by another process; run the same command again"


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """Tasks, by number.

    Attributes:
        folder: folder of the results.
        names: name of the result of each.
        build: makes the result of a task, given its number and an empty folder to work in; returns its path there. It
            must be picklable.
        what: what they are, in the plural, for messages.
    """

    folder: Path
    names: tuple[str, ...]
    build: Callable[[int, Path], Path]
    what: str

    def published(self, task: int) -> Path:
        """Return the path of the result of a task."""
        return self.folder / self.names[task]

    def is_published(self, task: int) -> bool:
        """Return True if a task is finished."""
        return os.path.lexists(self.published(task))

    def list_tasks(self) -> tuple[set[int], list[int]]:
        """Return the finished tasks, and those that nobody has begun, by one listing of the folder."""
        there = set(os.listdir(self.folder))
        finished = {task for task, name in enumerate(self.names) if name in there}
        return finished, [
            task for task, name in enumerate(self.names) if task not in finished and name + CLAIM not in there
        ]

    def list_missing(self) -> list[int]:
        """Return the tasks that are not finished."""
        finished, _ = self.list_tasks()
        return [task for task in range(len(self.names)) if task not in finished]


BuildTasks = Callable[[Tasks, Progress], dict[int, str]]
"""Does what it can of the tasks; returns what went wrong, by task."""


def run_tasks(tasks: Tasks, build_tasks: BuildTasks, progress: Progress) -> None:
    """Do the tasks that are missing, beside other processes that do the same.

    Args:
        tasks: the tasks.
        build_tasks: does most of them; those that are left are done here.
        progress: called with the finished tasks.

    Raises:
        DataError: tasks failed; the others are finished first, and the message names some.
    """
    failures = build_tasks(tasks, progress)
    rest = [task for task in tasks.list_missing() if task not in failures]
    for task in random.SystemRandom().sample(rest, len(rest)):
        failures |= build_task(tasks, task)
        progress(len(tasks.list_tasks()[0]), len(tasks.names), tasks.what)
    if failed := tasks.list_missing():
        # without a failure: a faster process ended the job, and removed what it had used
        reasons = [f"{tasks.names[task]}: {failures.get(task, _REMOVED)}" for task in failed[:_MAX_NAMED]]
        more = f"; and {len(failed) - _MAX_NAMED} more" if len(failed) > _MAX_NAMED else ""
        raise DataError(
            f"{len(failed)} of {len(tasks.names)} {tasks.what} failed, the others are finished; "
            f"{'; '.join(reasons)}{more}"
        )


def check_picklable(tasks: Tasks, remedy: str) -> None:
    """Raise a DataError if tasks cannot be given to other processes."""
    try:
        pickle.dumps(tasks)
    except (TypeError, AttributeError, pickle.PicklingError) as exc:
        raise DataError(f"these sources cannot be given to other processes ({exc}); {remedy}") from exc


def build_unclaimed(tasks: Tasks, progress: Progress = no_progress) -> dict[int, str]:
    """Do tasks that nobody has claimed, in random order; return what went wrong, by task."""
    failures: dict[int, str] = {}
    parent = multiprocessing.parent_process()
    while parent is None or parent.is_alive():  # killed: nobody waits for the rest
        # A listing per task, rather than a try at every task: thousands of processes may be at work.
        finished, free = tasks.list_tasks()
        progress(len(finished), len(tasks.names), tasks.what)
        if not free:
            break
        task = random.SystemRandom().choice(free)
        if _claim(tasks, task):
            failures |= build_task(tasks, task)
    return failures


def _claim(tasks: Tasks, task: int) -> bool:
    """Return True if nobody has claimed a task before."""
    path = tasks.published(task).with_name(tasks.names[task] + CLAIM)
    with translate_os_errors("write", path):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    return True


def build_task(tasks: Tasks, task: int) -> dict[int, str]:
    """Do and publish a task, unless another process is faster; return its failure."""
    if tasks.is_published(task):
        return {}
    work = tasks.folder / f"{WORK}{secrets.token_hex(8)}"
    try:
        with translate_os_errors("create", work):
            work.mkdir()
        result = tasks.build(task, work)
        with translate_os_errors("publish", tasks.published(task)):
            try:
                result.rename(tasks.published(task))
            except OSError:
                if not tasks.is_published(task):
                    raise
            fsync_folder(tasks.folder)
    except DataError as exc:
        return {task: str(exc)}
    finally:
        shutil.rmtree(work, ignore_errors=True)  # who ended the job may be removing it too
    return {}
