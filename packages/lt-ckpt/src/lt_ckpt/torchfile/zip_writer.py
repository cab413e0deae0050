"""Streaming writer of zip archives of uncompressed records, as torch writes them.

Every record begins at a multiple of 64 bytes, padded by an extra field of its header, and its CRC-32 and size follow
it, so nothing is ever patched and a record's bytes may come in blocks of any size. Headers have zip64 fields exactly
where torch's do. The bytes depend on the contents alone: there are no timestamps.

Cost: one pass over the bytes for the CRC; memory: some 200 bytes per record.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from lt_ckpt.torchfile.crc import crc32

ALIGNMENT = 64
BUFFER_BYTES = 2**16
"""Shorter writes are buffered."""

_FULL = 0xFFFFFFFF
_FLAGS = 0x0800  # names are UTF-8
_SIZES_FOLLOW = 0x0008

WriteBytes = Callable[[bytes | memoryview], None]
"""Writes the next bytes of the archive."""


@dataclass(frozen=True, slots=True)
class _DirectoryEntry:
    """Entry of the central directory."""

    name: bytes
    byte_offset: int
    n_bytes: int
    crc32: int


class StoredZipWriter:
    """Writer of a zip archive.

    Headers are buffered until the bytes that follow them, so that the byte sink is called for records, not for headers.

    Attributes:
        position: Bytes of the archive so far.
    """

    def __init__(self, write: WriteBytes, root: str) -> None:
        self.position = 0
        self._write = write
        self._waiting = bytearray()
        self._root = root
        self._entries: list[_DirectoryEntry] = []
        self._open: tuple[bytes, int, int] | None = None
        """Name, position and size of the open record."""
        self._crc32 = self._remaining = 0

    @property
    def remaining(self) -> int:
        """Bytes of the open record still to be written."""
        return self._remaining

    def _put(self, data: bytes | memoryview) -> None:
        self.position += len(data)
        if len(data) < BUFFER_BYTES and len(self._waiting) + len(data) < BUFFER_BYTES:
            self._waiting += data
            return
        self._flush()
        self._write(data)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, bytearray()
        if waiting:
            self._write(bytes(waiting))

    def begin_record(self, name: str, n_bytes: int) -> None:
        """Begin the next record."""
        assert self._open is None, self._open
        raw = f"{self._root}/{name}".encode()
        begin = self.position
        large = [n_bytes, 0] if n_bytes >= _FULL else []  # as torch does; readers use the directory
        extra = _pack_zip64_extra(large, [begin] if begin >= _FULL else [])
        padding = -(begin + 30 + len(raw) + len(extra) + 4) % ALIGNMENT
        extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
        flags = _FLAGS | (_SIZES_FOLLOW if n_bytes else 0)
        self._put(struct.pack("<4s5H3L2H", b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(raw), len(extra)) + raw + extra)
        self._open, self._crc32, self._remaining = (raw, begin, n_bytes), 0, n_bytes

    def append(self, data: memoryview) -> None:
        """Write the next bytes of the open record."""
        self._remaining -= len(data)
        assert self._remaining >= 0, self._open
        self._crc32 = crc32(data, self._crc32)
        self._put(data)

    def skip_record(self) -> None:
        """Count the rest of the open record without its bytes, to measure an archive."""
        self.position += self._remaining
        self._remaining = 0

    def end_record(self) -> None:
        """End the open record, all of whose bytes have been written."""
        assert self._open is not None
        assert self._remaining == 0, self._open
        raw, begin, n_bytes = self._open
        if n_bytes:
            wide = n_bytes >= _FULL or begin >= _FULL
            form = "<4sLQQ" if wide else "<4sLLL"
            self._put(struct.pack(form, b"PK\7\10", self._crc32, n_bytes, n_bytes))
        self._entries.append(_DirectoryEntry(raw, begin, n_bytes, self._crc32))
        self._open = None

    def write_record(self, name: str, data: bytes) -> None:
        """Write a whole record."""
        self.begin_record(name, len(data))
        self.append(memoryview(data))
        self.end_record()

    def serialization_id(self) -> str:
        """Return forty digits that depend on the names and bytes of all records so far."""
        names = crc32(b"\0".join(sorted(entry.name.partition(b"/")[2] for entry in self._entries)), 0)
        data = crc32(b"".join(struct.pack("<LQ", entry.crc32, entry.n_bytes) for entry in self._entries), 0)
        return f"{names:020d}{data:020d}"

    def finish(self) -> None:
        """Write the directory."""
        assert self._open is None, self._open
        begin = self.position
        directory = b"".join(map(_pack_directory_entry, self._entries))
        n, size = len(self._entries), len(directory)
        end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0x031E, 45, 0, 0, n, n, size, begin)
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, begin + size, 1)
        short = min(n, 0xFFFF)
        end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, short, short, min(size, _FULL), min(begin, _FULL), 0)
        self._put(directory + end64 + locator + end)
        self._flush()


def _pack_zip64_extra(sizes: list[int], position: list[int]) -> bytes:
    values = [*sizes, *position]
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _pack_directory_entry(entry: _DirectoryEntry) -> bytes:
    large, far = entry.n_bytes >= _FULL, entry.byte_offset >= _FULL
    extra = _pack_zip64_extra([entry.n_bytes] * 2 if large else [], [entry.byte_offset] if far else [])
    size = _FULL if large else entry.n_bytes
    flags = _FLAGS | (_SIZES_FOLLOW if entry.n_bytes else 0)
    fixed = (0, 0, flags, 0, 0, 0, entry.crc32, size, size, len(entry.name), len(extra), 0, 0, 0, 0)
    return struct.pack("<4s6H3L5H2L", b"PK\1\2", *fixed, _FULL if far else entry.byte_offset) + entry.name + extra
