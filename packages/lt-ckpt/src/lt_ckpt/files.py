"""Durable writes and exact reads.

A file counts as written once its bytes and then its folder's entry are on the disk: write → fsync(file) → rename →
fsync(folder). Every fsync of the package goes through `fsync`, every rename through `rename`. Files are created new
(never opened over an existing one) with mode 0666 and folders with 0777, less the umask, as by any other program.

These functions raise plain `OSError`; callers translate it (`lt_ckpt.errors.translate_os_errors`).
"""

import errno
import os
import re
import secrets
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lt_ckpt.errors import CheckpointError

ProgressCallback = Callable[[int, int, str], None]
"""Progress callback: (done, total, unit)."""

TEMP_FILE = re.compile(r"(?P<name>.+)\.[0-9a-f]{16}\.tmp")
"""Name of a file being written (`write_file`), with that of the finished one."""

BLOCK_BYTES = 8 * 2**20
"""Bytes hashed and written, or read and hashed, at a time."""


def fsync(descriptor: int) -> None:
    """Flush what was written through the descriptor to the disk itself."""
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # a plain fsync leaves the bytes in the drive's cache
    else:
        os.fsync(descriptor)


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk: files made, renamed or removed in it."""
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
    """Rename a file or folder; durable only after `fsync_folder` of the parent."""
    os.rename(source, target)


def make_folder(folder: Path) -> None:
    """Make a new folder and flush its entry to the disk."""
    os.mkdir(folder, 0o777)
    fsync_folder(folder.parent)


def make_folders(folder: Path) -> None:
    """Make a folder and its missing parents, if any."""
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


def check_free_space(folder: Path, required_bytes: int) -> None:
    """Raise a CheckpointError if a folder's file system has less free space than will be written."""
    space = os.statvfs(folder)
    free_bytes = space.f_bavail * space.f_frsize
    if free_bytes < required_bytes:
        raise CheckpointError(
            f"{folder}: {required_bytes:,} bytes will be written and {free_bytes:,} are free; free some space on that "
            "disk or choose another one"
        )


def create_file(path: Path) -> int:
    """Create a new file for writing and return its descriptor; an existing file or link is an error."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def finished_name(name: str) -> str:
    """Return the name that a file gets once it is written; other names are returned as they are."""
    match = TEMP_FILE.fullmatch(name)
    return match["name"] if match else name


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`, also if the system takes it in parts."""
    rest = memoryview(data)
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]


def write_file(path: Path, data: bytes) -> None:
    """Write a new file atomically: complete and on the disk, or absent."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")  # beside it, and not to be guessed
    descriptor = create_file(temporary)
    try:
        write_all(descriptor, data)
        fsync(descriptor)
    finally:
        os.close(descriptor)
    rename(temporary, path)
    fsync_folder(path.parent)


def read_exactly(descriptor: int, position: int, buffer: memoryview, path: Path) -> None:
    """Fill the buffer from a file.

    Raises:
        CheckpointError: The file ends before the buffer is full.
    """
    done = 0
    while done < len(buffer):
        n_read = os.preadv(descriptor, [buffer[done : done + 2**30]], position + done)
        if not n_read:
            raise CheckpointError(
                f"{path}: ends at byte {position + done}, {len(buffer) - done} bytes are missing; the file is truncated"
            )
        done += n_read


def open_for_reading(path: str | os.PathLike[str]) -> int:
    """Open a file and return its descriptor."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a file of at most `max_bytes`."""
    size = os.stat(path).st_size
    if size > max_bytes:
        raise CheckpointError(f"{path}: {size} bytes, more than the {max_bytes} allowed for such a file")
    return path.read_bytes()


def hash_range(digest: Any, path: Path, position: int, n_bytes: int, count_bytes: Callable[[int], object]) -> None:
    """Hash a range of a file, block by block; the next one is read meanwhile.

    Raises:
        CheckpointError: The file ends early.
    """
    buffers = [memoryview(bytearray(min(n_bytes, BLOCK_BYTES))) for _ in range(2)]
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(1) as pool:

        def read(start: int) -> memoryview:
            block = buffers[start // BLOCK_BYTES % 2][: min(BLOCK_BYTES, n_bytes - start)]
            read_exactly(file.fileno(), position + start, block, path)
            return block

        block = read(0)
        for end in range(BLOCK_BYTES, n_bytes + BLOCK_BYTES, BLOCK_BYTES):
            ahead = pool.submit(read, end) if end < n_bytes else None
            digest.update(block)
            count_bytes(len(block))
            block = ahead.result() if ahead else block


def start_writeback(descriptor: int, begin: int = 0, end: int = 0) -> None:
    """Let the system write a file or a range of it now, and forget those of its pages that are on the disk.

    Otherwise nothing is written until the fsync, and a save takes the page cache that training needs; what was
    forgotten is memory for the next bytes, and new memory is most of a save's work in a virtual machine.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
