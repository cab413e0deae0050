"""SHA-256 of the files of an output, taken while they are written.

A conversion fills its files from the front, more or less, with several threads. As soon as the front of a file is
settled it is read again, from memory, and hashed, while the threads go on; the system is told to write it to the disk.
So when the last block is written, little is left to hash and to flush. What lies behind the settled part, and files
whose writer does not settle them, is hashed at the end.

Cost: one pass over the bytes, of which most are still in memory; one buffer.
"""

import hashlib
import os
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.parallel import iter_in_threads

STEP_BYTES = 8 * 2**20
"""Settled bytes of a file from which on it is worth to open it."""
WRITEBACK_BYTES = 128 * 2**20
"""Bytes in front of the settled end that may still be on their way to the disk."""


class OutputHashes:
    """Hashes of files that are being written.

    Args:
        is_listed: False: nobody asks for the hashes, so the files are only flushed.
    """

    def __init__(self, *, is_listed: bool) -> None:
        self._is_listed = is_listed
        self._files: dict[Path, tuple[hashlib._Hash, int]] = {}
        """File → digest and bytes hashed so far."""
        self._buffer = memoryview(bytearray(2**20))

    def settle(self, path: Path, end: int) -> None:
        """Say that the bytes of a file up to `end` do not change any more."""
        digest, position = self._files.get(path, (hashlib.sha256(), 0))
        if end - position < STEP_BYTES:
            return
        with open(path, "rb", buffering=0) as file:
            position = position if self._is_listed else end
            file.seek(position)
            while position < end and (n_read := file.readinto(self._buffer[: end - position])):
                digest.update(self._buffer[:n_read])
                position += n_read
            files.start_writeback(file.fileno(), max(0, position - WRITEBACK_BYTES), position)
        self._files[path] = digest, position

    def finish(self, folder: Path) -> dict[str, str]:
        """Flush all files of a folder to the disk; return path relative to the folder → SHA-256."""

        def finish_file(path: Path) -> str:
            digest, position = self._files.get(path, (hashlib.sha256(), 0))
            with os.fdopen(files.open_for_reading(path), "rb") as file:
                files.fsync(file.fileno())
                if not self._is_listed:
                    return ""
                file.seek(position)
                return hashlib.file_digest(file, lambda: digest).hexdigest()

        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        hashes = iter_in_threads(finish_file, [(path,) for path in paths])
        return {path.relative_to(folder).as_posix(): digest for path, digest in zip(paths, hashes, strict=True)}
