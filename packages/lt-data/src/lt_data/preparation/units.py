"""Units of a job: parts that depend on the sources alone, for any number of processes and machines.

    OUT/units/plan.json            the job: settings, listing of the sources, number of units
    OUT/units/00012-of-00040/      a finished unit: a token store of consecutive whole files
    OUT/units/00012-of-00040.claim who began it first
    OUT/units/work-RANDOM/         what one process is building
    OUT/manifest.json              last: the joined store of all units (lt_data.store.joined)

A process takes units that nobody has claimed, in random order; then those that are claimed and not finished: their
process may be dead or slow. A unit is published by renaming its folder, and all who build it write the same bytes, so
the first one wins and a claim only saves work: there is no clock, no lock, and no process that others wait for. Whoever
finds all units finished writes the manifest, which is the same from any of them. A killed process costs the unit that
it was building.

Cost: that of `prepare`; the sources are listed once per process, and the folder of units once per unit.
"""

import json
import multiprocessing
import os
import pickle
import random
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.preparation.build_folder import describe_differences
from lt_data.preparation.join import join, remove_unfinished
from lt_data.progress import Progress, no_progress
from lt_data.storage import (
    fsync_folder,
    make_folder_synced,
    read_file,
    translate_os_errors,
    write_file,
)
from lt_data.store.joined import load_store
from lt_data.store.joined_index import INDEX_FILE
from lt_data.store.manifest import MANIFEST_FILE, StoreManifest

UNIT_FOLDER = "units"
PLAN_FILE = "plan.json"
CLAIM = ".claim"
_WORK = "work-"
_MAX_PLAN_BYTES = 2**20
_START_OVER = f"choose another folder, or remove its folder {UNIT_FOLDER}"

PrepareUnit = Callable[[int, int, Path], StoreManifest]
"""(unit, number of units, path beside which the store of the unit is made) → its manifest; must be picklable."""


@dataclass(frozen=True, kw_only=True)
class UnitJob:
    """Job in units.

    Attributes:
        out: folder of the joined store.
        n_units: number of parts of the sources.
        units: those of them that have files.
        prepare: prepares one.
        unit_path: returns the folder that `prepare` makes of the same arguments.
    """

    out: Path
    n_units: int
    units: tuple[int, ...]
    prepare: PrepareUnit
    unit_path: Callable[[Path, int, int], Path]

    @property
    def folder(self) -> Path:
        """Folder of the units."""
        return self.out / UNIT_FOLDER

    def published(self, unit: int) -> Path:
        """Return the folder of a finished unit."""
        return self.folder / f"{unit:05d}-of-{self.n_units:05d}"

    def is_published(self, unit: int) -> bool:
        """Return True if a unit is finished."""
        return os.path.lexists(self.published(unit))

    def list_units(self) -> tuple[set[int], list[int]]:
        """Return the finished units, and those that nobody has begun, by one listing of the folder."""
        names = set(os.listdir(self.folder))
        finished = {unit for unit in self.units if self.published(unit).name in names}
        free = [u for u in self.units if u not in finished and self.published(u).name + CLAIM not in names]
        return finished, free


BuildUnits = Callable[["UnitJob", Progress], dict[int, str]]
"""Builds what it can of a job's units; returns what went wrong, by unit."""


def run_units(
    job: UnitJob, settings: Mapping[str, Any], build_units: BuildUnits, *, progress: Progress
) -> StoreManifest:
    """Prepare the units of a job that are missing, beside other processes that do the same, and join them.

    Args:
        job: the job.
        settings: what must be the same for all processes, JSON values.
        build_units: builds most of them; those that are left are built here.
        progress: called with the finished units.

    Returns:
        The manifest of a flat store with the same shards.

    Raises:
        DataError: units failed (the others are finished first), or the folder holds another job.
    """
    _write_plan(job, settings)
    if not (job.out / MANIFEST_FILE).is_file():
        failures = build_units(job, progress)
        rest = sorted(set(job.units) - job.list_units()[0] - failures.keys())
        for unit in random.SystemRandom().sample(rest, len(rest)):
            failures |= build_unit(job, unit)
            progress(len(job.list_units()[0]), len(job.units), "units")
        if failed := sorted(set(job.units) - job.list_units()[0]):
            raise DataError(
                f"{len(failed)} of {len(job.units)} units failed, the others are finished; unit {failed[0]} of "
                f"{job.n_units}: {failures[failed[0]]}"
            )
        _join(job)
    _remove_leftovers(job)
    return load_store(job.out).manifest


def _write_plan(job: UnitJob, settings: Mapping[str, Any]) -> None:
    """Write the plan, or compare the one that is there."""
    path = job.folder / PLAN_FILE
    if (job.out / MANIFEST_FILE).is_file() and not path.is_file():
        raise DataError(f"out = {job.out}: holds a token store already; choose another folder")
    with translate_os_errors("create", job.folder):
        make_folder_synced(job.folder)
        # Of a unit's own files the reader of stores takes care: there may be a million of them.
        if link := next((path for path in (job.folder, *job.folder.iterdir()) if path.is_symlink()), None):
            raise DataError(f"{link}: a symbolic link; remove it, or choose another folder")
    plan = {"n_units": job.n_units, **settings}
    if not path.exists():
        building = job.folder / f"{_WORK}{secrets.token_hex(8)}.json"
        try:
            write_file(building, (json.dumps(plan, indent=1, ensure_ascii=False) + "\n").encode())
            with translate_os_errors("write", path):
                # Not found: a faster process has joined the units and removed what was left, so its plan is there.
                with suppress(FileExistsError, FileNotFoundError):
                    os.link(building, path)
                fsync_folder(job.folder)
        finally:
            building.unlink(missing_ok=True)
    there = strict_json.load_object(read_file(path, max_bytes=_MAX_PLAN_BYTES), str(path), _START_OVER)
    if changed := describe_differences(there, json.loads(json.dumps(plan))):
        raise DataError(f"{job.folder}: units of a job with other settings: {'; '.join(changed)}; {_START_OVER}")


def build_with_processes(job: UnitJob, progress: Progress, *, workers: int) -> dict[int, str]:
    """Build the units that nobody has claimed, with other processes; return failures of this one, by unit."""
    if workers > 1:
        check_picklable(job, f"workers = {workers}: use 1, and run the same command several times")
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=build_unclaimed, args=(job,)) for _ in range(workers - 1)]
    try:
        for process in others:
            process.start()
        return build_unclaimed(job, progress)
    except BaseException:
        for process in others:
            process.terminate()
        raise
    finally:
        for process in others:
            if process.pid is not None:
                process.join()


def check_picklable(job: UnitJob, remedy: str) -> None:
    """Raise a DataError if a job cannot be given to other processes."""
    try:
        pickle.dumps(job)
    except (TypeError, AttributeError, pickle.PicklingError) as exc:
        raise DataError(f"these sources cannot be given to other processes ({exc}); {remedy}") from exc


def build_unclaimed(job: UnitJob, progress: Progress = no_progress) -> dict[int, str]:
    """Build units that nobody has claimed, in random order; return what went wrong, by unit."""
    failures: dict[int, str] = {}
    parent = multiprocessing.parent_process()
    while parent is None or parent.is_alive():  # killed: nobody waits for the rest
        # A listing per unit, rather than a try at every unit: thousands of processes may be at work.
        finished, free = job.list_units()
        progress(len(finished), len(job.units), "units")
        if not free:
            break
        unit = random.SystemRandom().choice(free)
        if _claim(job, unit):
            failures |= build_unit(job, unit)
    return failures


def _claim(job: UnitJob, unit: int) -> bool:
    """Return True if nobody has claimed a unit before."""
    path = job.published(unit).with_name(job.published(unit).name + CLAIM)
    with translate_os_errors("write", path):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    return True


def build_unit(job: UnitJob, unit: int) -> dict[int, str]:
    """Build and publish a unit, unless another process is faster; return its failure."""
    if job.is_published(unit):
        return {}
    work = job.folder / f"{_WORK}{secrets.token_hex(8)}"
    try:
        with translate_os_errors("create", work):
            work.mkdir()
        job.prepare(unit, job.n_units, work / "unit")
        with translate_os_errors("publish", job.published(unit)):
            try:
                job.unit_path(work / "unit", unit, job.n_units).rename(job.published(unit))
            except OSError:
                if not job.is_published(unit):
                    raise
            fsync_folder(job.folder)
    except DataError as exc:
        return {unit: str(exc)}
    finally:
        shutil.rmtree(work, ignore_errors=True)  # who joined the units may be removing it too
    return {}


def _join(job: UnitJob) -> None:
    """Join the units, unless another process is faster."""
    try:
        join(job.out, [job.published(unit) for unit in job.units])
    except DataError:
        if not (job.out / MANIFEST_FILE).is_file():
            raise


def _remove_leftovers(job: UnitJob) -> None:
    """Remove the claims, and what killed processes left."""
    with translate_os_errors("clean", job.folder):
        for left in job.folder.glob(f"{_WORK}*"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)  # a slow process may be at work there, and removes it at last
            else:
                left.unlink(missing_ok=True)
        for claim in job.folder.glob(f"*{CLAIM}"):
            claim.unlink(missing_ok=True)
        for name in (MANIFEST_FILE, INDEX_FILE):  # the manifest is there: who still writes one has nothing to add
            remove_unfinished(job.out / name)
