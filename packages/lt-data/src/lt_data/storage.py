"""Writing that survives a crash: a folder is built beside its place, synced, and moved there in one rename.

A reader sees the old state or the whole new one, never a part: every file is written and synced, then every folder is
synced, then the finished folder is renamed to its name and the parent is synced. If anything fails, the unfinished
folder (ours, made under a fresh name) is removed and what stood there before is as it was. Cost: one fsync per file.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lt_data.errors import DataError

_REMEDIES = {
    errno.ENOSPC: "free some space or write to another disk",
    errno.EDQUOT: "the disk quota is used up: free some space or write to another disk",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "the file system is read-only: choose another place",
    errno.ENOENT: "check the path",
    errno.ENOTEMPTY: "something was written there meanwhile: choose another place",
    errno.EEXIST: "something was written there meanwhile: choose another place",
    errno.EIO: "the disk reports an error: check it, or use another one",
}


@contextmanager
def os_errors(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an `OSError` of the block into a `DataError` that names the action, the path and a remedy."""
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc) or type(exc).__name__
        remedy = _REMEDIES.get(exc.errno or 0, "check the path and the disk")
        raise DataError(f"cannot {action} {os.fspath(path)}: {reason}; {remedy}") from exc
    except UnicodeEncodeError as exc:
        raise DataError(
            f"cannot {action} {os.fspath(path)}: under this locale file names are {exc.encoding}, which cannot express "
            "this one; set LC_ALL=C.UTF-8"
        ) from exc


def write(file: BinaryIO, content: bytes | memoryview) -> None:
    """Append bytes to an open file. The only way by which this package writes, so that a test can make it fail."""
    file.write(content)


def fsync(descriptor: int) -> None:
    """Ask the disk to keep what was written. The only way by which this package syncs, so that a test can watch it."""
    os.fsync(descriptor)


def create(path: Path) -> BinaryIO:
    """Open one new file for writing. The only way by which this package makes files, so that a test can follow it."""
    return path.open("xb")


def open_at(path: Path, size: int) -> BinaryIO:
    """Open a file for appending after its first `size` bytes; what follows them is cut off, a missing file is made."""
    if not path.exists():
        assert size == 0
        return create(path)
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file


def make_folder(path: Path) -> None:
    """Make a folder that is not there, and sync the entry in its parent; missing parents are made likewise."""
    if path.exists():
        return
    make_folder(path.parent)
    with suppress(FileExistsError):  # another process was quicker
        path.mkdir()
    try:
        fsync_folder(path.parent)
    except OSError:
        with suppress(OSError):  # not empty: another process is at work in it
            path.rmdir()
        raise


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it; symbolic links are removed, not followed."""
    for folder, subfolders, names in os.walk(path, topdown=False):
        for name in names:
            os.unlink(os.path.join(folder, name))
        for name in subfolders:
            inner = os.path.join(folder, name)
            (os.unlink if os.path.islink(inner) else os.rmdir)(inner)
    os.rmdir(path)


def fsync_tree(path: Path) -> None:
    """Sync the entries of a folder and of all folders in it, the innermost first."""
    for folder, _, _ in os.walk(path, topdown=False):
        fsync_folder(Path(folder))


def fsync_folder(path: Path) -> None:
    """Sync the entries of a folder: a rename or a new file is only safe after that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Write one new file and sync it.

    Raises:
        DataError: the file system refuses; the path and the reason are named.
    """
    with os_errors("write", path), create(path) as file:
        write(file, content)
        file.flush()
        fsync(file.fileno())


@contextmanager
def new_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Build a folder and move it to `target` in one step when the block ends without an exception.

    Args:
        target: where the folder is to stand. An empty folder there is replaced.
        replace: move a non-empty `target` aside first and remove it when the new one stands. The caller has made sure
            that it is ours to remove.

    Yields:
        The folder to write into, `<target>.tmp-<random>`, on the same file system.

    Raises:
        DataError: the file system refuses, or `target` came into being meanwhile.
    """
    target = Path(os.path.abspath(target))
    building = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    with os_errors("create", building):
        make_folder(target.parent)
        building.mkdir()
    try:
        yield building
        with os_errors("write", building):
            fsync_tree(building)
        _move(building, target, replace=replace)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _move(building: Path, target: Path, *, replace: bool) -> None:
    aside = target.with_name(f"{target.name}.old-{secrets.token_hex(4)}")
    with os_errors("move the finished folder to", target):
        replaced = replace and target.exists()
        if replaced:
            target.rename(aside)
        moved = False
        try:
            building.rename(target)
            moved = True
            fsync_folder(target.parent)
        except OSError:
            if moved:
                target.rename(building)
            if replaced:
                aside.rename(target)
            raise
        if replaced:
            shutil.rmtree(aside)
