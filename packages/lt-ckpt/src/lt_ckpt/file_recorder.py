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
    size, digest = os.stat(path).st_size, xxhash.xxh3_128()
    hashed = size if hashed_bytes is None else min(hashed_bytes, size)
    for block in files.iter_blocks(path, 0, hashed):
        digest.update(block)
    return FileRecord(n_bytes=size, hashed_bytes=hashed, xxh3_128=digest.hexdigest())
