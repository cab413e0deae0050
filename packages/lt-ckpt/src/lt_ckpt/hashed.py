"""New files that are hashed as a whole while they are written.

Cost: one hash of the bytes, taken while they are in the processor's cache, beside what `lt_ckpt.direct` costs.
"""

from pathlib import Path

import xxhash

from lt_ckpt.direct import NewFile
from lt_ckpt.records import FileRecord, Files
from lt_ckpt.tensorfile import HASH_BYTES


class Ledger:
    """Makes files below a folder and keeps the records of those that are on the disk.

    Attributes:
        files: Name, relative to the folder → record, in the order in which the files were put on the disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: Files = {}

    def create(self, path: Path, n_bytes: int) -> NewFile:
        """Makes a new file of so many bytes."""
        return _Hashed(path, n_bytes, self)

    def note(self, path: Path, record: FileRecord) -> None:
        """Takes the record of a file that is on the disk."""
        self.files[path.relative_to(self._folder).as_posix()] = record


class _Hashed(NewFile):
    def __init__(self, path: Path, n_bytes: int, ledger: Ledger) -> None:
        super().__init__(path, n_bytes)
        self._path, self._n_bytes, self._ledger = path, n_bytes, ledger
        self._digest = xxhash.xxh3_128()

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), HASH_BYTES):
            part = view[start : start + HASH_BYTES]
            self._digest.update(part)
            super().write(part)

    def sync(self) -> None:
        super().sync()
        record = FileRecord(n_bytes=self._n_bytes, hashed_bytes=self._n_bytes, xxh3_128=self._digest.hexdigest())
        self._ledger.note(self._path, record)
