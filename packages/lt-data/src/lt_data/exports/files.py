"""Output files of an export, counted and hashed as they are written, and synced when complete."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lt_data.errors import DataError
from lt_data.file_names import is_plain_name
from lt_data.storage import fsync, translate_os_errors, write


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """File of an export: path relative to its folder, bytes and SHA-256 of its content."""

    path: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not all(map(is_plain_name, self.path.split("/"))):
            raise DataError(f"{self.path!r} is not the name of a file of the folder")


class OutputFile:
    """File that is being written, with the write-only file interface of pyarrow.

    Attributes:
        path: its path.
        bytes: bytes written so far.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.bytes = 0
        self._file = file
        self._digest = hashlib.sha256()

    @property
    def closed(self) -> bool:
        """True if the file is closed."""
        return self._file.closed

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of the bytes written so far."""
        return self._digest.hexdigest()

    def write(self, content: bytes | memoryview) -> int:
        """Write bytes; return their number.

        Raises:
            DataError: a file system error.
        """
        view = memoryview(content)
        with translate_os_errors("write", self.path):
            write(self._file, view)
        self._digest.update(view)
        self.bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Do nothing: `OutputFiles.create` flushes and syncs the complete file."""

    def close(self) -> None:
        """Do nothing: `OutputFiles.create` closes the complete file."""


class OutputFiles:
    """Output files of one export in a folder.

    Attributes:
        folder: the folder.
        completed: the complete files, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.completed: list[ExportedFile] = []

    @contextmanager
    def create(self, name: str) -> Iterator[OutputFile]:
        """Create a file and its parent folders; sync and list it when the block ends without an error.

        Raises:
            DataError: a file system error, or the file exists.
        """
        path = self.folder / name
        with translate_os_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("xb")
        with file:
            output = OutputFile(path, file)
            yield output
            with translate_os_errors("write", path):
                file.flush()
                fsync(file.fileno())
        self.completed.append(ExportedFile(path=name, bytes=output.bytes, sha256=output.sha256))

    def add(self, name: str, content: bytes) -> None:
        """Write a whole file."""
        with self.create(name) as file:
            file.write(content)

    @property
    def bytes(self) -> int:
        """Total bytes of the complete files."""
        return sum(file.bytes for file in self.completed)
