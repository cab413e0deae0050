"""Output folders and files that appear complete or not at all.

While `out` is made, `.out.converting` is beside it: locked (flock) by the running process, with the output inside. At
the end everything is fsynced and the output renamed. An error removes what was made; what a killed process left is
removed by the next one that makes `out`. A folder of that name that holds anything else is refused and not touched.
"""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError, storage_error

OUTPUT = "output"


class AtomicFolder:
    """Context manager that builds a folder or a file under a hidden name and renames it at the end.

    Args:
        folder: The folder to make; an existing one must be empty.
        single_file: Path of the one file in the folder that is published instead of it, at a path that does not exist.
    """

    def __init__(self, folder: Path, *, single_file: str = "") -> None:
        self._folder, self._single_file, self._lock = folder, single_file, -1
        self._hidden = folder.with_name(f".{folder.name}.converting")
        self.temp_path = self._hidden / OUTPUT

    def write_file(self, relative: str, data: bytes) -> None:
        """Write a small file, and the folders above it that are missing."""
        path = self.temp_path / relative
        files.make_folders(path.parent)
        files.write_file(path, data)

    def __enter__(self) -> "AtomicFolder":
        folder = self._folder
        is_empty_folder = folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())
        if os.path.lexists(folder) and (self._single_file or not is_empty_folder):
            hint = "" if self._single_file else " and not an empty folder"
            raise CheckpointError(f"{folder}: already exists{hint}; choose another path")
        files.make_folders(folder.parent)
        self._acquire_lock()
        foreign = sorted({entry.name for entry in os.scandir(self._hidden)} - {OUTPUT})
        if foreign or self.temp_path.is_symlink():
            os.close(self._lock)
            raise CheckpointError(
                f"{self._hidden}: no conversion made {(foreign or [OUTPUT])[0]}; move that folder away, or choose "
                "another path"
            )
        try:
            if self.temp_path.exists():
                shutil.rmtree(self.temp_path)
            files.make_folder(self.temp_path)
        except BaseException:
            self._remove()
            raise
        return self

    def _acquire_lock(self) -> None:
        """Make the hidden folder if it is missing, and lock it."""
        while self._lock < 0:
            with suppress(FileExistsError):
                os.mkdir(self._hidden, 0o777)
            try:
                lock = os.open(self._hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:  # its owner has just removed it
                continue
            except OSError as exc:
                with suppress(OSError):
                    self._hidden.rmdir()
                raise storage_error(exc, "opening", self._hidden) from exc
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.stat(self._hidden), os.fstat(lock)):
                    self._lock = lock
            except BlockingIOError as exc:
                raise CheckpointError(
                    f"{self._folder}: another process is writing it ({self._hidden} is locked); wait for it, or choose "
                    "another path"
                ) from exc
            except FileNotFoundError:
                continue
            finally:
                if self._lock < 0:
                    os.close(lock)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                for folder, _, _ in os.walk(self.temp_path, topdown=False):
                    files.fsync_folder(Path(folder))
                files.rename(self.temp_path / self._single_file, self._folder)
                files.fsync_folder(self._folder.parent)
        finally:
            self._remove()

    def _remove(self) -> None:
        """Remove the hidden folder; what the system does not let go stays for the next process."""
        shutil.rmtree(self.temp_path, ignore_errors=True)
        with suppress(OSError):
            self._hidden.rmdir()
        with suppress(OSError):
            os.close(self._lock)
