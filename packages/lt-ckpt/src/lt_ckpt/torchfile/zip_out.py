"""Writes a zip archive of stored records as torch does, from front to back.

Every record begins at a multiple of 64 bytes, padded by an extra field of its header, and its CRC-32 and size follow
it, so nothing is ever patched and a record's bytes may come in blocks of any size. Headers grow by zip64 fields exactly
where torch's do. The bytes depend on the contents alone: there are no times in it.

Cost: one pass over the bytes for the CRC; memory: some 200 bytes per record.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from lt_ckpt.torchfile.crc import crc32

ALIGNMENT = 64
SMALL_BYTES = 2**16
"""What is shorter waits for more."""

_FULL = 0xFFFFFFFF
_FLAGS = 0x0800  # names are UTF-8
_SIZES_FOLLOW = 0x0008

Write = Callable[[bytes | memoryview], None]
"""Takes the next bytes of the archive."""


@dataclass(frozen=True, slots=True)
class _Line:
    """What the directory says of a record."""

    name: bytes
    begin: int
    n_bytes: int
    crc32: int


class ZipOut:
    """An archive, being written.

    Headers wait for the bytes that follow them, so that a writer is called for records, not for their wrapping.

    Attributes:
        position: Bytes of the archive so far.
    """

    def __init__(self, write: Write, root: str) -> None:
        self.position = 0
        self._write = write
        self._waiting = bytearray()
        self._root = root
        self._lines: list[_Line] = []
        self._open: tuple[bytes, int, int] | None = None
        """Name, position and size of the record that is being written."""
        self._crc32 = self._left = 0

    @property
    def left(self) -> int:
        """Bytes of the open record that have not come yet."""
        return self._left

    def _put(self, data: bytes | memoryview) -> None:
        self.position += len(data)
        if len(data) < SMALL_BYTES and len(self._waiting) + len(data) < SMALL_BYTES:
            self._waiting += data
            return
        self._flush()
        self._write(data)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, bytearray()
        if waiting:
            self._write(bytes(waiting))

    def begin(self, name: str, n_bytes: int) -> None:
        """Begins the next record."""
        assert self._open is None, self._open
        raw = f"{self._root}/{name}".encode()
        begin = self.position
        large = [n_bytes, 0] if n_bytes >= _FULL else []  # what torch puts there; readers look into the directory
        extra = _zip64(large, [begin] if begin >= _FULL else [])
        padding = -(begin + 30 + len(raw) + len(extra) + 4) % ALIGNMENT
        extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
        flags = _FLAGS | (_SIZES_FOLLOW if n_bytes else 0)
        self._put(struct.pack("<4s5H3L2H", b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(raw), len(extra)) + raw + extra)
        self._open, self._crc32, self._left = (raw, begin, n_bytes), 0, n_bytes

    def append(self, data: memoryview) -> None:
        """Takes the next bytes of the open record."""
        self._left -= len(data)
        assert self._left >= 0, self._open
        self._crc32 = crc32(data, self._crc32)
        self._put(data)

    def skip(self) -> None:
        """Counts the bytes of the open record that have not come, without having them: to measure an archive."""
        self.position += self._left
        self._left = 0

    def end(self) -> None:
        """Ends the record, all of whose bytes have come."""
        assert self._open is not None
        assert self._left == 0, self._open
        raw, begin, n_bytes = self._open
        if n_bytes:
            wide = n_bytes >= _FULL or begin >= _FULL
            form = "<4sLQQ" if wide else "<4sLLL"
            self._put(struct.pack(form, b"PK\7\10", self._crc32, n_bytes, n_bytes))
        self._lines.append(_Line(raw, begin, n_bytes, self._crc32))
        self._open = None

    def record(self, name: str, data: bytes) -> None:
        """Writes a record whole."""
        self.begin(name, len(data))
        self.append(memoryview(data))
        self.end()

    def checksum(self) -> str:
        """Returns forty digits that depend on the names and bytes of all records so far."""
        names = crc32(b"\0".join(sorted(line.name.partition(b"/")[2] for line in self._lines)), 0)
        data = crc32(b"".join(struct.pack("<LQ", line.crc32, line.n_bytes) for line in self._lines), 0)
        return f"{names:020d}{data:020d}"

    def finish(self) -> None:
        """Writes the directory."""
        assert self._open is None, self._open
        begin = self.position
        directory = b"".join(map(_directory_line, self._lines))
        n, size = len(self._lines), len(directory)
        end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0x031E, 45, 0, 0, n, n, size, begin)
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, begin + size, 1)
        short = min(n, 0xFFFF)
        end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, short, short, min(size, _FULL), min(begin, _FULL), 0)
        self._put(directory + end64 + locator + end)
        self._flush()


def _zip64(sizes: list[int], position: list[int]) -> bytes:
    values = [*sizes, *position]
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _directory_line(line: _Line) -> bytes:
    large, far = line.n_bytes >= _FULL, line.begin >= _FULL
    extra = _zip64([line.n_bytes] * 2 if large else [], [line.begin] if far else [])
    size = _FULL if large else line.n_bytes
    flags = _FLAGS | (_SIZES_FOLLOW if line.n_bytes else 0)
    fixed = (0, 0, flags, 0, 0, 0, line.crc32, size, size, len(line.name), len(extra), 0, 0, 0, 0)
    return struct.pack("<4s6H3L5H2L", b"PK\1\2", *fixed, _FULL if far else line.begin) + line.name + extra
