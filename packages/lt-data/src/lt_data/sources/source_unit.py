"""Units of reading: a listed file, or a range of rows of a dataset."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import urlsplit

from lt_data.errors import DataError
from lt_data.file_names import to_portable_name
from lt_data.sources.formats import read_file
from lt_data.sources.hashing_reader import HashingCounter
from lt_data.sources.options import SourceOptions
from lt_data.sources.record import DamagedFileError, SourceRecord
from lt_data.sources.transfer_errors import translate_transfer_errors
from lt_data.storage import open_regular, translate_os_errors


class SourceUnit(Protocol):
    """Interface of a unit of reading, such as `ListedFile`."""

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    @property
    def manifest_name(self) -> str:
        """Name in the manifest."""
        ...

    @property
    def size(self) -> int | None:
        """Approximate bytes; None if unknown before reading."""
        ...

    def records(self, options: SourceOptions, start: int, counter: HashingCounter) -> Iterator[SourceRecord]:
        """Yield the records from index `start` on; the counter covers the whole unit.

        Raises:
            DamagedFileError: the rest cannot be read.
            ChangedFileError: the unit is not what it was when it was read before.
            DataError: any other error.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ListedFile:
    """Listed file.

    Attributes:
        name: name for messages, without the parts of a URL that may be secret.
        size: bytes when it was listed; None if the server does not report it.
        path: path in its file system.
        filesystem: fsspec file system; None for a local file.
    """

    name: str
    size: int | None
    path: str
    filesystem: Any = None

    @property
    def manifest_name(self) -> str:
        """Name in the manifest, the same under every locale."""
        return to_portable_name(self.name) if self.filesystem is None else self.name

    def records(self, options: SourceOptions, start: int, counter: HashingCounter) -> Iterator[SourceRecord]:
        """Yield the records of the file from index `start` on; the counter covers all of its bytes.

        Raises:
            DamagedFileError: the rest cannot be read.
            ChangedFileError: the file is not what it was when it was read before.
            DataError: a file system error, a changed size, or a missing package.
        """
        path = urlsplit(self.path).path if "://" in self.path else self.path
        try:
            with self.translate_errors(), self.open() as file:
                yield from read_file(file, path.lower(), options, start, counter, local=self.filesystem is None)
        except DamagedFileError:
            self._check_size(counter)
            raise
        self._check_size(counter)

    def translate_errors(self) -> AbstractContextManager[None]:
        """Return a context that converts errors of the file system, or of the transfer, to a DataError."""
        return (
            translate_os_errors("read", self.name)
            if self.filesystem is None
            else translate_transfer_errors(self.name, self.path)
        )

    def open(self) -> BinaryIO:
        """Open the file."""
        return open_regular(Path(self.path)) if self.filesystem is None else self.filesystem.open(self.path, "rb")

    def _check_size(self, counter: HashingCounter) -> None:
        if self.size is not None and counter.bytes != self.size:
            raise DataError(
                f"{self.name}: {counter.bytes} bytes read of a file that had {self.size} when it was listed; "
                "it was changed meanwhile, or the transfer was interrupted: run again once it no longer changes"
            )
