"""Writes that survive a power cut, and exact reads.

A file counts as written once its bytes and then its folder's entry are on the disk: write → fsync(file) → rename →
fsync(folder). Every fsync of the package goes through `fsync`, every rename through `rename`. Files are made new (never
opened over an existing one) with mode 0666 and folders with 0777, less the umask, as any other program makes them.

These functions raise plain `OSError`; the callers turn it into an error with a remedy (`lt_ckpt.errors.storage`).
"""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

from lt_ckpt.errors import CheckpointError

Progress = Callable[[int, int, str], None]
"""Told how much is done: (done, total, unit)."""

BLOCK_BYTES = 8 * 2**20
"""Bytes that are hashed and written, or read and hashed, in one go."""


def fsync(descriptor: int) -> None:
    """Puts what was written through the descriptor on the disk itself."""
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # plain fsync leaves the bytes in the drive's cache there
    else:
        os.fsync(descriptor)


def fsync_folder(folder: Path) -> None:
    """Puts a folder's entries on the disk: files made, renamed or removed in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fsync(descriptor)
    except OSError as exc:
        # Some network file systems have no fsync for folders; their renames are synchronous at the server.
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Renames a file or folder; durable only after `fsync_folder` of the parent."""
    os.rename(source, target)


def make_folder(folder: Path) -> None:
    """Makes a new folder and puts its entry on the disk."""
    os.mkdir(folder, 0o777)
    fsync_folder(folder.parent)


def make_folders(folder: Path) -> None:
    """Makes a folder and its missing parents; nothing happens when it is there."""
    missing: list[Path] = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        try:
            make_folder(new)
        except FileExistsError:
            if not new.is_dir():
                raise


def create(path: Path) -> int:
    """Makes a new file for writing and returns its descriptor; an existing file is an error."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of `data`, also when the system takes it in parts."""
    rest = memoryview(data)
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]


def write_file(path: Path, data: bytes) -> None:
    """Makes a whole new file at once: it is there complete and on the disk, or not there under its name."""
    temporary = path.with_name(path.name + ".tmp")
    descriptor = create(temporary)
    try:
        write_all(descriptor, data)
        fsync(descriptor)
    finally:
        os.close(descriptor)
    rename(temporary, path)
    fsync_folder(path.parent)


def read_exactly(descriptor: int, position: int, buffer: memoryview, path: Path) -> None:
    """Fills the buffer from a file.

    Raises:
        CheckpointError: The file ends before the buffer is full.
    """
    done = 0
    while done < len(buffer):
        got = os.preadv(descriptor, [buffer[done : done + 2**30]], position + done)
        if not got:
            raise CheckpointError(
                f"{path}: ends at byte {position + done}, {len(buffer) - done} bytes are missing; the file is truncated"
            )
        done += got


def read_small(path: Path, limit: int) -> bytes:
    """Returns the bytes of a file that must not be longer than `limit`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise CheckpointError(f"{path}: {size} bytes, more than the {limit} that such a file may have")
        buffer = bytearray(size)
        read_exactly(descriptor, 0, memoryview(buffer), path)
        return bytes(buffer)
    finally:
        os.close(descriptor)
