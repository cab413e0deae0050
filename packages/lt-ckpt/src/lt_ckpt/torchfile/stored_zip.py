"""Zip archives of uncompressed records: location of each record's bytes.

torch's files are such archives. Everything is read from the central directory and the records' own headers; no record's
bytes are read. The reader accepts what torch writes and little else: one disk, nothing before or after, no compression
(so nothing can unpack to more than its size) and no encryption; every record under one root folder, with a plain unique
name; headers and directory that agree; records that do not overlap.

An archive may be part of a file, as in `torch.distributed.checkpoint`.

Cost: two or three reads of a few kB for a small archive, one more per record; memory: the directory.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lt_ckpt.errors import CheckpointError

MAX_DIRECTORY_BYTES = 2**26
MAX_NAME_BYTES = 512
CACHE_BYTES = 2**13

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED, _SIZES_FOLLOW = 0x2041, 0x0008

ReadBytesAt = Callable[[int, int], bytes]
"""Returns the bytes of a file at a position: (position, number)."""


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """Record: position of its bytes in the file, their number, and their CRC-32 from the directory."""

    byte_offset: int
    n_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class StoredZip:
    """Zip archive of uncompressed records.

    Attributes:
        root: The folder that contains all records.
        records: Name below the root → record, by position in the file.
    """

    root: str
    records: Mapping[str, ZipRecord]

    @property
    def has_checksums(self) -> bool:
        """False if the writer left them out (`torch.serialization.set_crc32_options(False)`): all are 0 then."""
        return any(record.crc32 for record in self.records.values())


@dataclass(frozen=True, slots=True)
class _Entry:
    """Entry of the central directory."""

    name: bytes
    flags: int
    crc32: int
    n_bytes: int
    byte_offset: int


def read_zip(read: ReadBytesAt, begin: int, end: int, where: str) -> StoredZip:
    """Read the directory of the archive between two positions of a file.

    Raises:
        CheckpointError: Not such an archive, or damaged.
    """
    archive = _ArchiveReader(read, begin, end)
    try:
        directory, n_entries, limit = _read_directory(archive)
        entries = sorted(_parse_entries(directory, n_entries), key=lambda entry: entry.byte_offset)
        return _read_records(archive, entries, limit)
    except CheckpointError as exc:
        raise CheckpointError(f"{where}: {exc}") from None
    except (struct.error, IndexError, UnicodeDecodeError) as exc:
        raise CheckpointError(f"{where}: its zip directory is truncated or unreadable; the file is damaged") from exc


class _ArchiveReader:
    """Range of a file; caches the last two reads, because small reads are close together."""

    def __init__(self, read: ReadBytesAt, begin: int, end: int) -> None:
        self._read, self._begin, self.size = read, begin, end - begin
        self._cached: list[tuple[int, bytes]] = []

    def file_position(self, at: int) -> int:
        """Return the position in the file of an offset in the archive."""
        return self._begin + at

    def read_bytes(self, at: int, n: int) -> bytes:
        """Return n bytes at an offset."""
        if at < 0 or n < 0 or at + n > self.size:
            raise IndexError
        for begin, data in self._cached:
            if begin <= at and at + n <= begin + len(data):
                return data[at - begin : at - begin + n]
        # Reads near the end come together: the directory and the records that point to it.
        begin = at if at + CACHE_BYTES <= self.size else max(0, min(at, self.size - CACHE_BYTES))
        data = self._read(self._begin + begin, max(at + n, min(self.size, begin + CACHE_BYTES)) - begin)
        self._cached = [*self._cached[-1:], (begin, data)]
        return data[at - begin : at - begin + n]


def _read_directory(archive: _ArchiveReader) -> tuple[bytes, int, int]:
    """Return the bytes of the central directory, its number of entries, and its position."""
    at = archive.size - _END.size
    if at < 0:
        raise CheckpointError(f"{archive.size} bytes are not a zip archive; the file is truncated or not torch's")
    magic, disk, first_disk, n_entries_here, n_entries, n_bytes, begin, comment = _END.unpack(
        archive.read_bytes(at, _END.size)
    )
    if magic != b"PK\5\6" or comment:
        raise CheckpointError("its end is not that of a zip archive; the file is truncated or has trailing bytes")
    small = disk, first_disk, n_entries_here, n_entries, n_bytes, begin
    locator_at = at - _LOCATOR.size
    locator = _LOCATOR.unpack(archive.read_bytes(locator_at, _LOCATOR.size)) if locator_at >= 0 else (b"", 0, 0, 0)
    if locator[0] == b"PK\6\7":
        at = locator_at - _END64.size
        if (locator[1], locator[2], locator[3]) != (0, at, 1):
            raise CheckpointError("its zip64 locator points elsewhere; the file is damaged")
        magic, length, _, _, disk, first_disk, n_entries_here, n_entries, n_bytes, begin = _END64.unpack(
            archive.read_bytes(at, _END64.size)
        )
        large = disk, first_disk, n_entries_here, n_entries, n_bytes, begin
        if magic != b"PK\6\6" or length != _END64.size - 12:
            raise CheckpointError("its zip64 end record is damaged")
        if any(s not in (b, _FULL16 if i < 4 else _FULL32) for i, (s, b) in enumerate(zip(small, large, strict=True))):
            raise CheckpointError("its two end records disagree; the file is damaged")
    if disk or first_disk or n_entries_here != n_entries:
        raise CheckpointError("it is a part of an archive on several disks")
    if begin + n_bytes != at or n_bytes > MAX_DIRECTORY_BYTES:
        raise CheckpointError(f"its directory of {n_bytes} bytes at {begin} does not end at {at}; the file is damaged")
    return archive.read_bytes(begin, n_bytes), n_entries, begin


def _parse_entries(directory: bytes, n_entries: int) -> list[_Entry]:
    entries: list[_Entry] = []
    at = 0
    for _ in range(n_entries):
        fields = _ENTRY.unpack_from(directory, at)
        magic, _, _, flags, method, _, _, crc32, packed, size = fields[:10]
        n_name, n_extra, n_comment, disk, _, _, begin = fields[10:]
        end = at + _ENTRY.size + n_name + n_extra + n_comment
        if magic != b"PK\1\2" or disk or end > len(directory):
            raise CheckpointError(f"entry {len(entries)} of its directory is damaged")
        name = directory[at + _ENTRY.size : at + _ENTRY.size + n_name]
        extra = directory[at + _ENTRY.size + n_name : end - n_comment]
        size, packed, begin = _read_zip64_extra(extra, size, packed, begin)
        if method or size != packed:
            raise CheckpointError(
                f"its record {_format_name(name)} is compressed, which torch.save never does; load it with the "
                "program that made it and save it again"
            )
        if flags & _ENCRYPTED:
            raise CheckpointError(f"its record {_format_name(name)} is encrypted")
        entries.append(_Entry(name, flags, crc32, size, begin))
        at = end
    if at != len(directory):
        raise CheckpointError(f"{len(directory) - at} bytes follow the last entry of its directory")
    return entries


def _read_zip64_extra(extra: bytes, size: int, packed: int, begin: int) -> tuple[int, int, int]:
    """Return size, packed size and position, with those too large for an entry from its extra field."""
    values = [size, packed, begin]
    missing = [i for i, value in enumerate(values) if value == _FULL32]
    at = 0
    while missing and at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            for n, i in enumerate(missing):
                values[i] = struct.unpack("<Q", extra[at + 4 : at + 4 + length][8 * n : 8 * n + 8])[0]
            break
        at += 4 + length
    return values[0], values[1], values[2]


def _read_records(archive: _ArchiveReader, entries: list[_Entry], limit: int) -> StoredZip:
    """Check every record's own header and return the records.

    Args:
        archive: The archive.
        entries: The directory's entries, by position.
        limit: Position of the directory: all records end before it.
    """
    roots: set[str] = set()
    records: dict[str, ZipRecord] = {}
    free = 0
    for entry in entries:
        root, name = _split_name(entry.name)
        header = archive.read_bytes(entry.byte_offset, _LOCAL.size)
        magic, _, flags, method, _, _, crc32, packed, size, n_name, n_extra = _LOCAL.unpack(header)
        begin = entry.byte_offset + _LOCAL.size + n_name + n_extra
        if magic != b"PK\3\4" or method or flags != entry.flags:
            raise CheckpointError(f"the header of its record {_format_name(entry.name)} is damaged")
        if archive.read_bytes(entry.byte_offset + _LOCAL.size, n_name) != entry.name:
            raise CheckpointError(f"its record {_format_name(entry.name)} has another name in its own header")
        if not flags & _SIZES_FOLLOW:
            extra = archive.read_bytes(entry.byte_offset + _LOCAL.size + n_name, n_extra)
            size, packed, _ = _read_zip64_extra(extra, size, packed, 0)
            if (size, packed, crc32) != (entry.n_bytes, entry.n_bytes, entry.crc32):
                raise CheckpointError(f"its record {_format_name(entry.name)} has another size in its own header")
        if entry.byte_offset < free or begin + entry.n_bytes > limit:
            raise CheckpointError(f"its record {_format_name(entry.name)} overlaps another; the file is damaged")
        if name in records:
            raise CheckpointError(f"its record {_format_name(entry.name)} occurs twice")
        free = begin + entry.n_bytes
        roots.add(root)
        records[name] = ZipRecord(archive.file_position(begin), entry.n_bytes, entry.crc32)
    if len(roots) != 1:
        raise CheckpointError(f"its records lie in {len(roots)} folders, not in one")
    return StoredZip(roots.pop(), records)


def _split_name(raw: bytes) -> tuple[str, str]:
    """Return a record's root folder and its name below."""
    parts = raw.decode().split("/")
    if (
        len(raw) > MAX_NAME_BYTES
        or len(parts) < 2
        or not all(p.isprintable() and p not in ("", ".", "..") for p in parts)
    ):
        raise CheckpointError(f"its record {_format_name(raw)} has an invalid name")
    return parts[0], "/".join(parts[1:])


def _format_name(name: bytes) -> str:
    return repr(name[:100].decode(errors="replace"))
