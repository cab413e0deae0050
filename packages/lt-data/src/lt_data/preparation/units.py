"""Units of a job: parts that depend on the sources alone, for any number of processes and machines.

    OUT/units/plan.json               the job: settings, listing of the sources, number of units
    OUT/units/00012-of-00040/         a finished unit: a token store of consecutive files, or ranges of them
    OUT/units/duplicates-003-of-016   duplicates among the units, of one range of hashes
    OUT/kept.extents                  what is left of the units without them
    OUT/manifest.json                 last: the joined store of all units (lt_data.store.joined)

Units, and then the ranges of hashes in which duplicates are found, are tasks that any number of processes take
(lt_data.preparation.tasks). Whoever finds all of them finished writes the manifest, which is the same from any of them.

Cost: that of `prepare`; the sources are listed once per process. If duplicates are dropped: see
lt_data.preparation.duplicates and lt_data.preparation.drop_list.
"""

import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.preparation.build_folder import describe_differences
from lt_data.preparation.drop_list import write_drop_list
from lt_data.preparation.duplicates import (
    BY_HASH,
    count_documents,
    count_ranges,
    encode_duplicates,
    find_duplicates,
    write_by_hash,
)
from lt_data.preparation.join import join, remove_unfinished
from lt_data.preparation.store_writer import PART_FOLDER
from lt_data.preparation.tasks import CLAIM, WORK, BuildTasks, Tasks, run_tasks
from lt_data.progress import Progress
from lt_data.storage import fsync_folder, make_folder_synced, read_file, translate_os_errors, write_file
from lt_data.store.combined_manifest import LoadedPart
from lt_data.store.extents import EXTENTS_FILE
from lt_data.store.joined import PLAN_FILE, UNIT_FOLDER, load_parts, load_store
from lt_data.store.joined_index import INDEX_FILE
from lt_data.store.manifest import MANIFEST_FILE, DropList, StoreManifest

_DUPLICATES = "duplicates-"
_LISTING = "listing of the sources"
_MAX_PLAN_BYTES = 2**20
_START_OVER = f"choose another folder, or remove its folder {UNIT_FOLDER}"

PrepareUnit = Callable[[int, int, Path], Path]
"""(unit, number of units, path beside which to make its store) → folder of the store; must be picklable."""


@dataclass(frozen=True, kw_only=True)
class UnitJob:
    """Job in units.

    Attributes:
        out: folder of the joined store.
        n_units: number of parts of the sources.
        units: those of them that have files.
        prepare: prepares one.
        drop_duplicates: keep only the first of equal documents of different units; each has dropped its own.
    """

    out: Path
    n_units: int
    units: tuple[int, ...]
    prepare: PrepareUnit
    drop_duplicates: bool = False

    @property
    def folder(self) -> Path:
        """Folder of the units."""
        return self.out / UNIT_FOLDER

    @property
    def are_compared(self) -> bool:
        """True if duplicates among units are to be found."""
        return self.drop_duplicates and self.n_units > 1

    @property
    def tasks(self) -> Tasks:
        """The units as tasks."""
        return Tasks(
            folder=self.folder,
            names=tuple(f"{unit:05d}-of-{self.n_units:05d}" for unit in self.units),
            build=partial(_build_unit, self),
            what="units",
        )

    @property
    def unit_folders(self) -> list[Path]:
        """Folders of the finished units, in order."""
        return [self.tasks.published(task) for task in range(len(self.units))]


def run_units(
    job: UnitJob, settings: Mapping[str, Any], build_tasks: BuildTasks, *, progress: Progress
) -> StoreManifest:
    """Prepare the units of a job that are missing, beside other processes that do the same, and join them.

    Args:
        job: the job.
        settings: what must be the same for all processes, JSON values.
        build_tasks: does most of the tasks; those that are left are done here.
        progress: called with the finished units, and ranges of hashes.

    Returns:
        The manifest of a flat store with the same documents.

    Raises:
        DataError: units failed (the others are finished first), or the folder holds another job.
    """
    _write_plan(job, settings)
    if not _is_complete(job):
        run_tasks(job.tasks, build_tasks, progress)
        try:
            duplicates: list[Path] = []
            if job.are_compared:
                ranges = _plan_ranges(job)
                run_tasks(ranges, build_tasks, progress)
                duplicates = [ranges.published(task) for task in range(len(ranges.names))]
            _join(job, duplicates)
        except DataError:
            if not _is_complete(job):  # else a faster process has joined the units, and removed what was left
                raise
    _remove_leftovers(job)
    return load_store(job.out).manifest


def _is_complete(job: UnitJob) -> bool:
    return (job.out / MANIFEST_FILE).is_file()


def _write_plan(job: UnitJob, settings: Mapping[str, Any]) -> None:
    """Write the plan, or compare the one that is there."""
    path = job.folder / PLAN_FILE
    if _is_complete(job) and not path.is_file():
        raise DataError(f"out = {job.out}: holds a token store already; choose another folder")
    with translate_os_errors("create", job.folder):
        make_folder_synced(job.folder)
        # Of a unit's own files the reader of stores takes care: there may be a million of them.
        if link := next((path for path in (job.folder, *job.folder.iterdir()) if path.is_symlink()), None):
            raise DataError(f"{link}: a symbolic link; remove it, or choose another folder")
    plan = {"n_units": job.n_units, **settings}
    if not path.exists():
        building = job.folder / f"{WORK}{secrets.token_hex(8)}.json"
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
        remedy = "choose another folder" if _is_complete(job) else _START_OVER
        if _LISTING in there and there[_LISTING] != plan[_LISTING]:
            remedy = f"restore the sources (--on-bad skip ends the job without bad input), {remedy}"
        raise DataError(f"{job.folder}: units of a job with other settings: {'; '.join(changed)}; {remedy}")


def _build_unit(job: UnitJob, task: int, work: Path) -> Path:
    store = job.prepare(job.units[task], job.n_units, work / "unit")
    if job.are_compared:
        write_by_hash(store)
        with translate_os_errors("write", store):
            fsync_folder(store / PART_FOLDER)
    return store


def _plan_ranges(job: UnitJob) -> Tasks:
    """Return the ranges of hashes in which duplicates are found, as tasks."""
    n_ranges = count_ranges(sum(map(count_documents, job.unit_folders)))
    return Tasks(
        folder=job.folder,
        names=tuple(f"{_DUPLICATES}{i:03d}-of-{n_ranges:03d}" for i in range(n_ranges)),
        build=partial(_build_range, job, n_ranges),
        what="ranges of hashes",
    )


def _build_range(job: UnitJob, n_ranges: int, index: int, work: Path) -> Path:
    path = work / "duplicates"
    write_file(path, encode_duplicates(find_duplicates(job.unit_folders, index, n_ranges)))
    return path


def _join(job: UnitJob, duplicates: list[Path]) -> None:
    """Join the units; another process may do the same."""
    if not any(load_parts([folder])[0].manifest.documents for folder in job.unit_folders):
        raise DataError(_describe_empty(load_parts(job.unit_folders)))
    work = job.folder / f"{WORK}{secrets.token_hex(8)}"
    dropped: DropList | None = None
    try:
        if job.are_compared:
            with translate_os_errors("create", work):
                work.mkdir()
            dropped, extents = write_drop_list(load_parts(job.unit_folders), duplicates, work)
            with translate_os_errors("write", job.out / EXTENTS_FILE):
                extents.rename(job.out / EXTENTS_FILE)
                fsync_folder(job.out)
        join(job.out, job.unit_folders, dropped=dropped)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # who joined the units may be removing it too


def _describe_empty(parts: Sequence[LoadedPart]) -> str:
    reasons = sum((Counter(part.manifest.skipped) for part in parts), Counter[str]())
    for part in parts:
        reasons.update({reason: totals.documents for reason, totals in part.manifest.left_out.items()})
    counts = ", ".join(f"{n} {reason}" for reason, n in sorted(reasons.items()))
    return f"no text in any of the {len(parts)} units ({counts}): check the sources, the suffixes and the filter"


def _remove_leftovers(job: UnitJob) -> None:
    """Remove the claims, what duplicates were found by, and what killed processes left."""
    with translate_os_errors("clean", job.folder):
        for left in job.folder.glob(f"{WORK}*"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)  # a slow process may be at work there, and removes it at last
            else:
                left.unlink(missing_ok=True)
        by_hash = [folder / PART_FOLDER / BY_HASH for folder in job.unit_folders] if job.are_compared else []
        for left in (*job.folder.glob(f"*{CLAIM}"), *job.folder.glob(f"{_DUPLICATES}*"), *by_hash):
            left.unlink(missing_ok=True)
        for name in (MANIFEST_FILE, INDEX_FILE):  # the manifest is there: who still writes one has nothing to add
            remove_unfinished(job.out / name)
