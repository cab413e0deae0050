"""Limits of the disk: bytes written and read directly (O_DIRECT), in large blocks.

Direct reads and writes pass by the page cache, need blocks of whole pages, and are the fastest that one process gets.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK_BYTES = 8 * 2**20
BLOCK = mmap.mmap(-1, BLOCK_BYTES)
BLOCK.write(os.urandom(BLOCK_BYTES))


def files_of(folder: Path) -> list[Path]:
    """Return the files in a folder and below it."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def drop_page_cache(folder: Path) -> None:
    """Drop the page cache of the files in a folder."""
    for path in files_of(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def write_raw(path: Path, n_bytes: int, flags: int = os.O_DIRECT) -> None:
    """Write a new file of `n_bytes`, rounded up to whole blocks, and an fsync."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    for position in range(0, n_bytes, BLOCK_BYTES):
        os.pwrite(descriptor, BLOCK, position)
    os.fsync(descriptor)
    os.close(descriptor)


def read_raw(paths: Iterable[Path], n_threads: int = 1) -> None:
    """Read files directly; each thread takes the next block that no other has taken."""
    blocks = iter([(path, at) for path in paths for at in range(0, path.stat().st_size, BLOCK_BYTES)])

    def read_blocks(_: int) -> None:
        buffer = mmap.mmap(-1, BLOCK_BYTES)
        for path, position in blocks:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.preadv(descriptor, [buffer], position)
            os.close(descriptor)

    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(read_blocks, range(n_threads)))
