"""Processes of this machine for the tasks of a job.

With one worker this process does the tasks itself. Else each worker is a process that takes tasks until none is free,
and this one watches. What is left then was claimed by processes that are dead, or at work elsewhere: each of those
tasks has a process of its own, as many at a time as there are workers. So if a process dies (memory ran out, a library
crashed), it is known at which task; another one tries it again, some times, and then it is named as failed. A process
is ended when another machine has finished its task.

Cost: a process and its imports, about a second, per worker and per task that others had claimed.
"""

import multiprocessing
import random
import signal
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from lt_data.preparation.tasks import Tasks, build_task, build_unclaimed, check_picklable
from lt_data.progress import Progress
from lt_data.storage import fsync_folder, translate_os_errors

MAX_LOST = 4
"""Processes that may end at a task without a result before it counts as failed."""
_LOOK_S = 5.0
"""How often the results of others are looked at; nothing but idle time depends on it."""


def build_with_processes(tasks: Tasks, progress: Progress, *, workers: int) -> dict[int, str]:
    """Do tasks that nobody has claimed, then those that are left; return failures, by task.

    Raises:
        DataError: the tasks cannot be given to other processes.
    """
    if workers == 1:
        return build_unclaimed(tasks, progress)
    check_picklable(tasks, f"workers = {workers}: use 1, and run the same command several times")
    failures: dict[int, str] = {}
    with _Workers(tasks, progress) as at_work:
        for _ in range(min(workers, len(tasks.list_tasks()[1]))):
            at_work.start(None)
        while at_work:
            for _, found in at_work.wait():
                failures |= found if isinstance(found, dict) else {}
        rest = [task for task in tasks.list_missing() if task not in failures]
        random.SystemRandom().shuffle(rest)
        lost = Counter[int]()
        while rest or at_work:
            while rest and len(at_work) < workers:
                if not tasks.is_published(task := rest.pop()):
                    at_work.start(task)
            at_work.end_published()
            for task, found in at_work.wait(_LOOK_S):
                if isinstance(found, dict):
                    failures |= found
                    continue
                assert task is not None
                lost[task] += 1
                if lost[task] < MAX_LOST:
                    rest.append(task)
                else:
                    failures[task] = (
                        f"its process ended {MAX_LOST} times without a result, the last time {found}; if memory ran "
                        "out (see dmesg), use fewer workers"
                    )
    return failures


class _Workers:
    """Processes that are at work; left by an error, it ends them."""

    def __init__(self, tasks: Tasks, progress: Progress) -> None:
        self._tasks = tasks
        self._progress = progress
        self._running: dict[Any, tuple[BaseProcess, int | None]] = {}
        self._finished = 0

    def __len__(self) -> int:
        return len(self._running)

    def start(self, task: int | None) -> None:
        """Start a process for one task, or for those that nobody has claimed."""
        context = multiprocessing.get_context("spawn")
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = context.Process(target=_work, args=(sender, self._tasks, task))
        process.start()
        sender.close()  # so that the end of the process is the end of the pipe
        self._running[receiver] = (process, task)

    def end_published(self) -> None:
        """End the processes whose tasks are finished, mostly by other machines."""
        for pipe, (process, task) in [*self._running.items()]:
            if task is not None and self._tasks.is_published(task):
                process.kill()  # SIGTERM may be ignored; what it leaves is removed with the rest of the job
                process.join()
                del self._running[pipe]
                pipe.close()
                with translate_os_errors("publish", self._tasks.published(task)):
                    fsync_folder(self._tasks.folder)  # it may have been at that itself

    def wait(self, timeout_s: float | None = None) -> list[tuple[int | None, dict[int, str] | str]]:
        """Wait for news; return for each process that ended its task, and its failures or how it died."""
        ended: list[tuple[int | None, dict[int, str] | str]] = []
        ready: list[Any] = wait([*self._running], timeout_s)
        for pipe in ready:
            process, task = self._running[pipe]
            try:
                found = pipe.recv()
            except EOFError:
                process.join()
                found = _describe_end(process.exitcode)
            if isinstance(found, int):
                if found > self._finished:
                    self._finished = found
                    self._progress(found, len(self._tasks.names), self._tasks.what)
                continue
            del self._running[pipe]
            pipe.close()
            process.join()
            ended.append((task, found))
        return ended

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *error: object) -> None:
        for process, _ in self._running.values():
            process.kill()
        for pipe, (process, _) in self._running.items():
            process.join()
            pipe.close()


def _work(sender: Connection, tasks: Tasks, task: int | None) -> None:
    def report(finished: int, total: int, what: str) -> None:
        sender.send(finished)

    with suppress(BrokenPipeError):  # the process that waits for it was killed
        if task is None:
            sender.send(build_unclaimed(tasks, report))
        else:
            failures = build_task(tasks, task)
            sender.send(len(tasks.list_tasks()[0]))
            sender.send(failures)


def _describe_end(code: int | None) -> str:
    assert code is not None
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
