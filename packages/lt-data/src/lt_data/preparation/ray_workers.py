"""Workers for the tasks of a job on a Ray cluster; the only module that imports ray (extra `ray`).

Each worker is a Ray task that takes tasks of the job until none is free. Ray starts that of a lost worker again; what
lost workers had claimed is done by Ray tasks of their own in the end. All machines must see the sources and the folder
of the store.
"""

from lt_data.errors import DataError
from lt_data.preparation.tasks import Tasks, build_task, build_unclaimed, check_picklable
from lt_data.progress import Progress

_POLL_S = 1.0


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
        options = {"num_cpus": 1, "max_retries": -1}
        pending = [ray.remote(**options)(build_unclaimed).remote(tasks) for _ in range(workers)]
        failures = _gather(tasks, pending, progress)
        rest = [task for task in tasks.list_missing() if task not in failures]
        pending = [ray.remote(**options)(build_task).remote(tasks, task) for task in rest]
        return failures | _gather(tasks, pending, progress)
    finally:
        if is_mine:
            ray.shutdown()


def _gather(tasks: Tasks, pending: list[object], progress: Progress) -> dict[int, str]:
    """Wait for Ray tasks; return their failures."""
    import ray  # pyright: ignore[reportMissingImports] - in no environment of ours

    failures: dict[int, str] = {}
    while pending:
        done, pending = ray.wait(pending, timeout=_POLL_S)
        for result in ray.get(done):
            failures |= result
        progress(len(tasks.list_tasks()[0]), len(tasks.names), tasks.what)
    return failures
