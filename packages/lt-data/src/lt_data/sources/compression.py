"""Decompression of gzip, zstandard, bzip2 and xz files, which the endings of their names tell.

A compressed file is a sequence of frames (also called members or streams), most with a checksum at their end: damage is
certain only when the file has been read to its end. Whatever follows a frame must be another one, or the zeros that
gzip and xz allow; the file classes of Python would drop what follows damage between two frames of bzip2 or xz.

Memory: 16 KiB of the file and the content of these, and the window of the frame: that of zstandard at most 2 GiB
(`zstd --long=31`), of bzip2 4 MB, of xz as `xz -l -vv` says.
"""

import io
import re
from collections.abc import Callable
from typing import Any

from lt_data.errors import DataError
from lt_data.sources.record import BadRecord, DamagedFileError

_READ_BYTES = 1 << 14
_CONTENT_BYTES = 1 << 20  # at most, of what bzip2 and xz give at a time
_MAX_WINDOW_BYTES = 1 << 31
_HEADER_BYTES = 6  # of each frame, needed to begin it
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_FLAGS = 4  # index of that byte
_ZSTD_HAS_CHECKSUM = 0b100
_GZIP_WITH_HEADER = 31  # zlib's wbits
_REMEDY = "download or compress it again"
_XZ_UNCHECKED = 0  # lzma.CHECK_NONE

_MAGICS = {"gzip": b"\x1f\x8b", "zstandard": _ZSTD_MAGIC, "bzip2": b"BZh", "xz": b"\xfd7zXZ\0"}
_BINARY = tuple(
    (re.compile(pattern, re.DOTALL), message)
    for pattern, message in (
        (rb"\x1f\x8b", "compressed with gzip; end its name in .gz"),
        (rb"\x28\xb5\x2f\xfd", "compressed with zstandard; end its name in .zst"),
        (rb"BZh[1-9]1AY&SY", "compressed with bzip2; end its name in .bz2"),
        (rb"\xfd7zXZ\0", "compressed with xz; end its name in .xz"),
        (rb"PAR1\x15", "a parquet file; end its name in .parquet (unpack it first if it is compressed)"),
        (rb"ARROW1\0\0", "an Arrow file; end its name in .arrow (unpack it first if it is compressed)"),
        (rb"PK\x03\x04", "a zip archive, which is not read; unpack it"),
        (rb"7z\xbc\xaf", "a 7z archive, which is not read; unpack it"),
        (rb"(?=.{0,256}\0).{257}ustar", "a tar archive, which is not read; unpack it"),
        (rb"\x04\x22\x4d\x18", "compressed with lz4, which is not read; unpack it"),
        (rb"\x1f\x9d", "compressed with compress, which is not read; unpack it"),
        (rb"\x5d\0\0", "compressed with lzma, which is not read; unpack it"),
    )
)
"""Beginnings of files that are not text, and the message for each."""


def identify_binary(head: bytes) -> BadRecord | None:
    """Return the problem of a file of text whose first 512 bytes are those of a compressed file or an archive."""
    message = next((message for pattern, message in _BINARY if pattern.match(head)), None)
    return None if message is None else BadRecord("not text", message)


class DecompressedFile(io.RawIOBase):
    """Content of a compressed file.

    Attributes:
        has_unchecked: True if a frame read so far has no checksum, so that damage of it may stay unnoticed.
    """

    def __init__(self, stream: io.BufferedIOBase, compression: str) -> None:
        """Begin at the first frame.

        Raises:
            DataError: the library of the compression is not installed.
        """
        self.has_unchecked = False
        self._stream = stream
        self._compression = compression
        self._make_frame, self._error = _load_library(compression)
        self._frame: Any = None
        self._is_first = True
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read the next bytes of the content into a buffer; return their number, 0 at the end."""
        while not self._output:
            if self._frame is None and not self._begin_frame():
                return 0
            self._continue_frame()
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

    def _begin_frame(self) -> bool:
        """Begin the next frame; return False at the end of the file."""
        pads = not self._is_first and self._compression in ("gzip", "xz")
        header = self._input.lstrip(b"\0") if pads else self._input
        while len(header) < _HEADER_BYTES and (content := self._stream.read(_READ_BYTES)):
            header += content
            header = header.lstrip(b"\0") if pads else header
        self._input = header
        if not header:
            if self._is_first:
                raise self._damage(f"the file is empty; {_REMEDY}")
            return False
        has_magic = header.startswith(_MAGICS[self._compression])
        if self._compression == "zstandard":  # which has other frames too, without content
            has_checksum = len(header) <= _ZSTD_FLAGS or header[_ZSTD_FLAGS] & _ZSTD_HAS_CHECKSUM
            self.has_unchecked |= has_magic and not has_checksum
        elif self._is_first and not has_magic:
            raise self._damage(f"it does not begin as one of {self._compression}; {_REMEDY}")
        self._is_first = False
        self._frame = self._make_frame()
        return True

    def _continue_frame(self) -> None:
        """Decompress the next bytes of the frame."""
        frame = self._frame
        content = b""
        is_limited = hasattr(frame, "needs_input")
        if not is_limited or frame.needs_input:
            content = self._input or self._stream.read(_READ_BYTES)
            if not content:
                raise self._damage(f"it is truncated; {_REMEDY}")
        try:
            output = frame.decompress(content, _CONTENT_BYTES) if is_limited else frame.decompress(content)
        except self._error as exc:
            if "Allocation error" in str(exc):
                raise DataError(f"zstandard needs more memory than there is ({exc}); use fewer workers") from exc
            if "Dictionary mismatch" in str(exc):  # or the header, which says so, is damaged
                raise self._damage("it needs a dictionary, and files of that kind are not read; unpack it") from exc
            raise self._damage(f"{exc}; {_REMEDY}") from exc
        self._output = memoryview(output)
        self._input = b""
        if frame.eof:
            self._input = frame.unused_data
            self._frame = None
            self.has_unchecked |= self._compression == "xz" and frame.check == _XZ_UNCHECKED

    def _damage(self, problem: str) -> DamagedFileError:
        return DamagedFileError(f"damaged file ({self._compression}): {problem}")


def _load_library(compression: str) -> tuple[Callable[[], Any], type[Exception]]:
    """Return the function that begins a frame, and the error that its damage raises."""
    try:
        match compression:
            case "gzip":
                import zlib

                return lambda: zlib.decompressobj(_GZIP_WITH_HEADER), zlib.error
            case "bzip2":
                import bz2

                return bz2.BZ2Decompressor, OSError
            case "xz":
                import lzma

                return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError
            case _:
                import zstandard

                decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
                return decompressor.decompressobj, zstandard.ZstdError
    except ImportError as exc:
        remedy = 'pip install "lt-data[zstd]"' if compression == "zstandard" else "use a Python that was built with it"
        raise DataError(f"files compressed with {compression}: {exc}; {remedy}") from exc
