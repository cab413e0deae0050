"""What is read as one: a listed file, or a run of rows of a dataset."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol
from urllib.parse import urlsplit

from lt_data.errors import DataError
from lt_data.names import portable
from lt_data.sources.bytes_in import Tally
from lt_data.sources.formats import read_file
from lt_data.sources.options import ReadOptions
from lt_data.sources.record import Damaged, Record
from lt_data.sources.transfer import transfer_errors
from lt_data.storage import os_errors


class Unit(Protocol):
    """Anything with the members of `ListedFile` that a reader uses."""

    @property
    def name(self) -> str:
        """As it is shown."""
        ...

    @property
    def recorded(self) -> str:
        """As it stands in the manifest."""
        ...

    @property
    def size(self) -> int | None:
        """Bytes, about; None where only reading tells."""
        ...

    def records(self, options: ReadOptions, start: int, tally: Tally) -> Iterator[Record]:
        """The records from number `start` on; the tally is told of everything from the beginning."""
        ...


@dataclass(frozen=True, kw_only=True)
class ListedFile:
    """One file.

    Attributes:
        name: as it is shown, without the parts of a URL that may be secret.
        size: bytes when it was listed; None where the server does not tell.
        path: as its file system knows it.
        filesystem: of fsspec; None for a local file.
    """

    name: str
    size: int | None
    path: str
    filesystem: Any = None

    @property
    def recorded(self) -> str:
        """The name for the manifest: the same under every locale."""
        return portable(self.name) if self.filesystem is None else self.name

    def records(self, options: ReadOptions, start: int, tally: Tally) -> Iterator[Record]:
        """The records of the file from number `start` on; the tally is told of all of its bytes.

        Raises:
            Damaged: it cannot be read on.
            DataError: the file system refuses, the size is another one by now, or a package is missing.
        """
        path = urlsplit(self.path).path if "://" in self.path else self.path
        try:
            with self._faults(), self.open() as file:
                yield from read_file(file, path.lower(), options, start, tally, local=self.filesystem is None)
        except Damaged:
            self._check_size(tally)
            raise
        self._check_size(tally)

    def _faults(self) -> AbstractContextManager[None]:
        return os_errors("read", self.name) if self.filesystem is None else transfer_errors(self.name, self.path)

    def open(self) -> BinaryIO:
        """The file at its beginning."""
        return open(self.path, "rb") if self.filesystem is None else self.filesystem.open(self.path, "rb")

    def _check_size(self, tally: Tally) -> None:
        if self.size is not None and tally.bytes != self.size:
            raise DataError(
                f"{self.name}: {tally.bytes} bytes read of a file that had {self.size} when it was listed; "
                "it was changed meanwhile, or the transfer was cut off: run again when it is at rest"
            )
