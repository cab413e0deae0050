"""Streams that hash and count the bytes of a file, and decompress .gz and .zst files.

The stored bytes are hashed, before decompression. A truncated or damaged compressed file raises `DamagedFileError`;
zstandard's own reader does not detect truncation. Memory: a buffer of 1 MiB.
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

from lt_data.sources.record import DamagedFileError

BUFFER_BYTES = 1 << 20
COMPRESSED_SUFFIXES = (".gz", ".zst")


class HashingCounter:
    """SHA-256 and number of the bytes read from a file."""

    def __init__(self) -> None:
        self.bytes = 0
        self._digest = hashlib.sha256()

    def update(self, content: "bytes | memoryview") -> None:
        """Count and hash the next bytes."""
        self._digest.update(content)
        self.bytes += len(content)

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of the bytes so far."""
        return self._digest.hexdigest()


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


@contextmanager
def decompress_stream(stream: io.BufferedReader, name: str) -> Iterator[io.BufferedIOBase]:
    """Decompress a stream by the suffix of its name.

    Raises:
        DamagedFileError: from the block, if the data is damaged or truncated.
        DataError: a `.zst` file without the zstandard package.
    """
    if name.endswith(".gz"):
        with _translate_gzip_errors():
            yield io.BufferedReader(gzip.GzipFile(fileobj=stream, mode="rb"), BUFFER_BYTES)
    elif name.endswith(".zst"):
        from lt_data.sources.zstd import decompress

        yield io.BufferedReader(decompress(stream), BUFFER_BYTES)
    else:
        yield stream


@contextmanager
def _translate_gzip_errors() -> Iterator[None]:
    try:
        yield
    except EOFError as exc:
        raise DamagedFileError("truncated gzip file; download or compress it again") from exc
    except (gzip.BadGzipFile, zlib.error) as exc:
        raise DamagedFileError(f"damaged gzip file: {exc}; download or compress it again") from exc


@contextmanager
def open_seekable(file: BinaryIO, counter: HashingCounter, *, local: bool) -> Iterator[BinaryIO]:
    """Hash a whole file, then open it for random access.

    Args:
        file: the file, at its beginning.
        counter: counts and hashes all bytes.
        local: whether it can be read twice; if not, a temporary copy is read.
    """
    stream = hash_stream(file, counter)
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
