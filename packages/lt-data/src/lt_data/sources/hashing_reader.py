"""Streams that hash and count the stored bytes of a file, and its opening for random access.

A resumed job gives the hash of the bytes that its finished shards came from: other bytes are an error, as is a file
that changes between two passes over it. Memory: a buffer of 1 MiB.
"""

import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

from lt_data.sources.record import ChangedFileError

BUFFER_BYTES = 1 << 20


class HashedPrefix(NamedTuple):
    """Number and SHA-256 (hex) of the first bytes of a file."""

    bytes: int
    sha256: str


class HashingCounter:
    """SHA-256 and number of the bytes read from a file.

    Attributes:
        bytes: number of the bytes so far.
        unchecked: format of the file if no checksum in it confirms its content, otherwise "".
    """

    def __init__(self, expected: HashedPrefix | None = None) -> None:
        """Start at the beginning of a file, whose first bytes are compared with those expected."""
        self.bytes = 0
        self.unchecked = ""
        self._expected = expected
        self._digest = hashlib.sha256()

    def update(self, content: "bytes | memoryview") -> None:
        """Count and hash the next bytes.

        Raises:
            ChangedFileError: the first bytes of the file are not those expected.
        """
        if self._expected is not None and self.bytes + len(content) >= self._expected.bytes:
            rest = self._expected.bytes - self.bytes
            self._digest.update(content[:rest])
            if self.sha256 != self._expected.sha256:
                raise ChangedFileError(
                    f"its first {self._expected.bytes} bytes are not those that the interrupted job read; restore the "
                    "file, or start over (--no-resume)"
                )
            self._digest.update(content[rest:])
            self._expected = None
        else:
            self._digest.update(content)
        self.bytes += len(content)

    def finish(self) -> None:
        """Check that the file is not shorter than expected.

        Raises:
            ChangedFileError: it is.
        """
        if self._expected is not None:
            raise ChangedFileError(
                f"{self.bytes} bytes, of which the interrupted job read {self._expected.bytes}; restore the file, or "
                "start over (--no-resume)"
            )

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of the bytes so far."""
        return self._digest.hexdigest()

    @property
    def prefix(self) -> HashedPrefix:
        """The bytes so far, or those expected if they are more."""
        return self._expected or HashedPrefix(self.bytes, self.sha256)


class _HashingRawIO(io.RawIOBase):
    """Sequential reader of a file that updates a counter."""

    def __init__(self, file: BinaryIO, counter: HashingCounter) -> None:
        self._file = file
        self._counter = counter

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview", /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        self._counter.update(content)
        return len(content)


def hash_stream(file: BinaryIO, counter: HashingCounter) -> io.BufferedReader:
    """Return a sequential stream of the file's bytes that updates the counter."""
    return io.BufferedReader(_HashingRawIO(file, counter), BUFFER_BYTES)


class _OffsetRawIO(io.RawIOBase):
    """Reader of a file from an offset on, which leaves the position of the open file as it is."""

    def __init__(self, file: BinaryIO, offset: int) -> None:
        self._descriptor = file.fileno()
        self._offset = offset

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview", /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        n = os.preadv(self._descriptor, [buffer], self._offset)
        self._offset += n
        return n


def open_at(file: BinaryIO, offset: int) -> io.BufferedReader:
    """Return another stream of an open local file, from an offset on."""
    return io.BufferedReader(_OffsetRawIO(file, offset), BUFFER_BYTES)


def write_time(file: BinaryIO) -> tuple[int, int]:
    """Return the size of an open local file and the time of its last write."""
    state = os.fstat(file.fileno())
    return state.st_size, state.st_mtime_ns


def check_unchanged(file: BinaryIO, written: tuple[int, int]) -> None:
    """Raise ChangedFileError if an open local file was written since `write_time` returned `written`."""
    if write_time(file) != written:
        raise ChangedFileError("it was changed while it was read; run again once it no longer changes")


@contextmanager
def open_seekable(file: BinaryIO, counter: HashingCounter, *, local: bool) -> Iterator[BinaryIO]:
    """Hash a whole file, then open it for random access.

    Args:
        file: the file, at its beginning.
        counter: counts and hashes all bytes.
        local: whether it can be read twice; if not, a temporary copy is read.

    Raises:
        ChangedFileError: it was changed in the meantime.
    """
    stream = hash_stream(file, counter)
    if local:
        written = write_time(file)
        while stream.read(BUFFER_BYTES):
            pass
        file.seek(0)
        yield file
        check_unchanged(file, written)
        return
    with tempfile.TemporaryFile() as copy:
        while content := stream.read(BUFFER_BYTES):
            copy.write(content)
        copy.flush()
        copy.seek(0, os.SEEK_SET)
        yield copy
