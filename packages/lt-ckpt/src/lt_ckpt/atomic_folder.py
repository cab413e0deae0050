"""Output folders and files that appear complete or not at all, and what a killed process left of one.

While a conversion to `out` runs, or was killed, `.out.converting` is beside it:

    lock       locked (flock) by the running process; the system releases it when that process ends, however it ends
    journal    the job, then a line per finished file: its parts with their sizes and hashes
    output/    becomes `out`

A line is appended once the file's bytes are on the disk. The same job again hashes the files of each line, keeps those
that are as recorded, and removes the rest; another job removes all of it. Time plays no part in it. A folder of that
name that holds anything else, or a link, is refused and not touched. An error removes what was made; at the end
everything is fsynced, `output` is renamed, and only then are journal and lock removed.

Cost: one hash of the bytes while they are written, and a line per file; resuming reads the finished files once.
"""

import fcntl
import os
import shutil
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lt_ckpt import files, strict_json
from lt_ckpt.direct_io import DirectFileWriter
from lt_ckpt.errors import CheckpointError, storage_error
from lt_ckpt.file_recorder import FileRecorder, hash_file
from lt_ckpt.records import FileRecord, FileRecords

LOCK, JOURNAL, OUTPUT = "lock", "journal", "output"
FORMAT, VERSION = "lt-conversion", 1
MAX_JOURNAL_BYTES = 2**31


class AtomicFolder:
    """Context manager that builds a folder or a file under a hidden name and renames it at the end.

    Args:
        folder: The folder to make; an existing one must be empty.
        single_file: Path of the one file in the folder that is published instead of it, at a path that does not exist.
        job: Whatever determines the output's bytes, as a text; a killed one with the same job is continued. With an
            empty one nothing is.
    """

    def __init__(self, folder: Path, *, single_file: str = "", job: str = "") -> None:
        self._folder, self._single_file, self._job = folder, single_file, job
        self._path = folder.with_name(f".{folder.name}.converting")
        self.temp_path = self._path / OUTPUT
        self._recorder = FileRecorder(self.temp_path)
        self._lock, self._journal, self._made_lock = -1, -1, False
        self._finished: dict[str, FileRecords] = {}
        self._append_lock = threading.Lock()

    def file_path(self, relative: str) -> Path:
        """Return the path at which to create a file of the folder, and make its parent folders."""
        assert not relative.startswith("/"), relative
        assert ".." not in Path(relative).parts, relative
        path = self.temp_path / relative
        files.make_folders(path.parent)
        return path

    def write_file(self, relative: str, data: bytes) -> None:
        """Write a small file."""
        files.write_file(self.file_path(relative), data)

    def create(self, path: Path, n_bytes: int) -> DirectFileWriter:
        """Create a file of the folder that is hashed while it is written (`lt_ckpt.direct_io.CreateFile`)."""
        return self._recorder.create(path, n_bytes)

    def is_finished(self, relative: str) -> bool:
        """Return True for a file that a killed process finished, and that is still as it was."""
        return relative in self._finished

    def record_finished(self, relative: str) -> None:
        """Record a synced file, with those beside it whose names it begins (`x.pt.tensors/tensor_0.pt`)."""
        if not relative:  # a folder with whatever is in it
            return
        created = self._recorder.files
        names = [name for name in list(created) if name == relative or name.startswith(f"{relative}.")]
        line = _journal_line(relative, {name: created.pop(name) for name in names})
        with self._append_lock:
            files.write_all(self._journal, line)

    def __enter__(self) -> "AtomicFolder":
        self._check_target()
        files.make_folders(self._folder.parent)
        self._acquire_lock()
        try:
            journal = self._read_leftovers()
            self._finished = {name: parts for name, parts in journal.items() if self._is_unchanged(name, parts)}
            kept = {self.temp_path / part for parts in self._finished.values() for part in parts}
            header = {"format": FORMAT, "version": VERSION, "job": self._job}
            lines = (_journal_line(name, parts) for name, parts in self._finished.items())
            files.write_file(self._path / JOURNAL, b"".join((strict_json.dumps(header, JOURNAL), *lines)))
            _remove_all_but(self.temp_path, kept)
            if not self.temp_path.is_dir():
                files.make_folder(self.temp_path)
            self._journal = os.open(self._path / JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except CheckpointError:  # not ours
            if self._made_lock:
                with suppress(OSError):
                    (self._path / LOCK).unlink()
            self._release_lock()
            raise
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                for folder, _, _ in os.walk(self.temp_path, topdown=False):
                    files.fsync_folder(Path(folder))
                files.rename(self.temp_path / self._single_file, self._folder)
                files.fsync_folder(self._folder.parent)
        finally:
            self._remove()

    def _check_target(self) -> None:
        """Raise if the target exists; remove what a process that was killed after the rename left beside it."""
        folder = self._folder
        if not os.path.lexists(folder) or (
            not self._single_file and folder.is_dir() and not any(folder.iterdir()) and not folder.is_symlink()
        ):
            return
        if self._path.is_dir() and not (self.temp_path / self._single_file).exists():
            self._acquire_lock()
            self._remove()
        hint = "" if self._single_file else " and not an empty folder"
        raise CheckpointError(f"{folder}: already exists{hint}; choose another path")

    def _acquire_lock(self) -> None:
        """Make the hidden folder if it is missing, and lock it; raise if it is in use or not ours."""
        while self._lock < 0:
            try:
                files.make_folder(self._path)
            except FileExistsError:
                self._check_content()
            except OSError:  # perhaps after it was made
                with suppress(OSError):
                    self._path.rmdir()
                raise
            try:
                lock = self._open_lock()
            except FileNotFoundError:  # its owner has just removed the folder
                continue
            except OSError:
                with suppress(OSError):
                    self._path.rmdir()
                raise
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.stat(self._path / LOCK), os.fstat(lock)):
                    self._lock = lock
            except BlockingIOError as exc:
                raise CheckpointError(
                    f"{self._folder}: another process is writing it ({self._path} is locked); wait for it, or choose "
                    "another path"
                ) from exc
            except FileNotFoundError:  # its owner removed it meanwhile
                continue
            except OSError as exc:
                with suppress(OSError):
                    (self._path / LOCK).unlink()
                    self._path.rmdir()
                raise storage_error(exc, "locking (flock)", self._path) from exc
            finally:
                if self._lock < 0:
                    os.close(lock)

    def _open_lock(self) -> int:
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            lock = os.open(self._path / LOCK, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            self._made_lock = False
            return os.open(self._path / LOCK, flags)
        self._made_lock = True
        return lock

    def _check_content(self) -> None:
        """Raise if the hidden folder holds what no conversion made."""
        expected = {LOCK: stat.S_ISREG, JOURNAL: stat.S_ISREG, OUTPUT: stat.S_ISDIR}
        with suppress(FileNotFoundError):  # its owner is removing it
            if not stat.S_ISDIR(os.lstat(self._path).st_mode):
                self._raise_foreign("it")
            for entry in list(os.scandir(self._path)):
                name = JOURNAL if files.finished_name(entry.name) == JOURNAL else entry.name
                if name not in expected or not expected[name](entry.stat(follow_symlinks=False).st_mode):
                    self._raise_foreign(entry.name)

    def _raise_foreign(self, name: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: no conversion made {name}; move that folder away, or choose another path")

    def _read_leftovers(self) -> dict[str, FileRecords]:
        """Return the finished files of a killed process with the same job."""
        path = self._path / JOURNAL
        if not path.exists():
            if self.temp_path.exists():
                self._raise_foreign(OUTPUT)
            return {}
        header, *lines = files.read_bounded(path, MAX_JOURNAL_BYTES).split(b"\n")[:-1] or [b""]
        obj = strict_json.loads(header, str(path))
        if obj.get("format") != FORMAT:
            self._raise_foreign(JOURNAL)
        if not self._job or (obj.get("version"), obj.get("job")) != (VERSION, self._job):
            return {}
        return dict(_parse_journal_line(line, str(path)) for line in lines)

    def _is_unchanged(self, relative: str, parts: FileRecords) -> bool:
        root = self.temp_path.resolve()
        return relative in parts and all(
            (root / name).resolve() == root / name
            and (root / name).is_file()
            and hash_file(root / name, record.n_bytes) == record
            for name, record in parts.items()
        )

    def _remove(self) -> None:
        """Remove the hidden folder; what the system does not let go stays for the next process."""
        if self._journal >= 0:
            with suppress(OSError):
                os.close(self._journal)
            self._journal = -1
        with suppress(OSError):
            shutil.rmtree(self.temp_path, ignore_errors=True)
            if not self.temp_path.exists():
                (self._path / JOURNAL).unlink(missing_ok=True)
                files.remove_temp_files(self._path / JOURNAL)
                (self._path / LOCK).unlink()
                self._path.rmdir()
        self._release_lock()

    def _release_lock(self) -> None:
        lock, self._lock = self._lock, -1
        with suppress(OSError):
            os.close(lock)


def _journal_line(relative: str, parts: FileRecords) -> bytes:
    values = {name: [record.n_bytes, record.xxh3_128] for name, record in parts.items()}
    return strict_json.dumps({"file": relative, "parts": values}, JOURNAL)


def _parse_journal_line(line: bytes, source: str) -> tuple[str, FileRecords]:
    obj = strict_json.loads(line, source)
    parts: dict[str, Any] = strict_json.get_field(obj, "parts", dict, source)
    records: FileRecords = {}
    for name, values in parts.items():
        n_bytes, digest = values
        records[name] = FileRecord(n_bytes=n_bytes, hashed_bytes=n_bytes, xxh3_128=digest)
    return strict_json.get_field(obj, "file", str, source), records


def _remove_all_but(folder: Path, kept: set[Path]) -> None:
    """Remove all files below a folder but those to keep, and the folders that are then empty."""
    for parent, folders, names in os.walk(folder, topdown=False):
        for name in names:
            if Path(parent) / name not in kept:
                os.unlink(Path(parent) / name)
        for path in (Path(parent) / name for name in folders):
            if path.is_symlink():
                path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()
