"""Pieces of sources, which are read one after the other, each by one process: a file, or a range of a large one.

    FILE.jsonl[0:1000000]         whole lines, numbered in the piece
    FILE.parquet[0:12]            row groups of a local file, with rows numbered in the file

Files of other formats, and compressed files, are never divided. The ranges depend on the file and the requested size
alone. Each piece has its own hash, of the bytes from its first to that of the next. A file whose size has changed
since it was listed is an error. Cost: a seek per range and a footer per parquet file when the sources are listed; a
table is read twice, the first time for its hash, and if it is not local from a temporary copy.
"""

import hashlib
import io
import itertools
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

from lt_data.errors import DataError
from lt_data.file_names import COMPRESSIONS, find_compression, to_portable_name
from lt_data.sources.compression import DecompressedFile, identify_binary
from lt_data.sources.lines import read_json, read_lines, read_text
from lt_data.sources.options import SourceOptions
from lt_data.sources.pdf import read_pdf
from lt_data.sources.record import DamagedFileError, SourceRecord
from lt_data.sources.tables import list_row_groups, read_arrow, read_parquet
from lt_data.sources.transfer_errors import translate_transfer_errors

_BUFFER_BYTES = 1 << 20
_SEARCH_BYTES = 1 << 16
_CONTENT_BYTES = 1 << 16
_HEAD_BYTES = 512
_LINES = (".jsonl", ".ndjson")
_TABLES = (".parquet", ".arrow")


class Digest:
    """SHA-256 and number of the bytes read from a piece; `unchecked` is that of its `SourceFile`."""

    def __init__(self) -> None:
        self.bytes = 0
        self.unchecked = ""
        self._hash = hashlib.sha256()

    def update(self, content: bytes) -> None:
        """Count and hash the next bytes."""
        self.bytes += len(content)
        self._hash.update(content)

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of the bytes so far."""
        return self._hash.hexdigest()


@dataclass(frozen=True, kw_only=True)
class FilePiece:
    """A listed file, or a range of one.

    Attributes:
        name: name for messages, without the parts of a URL that may be secret.
        size: bytes when it was listed; None if the server does not report it.
        path: path in its file system.
        filesystem: fsspec file system; None for a local file.
        begin: first byte.
        end: byte after the last; None at the end of the file.
        groups: row groups of a parquet file; None for all.
    """

    name: str
    size: int | None
    path: str
    filesystem: Any = None
    begin: int = 0
    end: int | None = None
    groups: range | None = None

    @property
    def manifest_name(self) -> str:
        """Name in the manifest, the same under every locale."""
        return to_portable_name(self.name) if self.filesystem is None else self.name

    @property
    def format_name(self) -> str:
        """Path in lower case, without the query of a URL."""
        return (self.path.partition("?")[0] if self.filesystem else self.path).lower()

    @property
    def is_continuation(self) -> bool:
        """True if it is a range of the file of the piece before it."""
        return self.begin > 0

    @property
    def is_checked_at_end(self) -> bool:
        """True if damage may be found after documents that look good."""
        return self._is_table or find_compression(self.format_name) != ""

    @property
    def _is_table(self) -> bool:
        return self.format_name.endswith(_TABLES)

    def divide(self, max_bytes: int) -> list["FilePiece"]:
        """Return ranges of about `max_bytes` of a larger file; the file itself if it cannot be divided."""
        if self.size is None or self.size <= max_bytes:
            return [self]
        if self.format_name.endswith(_LINES):
            offsets = list(self._line_offsets(max_bytes))
            return [self._range(f"{a}:{b}", a, b) for a, b in itertools.pairwise(offsets)]
        if self.format_name.endswith(".parquet") and self.filesystem is None:
            return self._divide_rows(max_bytes)
        return [self]

    def _range(self, label: str, begin: int, end: int, groups: range | None = None) -> "FilePiece":
        assert self.size is not None
        if (begin, end) == (0, self.size):
            return self
        last = None if end == self.size else end
        return replace(self, name=f"{self.name}[{label}]", size=end - begin, begin=begin, end=last, groups=groups)

    def _line_offsets(self, max_bytes: int) -> Iterator[int]:
        """Yield 0, the first line after each multiple of about `max_bytes`, and the size."""
        assert self.size is not None
        n, last = -(-self.size // max_bytes), 0
        yield 0
        with self._open() as file:
            for i in range(1, n):
                offset = self.size * i // n
                file.seek(offset)
                while (piece := file.read(_SEARCH_BYTES)) and b"\n" not in piece:
                    offset += len(piece)
                offset += piece.find(b"\n") + 1
                if last < offset < self.size:
                    last = offset
                    yield offset
        yield self.size

    def _divide_rows(self, max_bytes: int) -> list["FilePiece"]:
        assert self.size is not None
        try:
            with self._open() as file:
                begins = list_row_groups(file)
        except DamagedFileError:  # reported when the file is read
            return [self]
        if len(begins) < 2 or begins != sorted(begins):
            return [self]
        cuts = [0]
        bounds = [0, *begins[1:], self.size]
        for group in range(1, len(begins)):
            if bounds[group + 1] - bounds[cuts[-1]] > max_bytes:
                cuts.append(group)
        pairs = itertools.pairwise([*cuts, len(begins)])
        return [self._range(f"{a}:{b}", bounds[a], bounds[b], range(a, b)) for a, b in pairs]

    def hash(self, digest: Digest) -> None:
        """Read the bytes of the piece without its records.

        Raises:
            DataError: a file system error, or a changed size.
        """
        with self._open() as file:
            _drain(self._hash_bytes(file, digest))
        self._check_size(digest)

    def records(self, options: SourceOptions, digest: Digest) -> Generator[SourceRecord]:
        """Yield the records; the digest covers all bytes of the piece.

        Raises:
            DamagedFileError: the file is damaged; none of the records is good.
            DataError: a file system error, a changed size, or a missing package.
        """
        damage = None
        with self._open() as file:
            stream = self._hash_bytes(file, digest)
            try:
                if self._is_table:
                    with self._open_table(file, stream) as table:
                        yield from self._read_table(table, options)
                else:
                    yield from self._read_stream(stream, options, digest)
            except DamagedFileError as exc:
                damage = exc
            if not self._is_table:  # which is hashed before it is read
                _drain(stream)
        self._check_size(digest)
        if damage:
            raise damage

    def _hash_bytes(self, file: BinaryIO, digest: Digest) -> "io.BufferedReader[Any]":
        return io.BufferedReader(cast(Any, _HashedFile(file, self.begin, self.end, digest)), _BUFFER_BYTES)

    def _check_size(self, digest: Digest) -> None:
        if self.size is not None and digest.bytes != self.size:
            raise DataError(
                f"{self.name}: {digest.bytes} bytes read of a file that had {self.size} when it was listed; "
                "it was changed meanwhile, or the transfer was interrupted: run again once it no longer changes"
            )

    def _read_stream(
        self, stream: "io.BufferedReader[Any]", options: SourceOptions, digest: Digest
    ) -> Iterator[SourceRecord]:
        suffix = find_compression(self.format_name)
        if not suffix:
            yield from self._read_content(stream, self.format_name, options)
            return
        file = DecompressedFile(stream, COMPRESSIONS[suffix])
        content = io.BufferedReader(cast(Any, file), _CONTENT_BYTES)
        yield from self._read_content(content, self.format_name.removesuffix(suffix), options)
        _drain(content)  # so that all checksums are compared
        digest.unchecked = COMPRESSIONS[suffix] if file.has_unchecked else ""

    def _read_content(
        self, content: "io.BufferedReader[Any]", name: str, options: SourceOptions
    ) -> Iterator[SourceRecord]:
        if name.endswith(".pdf"):
            yield from read_pdf(content, options)
        elif not self.begin and (problem := identify_binary(content.peek(_HEAD_BYTES)[:_HEAD_BYTES])):
            yield SourceRecord(0, problem)
        elif name.endswith(_LINES):
            yield from read_lines(content, options)
        elif name.endswith(".json"):
            yield from read_json(content, options)
        else:
            yield from read_text(content, options)

    def _read_table(self, table: BinaryIO, options: SourceOptions) -> Iterator[SourceRecord]:
        if self.format_name.endswith(".parquet"):
            return read_parquet(table, options, self.groups)
        return read_arrow(table, options)

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        local = self.filesystem is None
        with (
            translate_transfer_errors(self.name, self.path),
            open(self.path, "rb") if local else self.filesystem.open(self.path, "rb") as file,
        ):
            yield file

    @contextmanager
    def _open_table(self, file: BinaryIO, stream: io.BufferedIOBase) -> Iterator[BinaryIO]:
        """Hash the piece, then open its file for random access."""
        if self.filesystem is not None:
            with tempfile.TemporaryFile() as copy:
                shutil.copyfileobj(stream, copy)
                copy.seek(0)
                yield copy
            return
        written = os.fstat(file.fileno()).st_mtime_ns
        _drain(stream)
        file.seek(0)
        yield file
        if os.fstat(file.fileno()).st_mtime_ns != written:
            raise DataError(f"{self.name}: it was changed while it was read; run again once it no longer changes")


def _drain(stream: io.BufferedIOBase) -> None:
    while stream.read(_BUFFER_BYTES):
        pass


class _HashedFile(io.RawIOBase):
    """Sequential reader of a range of a file that updates a digest."""

    def __init__(self, file: BinaryIO, begin: int, end: int | None, digest: Digest) -> None:
        if begin:
            file.seek(begin)
        self._file, self._digest = file, digest
        self._size = None if end is None else end - begin

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        size = len(buffer) if self._size is None else min(len(buffer), self._size - self._digest.bytes)
        content = self._file.read(size)
        buffer[: len(content)] = content
        self._digest.update(content)
        return len(content)
