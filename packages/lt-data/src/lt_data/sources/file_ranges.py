"""Ranges of large files, each a source of its own, so that several processes may read one file.

    FILE.jsonl[0:1000000]         lines of a range of bytes
    FILE.jsonl.zst[0:1000000]     lines of whole zstandard frames, in a range of stored bytes
    FILE.parquet[0:12]            rows of a range of row groups

A line belongs to the range with the line end before it, and the first one to the first range: so a range leaves out
what comes before its first line end, and goes on to the first line end after it. Lines are numbered in their range,
rows in their file. Each range has its own hash: of its bytes, or of those from its first row group to the next range.
The ranges depend on the file and the requested size alone. Of files on servers only JSON lines without compression are
divided; gzip, one JSON array, Arrow, text and PDF files never.

Cost: a footer per parquet file, and a seek per block of 128 KiB of a zstandard file, when the sources are listed; the
rest of a line that begins in a range is read twice.
"""

import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

from lt_data.sources.decompression import decompress_stream
from lt_data.sources.hashing_reader import (
    BUFFER_BYTES,
    HashingCounter,
    check_unchanged,
    hash_stream,
    open_at,
    write_time,
)
from lt_data.sources.json_lines import read_jsonl
from lt_data.sources.options import SourceOptions
from lt_data.sources.parquet import list_row_groups, read_parquet
from lt_data.sources.record import ChangedFileError, DamagedFileError, SourceRecord
from lt_data.sources.source_unit import ListedFile, SourceUnit
from lt_data.sources.zstd import ZSTD_SUFFIX, list_frames
from lt_data.storage import translate_os_errors

_LINES = (".jsonl", ".ndjson")
_CHANGED = "it was changed after it was listed; run again once it no longer changes"


def divide(unit: SourceUnit, max_bytes: int) -> list[SourceUnit]:
    """Return ranges of about `max_bytes` of a larger file; the unit itself if it cannot be divided.

    Raises:
        DataError: the file cannot be read, or a package is missing.
    """
    if not isinstance(unit, ListedFile) or unit.size is None or unit.size <= max_bytes:
        return [unit]
    name = unit.path.lower()
    if name.endswith(_LINES):
        n = -(-unit.size // max_bytes)
        return _line_ranges(unit, [unit.size * i // n for i in range(n + 1)], compressed=False)
    if unit.filesystem is not None:
        return [unit]
    try:
        with translate_os_errors("read", unit.name), unit.open() as file:
            if name.endswith(tuple(f"{suffix}{ZSTD_SUFFIX}" for suffix in _LINES)):
                return _line_ranges(unit, _group([*list_frames(file), unit.size], max_bytes), compressed=True)
            if name.endswith(".parquet"):
                return _row_ranges(unit, list_row_groups(file), max_bytes)
    except DamagedFileError:  # reported when the file is read
        return [unit]
    return [unit]


def _group(offsets: list[int], max_bytes: int) -> list[int]:
    """Return offsets that are at least `max_bytes` apart, the first and the last included."""
    chosen = [0]
    for before, offset in itertools.pairwise(offsets):
        if before > chosen[-1] and offset - chosen[-1] > max_bytes:
            chosen.append(before)
    return [*chosen, offsets[-1]]


def _line_ranges(file: ListedFile, offsets: list[int], *, compressed: bool) -> list[SourceUnit]:
    if len(offsets) < 3:
        return [file]
    return [LineRange(file=file, begin=a, end=b, compressed=compressed) for a, b in itertools.pairwise(offsets)]


def _row_ranges(file: ListedFile, groups: list[tuple[int, int]], max_bytes: int) -> list[SourceUnit]:
    """Return ranges of the row groups, given by first byte and rows of each."""
    assert file.size is not None
    begins = [begin for begin, _ in groups]
    if len(groups) < 2 or begins != sorted(set(begins)):
        return [file]
    offsets = _group([0, *begins[1:], file.size], max_bytes)
    places = [0, *(begins.index(offset) for offset in offsets[1:-1]), len(groups)]
    rows = [0, *itertools.accumulate(n for _, n in groups)]
    return [
        RowGroupRange(file=file, first_group=a, last_group=b, first_row=rows[a], begin=offsets[i], end=offsets[i + 1])
        for i, (a, b) in enumerate(itertools.pairwise(places))
    ]


@dataclass(frozen=True, kw_only=True)
class LineRange:
    """Lines of a file of JSON lines whose preceding line end is in a range.

    Attributes:
        file: the file.
        begin: first byte of the range.
        end: byte after the last.
        compressed: the range is of zstandard frames.
    """

    file: ListedFile
    begin: int
    end: int
    compressed: bool

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.file.name}[{self.begin}:{self.end}]"

    @property
    def manifest_name(self) -> str:
        """Name in the manifest."""
        return f"{self.file.manifest_name}[{self.begin}:{self.end}]"

    @property
    def size(self) -> int:
        """Stored bytes of the range."""
        return self.end - self.begin

    def records(self, options: SourceOptions, start: int, counter: HashingCounter) -> Iterator[SourceRecord]:
        """Yield the records from index `start` on; the counter covers the bytes of the range.

        Raises:
            DamagedFileError: the rest cannot be read.
            ChangedFileError: the file is not what it was when it was listed, or read before.
            DataError: a file system error, or a missing package.
        """
        with self.file.translate_errors(), self.file.open() as file, self.file.open() as rest:
            listed = self.file.size or 0
            written = write_time(file) if self.file.filesystem is None else None
            if written is not None and written[0] != listed:
                raise ChangedFileError(_CHANGED)
            file.seek(self.begin)
            rest.seek(self.end)
            stream = hash_stream(cast("BinaryIO", _Limited(file, self.size)), counter)
            following: io.BufferedIOBase = io.BufferedReader(_Limited(rest, listed - self.end), BUFFER_BYTES)
            content: io.BufferedIOBase = stream
            if self.compressed:
                confirmed = file if options.on_bad == "skip" else None
                content = decompress_stream(stream, ZSTD_SUFFIX, counter, confirmed, offset=self.begin)
                confirmed = rest if options.on_bad == "skip" else None
                following = decompress_stream(
                    open_at(rest, self.end), ZSTD_SUFFIX, HashingCounter(), confirmed, offset=self.end
                )
            else:
                counter.unchecked = "jsonl"
            lines = io.BufferedReader(_Lines(content, following, has_first=self.begin == 0), BUFFER_BYTES)
            try:
                yield from read_jsonl(lines, options, start, has_first=self.begin == 0)
            except DamagedFileError:
                while stream.read(BUFFER_BYTES):  # all of it is hashed
                    pass
                raise
            if written is not None:
                check_unchanged(file, written)
        if counter.bytes != self.size:
            raise ChangedFileError(_CHANGED)


@dataclass(frozen=True, kw_only=True)
class RowGroupRange:
    """Rows of a range of row groups of a local parquet file.

    Attributes:
        file: the file.
        first_group: first row group.
        last_group: row group after the last.
        first_row: rows of the groups before.
        begin: first byte of the range.
        end: byte after the last.
    """

    file: ListedFile
    first_group: int
    last_group: int
    first_row: int
    begin: int
    end: int

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.file.name}[{self.first_group}:{self.last_group}]"

    @property
    def manifest_name(self) -> str:
        """Name in the manifest."""
        return f"{self.file.manifest_name}[{self.first_group}:{self.last_group}]"

    @property
    def size(self) -> int:
        """Stored bytes of the range."""
        return self.end - self.begin

    def records(self, options: SourceOptions, start: int, counter: HashingCounter) -> Iterator[SourceRecord]:
        """Yield the records from index `start` of the file on; the counter covers the bytes of the range.

        Raises:
            DamagedFileError: the rest cannot be read.
            ChangedFileError: the file is not what it was when it was listed, or read before.
            DataError: a file system error, or a missing package.
        """
        with translate_os_errors("read", self.file.name), self.file.open() as file:
            written = write_time(file)
            if written[0] != self.file.size:
                raise ChangedFileError(_CHANGED)
            file.seek(self.begin)
            stream = hash_stream(cast("BinaryIO", _Limited(file, self.size)), counter)
            while stream.read(BUFFER_BYTES):
                pass
            file.seek(0)
            groups = range(self.first_group, self.last_group)
            yield from read_parquet(file, options, max(start, self.first_row), counter, groups=groups)
            check_unchanged(file, written)


class _Limited(io.RawIOBase):
    """Reader of the next `size` bytes of a file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        content = self._file.read(min(len(buffer), self._left))
        buffer[: len(content)] = content
        self._left -= len(content)
        return len(content)


class _Lines(io.RawIOBase):
    """Lines of a range: content after its first line end, and what follows up to the next one."""

    def __init__(self, content: io.BufferedIOBase, following: io.BufferedIOBase, *, has_first: bool) -> None:
        self._content = content
        self._following = following
        self._has_begun = has_first
        self._is_past = self._has_ended = False
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._output and not self._has_ended:
            self._output = memoryview(self._next())
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

    def _next(self) -> bytes:
        if self._is_past:
            piece = self._following.read1(BUFFER_BYTES)
            end = piece.find(b"\n")
            self._has_ended = not piece or end >= 0
            return piece if end < 0 else piece[: end + 1]
        piece = self._content.read1(BUFFER_BYTES)
        if not piece:
            self._is_past = True
            self._has_ended = not self._has_begun  # no line begins here
        elif not self._has_begun:
            end = piece.find(b"\n")
            self._has_begun = end >= 0
            return piece[end + 1 :] if end >= 0 else b""
        return piece
