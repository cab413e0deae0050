"""Tasks of a job that any number of processes take, each done once or more, with the same result.

    FOLDER/NAME            the result of a finished task, a file or folder
    FOLDER/NAME.claim      who began it first
    FOLDER/work-RANDOM/    what one process is building

A process takes tasks that nobody has claimed, in random order; then those that are claimed and not finished: their
process may be dead or slow. A result is synced and then published by renaming it, and all who do the task write the
same bytes, so the first one wins and a claim only saves work: there is no clock, no lock, and no process that others
wait for. A killed process costs the task that it was doing. Workers are processes of this machine
(lt_data.preparation.processes) or tasks of a Ray cluster (lt_data.preparation.ray_workers).

Cost: the folder is listed once per task.
"""

import os
import random
import secrets
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path

from lt_data.errors import DataError
from lt_data.progress import Progress
from lt_data.storage import fsync_folder, fsync_tree, translate_os_errors

CLAIM = ".claim"
WORK = "work-"
_MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """Tasks, by number.

    Attributes:
        folder: folder of the results.
        names: name of the result of each.
        build: makes the result of a task, given its number and an empty folder to work in; returns its path there.
            Must be picklable if other processes take part.
        what: what they are, in the plural, for messages.
        work: beginning of the names of folders to work in.
    """

    folder: Path
    names: tuple[str, ...]
    build: Callable[[int, Path], Path]
    what: str
    work: str = WORK

    def published(self, task: int) -> Path:
        """Return the path of the result of a task."""
        return self.folder / self.names[task]

    def is_published(self, task: int) -> bool:
        """Return True if a task is finished: there is a file, or a folder that is not empty."""
        path = self.published(task)
        return os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir()))

    def list_tasks(self) -> tuple[list[int], list[int]]:
        """Return the tasks that are not finished, and those of them that nobody has begun, by one listing."""
        there = set(os.listdir(self.folder))
        missing = [task for task, name in enumerate(self.names) if name not in there]
        return missing, [task for task in missing if self.names[task] + CLAIM not in there]


Submit = Callable[..., "Future[dict[int, str] | None]"]
"""Runs a function of this module, whose first argument `Tasks` it has, with further arguments in a worker."""


def run_tasks(tasks: Tasks, progress: Progress, submit: Submit, workers: int) -> None:
    """Do the tasks that are missing, beside other processes that do the same.

    Args:
        tasks: the tasks.
        progress: called with the finished tasks.
        submit: runs a function in a worker.
        workers: number of workers.

    Raises:
        DataError: tasks failed; the others are finished first, and the message names some.
    """
    failures: dict[int, str] = {}
    running = {submit(build_next) for _ in range(workers)}
    while running:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for found in (future.result() for future in done):
            if found is not None:  # else no task is free
                failures |= found
                running.add(submit(build_next))
        progress(len(tasks.names) - len(tasks.list_tasks()[0]), len(tasks.names), tasks.what)
    claimed = [task for task in tasks.list_tasks()[0] if task not in failures]
    for future in [submit(build_claimed, task) for task in random.SystemRandom().sample(claimed, len(claimed))]:
        failures |= future.result() or {}
        progress(len(tasks.names) - len(tasks.list_tasks()[0]), len(tasks.names), tasks.what)
    if failed := [task for task in failures if not tasks.is_published(task)]:
        reasons = "; ".join(f"{tasks.names[task]}: {failures[task]}" for task in failed[:_MAX_NAMED])
        more = f"; and {len(failed) - _MAX_NAMED} more" if len(failed) > _MAX_NAMED else ""
        raise DataError(
            f"{len(failed)} of {len(tasks.names)} {tasks.what} failed, the others are finished; {reasons}{more}"
        )


def run_here(tasks: Tasks) -> Submit:
    """Return a submission that does the task in this process, before it returns."""

    def submit(function: Callable[..., dict[int, str] | None], *arguments: int) -> "Future[dict[int, str] | None]":
        future: Future[dict[int, str] | None] = Future()
        future.set_result(function(tasks, *arguments))
        return future

    return submit


def build_next(tasks: Tasks) -> dict[int, str] | None:
    """Do a task that nobody has claimed, chosen at random; return its failure, or None if no task is free."""
    while free := tasks.list_tasks()[1]:
        task = random.SystemRandom().choice(free)
        claim = tasks.published(task).with_name(tasks.names[task] + CLAIM)
        with translate_os_errors("write", claim):
            try:
                with claim.open("x", encoding="utf-8") as file:
                    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            except FileExistsError:
                continue
        return build_claimed(tasks, task)
    return None


def build_claimed(tasks: Tasks, task: int) -> dict[int, str]:
    """Do a task; return its failure."""
    try:
        build_task(tasks, task)
    except DataError as exc:
        return {task: str(exc)}
    return {}


def build_task(tasks: Tasks, task: int) -> None:
    """Do and publish a task, unless another process is faster.

    Raises:
        DataError: it failed, and nobody else has finished it.
    """
    if tasks.is_published(task):
        return
    work = tasks.folder / f"{tasks.work}{secrets.token_hex(8)}"
    target = tasks.published(task)
    try:
        with translate_os_errors("create", work):
            work.mkdir()
        result = tasks.build(task, work)
        with translate_os_errors("publish", target):
            fsync_tree(result)
            result.rename(target)
    except DataError:
        if not tasks.is_published(task):
            raise  # else whoever finished it, and ended the job, may have removed what was built here
    finally:
        shutil.rmtree(work, ignore_errors=True)
    with translate_os_errors("publish", target):
        fsync_folder(tasks.folder)
