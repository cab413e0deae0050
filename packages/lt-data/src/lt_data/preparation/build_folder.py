"""Resumable build folder: a kill, power failure or full disk leaves a state to resume from.

While a job runs or is interrupted, T.building is beside the target T:

    lock         locked (flock) by the running process; the system releases it when that process ends
    journal      the job, then one record per finished shard (lt_data.preparation.journal)
    store/       becomes T
    old/         the former T, from its replacement until the job is done
    *.side       files that grow in step with the journal

Order of writes: a shard and its folder are synced, then the side files, then a record with the sizes of these is
appended and synced. Resuming reads the finished shards from the records, truncates the side files to the sizes in the
last record and removes unrecorded files. At the end everything is synced, the journal records it, and the store is
renamed to T, after a former T was moved to `old`. Only then the rest is removed.
"""

import fcntl
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.preparation.journal import Journal
from lt_data.storage import (
    find_link,
    fsync,
    fsync_folder,
    fsync_tree,
    make_folder_synced,
    open_truncated,
    remove_tree,
    translate_os_errors,
)
from lt_data.store.manifest import MANIFEST_FILE, ShardFile, read_manifest
from lt_data.store.manifest_checks import check_counts

SUFFIX = ".building"
START_OVER = "start over (--no-resume)"
_LOCK, _JOURNAL, _STORE, _REPLACED, _SIDE = "lock", "journal", "store", "old", ".side"
_LOCK_ATTEMPTS = 100  # to acquire a lock that another process is just releasing


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """First record of a journal: the job's settings, and whether it can be resumed."""

    job: Mapping[str, Any]
    resumable: bool


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """Record of a finished shard, and the sizes of the side files."""

    shard: ShardFile
    sides: Mapping[str, int]

    def __post_init__(self) -> None:
        check_counts(**self.sides)


R = TypeVar("R", bound=ShardRecord)


class BuildFolder:
    """Build folder of a running job; opened by `open_build_folder`.

    Attributes:
        target: path of the result.
        path: the build folder.
        store_path: folder in it that becomes the result.
        records: records of the finished shards, in order.
        is_published: whether the result is in place.
        was_resumed: whether the job began in an earlier process.
    """

    def __init__(self, target: Path, lock: int, *, no_resume: bool) -> None:
        self.target = target
        self.path = target.with_name(target.name + SUFFIX)
        self.store_path = self.path / _STORE
        self.is_published = False
        self.was_resumed = False
        self._old = self.path / _REPLACED
        self._lock = lock
        self._side_files: dict[str, BinaryIO] = {}
        self._journal = Journal(self.path / _JOURNAL, ignore_damage=no_resume)

    @property
    def has_started(self) -> bool:
        """True if a job was started here, by this process or an earlier one."""
        return bool(self._journal.records)

    @property
    def can_resume(self) -> bool:
        """True if the same job can resume from finished shards."""
        return self.has_started and self._journal.records[0].get("resumable") is True and bool(self.records)

    def parse_records(self, kind: type[R]) -> list[R]:
        """Return the records of the finished shards as dataclasses.

        Raises:
            DataError: a record is not of this kind.
        """
        journal = self.path / _JOURNAL
        return [
            strict_json.parse(kind, record, f"{journal}:{number}", START_OVER)
            for number, record in enumerate(self._journal.records[1:], start=2)
            if "finished" not in record
        ]

    @property
    def records(self) -> list[dict[str, Any]]:
        """Records of the finished shards."""
        return [record for record in self._journal.records[1:] if "finished" not in record]

    def open_side_file(self, name: str, folder: Path | None = None) -> BinaryIO:
        """Open a file that grows with the records, truncated to its size at the last record.

        Args:
            name: its name.
            folder: its folder if it belongs to the result.
        """
        size = self.records[-1]["sides"].get(name, 0) if self.records else 0
        path = self.path / f"{name}{_SIDE}" if folder is None else folder / name
        with translate_os_errors("open", path):
            actual = path.stat().st_size if path.exists() else 0
            if actual < size:
                raise DataError(f"{path}: {actual} bytes, the journal says {size}: {self._damage_message}")
            self._side_files[name] = open_truncated(path, size)
        return self._side_files[name]

    def add_record(self, record: Mapping[str, Any], folders: Sequence[Path]) -> None:
        """Record a finished shard.

        Args:
            record: the state to resume from.
            folders: folders of its files; the files are synced already.
        """
        sizes: dict[str, int] = {}
        with translate_os_errors("write", self.path):
            for name, file in self._side_files.items():
                file.flush()
                fsync(file.fileno())
                sizes[name] = file.tell()
            for folder in (*folders, self.path):
                fsync_folder(folder)
        self._journal.append({**record, "sides": sizes})

    def publish(self, fingerprint: str, *, overwrite: bool) -> None:
        """Move the result to its target and remove the build folder.

        Args:
            fingerprint: fingerprint of the result, by which an interrupted move is recognized.
            overwrite: whether to replace a store at the target.

        Raises:
            DataError: a file system error; the target is unchanged.
        """
        with translate_os_errors("write", self.path):
            for file in self._side_files.values():
                file.flush()
                fsync(file.fileno())
                file.close()
            self._side_files.clear()
            fsync_tree(self.store_path)
            fsync_folder(self.path)
        self._journal.append({"finished": fingerprint})
        with translate_os_errors("move the finished folder to", self.target):
            replaced = overwrite and os.path.lexists(self.target)
            moved = False
            try:
                if replaced:
                    self.target.rename(self._old)
                self.store_path.rename(self.target)
                moved = True
                fsync_folder(self.target.parent)
                fsync_folder(self.path)
            except OSError:
                if moved:
                    self.target.rename(self.store_path)
                if replaced and os.path.lexists(self._old):
                    self._old.rename(self.target)
                raise
        self.is_published = True
        with translate_os_errors("remove the rest of the finished job in", self.path):
            self._remove()

    @property
    def _damage_message(self) -> str:
        return f"it was changed by another program; {START_OVER}"

    def _start_or_resume(self, job: Mapping[str, Any], *, resumable: bool, no_resume: bool) -> None:
        """Resume the job that is in the folder, or start a new one."""
        records = self._journal.records
        finished = records[-1].get("finished") if len(records) > 1 else None
        if finished and _fingerprint(self.target) == finished and not self._has_unpublished_store():
            with translate_os_errors("remove the rest of the finished job in", self.path):
                if os.path.lexists(self._old):
                    remove_tree(self._old)
                if not no_resume:
                    self.is_published = True
                    self._remove()
                    return
        header = JobRecord(job={}, resumable=False)
        if records and not no_resume:
            header = strict_json.parse(JobRecord, records[0], f"{self.path / _JOURNAL}:1", START_OVER)
        if header.resumable:
            if not resumable:
                raise DataError(f"{self.path}: holds another interrupted job; finish it, or {START_OVER}")
            if changed := describe_differences(header.job, job):
                raise DataError(
                    f"{self.path}: holds an interrupted job with other settings: {'; '.join(changed)}; resume with the "
                    "same settings, or " + START_OVER
                )
            self.was_resumed = bool(self.records)
            return
        with translate_os_errors("write", self.path):
            self._discard()
        self._journal.append({"job": dict(job), "resumable": resumable})
        with translate_os_errors("write", self.path):
            fsync_folder(self.path)

    def _has_unpublished_store(self) -> bool:
        """Return True if the built store is still here and differs from the one at the target.

        A file system without atomic renames may show a folder at both paths after a power failure.
        """
        if not self.store_path.exists():
            return False
        manifests = [folder / MANIFEST_FILE for folder in (self.store_path, self.target)]
        return not all(path.is_file() for path in manifests) or manifests[0].read_bytes() != manifests[1].read_bytes()

    def _discard(self) -> None:
        """Remove everything but the lock and an empty journal, and restore a store that was moved aside."""
        if os.path.lexists(self._old):
            if self.target.exists():
                raise DataError(
                    f"{self._old}: holds the former store of {self.target}, which exists again; move one of them away"
                )
            self._old.rename(self.target)
            fsync_folder(self.target.parent)
        self._journal.clear()
        if os.path.lexists(self.store_path):
            remove_tree(self.store_path)
        for side in self.path.glob(f"*{_SIDE}"):
            side.unlink()

    def _remove(self) -> None:
        """Remove the build folder, after publishing or when nothing is kept."""
        if os.path.lexists(self._old):
            assert self.is_published
            remove_tree(self._old)
        if os.path.lexists(self.store_path):
            remove_tree(self.store_path)
        for side in self.path.glob(f"*{_SIDE}"):
            side.unlink()
        (self.path / _JOURNAL).unlink()
        (self.path / _LOCK).unlink()
        self.path.rmdir()

    def _close(self, *, keep: bool) -> None:
        for file in (*self._side_files.values(), self._journal):
            with suppress(OSError):  # flushing may fail on a full disk; no record needs it
                file.close()
        if not keep and not self.is_published and not os.path.lexists(self._old):
            with suppress(OSError):  # report the first error; the next run removes the rest
                self._remove()
        os.close(self._lock)


@contextmanager
def open_build_folder(
    target: Path, *, job: Mapping[str, Any], resumable: bool, no_resume: bool = False, lock: bool = True
) -> Iterator[BuildFolder]:
    """Open the folder in which `target` is built, to start or resume a job.

    If the block raises, finished shards are kept if the job can resume from them; otherwise everything is removed.

    Args:
        target: path of the result.
        job: the job's settings as JSON values, which must not change on resume.
        resumable: whether the same job can be resumed later.
        no_resume: discard an interrupted job.
        lock: False where no other process knows the path, so that nothing is asked of a file system without `flock`.

    Raises:
        DataError: another process uses the folder, the interrupted job was a different one, or a file system error.
    """
    target = Path(os.path.abspath(target))
    descriptor = _acquire_lock(target, lock=lock)
    try:
        opened = BuildFolder(target, descriptor, no_resume=no_resume)
    except BaseException:
        _release_lock(target, descriptor)
        raise
    keep = opened.has_started
    try:
        opened._start_or_resume(job, resumable=resumable, no_resume=no_resume)
        keep = False
        yield opened
    except DataError as exc:
        keep = keep or opened.can_resume
        if opened.can_resume and not opened.is_published:
            raise DataError(
                f"{exc}. {len(opened.records)} finished shards are kept in {opened.path}: run the same command to "
                "resume after them"
            ) from exc
        raise
    except BaseException:
        keep = keep or opened.can_resume
        raise
    finally:
        opened._close(keep=keep)


def _acquire_lock(target: Path, *, lock: bool) -> int:
    """Lock the build folder (if `lock`), and create it if missing; raise if it holds foreign files."""
    path = target.with_name(target.name + SUFFIX)
    for _ in range(_LOCK_ATTEMPTS):
        with translate_os_errors("create", path):
            if os.path.lexists(path):
                _check_no_foreign_files(path)
            make_folder_synced(path)
            try:
                descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # its owner has just removed the folder
                continue
            except OSError:
                with suppress(OSError):  # not empty: it existed before
                    path.rmdir()
                raise
        try:
            with translate_os_errors("lock (flock)", path / _LOCK):
                try:
                    if lock:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as exc:
                    owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "just started"
                    raise DataError(
                        f"{target}: another process is writing it ({owner}); wait for it, or choose another path"
                    ) from exc
        except BaseException:
            os.close(descriptor)
            raise
        if _is_open_file(path / _LOCK, descriptor):
            try:
                with translate_os_errors("write", path / _LOCK):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            except BaseException:
                _release_lock(target, descriptor)
                raise
            return descriptor
        os.close(descriptor)
    raise DataError(f"{path}: other processes keep locking it; choose another path")


def _release_lock(target: Path, lock: int) -> None:
    """Release the lock of a folder that cannot be used, and remove the folder if no job started in it."""
    path = target.with_name(target.name + SUFFIX)
    with suppress(OSError):  # report the first error
        if {*os.listdir(path)} <= {_LOCK, _JOURNAL} and (
            not (path / _JOURNAL).exists() or not (path / _JOURNAL).stat().st_size
        ):
            (path / _JOURNAL).unlink(missing_ok=True)
            (path / _LOCK).unlink()
            path.rmdir()
    os.close(lock)


def _is_open_file(path: Path, descriptor: int) -> bool:
    """Return True if the path still names the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _check_no_foreign_files(path: Path) -> None:
    """Raise if a build folder holds other files, or links through which a job would write elsewhere."""
    if link := find_link(path, but=_REPLACED):  # a link moved to `old` is never followed
        raise DataError(f"{link}: a symbolic link; remove it, or choose another path")
    known = {_LOCK, _JOURNAL, _STORE, _REPLACED}
    foreign = [path.name] if not path.is_dir() else os.listdir(path)
    if foreign := sorted(name for name in foreign if name not in known and not name.endswith(_SIDE)):
        raise DataError(f"{path}: holds other files ({', '.join(foreign[:3])}); move them away")


def _fingerprint(store: Path) -> str | None:
    return read_manifest(store).fingerprint if (store / MANIFEST_FILE).is_file() else None


def describe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a text for each setting of a job that is another one now.

    A job that stops at bad input may go on without it, or with larger documents: what is finished is the same.
    """
    names = [*before, *(name for name in now if name not in before)]
    changed = [name for name in names if before.get(name) != now.get(name)]
    if before.get("on_bad") == "error":
        larger = now.get("max_document_bytes", 0) > before.get("max_document_bytes", 0)
        changed = [name for name in changed if name != "on_bad" and not (name == "max_document_bytes" and larger)]
    return [f"{name} was {_shorten(before.get(name))} and is {_shorten(now.get(name))}" for name in changed]


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
