"""Decompression of zstandard files, the only module that imports zstandard.

Its stream reader does not detect truncation, so the end of each frame is checked here. Input is decompressed in chunks
of 16 KiB, which bounds the output per chunk for usual data.
"""

import io
from typing import Any

from lt_data.errors import DataError
from lt_data.sources.record import DamagedFileError

_CHUNK_BYTES = 1 << 14


def decompress(stream: io.BufferedReader) -> io.RawIOBase:
    """Return a stream of the decompressed frames of a file.

    Raises:
        DataError: the zstandard package is missing.
        DamagedFileError: while reading: a frame is damaged or truncated.
    """
    try:
        import zstandard
    except ImportError as exc:
        raise DataError('.zst files need the zstandard package: pip install "lt-data[zstd]"') from exc
    return _ZstdReader(stream, zstandard)


class _ZstdReader(io.RawIOBase):
    def __init__(self, stream: io.BufferedReader, zstandard: Any) -> None:
        self._stream = stream
        self._zstandard = zstandard
        self._frame: Any = None  # the open frame
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._output:
            if not self._input:
                self._input = self._stream.read(_CHUNK_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise DamagedFileError("truncated zstandard file; download or compress it again")
                return 0
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._zstandard.ZstdError as exc:
                raise DamagedFileError(f"damaged zstandard file: {exc}; download or compress it again") from exc
            self._input = b""
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = None
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size
