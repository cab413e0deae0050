"""Workers for the tasks of a job on a Ray cluster; the only module that imports ray (extra `ray`).

A worker is a Ray task of one CPU, which Ray starts again if it is lost, some times. All machines must see the sources
and the folder of the store.
"""

from collections.abc import Callable
from concurrent.futures import Future

from lt_data.errors import DataError
from lt_data.preparation.tasks import Tasks, run_tasks
from lt_data.progress import Progress

MAX_RETRIES = 10
"""Times that a worker may be lost at one task before the job ends with an error."""


def run_on_ray(tasks: Tasks, progress: Progress, workers: int, address: str) -> None:
    """Do the tasks that are missing by `workers` Ray tasks at a time (lt_data.preparation.tasks).

    Args:
        tasks: the tasks of the job.
        progress: called with the finished ones.
        workers: Ray tasks, of one CPU each.
        address: the cluster's: `auto` for the one that this machine belongs to, `local` for a new one here.

    Raises:
        DataError: ray is not installed, there is no such cluster, tasks failed, or workers were lost too often.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports] - in no environment of ours
        from ray.exceptions import RayError, RayTaskError  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as exc:
        raise DataError('ray is not installed: pip install "lt-data[ray]"') from exc
    is_mine = not ray.is_initialized()
    if is_mine:
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as exc:
            raise DataError(f"ray = {address!r}: no such cluster ({exc}); start it (ray start), or give local") from exc
    shared = ray.put(tasks)

    def submit(function: Callable[..., dict[int, str] | None], *arguments: int) -> "Future[dict[int, str] | None]":
        return ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(function).remote(shared, *arguments).future()

    try:
        run_tasks(tasks, progress, submit, workers)
    except RayTaskError:  # an error of ours
        raise
    except RayError as exc:
        raise DataError(
            f"a worker was lost {MAX_RETRIES + 1} times: {' '.join(str(exc).split())}; finished {tasks.what} stay: run "
            "the same command again"
        ) from exc
    finally:
        if is_mine:
            ray.shutdown()
