"""The files of an export: each is counted and hashed as it is written, and synced when it is complete."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lt_data.storage import fsync, os_errors, write


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """One file of an export: path relative to its folder, bytes and SHA-256 of its content."""

    path: str
    bytes: int
    sha256: str


class NewFile:
    """A file that is being written. Has what pyarrow and gzip ask of a file that is only written to.

    Attributes:
        path: where it lies.
        bytes: written so far.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.bytes = 0
        self._file = file
        self._digest = hashlib.sha256()

    @property
    def closed(self) -> bool:
        """Whether it takes no more."""
        return self._file.closed

    @property
    def sha256(self) -> str:
        """Hex digest of what was written so far."""
        return self._digest.hexdigest()

    def write(self, content: bytes | memoryview) -> int:
        """Append bytes; gives back how many.

        Raises:
            DataError: the file system refuses.
        """
        view = memoryview(content)
        with os_errors("write", self.path):
            write(self._file, view)
        self._digest.update(view)
        self.bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Nothing: `Files.new` flushes and syncs when the file is complete."""

    def close(self) -> None:
        """Nothing: `Files.new` closes the file when it is complete."""


class Files:
    """The files that one export wrote into a folder, in order.

    Attributes:
        folder: where they lie.
        listed: those that are complete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.listed: list[ExportedFile] = []

    @contextmanager
    def new(self, name: str) -> Iterator[NewFile]:
        """Open a new file of this name (folders in it are made); it is synced and listed when the block ends well.

        Raises:
            DataError: the file system refuses, or there is such a file.
        """
        path = self.folder / name
        with os_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("xb")
        with file:
            new = NewFile(path, file)
            yield new
            with os_errors("write", path):
                file.flush()
                fsync(file.fileno())
        self.listed.append(ExportedFile(path=name, bytes=new.bytes, sha256=new.sha256))

    def add(self, name: str, content: bytes) -> None:
        """Write a whole file."""
        with self.new(name) as file:
            file.write(content)

    @property
    def bytes(self) -> int:
        """Bytes in all of them."""
        return sum(file.bytes for file in self.listed)
