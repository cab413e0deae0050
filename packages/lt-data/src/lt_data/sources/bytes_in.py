"""The bytes of one listed file, hashed and counted on their way, and unpacked where its name ends in .gz or .zst.

What is hashed is the file as it lies there, packed if it is. A packed file that ends early or is damaged raises
`Damaged`; zstandard's own reader would take a cut file for a whole one. Memory: a buffer of 1 MiB.
"""

import gzip
import hashlib
import io
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from lt_data.sources.record import Damaged

BUFFER_BYTES = 1 << 20
PACKED = (".gz", ".zst")


class Tally:
    """SHA-256 and number of the bytes that were read from a file."""

    def __init__(self) -> None:
        self.bytes = 0
        self._digest = hashlib.sha256()

    def update(self, content: "bytes | memoryview") -> None:
        """Count and hash what comes next."""
        self._digest.update(content)
        self.bytes += len(content)

    @property
    def sha256(self) -> str:
        """The hash of all so far."""
        return self._digest.hexdigest()


class _Tallied(io.RawIOBase):
    """Reads a file from its beginning to its end and tells a tally."""

    def __init__(self, file: BinaryIO, tally: Tally) -> None:
        self._file = file
        self._tally = tally

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview", /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        self._tally.update(content)
        return len(content)


def tallied(file: BinaryIO, tally: Tally) -> io.BufferedReader:
    """The file as it is, for reading in order."""
    return io.BufferedReader(_Tallied(file, tally), BUFFER_BYTES)


@contextmanager
def unpacked(stream: io.BufferedReader, name: str) -> Iterator[io.BufferedIOBase]:
    """What the file holds, by the end of its name.

    Raises:
        Damaged: out of the block, when it meets bytes that cannot be unpacked, or an end that comes too early.
        DataError: a `.zst` file without the zstandard package.
    """
    if name.endswith(".gz"):
        with _gzip_faults():
            yield io.BufferedReader(gzip.GzipFile(fileobj=stream, mode="rb"), BUFFER_BYTES)
    elif name.endswith(".zst"):
        from lt_data.sources.zstd import unpack

        yield io.BufferedReader(unpack(stream), BUFFER_BYTES)
    else:
        yield stream


@contextmanager
def _gzip_faults() -> Iterator[None]:
    try:
        yield
    except EOFError as exc:
        raise Damaged("the gzip file is cut off: its end is missing; fetch or pack it again") from exc
    except (gzip.BadGzipFile, zlib.error) as exc:
        raise Damaged(f"not a whole gzip file: {exc}; fetch or pack it again") from exc


@contextmanager
def seekable(file: BinaryIO, tally: Tally, *, local: bool) -> Iterator[BinaryIO]:
    """The file, tallied whole before anything of it is used, for a reader that jumps about in it.

    Args:
        file: the file, at its beginning.
        tally: told of all bytes.
        local: whether it can be read twice; if not, a copy in the folder for temporary files is.
    """
    stream = tallied(file, tally)
    if local:
        while stream.read(BUFFER_BYTES):
            pass
        file.seek(0)
        yield file
        return
    with tempfile.TemporaryFile() as copy:
        while content := stream.read(BUFFER_BYTES):
            copy.write(content)
        copy.seek(0, os.SEEK_SET)
        yield copy
