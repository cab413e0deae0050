"""Zip archives whose records are stored as they are: where each record's bytes lie.

torch's files are such archives. Everything is read from the central directory and the records' own headers; no record's
bytes are touched. The reader accepts what torch writes and little else: one disk, nothing before or after, no
compression (so nothing can unpack to more than it is) and no encryption; every record under one root folder, with a
plain name that occurs once; headers and directory that agree; records that do not overlap.

An archive may lie in a part of a file, as `torch.distributed.checkpoint` has them.

Cost: two or three reads of a few kB for a small archive, one more per record; memory: the directory.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lt_ckpt.errors import CheckpointError
from lt_ckpt.torchfile.crc import crc32

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

ReadPart = Callable[[int, int], bytes]
"""Returns the bytes of a file at a position: (position, number)."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record: where its bytes begin in the file, how many they are, and their CRC-32 as the directory has it."""

    begin: int
    n_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class StoredZip:
    """An archive.

    Attributes:
        root: The folder in which all records are.
        records: Name below the root → record, in the order in which they lie in the file.
    """

    root: str
    records: Mapping[str, Record]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line of the central directory."""

    name: bytes
    flags: int
    crc32: int
    n_bytes: int
    begin: int


def read_zip(read: ReadPart, begin: int, end: int, where: str) -> StoredZip:
    """Reads the directory of the archive that lies between two positions of a file.

    Raises:
        CheckpointError: It is not such an archive, or damaged.
    """
    part = _Part(read, begin, end)
    try:
        directory, n_entries, limit = _directory(part)
        entries = sorted(_entries(directory, n_entries), key=lambda entry: entry.begin)
        return _records(part, entries, limit)
    except CheckpointError as exc:
        raise CheckpointError(f"{where}: {exc}") from None
    except (struct.error, IndexError, UnicodeDecodeError) as exc:
        raise CheckpointError(f"{where}: its zip directory is cut short or unreadable; the file is damaged") from exc


class _Part:
    """A part of a file; the last two pieces that were read are kept, because small reads follow one another closely."""

    def __init__(self, read: ReadPart, begin: int, end: int) -> None:
        self._read, self._begin, self.size = read, begin, end - begin
        self._kept: list[tuple[int, bytes]] = []

    def position(self, at: int) -> int:
        """Where in the file this is."""
        return self._begin + at

    def take(self, at: int, n: int) -> bytes:
        """Returns n bytes."""
        if at < 0 or n < 0 or at + n > self.size:
            raise IndexError
        for begin, data in self._kept:
            if begin <= at and at + n <= begin + len(data):
                return data[at - begin : at - begin + n]
        # What is near the end is wanted together: the directory and what points at it.
        begin = at if at + CACHE_BYTES <= self.size else max(0, min(at, self.size - CACHE_BYTES))
        data = self._read(self._begin + begin, max(at + n, min(self.size, begin + CACHE_BYTES)) - begin)
        self._kept = [*self._kept[-1:], (begin, data)]
        return data[at - begin : at - begin + n]


def _directory(part: _Part) -> tuple[bytes, int, int]:
    """Returns the bytes of the central directory, its number of entries, and where it begins."""
    at = part.size - _END.size
    if at < 0:
        raise CheckpointError(f"{part.size} bytes are no zip archive; the file is truncated or not torch's")
    magic, disk, first_disk, here, n_entries, n_bytes, begin, comment = _END.unpack(part.take(at, _END.size))
    if magic != b"PK\5\6" or comment:
        raise CheckpointError("its end is not that of a zip archive; the file is truncated or has a foreign tail")
    small = disk, first_disk, here, n_entries, n_bytes, begin
    locator_at = at - _LOCATOR.size
    locator = _LOCATOR.unpack(part.take(locator_at, _LOCATOR.size)) if locator_at >= 0 else (b"", 0, 0, 0)
    if locator[0] == b"PK\6\7":
        at = locator_at - _END64.size
        if (locator[1], locator[2], locator[3]) != (0, at, 1):
            raise CheckpointError("its zip64 locator points elsewhere; the file is damaged")
        magic, length, _, _, disk, first_disk, here, n_entries, n_bytes, begin = _END64.unpack(
            part.take(at, _END64.size)
        )
        large = disk, first_disk, here, n_entries, n_bytes, begin
        if magic != b"PK\6\6" or length != _END64.size - 12:
            raise CheckpointError("its zip64 end record is damaged")
        if any(s not in (b, _FULL16 if i < 4 else _FULL32) for i, (s, b) in enumerate(zip(small, large, strict=True))):
            raise CheckpointError("its two end records disagree; the file is damaged")
    if disk or first_disk or here != n_entries:
        raise CheckpointError("it is a part of an archive on several disks")
    if begin + n_bytes != at or n_bytes > MAX_DIRECTORY_BYTES:
        raise CheckpointError(f"its directory of {n_bytes} bytes at {begin} does not end at {at}; the file is damaged")
    return part.take(begin, n_bytes), n_entries, begin


def _entries(directory: bytes, n_entries: int) -> list[_Entry]:
    found: list[_Entry] = []
    at = 0
    for _ in range(n_entries):
        fields = _ENTRY.unpack_from(directory, at)
        magic, _, _, flags, method, _, _, crc32, packed, size = fields[:10]
        n_name, n_extra, n_comment, disk, _, _, begin = fields[10:]
        end = at + _ENTRY.size + n_name + n_extra + n_comment
        if magic != b"PK\1\2" or disk or end > len(directory):
            raise CheckpointError(f"entry {len(found)} of its directory is damaged")
        name = directory[at + _ENTRY.size : at + _ENTRY.size + n_name]
        extra = directory[at + _ENTRY.size + n_name : end - n_comment]
        size, packed, begin = _zip64(extra, size, packed, begin)
        if method or size != packed:
            raise CheckpointError(
                f"its record {_shown(name)} is compressed; torch.save stores records as they are: load it with the "
                "program that made it and save it again"
            )
        if flags & _ENCRYPTED:
            raise CheckpointError(f"its record {_shown(name)} is encrypted")
        found.append(_Entry(name, flags, crc32, size, begin))
        at = end
    if at != len(directory):
        raise CheckpointError(f"{len(directory) - at} bytes follow the last entry of its directory")
    return found


def _zip64(extra: bytes, size: int, packed: int, begin: int) -> tuple[int, int, int]:
    """Takes the numbers that do not fit into an entry from its extra field."""
    values = [size, packed, begin]
    wanted = [i for i, value in enumerate(values) if value == _FULL32]
    at = 0
    while wanted and at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            for n, i in enumerate(wanted):
                values[i] = struct.unpack("<Q", extra[at + 4 : at + 4 + length][8 * n : 8 * n + 8])[0]
            break
        at += 4 + length
    return values[0], values[1], values[2]


def _records(part: _Part, entries: list[_Entry], limit: int) -> StoredZip:
    """Checks every record's own header and returns the records.

    Args:
        part: The archive.
        entries: The directory's lines, by position.
        limit: Where the directory begins: all records lie before it.
    """
    roots: set[str] = set()
    records: dict[str, Record] = {}
    free = 0
    for entry in entries:
        root, name = _split(entry.name)
        header = part.take(entry.begin, _LOCAL.size)
        magic, _, flags, method, _, _, crc32, packed, size, n_name, n_extra = _LOCAL.unpack(header)
        begin = entry.begin + _LOCAL.size + n_name + n_extra
        if magic != b"PK\3\4" or method or flags != entry.flags:
            raise CheckpointError(f"the header of its record {_shown(entry.name)} is damaged")
        if part.take(entry.begin + _LOCAL.size, n_name) != entry.name:
            raise CheckpointError(f"its record {_shown(entry.name)} has another name in its own header")
        if not flags & _SIZES_FOLLOW:
            extra = part.take(entry.begin + _LOCAL.size + n_name, n_extra)
            size, packed, _ = _zip64(extra, size, packed, 0)
            if (size, packed, crc32) != (entry.n_bytes, entry.n_bytes, entry.crc32):
                raise CheckpointError(f"its record {_shown(entry.name)} has another size in its own header")
        if entry.begin < free or begin + entry.n_bytes > limit:
            raise CheckpointError(f"its record {_shown(entry.name)} overlaps another; the file is damaged")
        if name in records:
            raise CheckpointError(f"its record {_shown(entry.name)} is there twice")
        free = begin + entry.n_bytes
        roots.add(root)
        records[name] = Record(part.position(begin), entry.n_bytes, entry.crc32)
    if len(roots) != 1:
        raise CheckpointError(f"its records lie in {len(roots)} folders, not in one")
    return StoredZip(roots.pop(), records)


def _split(raw: bytes) -> tuple[str, str]:
    """Returns a record's root folder and its name below."""
    parts = raw.decode().split("/")
    if (
        len(raw) > MAX_NAME_BYTES
        or len(parts) < 2
        or not all(p.isprintable() and p not in ("", ".", "..") for p in parts)
    ):
        raise CheckpointError(f"its record {_shown(raw)} has a name that torch does not give")
    return parts[0], "/".join(parts[1:])


def _shown(name: bytes) -> str:
    return repr(name[:100].decode(errors="replace"))


def crc32_of(read: ReadPart, record: Record, block_bytes: int) -> int:
    """Reads a record and returns the CRC-32 of its bytes."""
    crc = 0
    for start in range(0, record.n_bytes, block_bytes):
        crc = crc32(read(record.begin + start, min(block_bytes, record.n_bytes - start)), crc)
    return crc
