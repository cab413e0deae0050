"""Worker processes of this machine for the tasks of a job.

With one worker this process does the tasks itself. A worker that dies (memory ran out, a library crashed) ends the job
with an error; finished tasks stay, and the same command does the others. Cost: a process and its imports, about a
second, per worker.
"""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process

from lt_data.errors import DataError
from lt_data.preparation.tasks import Tasks, run_here, run_tasks
from lt_data.progress import Progress

_tasks: Tasks  # set once in each worker process


def run_in_processes(tasks: Tasks, progress: Progress, workers: int) -> None:
    """Do the tasks that are missing by `workers` processes (lt_data.preparation.tasks).

    Raises:
        DataError: tasks failed, or a process died.
    """
    if workers == 1:
        run_tasks(tasks, progress, run_here(tasks), 1)
        return
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(tasks,)
    ) as pool:

        def submit(function: Callable[..., dict[int, str] | None], *arguments: int) -> "Future[dict[int, str] | None]":
            return pool.submit(_work, function, *arguments)

        try:
            run_tasks(tasks, progress, submit, workers)
        except BrokenProcessPool as exc:
            raise DataError(
                f"a worker process died; if memory ran out (see dmesg), use fewer workers; finished {tasks.what} stay: "
                "run the same command again"
            ) from exc
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start_worker(tasks: Tasks) -> None:
    global _tasks
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # the parent reports it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _tasks = tasks


def _work(function: Callable[..., dict[int, str] | None], *arguments: int) -> dict[int, str] | None:
    return function(_tasks, *arguments)


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # it was killed
