"""Unpacking zstandard files: the one module that knows the zstandard package.

Its own stream reader takes a file that was cut off for a whole one, so the end of each frame is asked for here. Input
goes in by pieces of 16 KiB, which bounds what one piece can grow into for anything that people pack.
"""

import io
from typing import Any

from lt_data.errors import DataError
from lt_data.sources.record import Damaged

_PIECE_BYTES = 1 << 14


def unpack(stream: io.BufferedReader) -> io.RawIOBase:
    """The content of all frames of a file, one after the other.

    Raises:
        DataError: the zstandard package is missing.
        Damaged: when read: a frame is damaged or cut off.
    """
    try:
        import zstandard
    except ImportError as exc:
        raise DataError('.zst files need the zstandard package: pip install "lt-data[zstd]"') from exc
    return _Unpacked(stream, zstandard)


class _Unpacked(io.RawIOBase):
    def __init__(self, stream: io.BufferedReader, zstandard: Any) -> None:
        self._stream = stream
        self._zstandard = zstandard
        self._frame: Any = None  # the frame that is open, if one is
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._output:
            if not self._input:
                self._input = self._stream.read(_PIECE_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise Damaged("the zstandard file is cut off: its end is missing; fetch or pack it again")
                return 0
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._zstandard.ZstdError as exc:
                raise Damaged(f"not a whole zstandard file: {exc}; fetch or pack it again") from exc
            self._input = b""
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = None
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size
