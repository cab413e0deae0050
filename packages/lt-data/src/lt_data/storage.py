"""Crash-safe writing: a folder is built beside its target, synced, and renamed into place.

A reader sees the old state or the complete new one, never a part: every file is written and synced, then every folder
is synced, then the finished folder is renamed and its parent synced. If anything fails, the unfinished folder (with a
new random name) is removed and the target is unchanged. Cost: one fsync per file.
"""

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from lt_data.errors import DataError, describe_os_error


@contextmanager
def translate_os_errors(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert an `OSError` of the block to a `DataError` that names the action, the path and a remedy."""
    try:
        yield
    except OSError as exc:
        raise DataError(f"cannot {action} {describe_os_error(exc, os.fspath(path))}") from exc
    except UnicodeEncodeError as exc:
        raise DataError(
            f"cannot {action} {os.fspath(path)}: the locale encodes file names as {exc.encoding}, which cannot "
            "represent this one; set LC_ALL=C.UTF-8"
        ) from exc


def write(file: BinaryIO, content: bytes | memoryview) -> None:
    """Write bytes to an open file; all writes of the package pass here, so that tests can make them fail."""
    file.write(content)


def fsync(descriptor: int) -> None:
    """Sync a file or folder; all syncs of the package pass here, so that tests can watch them."""
    os.fsync(descriptor)


def create_file(path: Path) -> BinaryIO:
    """Create a file for writing; the package creates files only here, so that tests can follow it."""
    return path.open("xb")


def make_folder_synced(path: Path) -> None:
    """Create a missing folder and its missing parents, and sync each new entry in its parent."""
    if path.exists():
        return
    make_folder_synced(path.parent)
    with suppress(FileExistsError):  # another process made it first
        path.mkdir()
    try:
        fsync_folder(path.parent)
    except OSError:
        with suppress(OSError):  # not empty: another process writes into it
            path.rmdir()
        raise


def open_regular(path: Path, *, inside: Path | None = None) -> BufferedReader:
    """Open a regular file for reading; a pipe or device, for which a reader would wait, is refused.

    Args:
        path: the file.
        inside: folder out of which no symbolic link may lead.

    Raises:
        DataError: not a regular file, or it lies elsewhere.
        OSError: a file system error.
    """
    if inside is not None:
        check_inside(path, inside)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path}: not a regular file; put the file itself there")
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """Return the whole content of a regular file; for the rest see `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def read_file(path: Path, *, max_bytes: int, inside: Path | None = None) -> bytes:
    """Return the content of a regular file of at most `max_bytes`; for the rest see `open_regular`."""
    with open_regular(path, inside=inside) as file:
        # `read` allocates as many bytes as it is asked for
        content = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > max_bytes:
        raise DataError(f"{path}: more than the {max_bytes} bytes that such a file may have; check what it is")
    return content


def check_inside(path: Path, folder: Path) -> None:
    """Raise DataError if a symbolic link leads `path` out of a folder."""
    if not _is_inside(path, os.path.realpath(folder)):
        raise DataError(f"{path}: a symbolic link leads out of {folder}; put the file itself there")


def check_inside_model(path: Path, folder: Path) -> None:
    """Raise DataError if a link leads `path` out of a model's folder.

    Snapshots in the Hugging Face hub's cache consist of links to the blobs of their model:
    `models--ORG--NAME/snapshots/REVISION/FILE` → `models--ORG--NAME/blobs/HASH`. Those are followed.
    """
    real = Path(os.path.realpath(folder))
    for revision in (real, *real.parents):
        model = revision.parent.parent
        is_snapshot = revision.parent.name == "snapshots" and model.name.startswith("models--")
        if is_snapshot and _is_inside(path, str(model / "blobs")):
            return
    check_inside(path, folder)


def _is_inside(path: Path, root: str) -> bool:
    """Return True if a path without its links is in the folder `root`, a path without links."""
    return os.path.commonpath([os.path.realpath(path), root]) == root


def find_link(path: Path, *, but: str | None = None) -> Path | None:
    """Return a symbolic link: `path`, or one at any depth in that folder, except in its entry `but`."""
    if path.is_symlink():
        return path
    for folder, subfolders, names in os.walk(path):
        inner = Path(folder)
        if inner == path:
            subfolders[:] = [name for name in subfolders if name != but]
            names = [name for name in names if name != but]
        if link := next((inner / name for name in (*subfolders, *names) if (inner / name).is_symlink()), None):
            return link
    return None


def fsync_tree(path: Path) -> None:
    """Sync the entries of a folder and of all folders in it, innermost first."""
    for folder, _, _ in os.walk(path, topdown=False):
        fsync_folder(Path(folder))


def fsync_folder(path: Path) -> None:
    """Sync the entries of a folder, which makes a rename or a new file in it durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Write one new file and sync it.

    Raises:
        DataError: a file system error; the path and the reason are named.
    """
    with translate_os_errors("write", path), create_file(path) as file:
        write(file, content)
        file.flush()
        fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the one before or this; what a kill leaves is `<path>.tmp-<random>`.

    Raises:
        DataError: a file system error; nothing is left.
    """
    building = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        write_file(building, content)
        with translate_os_errors("write", path):
            os.replace(building, path)
            fsync_folder(path.parent)
    finally:
        building.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Build a folder and rename it to `target` when the block ends without an exception.

    Args:
        target: path of the folder. An empty folder there is replaced.
        overwrite: move a non-empty `target` aside first and remove it once the new one is in place. The caller has
            checked that it may be removed. Of a symbolic link only the link is replaced.

    Yields:
        The folder to write into, `<target>.tmp-<random>`, on the same file system.

    Raises:
        DataError: a file system error, `target` is a symbolic link, or it was created meanwhile.
    """
    target = Path(os.path.abspath(target))
    building = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    if target.is_symlink() and not overwrite:
        raise DataError(f"{target}: a symbolic link; remove it, or give the folder that it names")
    with translate_os_errors("create", building):
        make_folder_synced(target.parent)
        building.mkdir()
    try:
        yield building
        with translate_os_errors("write", building):
            fsync_tree(building)
        _replace_folder(building, target, overwrite=overwrite)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _replace_folder(building: Path, target: Path, *, overwrite: bool) -> None:
    aside = target.with_name(f"{target.name}.old-{secrets.token_hex(4)}")
    with translate_os_errors("move the finished folder to", target):
        replaced = overwrite and os.path.lexists(target)
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
            aside.unlink() if aside.is_symlink() else shutil.rmtree(aside)
