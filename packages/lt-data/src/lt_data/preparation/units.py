"""Job of units: parts of the sources that depend on these alone, for any number of processes and machines.

    OUT/plan.json                 the job: settings, listing of the sources, number of units
    OUT/units/00012-of-00040/     a finished unit: a token store of consecutive files, or ranges of them
    OUT/manifest.json             last: the joined store of all units (lt_data.store.joined)

A small corpus is one unit, which is the store itself and appears as OUT. Units, and then the ranges of hashes in which
duplicates of different units are found, are tasks that any number of processes take (lt_data.preparation.tasks).
Whoever finds all of them finished writes the manifest, which is the same from any of them. A killed process loses the
unit it was at. The same command on a finished store does nothing.

Cost: that of its units; the sources are listed once per process. If duplicates are dropped: see
lt_data.preparation.duplicates and lt_data.preparation.drop_list.
"""

import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lt_data import strict_json
from lt_data.errors import DataError
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
from lt_data.preparation.tasks import CLAIM, WORK, Tasks, build_task
from lt_data.preparation.unit_writer import UnitOptions, write_unit
from lt_data.progress import Progress
from lt_data.sources.document import Document
from lt_data.sources.reader import DocumentReader
from lt_data.storage import fsync_folder, make_folder_synced, read_file, translate_os_errors, write_file
from lt_data.store.extents import EXTENTS_FILE
from lt_data.store.joined import PLAN_FILE, UNIT_FOLDER, load_parts, load_store
from lt_data.store.joined_index import INDEX_FILE
from lt_data.store.manifest import MANIFEST_FILE, DropList, StoreManifest, read_manifest

_DUPLICATES = "duplicates-"
_LISTING = "listing of the sources"
_MAX_PLAN_BYTES = 2**20

RunTasks = Callable[[Tasks, Progress], None]
"""Does the tasks that are missing."""


@dataclass(frozen=True, kw_only=True)
class UnitJob:
    """Job of units.

    Attributes:
        out: folder of the store.
        options: what is made of the documents.
        reader: the sources.
        units: first file of each unit, and the one after its last.
    """

    out: Path
    options: UnitOptions
    reader: DocumentReader
    units: tuple[tuple[int, int], ...]

    @property
    def folder(self) -> Path:
        """Folder of the units."""
        return self.out / UNIT_FOLDER

    @property
    def plan(self) -> dict[str, Any]:
        """What must be the same for all processes, as JSON values."""
        options, reader = self.options, self.reader
        return {
            "n_units": len(self.units),
            "sources": reader.description,
            "bytes of the sources": reader.total_bytes,
            _LISTING: reader.fingerprint,
            **{name: getattr(reader.options, name) for name in ("on_bad", "max_document_bytes")},
            **options.describe(),
        }

    @property
    def are_compared(self) -> bool:
        """True if duplicates among units are to be found."""
        return self.options.selection.drop_duplicates and len(self.units) > 1

    @property
    def tasks(self) -> Tasks:
        """The units as tasks."""
        names = tuple(f"{unit:05d}-of-{len(self.units):05d}" for unit in range(len(self.units)))
        return Tasks(folder=self.folder, names=names, build=self.build, what="units")

    @property
    def unit_folders(self) -> list[Path]:
        """Folders of the finished units, in order."""
        return [self.tasks.published(task) for task in range(len(self.units))]

    def build(self, task: int, work: Path) -> Path:
        """Write a unit in an empty folder; return its folder."""
        tasks = self.tasks

        def check_needed(_: int) -> None:
            if tasks.is_published(task):
                raise DataError(f"{tasks.names[task]}: another process has finished it")  # seen by nobody

        reader = self.reader.slice(*self.units[task])
        folder = work / "unit"
        write_unit(
            self.options,
            reader,
            folder,
            on_batch=check_needed,
            list_documents=self.are_compared,
        )
        if self.are_compared:
            write_by_hash(folder)
        return folder


def run_units(job: UnitJob, run_tasks: RunTasks, *, progress: Progress) -> StoreManifest:
    """Prepare the units of a job that are missing, beside other processes that do the same, and join them.

    Args:
        job: the job.
        run_tasks: does the tasks that are missing.
        progress: called with the finished units, and ranges of hashes.

    Returns:
        The manifest of a flat store with the same documents.

    Raises:
        DataError: units failed (the others are finished first), or the folder holds another job.
    """
    _write_plan(job)
    if not _is_complete(job):
        try:
            run_tasks(job.tasks, progress)
            duplicates: list[Path] = []
            if job.are_compared:
                ranges = _plan_ranges(job)
                run_tasks(ranges, progress)
                duplicates = [ranges.published(task) for task in range(len(ranges.names))]
            _join(job, duplicates)
        except DataError:
            if not _is_complete(job):  # else a faster process has joined the units, and removed what was left
                raise
    _remove_leftovers(job)
    return load_store(job.out).manifest


def run_one_unit(
    out: Path,
    options: UnitOptions,
    documents: Iterable[Document],
    plan: Mapping[str, Any] | None,
    progress: Progress,
    skipped: Mapping[str, int] | None = None,
    add_files: Callable[[Path, StoreManifest], None] | None = None,
) -> StoreManifest:
    """Make a store of one unit, beside other processes that do the same.

    Args:
        out: folder of the store.
        options: the options of the job.
        documents: the documents; those of a `DocumentReader` have sources.
        plan: what must be the same for all processes; None if the documents are in memory.
        progress: called with the bytes read.
        skipped: records in memory without a document, by reason, complete when the documents are.
        add_files: writes more files into the folder of the finished store.

    Returns:
        Its manifest.

    Raises:
        DataError: bad input, no document, or `out` holds something else.
    """
    if plan is None:
        check_free(out)
    elif check_plan(out, plan):
        return read_manifest(out)
    reader = documents if isinstance(documents, DocumentReader) else None
    made: list[StoreManifest] = []

    def build(_: int, work: Path) -> Path:
        folder = work / "unit"
        total = reader.total_bytes if reader else 0
        manifest = write_unit(
            options, documents, folder, on_batch=lambda done: progress(done, total, "bytes"), skipped=skipped
        )
        if not manifest.documents:
            examples = sorted(reader.skip_examples.items()) if reader else []
            where = reader.description if reader else "the documents given"
            raise DataError(describe_empty(where, [manifest], [example for _, example in examples]))
        if plan is not None:
            write_file(folder / PLAN_FILE, encode_plan(plan))
        if add_files is not None:
            add_files(folder, manifest)
        made.append(manifest)
        return folder

    task = _as_task(out, build)
    build_task(task, 0)
    there = read_manifest(out)
    if made and there.fingerprint != made[0].fingerprint:
        raise DataError(f"out = {out}: another process has put another store there; choose another folder")
    _remove_work(task)
    return there


def check_plan(out: Path, plan: Mapping[str, Any]) -> bool:
    """Return True if the store is complete; False if there is none, or an unfinished job of the same plan.

    Raises:
        DataError: `out` is something else.
    """
    path = out / PLAN_FILE
    is_complete = (out / MANIFEST_FILE).is_file()
    if not path.is_file():
        check_free(out)
        return False
    there = strict_json.load_object(read_file(path, max_bytes=_MAX_PLAN_BYTES), str(path), f"remove {out}")
    if changed := describe_differences(there, json.loads(json.dumps(plan))):
        remedy = "choose another folder, or remove this one"
        if there.get(_LISTING) != plan[_LISTING] and not is_complete:
            remedy = f"restore the sources (--on-bad skip ends the job without bad input), {remedy}"
        raise DataError(f"out = {out}: of a job with other settings: {'; '.join(changed)}; {remedy}")
    return is_complete


def check_free(out: Path) -> None:
    """Raise DataError if anything but an empty folder is at `out`."""
    with translate_os_errors("read", out):
        if not os.path.lexists(out) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
            return
        what = "holds a token store already" if (out / MANIFEST_FILE).is_file() else "exists and is not a token store"
    raise DataError(f"out = {out}: {what}; choose another folder, or remove this one")


def describe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a text for each setting of a job that is another one now.

    A job that stops at bad input may go on without it, or with larger documents: what is finished is the same.
    """
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if before.get("on_bad") == "error":
        larger = now.get("max_document_bytes", 0) > before.get("max_document_bytes", 0)
        changed = [name for name in changed if name != "on_bad" and not (name == "max_document_bytes" and larger)]
    return [f"{name} was {str(before.get(name))[:80]} and is {str(now.get(name))[:80]}" for name in changed]


def describe_empty(where: str, manifests: Sequence[StoreManifest], examples: Sequence[str] = ()) -> str:
    """Return the message for a job without a document."""
    reasons = sum((Counter(manifest.skipped) for manifest in manifests), Counter[str]())
    for manifest in manifests:
        reasons.update({reason: totals.documents for reason, totals in manifest.left_out.items()})
    counts = ", ".join(f"{n} {reason}" for reason, n in sorted(reasons.items()))
    shown = "".join(f"{example}; " for example in examples)
    return (
        f"no text in {where}{f' ({counts})' if counts else ''}: {shown}check the sources, the suffixes and the filter"
    )


def encode_plan(plan: Mapping[str, Any]) -> bytes:
    """Return the file of a plan."""
    return (json.dumps(plan, indent=1, ensure_ascii=False) + "\n").encode()


def _is_complete(job: UnitJob) -> bool:
    return (job.out / MANIFEST_FILE).is_file()


def _write_plan(job: UnitJob) -> None:
    """Make the folder of the job with its plan, or compare the one that is there."""
    plan = job.plan

    def build(_: int, work: Path) -> Path:
        folder = work / "job"
        with translate_os_errors("create", folder):
            (folder / UNIT_FOLDER).mkdir(parents=True)
        write_file(folder / PLAN_FILE, encode_plan(plan))
        return folder

    check_plan(job.out, plan)
    build_task(_as_task(job.out, build), 0)
    check_plan(job.out, plan)


def _as_task(out: Path, build: Callable[[int, Path], Path]) -> Tasks:
    """Return the task of making a folder."""
    with translate_os_errors("create", out.parent):
        make_folder_synced(out.parent)
    return Tasks(folder=out.parent, names=(out.name,), build=build, what="units", work=f"{out.name}.{WORK}")


def _remove_work(task: Tasks) -> None:
    """Remove what killed processes left of a task; a slow one finds the result and does without."""
    for left in task.folder.iterdir():
        if left.name.startswith(task.work):
            shutil.rmtree(left, ignore_errors=True)


def _plan_ranges(job: UnitJob) -> Tasks:
    """Return the ranges of hashes in which duplicates are found, as tasks."""
    n_ranges = count_ranges(sum(map(count_documents, job.unit_folders)))
    names = tuple(f"{_DUPLICATES}{i:03d}-of-{n_ranges:03d}" for i in range(n_ranges))
    return Tasks(folder=job.folder, names=names, build=partial(_build_range, job, n_ranges), what="ranges of hashes")


def _build_range(job: UnitJob, n_ranges: int, index: int, work: Path) -> Path:
    path = work / "duplicates"
    write_file(path, encode_duplicates(find_duplicates(job.unit_folders, index, n_ranges)))
    return path


def _join(job: UnitJob, duplicates: list[Path]) -> None:
    """Join the units; another process may do the same."""
    parts = load_parts(job.unit_folders)
    if not any(part.manifest.documents for part in parts):
        raise DataError(describe_empty(f"any of the {len(parts)} units", [part.manifest for part in parts]))
    work = job.folder / f"{WORK}{secrets.token_hex(8)}"
    dropped: DropList | None = None
    try:
        if job.are_compared:
            with translate_os_errors("create", work):
                work.mkdir()
            dropped, extents = write_drop_list(parts, duplicates, work)
            with translate_os_errors("write", job.out / EXTENTS_FILE):
                extents.rename(job.out / EXTENTS_FILE)
                fsync_folder(job.out)
        join(job.out, job.unit_folders, dropped=dropped)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # who joined the units may be removing it too


def _remove_leftovers(job: UnitJob) -> None:
    """Remove the claims, what duplicates were found by, and what killed processes left."""
    with translate_os_errors("clean", job.folder):
        for task in (_as_task(job.out, job.build), job.tasks):
            _remove_work(task)
        by_hash = [folder / BY_HASH for folder in job.unit_folders] if job.are_compared else []
        for left in (*job.folder.glob(f"*{CLAIM}"), *job.folder.glob(f"{_DUPLICATES}*"), *by_hash):
            left.unlink(missing_ok=True)
        for name in (MANIFEST_FILE, INDEX_FILE):  # the manifest is there: who still writes one has nothing to add
            remove_unfinished(job.out / name)
