"""SHA-256 of a folder's files, computed while they are written.

A file that is written front to back is hashed from the memory it is written from, on a thread of its own while the
writer copies the same bytes into its blocks, so nothing is read a second time. Small files that are written
otherwise, and files that a killed process had finished, are read back at the end (`add_rest`).

Cost: one SHA-256 of every byte, 2 GB/s per file where the processor has instructions for it; no memory of its own.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.direct_io import CreateFile, WritableFile

HASH_THREADS = 3
"""Threads that hash, for as many files that are written at the same time."""

MIN_THREAD_BYTES = 64 * 2**10
"""Shorter writes are hashed by the writer itself: handing them over would cost more."""


class FolderHasher:
    """Hashes the files of a folder and collects the results; a context that ends its threads.

    Args:
        folder: The folder.
        create: Creates its files.

    Attributes:
        hashes: Path relative to the folder → SHA-256 as hexadecimal text, of the files that are finished.
    """

    def __init__(self, folder: Path, create: CreateFile) -> None:
        self._folder, self._create = folder, create
        self._pool = ThreadPoolExecutor(HASH_THREADS, "lt-ckpt-hash")
        self.hashes: dict[str, str] = {}

    def create(self, path: Path, n_bytes: int) -> WritableFile:
        """Create a file of `n_bytes` bytes that is hashed while it is written."""
        return _HashedFile(path, self._create(path, n_bytes), self, self._pool)

    def add(self, path: Path, digest: str) -> None:
        """Add the hash of a finished file."""
        self.hashes[path.relative_to(self._folder).as_posix()] = digest

    def add_rest(self) -> None:
        """Read and hash the files of the folder that were not created here."""
        for parent, _, names in os.walk(self._folder):
            for path in (Path(parent, name) for name in names):
                if path.relative_to(self._folder).as_posix() not in self.hashes:
                    with open(path, "rb") as file:
                        self.add(path, hashlib.file_digest(file, "sha256").hexdigest())

    def __enter__(self) -> "FolderHasher":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


class _HashedFile:
    def __init__(self, path: Path, file: WritableFile, hasher: FolderHasher, pool: ThreadPoolExecutor) -> None:
        self._path, self._file, self._hasher, self._pool = path, file, hasher, pool
        self._digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), files.BLOCK_BYTES):
            part = view[start : start + files.BLOCK_BYTES]
            if len(part) < MIN_THREAD_BYTES:
                self._digest.update(part)
                self._file.write(part)
                continue
            hashed = self._pool.submit(self._digest.update, part)
            try:
                self._file.write(part)
            finally:
                hashed.result()  # the caller may reuse the memory once this returns

    def sync(self) -> None:
        self._file.sync()
        self._hasher.add(self._path, self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()
