"""Frames of a zstandard file, the only module that imports zstandard.

A frame is given to the library block by block, since a block has at most 128 KiB of content: so the output is bounded
for any input, and a truncated frame is noticed, which zstandard's own reader does not do. A frame confirms its content
only if it was written with a checksum (the `zstd` command does, many libraries do not). Format: RFC 8878.
"""

import io
from collections.abc import Iterator
from typing import Any, BinaryIO

from lt_data.errors import DataError
from lt_data.sources.record import DamagedFileError

ZSTD_SUFFIX = ".zst"
_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_MAGIC = b"\x2a\x4d\x18"  # bytes 1 to 3; byte 0 is 0x50 to 0x5f
_WINDOW_BYTES, _DICTIONARY_BYTES, _SIZE_BYTES = (1, 0), (0, 1, 2, 4), (0, 2, 4, 8)
_RLE_BLOCK = 1
_TRUNCATED = "truncated zstandard file; download or compress it again"
_SKIP_BYTES = 1 << 20


class ZstdFrames:
    """Reader of the frames of a zstandard file in order; each `open_member` is followed by `read_chunk`s.

    Attributes:
        begin: offset of the open frame.
        is_checked: whether the open frame has a checksum of its content.

    Raises:
        DataError: the zstandard package is missing.
    """

    def __init__(self, stream: io.BufferedReader) -> None:
        """Read from the beginning of a frame; offsets count from there."""
        try:
            import zstandard
        except ImportError as exc:
            raise DataError('.zst files need the zstandard package: pip install "lt-data[zstd]"') from exc
        self.begin = 0
        self._offset = 0
        self.is_checked = True
        self._zstandard = zstandard
        self._stream = stream
        self._frame: Any = None
        self._ended = True

    def open_member(self) -> bool:
        """Begin the next frame; return False at the end of the file.

        Raises:
            DamagedFileError: there is no frame.
        """
        while True:
            self.begin = self._offset
            magic = self._stream.read(len(_MAGIC))
            self._offset += len(magic)
            if not magic:
                return False
            if magic[0] & 0xF0 == 0x50 and magic[1:] == _SKIPPABLE_MAGIC:
                self._skip(int.from_bytes(self._read(4), "little"))
                continue
            if magic != _MAGIC:
                short = _MAGIC.startswith(magic)
                raise DamagedFileError(_TRUNCATED if short else self._damage("Unknown frame descriptor"))
            self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            self._ended = False
            descriptor = self._read(1)
            flags = descriptor[0]
            single_segment = flags >> 5 & 1
            size_bytes = _SIZE_BYTES[flags >> 6] or single_segment
            self.is_checked = bool(flags & 4)
            header = self._read(_WINDOW_BYTES[single_segment] + _DICTIONARY_BYTES[flags & 3] + size_bytes)
            self._decompress(magic + descriptor + header)
            return True

    def read_chunk(self) -> bytes:
        """Return the next content of the frame; b"" at its end, once its checksum has been compared.

        Raises:
            DamagedFileError: the frame is damaged or truncated.
        """
        chunk = b""
        while not chunk and not self._ended:
            header = self._read(3)
            bits = int.from_bytes(header, "little")
            is_last, kind, size = bits & 1, bits >> 1 & 3, bits >> 3
            tail = 4 if is_last and self.is_checked else 0
            chunk = self._decompress(header + self._read((1 if kind == _RLE_BLOCK else size) + tail))
            if is_last:
                self._ended = True
                if not self._frame.eof:
                    raise DamagedFileError(self._damage("frame does not end with its last block"))
        return chunk

    def _decompress(self, content: bytes) -> bytes:
        try:
            return self._frame.decompress(content)
        except self._zstandard.ZstdError as exc:
            raise DamagedFileError(self._damage(exc)) from exc

    def _read(self, size: int) -> bytes:
        content = self._stream.read(size)
        self._offset += len(content)
        if len(content) < size:
            raise DamagedFileError(_TRUNCATED)
        return content

    def _skip(self, size: int) -> None:
        while size:
            size -= len(self._read(min(size, _SKIP_BYTES)))

    @staticmethod
    def _damage(reason: object) -> str:
        return f"damaged zstandard file: {reason}; download or compress it again"


def list_frames(file: BinaryIO) -> Iterator[int]:
    """Yield the offset of each frame of a file that can be sought, without decompressing it.

    Raises:
        DamagedFileError: the file is not made of whole frames.
    """
    size = file.seek(0, 2)
    offset = 0
    while offset < size:
        file.seek(offset)
        head = file.read(5)
        if len(head) == 5 and head[0] & 0xF0 == 0x50 and head[1:4] == _SKIPPABLE_MAGIC:
            offset += 8 + int.from_bytes(head[4:] + file.read(3), "little")
            continue
        if len(head) < 5 or head[:4] != _MAGIC:
            raise DamagedFileError(_TRUNCATED)
        yield offset
        flags = head[4]
        single_segment = flags >> 5 & 1
        size_bytes = _SIZE_BYTES[flags >> 6] or single_segment
        offset += 5 + _WINDOW_BYTES[single_segment] + _DICTIONARY_BYTES[flags & 3] + size_bytes
        is_last = 0
        while not is_last:
            file.seek(offset)
            header = file.read(3)
            bits = int.from_bytes(header, "little")
            is_last, kind, block = bits & 1, bits >> 1 & 3, bits >> 3
            offset += 3 + (1 if kind == _RLE_BLOCK else block)
            if len(header) < 3 or offset > size:
                raise DamagedFileError(_TRUNCATED)
        offset += 4 if flags & 4 else 0
    if offset != size:
        raise DamagedFileError(_TRUNCATED)
