"""Files of a shard, opened for reading, with their sizes and hashes compared with the manifest.

A file that is a link leading out of its store, no regular file, or not of the manifest's size is an error that names
it. Cost: about 3 microseconds a file to compare sizes of a folder, 15 to open and map one.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.storage import check_inside, open_regular, read_file, translate_os_errors
from lt_data.store.manifest import ShardFile
from lt_data.store.mapped_files import map_file
from lt_data.store.megatron import LENGTHS_OFFSET, index_size

_REMEDY = "copy it again or prepare it again"


def check_sizes(folder: Path, sizes: Mapping[str, int], *, inside: Path) -> None:
    """Compare the sizes of files in a folder with the manifest.

    Args:
        folder: their folder.
        sizes: bytes of each file by name.
        inside: folder out of which no symbolic link may lead.

    Raises:
        DataError: a file is missing, no regular file, elsewhere, or of another size; the message names it.
    """
    with translate_os_errors("read", folder):
        check_inside(folder, inside)
        with os.scandir(folder) as entries:
            found = {entry.name: entry.stat(follow_symlinks=False) for entry in entries if entry.name in sizes}
    for name, size in sizes.items():
        status = found.get(name)
        if status is None or status.st_size != size or not stat.S_ISREG(status.st_mode):
            os.close(_open(folder / name, size, inside))  # a link inside the store, or an error


def map_ids(path: Path, tokens: int, dtype: np.dtype, *, inside: Path) -> np.ndarray:
    """Return the ids of a shard as a view of its mapped file.

    Raises:
        DataError: the file cannot be opened or is not of this size.
    """
    return _map(path, tokens * dtype.itemsize, dtype, inside)


def map_index(path: Path, shard: ShardFile, *, inside: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths (ids) and offsets (bytes) of a shard's documents as views of its mapped index.

    Raises:
        DataError: the file cannot be opened or is not of its size.
    """
    content = _map(path, index_size(shard.documents), np.dtype(np.uint8), inside)
    lengths_end = LENGTHS_OFFSET + 4 * shard.documents
    return content[LENGTHS_OFFSET:lengths_end].view("<i4"), content[
        lengths_end : lengths_end + 8 * shard.documents
    ].view("<i8")


def read_checked(path: Path, max_bytes: int, inside: Path) -> bytes:
    """Return the content of a file of a store; for the limit see `lt_data.storage.read_file`."""
    with translate_os_errors("read", path):
        return read_file(path, max_bytes=max_bytes, inside=inside)


def check_hash(path: Path, expected: str, inside: Path) -> None:
    """Raise DataError if a file has another SHA-256."""
    with translate_os_errors("read", path), open_regular(path, inside=inside) as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise DataError(f"{path}: SHA-256 differs from the manifest: {_REMEDY}")


def _map(path: Path, n_bytes: int, dtype: np.dtype, inside: Path) -> np.ndarray:
    descriptor = _open(path, n_bytes, inside)
    try:
        with translate_os_errors("open", path):
            return map_file(descriptor, n_bytes, dtype)
    finally:
        os.close(descriptor)


def _open(path: Path, n_bytes: int, inside: Path) -> int:
    """Open a file of exactly this size for reading."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    with translate_os_errors("open the shard", path):
        try:
            descriptor = os.open(path, flags | os.O_NOFOLLOW)
        except OSError as exc:
            if exc.errno != errno.ELOOP:
                raise
            check_inside(path, inside)
            descriptor = os.open(path, flags)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size == n_bytes:
        return descriptor
    os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file; {_REMEDY}")
    raise DataError(f"{path}: {status.st_size} bytes, the manifest says {n_bytes}: {_REMEDY}")
