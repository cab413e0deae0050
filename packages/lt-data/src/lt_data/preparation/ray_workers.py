"""Workers for units on a Ray cluster; the only module that imports ray (extra `ray`).

Each worker is a task that takes units until none is free. Ray starts the task of a lost worker again; the units that
lost workers had claimed are tasks of their own in the end. All machines must see the sources and the store's folder.
"""

from lt_data.errors import DataError
from lt_data.preparation.units import UnitJob, build_unclaimed, build_unit, check_picklable
from lt_data.progress import Progress

_POLL_S = 1.0


def build_on_ray(job: UnitJob, progress: Progress, *, workers: int, address: str) -> dict[int, str]:
    """Build the units of a job on a cluster; return what went wrong, by unit.

    Args:
        job: the job.
        progress: called with the finished units.
        workers: tasks, of one CPU each.
        address: the cluster's: `auto` for the one that this machine belongs to, `local` for a new one here.

    Raises:
        DataError: ray is not installed, or there is no such cluster.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports] - in no environment of ours
    except ModuleNotFoundError as exc:
        raise DataError('ray is not installed: pip install "lt-data[ray]"') from exc
    check_picklable(job, "leave out ray, and run the same command on several machines")
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
        failures = _gather(job, [ray.remote(**options)(build_unclaimed).remote(job) for _ in range(workers)], progress)
        rest = sorted(set(job.units) - job.list_units()[0] - failures.keys())
        return failures | _gather(job, [ray.remote(**options)(build_unit).remote(job, unit) for unit in rest], progress)
    finally:
        if is_mine:
            ray.shutdown()


def _gather(job: UnitJob, tasks: list[object], progress: Progress) -> dict[int, str]:
    """Wait for tasks; return their failures."""
    import ray  # pyright: ignore[reportMissingImports] - in no environment of ours

    failures: dict[int, str] = {}
    while tasks:
        done, tasks = ray.wait(tasks, timeout=_POLL_S)
        for result in ray.get(done):
            failures |= result
        progress(len(job.list_units()[0]), len(job.units), "units")
    return failures
