"""New files hashed as a whole while they are written, and the hash of an existing one.

Cost: one hash of the bytes, taken while they are in the processor's cache, besides that of `lt_ckpt.direct_io`.
"""

import os
from pathlib import Path

import xxhash

from lt_ckpt import files
from lt_ckpt.direct_io import DirectFileWriter
from lt_ckpt.records import FileRecord, FileRecords
from lt_ckpt.tensorfile import HASH_BLOCK_BYTES


class FileRecorder:
    """Creates files below a folder and collects the records of those that are synced.

    Attributes:
        files: Name relative to the folder → record, in the order in which the files were synced.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: FileRecords = {}

    def create(self, path: Path, n_bytes: int) -> DirectFileWriter:
        """Create a new file of `n_bytes` bytes."""
        return _HashingFileWriter(path, n_bytes, self)

    def add(self, path: Path, record: FileRecord) -> None:
        """Add the record of a synced file."""
        self.files[path.relative_to(self._folder).as_posix()] = record


class _HashingFileWriter(DirectFileWriter):
    def __init__(self, path: Path, n_bytes: int, recorder: FileRecorder) -> None:
        super().__init__(path, n_bytes)
        self._path, self._n_bytes, self._recorder = path, n_bytes, recorder
        self._digest = xxhash.xxh3_128()

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), HASH_BLOCK_BYTES):
            part = view[start : start + HASH_BLOCK_BYTES]
            self._digest.update(part)
            super().write(part)

    def sync(self) -> None:
        super().sync()
        record = FileRecord(n_bytes=self._n_bytes, hashed_bytes=self._n_bytes, xxh3_128=self._digest.hexdigest())
        self._recorder.add(self._path, record)


def hash_file(path: Path, hashed_bytes: int) -> FileRecord:
    """Return a file's record as this machine sees it: its size and the hash of its leading bytes."""
    descriptor = files.open_for_reading(path)
    try:
        size = os.fstat(descriptor).st_size
        hashed, digest = min(hashed_bytes, size), xxhash.xxh3_128()
        block = memoryview(bytearray(min(hashed, files.BLOCK_BYTES)))
        for begin in range(0, hashed, files.BLOCK_BYTES):  # an NxD file is hashed whole, and may be very large
            part = block[: min(len(block), hashed - begin)]
            files.read_exactly(descriptor, begin, part, path)
            digest.update(part)
    finally:
        os.close(descriptor)
    return FileRecord(n_bytes=size, hashed_bytes=hashed, xxh3_128=digest.hexdigest())
