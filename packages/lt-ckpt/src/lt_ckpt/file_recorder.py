"""Record of a finished file: its size and the hash of its leading bytes."""

import os
from pathlib import Path

import xxhash

from lt_ckpt import files
from lt_ckpt.records import FileRecord


def hash_file(path: Path, hashed_bytes: int | None = None) -> FileRecord:
    """Return a file's record as this machine sees it.

    Args:
        path: The file.
        hashed_bytes: Leading bytes to hash; None: all.
    """
    descriptor = files.open_for_reading(path)
    try:
        size = os.fstat(descriptor).st_size
        hashed, digest = size if hashed_bytes is None else min(hashed_bytes, size), xxhash.xxh3_128()
        block = memoryview(bytearray(min(hashed, files.BLOCK_BYTES)))
        for begin in range(0, hashed, files.BLOCK_BYTES):  # an NxD file is hashed whole, and may be very large
            part = block[: min(len(block), hashed - begin)]
            files.read_exactly(descriptor, begin, part, path)
            digest.update(part)
    finally:
        os.close(descriptor)
    return FileRecord(n_bytes=size, hashed_bytes=hashed, xxh3_128=digest.hexdigest())
