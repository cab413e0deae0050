"""Workers for the tasks of a job on a Ray cluster; the only module that imports ray (extra `ray`).

Each worker is a Ray task that takes tasks of the job until none is free; Ray starts that of a lost worker again. What
lost workers had claimed is done by Ray tasks of their own in the end, each again if its worker is lost, some times:
then it is named as failed. All machines must see the sources and the folder of the store.
"""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lt_data.errors import DataError
from lt_data.preparation.tasks import Tasks, build_task, build_unclaimed, check_picklable
from lt_data.progress import Progress

_POLL_S = 1.0
MAX_LOST = 10
"""Workers that may be lost at a task before it counts as failed; more than of one machine, as machines are lost too."""


def build_on_ray(tasks: Tasks, progress: Progress, *, workers: int, address: str) -> dict[int, str]:
    """Do tasks on a cluster; return what went wrong, by task.

    Args:
        tasks: the tasks of the job.
        progress: called with the finished ones.
        workers: Ray tasks, of one CPU each.
        address: the cluster's: `auto` for the one that this machine belongs to, `local` for a new one here.

    Raises:
        DataError: ray is not installed, or there is no such cluster.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports] - in no environment of ours
    except ModuleNotFoundError as exc:
        raise DataError('ray is not installed: pip install "lt-data[ray]"') from exc
    check_picklable(tasks, "leave out ray, and run the same command on several machines")
    is_mine = not ray.is_initialized()
    if is_mine:
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as exc:
            raise DataError(
                f"ray = {address!r}: no such cluster ({exc}); start it (ray start), or give `local`"
            ) from exc
    try:
        take = ray.remote(num_cpus=1, max_retries=-1)(build_unclaimed)
        failures: dict[int, str] = {}
        for _, found in _wait({take.remote(tasks): None for _ in range(workers)}, tasks, progress):
            failures |= found if isinstance(found, dict) else {}
        rest = [task for task in tasks.list_missing() if task not in failures]
        random.SystemRandom().shuffle(rest)
        do = ray.remote(num_cpus=1, max_retries=0)(build_task)  # Ray would repeat a task that needs too much forever
        pending: dict[Any, int | None] = {do.remote(tasks, task): task for task in rest}
        lost = Counter[int]()
        for task, found in _wait(pending, tasks, progress):
            if isinstance(found, dict):
                failures |= found
                continue
            assert task is not None
            lost[task] += 1
            if lost[task] < MAX_LOST:
                pending[do.remote(tasks, task)] = task
            else:
                failures[task] = f"its worker was lost {MAX_LOST} times, the last time: {found}"
        return failures
    finally:
        if is_mine:
            ray.shutdown()


def _wait(
    pending: dict[Any, int | None], tasks: Tasks, progress: Progress
) -> Iterator[tuple[int | None, dict[int, str] | str]]:
    """Wait until no Ray task is pending; yield for each its task, and its failures or how it was lost."""
    import ray  # pyright: ignore[reportMissingImports] - in no environment of ours
    from ray.exceptions import RayError, RayTaskError  # pyright: ignore[reportMissingImports]

    while pending:
        for done in ray.wait([*pending], timeout=_POLL_S)[0]:
            task = pending.pop(done)
            try:
                yield task, ray.get(done)
            except RayTaskError:  # an error of ours
                raise
            except RayError as exc:
                yield task, " ".join(str(exc).split())
        progress(len(tasks.list_tasks()[0]), len(tasks.names), tasks.what)
