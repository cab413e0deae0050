"""Job of units: parts of the sources that depend on these alone, for any number of processes and machines.

    OUT/plan.json                 the job: settings, listing of the sources, number of units
    OUT/units/00012-of-00040/     a finished unit: a token store of consecutive files, or ranges of them
    OUT/units/00012-of-00040-redone/  written again without the ranges of files in which other units found damage
    OUT/keep/                     masks of the documents that no earlier unit has, if duplicates are dropped
    OUT/manifest.json             last: the parts of all units

A small corpus is one unit, which is the store itself and appears as OUT. Units are tasks that any number of processes
take (lt_data.preparation.tasks). Whoever finds all of them finished writes the manifest, which is the same from any of
them. A killed process loses the unit it was at. The same command on a finished store does nothing.

A damaged file is left out whole. Damage in a range of a file is listed by the unit that finds it (`damage.json`); when
all units are finished, those with other ranges of the file are done again as further tasks, and replaced. What is done
again follows from the finished units alone, so it is the same for any number of processes and after any kill.

Cost: that of its units; the sources are listed once per process. If duplicates are dropped: see
lt_data.preparation.deduplication.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.preparation.deduplication import drop_repeated
from lt_data.preparation.join import combine_stores
from lt_data.preparation.tasks import CLAIM, WORK, Tasks, build_task
from lt_data.preparation.unit_writer import DOCUMENTS_FILE, ENTRY_DTYPE, UnitOptions, write_unit
from lt_data.progress import Progress
from lt_data.sources.document import Document
from lt_data.sources.reader import DocumentReader
from lt_data.storage import make_folder_synced, read_file, translate_os_errors, write_file
from lt_data.store.manifest import MANIFEST_FILE, UNIT_FOLDER, StoreManifest, read_manifest, write_manifest
from lt_data.store.masks import MASK_FOLDER
from lt_data.store.token_store import TokenStore

PLAN_FILE = "plan.json"
_DAMAGE_FILE = "damage.json"
_REDONE = "-redone"
_LISTING = "listing of the sources"
_MAX_PLAN_BYTES = 2**20
_MAX_DAMAGE_BYTES = 2**30

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
        damage: pieces of the sources that are left out, with the problem.
        redone: units that are done again without them.
    """

    out: Path
    options: UnitOptions
    reader: DocumentReader
    units: tuple[tuple[int, int], ...]
    damage: Mapping[int, str] = field(default_factory=dict)
    redone: tuple[int, ...] = ()

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
        """The units as tasks; those to be done again if there are any."""
        names = tuple(self._name(unit) for unit in self.redone or range(len(self.units)))
        return Tasks(folder=self.folder, names=names, build=self.build, what="units")

    @property
    def unit_folders(self) -> list[Path]:
        """Folders of the finished units, in order."""
        return [self.folder / self._name(unit) for unit in range(len(self.units))]

    def _name(self, unit: int) -> str:
        return f"{unit:05d}-of-{len(self.units):05d}{_REDONE if unit in self.redone else ''}"

    def build(self, task: int, work: Path) -> Path:
        """Write a unit in an empty folder; return its folder."""
        tasks = self.tasks

        def check_needed(_: int) -> None:
            if tasks.is_published(task) or _is_complete(self):
                raise DataError(f"{tasks.names[task]}: another process has finished it")  # seen by nobody

        first, last = self.units[self.redone[task] if self.redone else task]
        reader = self.reader.slice(first, last, self.damage)
        folder = work / "unit"
        write_unit(self.options, reader, folder, on_batch=check_needed, list_documents=self.are_compared)
        if reader.damage:
            found = {first + index: problem for index, problem in sorted(reader.damage.items())}
            write_file(folder / _DAMAGE_FILE, json.dumps(found).encode())
        return folder

    def without_damage(self) -> "UnitJob":
        """Return the job with the damage that its units found, once all are finished, and with those to do again."""
        found = [_read_damage(folder) for folder in self.unit_folders]
        damage: dict[int, str] = {}
        for problems in found:
            for index, problem in problems.items():
                for piece in self.reader.pieces_of_file(index):
                    damage.setdefault(piece, problem)
        redone: list[int] = []
        for unit, (first, last) in enumerate(self.units):
            in_unit = {piece for piece in damage if first <= piece < last}
            if in_unit - {*found[unit]}:
                redone.append(unit)
        return replace(self, damage=damage, redone=tuple(redone))


def run_units(job: UnitJob, run_tasks: RunTasks, *, progress: Progress) -> StoreManifest:
    """Prepare the units of a job that are missing, beside other processes that do the same, and join them.

    Args:
        job: the job.
        run_tasks: does the tasks that are missing.
        progress: called with the finished units.

    Returns:
        The manifest of the store.

    Raises:
        DataError: units failed (the others are finished first), or the folder holds another job.
    """
    _write_plan(job)
    if not _is_complete(job):
        try:
            run_tasks(job.tasks, progress)
            revised = job.without_damage()
            if not _is_complete(job):  # else units that were done again may have been removed while they were read
                if revised.redone:
                    run_tasks(revised.tasks, progress)
                _join(revised)
            job.reader.damage.update(revised.damage)
        except DataError:
            if not _is_complete(job):  # else a faster process has joined the units, and removed what was left
                raise
    _remove_leftovers(job)
    return read_manifest(job.out)


def run_one_unit(
    out: Path,
    options: UnitOptions,
    documents: Iterable[Document],
    plan: Mapping[str, Any] | None,
    progress: Progress,
    skipped: Mapping[str, int] | None = None,
) -> StoreManifest:
    """Make a store of one unit, beside other processes that do the same.

    Args:
        out: folder of the store.
        options: the options of the job.
        documents: the documents; those of a `DocumentReader` have sources.
        plan: what must be the same for all processes; None if the documents are in memory.
        progress: called with the bytes read.
        skipped: records in memory without a document, by reason, complete when the documents are.

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


def _read_damage(folder: Path) -> dict[int, str]:
    path = folder / _DAMAGE_FILE
    if not path.exists():
        return {}
    found = strict_json.load_object(read_file(path, max_bytes=_MAX_DAMAGE_BYTES), str(path), f"remove {folder}")
    return {int(index): problem for index, problem in found.items()}


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


def _join(job: UnitJob) -> None:
    """Write the manifest of all units; another process may do the same."""
    stores = [TokenStore(folder) for folder in job.unit_folders]
    if not any(store.n_documents for store in stores):
        raise DataError(describe_empty(f"any of the {len(stores)} units", [store.manifest for store in stores]))
    manifest = combine_stores(job.out, stores)
    if job.are_compared:
        entries: list[np.ndarray] = []
        for folder in job.unit_folders:
            with translate_os_errors("read", folder / DOCUMENTS_FILE):
                entries.append(np.fromfile(folder / DOCUMENTS_FILE, ENTRY_DTYPE))
        hashes, sizes = [each["hash"] for each in entries], [each["text_bytes"] for each in entries]
        manifest = drop_repeated(manifest, job.out, hashes, sizes)
    write_manifest(manifest, job.out / MANIFEST_FILE)


def _remove_leftovers(job: UnitJob) -> None:
    """Remove the claims, what duplicates were found by, and what killed processes left."""
    with translate_os_errors("clean", job.folder):
        for task in (_as_task(job.out, job.build), job.tasks):
            _remove_work(task)
        for redone in job.folder.glob(f"*{_REDONE}"):
            shutil.rmtree(redone.with_name(redone.name.removesuffix(_REDONE)), ignore_errors=True)
        # the manifest is there: who still writes one, or a mask, has nothing to add
        unfinished = (*job.out.glob(f"{MANIFEST_FILE}.tmp-*"), *job.out.glob(f"{MASK_FOLDER}/*.tmp-*"))
        for left in (*job.folder.glob(f"*{CLAIM}"), *unfinished):
            left.unlink(missing_ok=True)
