"""Decompression of .gz and .zst files, on request only of content that a checksum has confirmed.

A checksum is at the end of its member (zstandard: frame). To confirm, up to 32 MiB of a member are held in memory until
its end; a longer member is decompressed twice, the second time to be read. So memory is bounded and nothing is written
to disk; files of short members, and files that are not to be confirmed, are decompressed once. A frame without a
checksum is confirmed by its structure only.
"""

import io
from collections import deque
from collections.abc import Callable
from typing import BinaryIO, Protocol

from lt_data.sources.gzip_members import GzipMembers
from lt_data.sources.hashing_reader import BUFFER_BYTES, HashingCounter, check_unchanged, open_at, write_time
from lt_data.sources.record import ChangedFileError, DamagedFileError
from lt_data.sources.zstd import ZstdFrames

_HELD_BYTES = 1 << 25


class Members(Protocol):
    """Interface of a compressed file as a sequence of members, each with its own check; see `GzipMembers`."""

    @property
    def begin(self) -> int:
        """Offset of the open member."""
        ...

    @property
    def is_checked(self) -> bool:
        """True if the open member has a checksum."""
        ...

    def open_member(self) -> bool:
        """Begin the next member; return False at the end of the file."""
        ...

    def read_chunk(self) -> bytes:
        """Return the next content of the member; b"" at its end, when its check has passed."""
        ...


COMPRESSIONS: dict[str, tuple[str, Callable[[io.BufferedReader], Members]]] = {
    ".gz": ("gzip", GzipMembers),
    ".zst": ("zstd", ZstdFrames),
}
"""Name and reader by suffix."""


class _DecompressedStream(io.RawIOBase):
    """Stream of the content of a compressed file.

    A read never mixes content with an error: what was confirmed before damage is returned first. The error counts the
    lines that were decompressed and not confirmed.
    """

    def __init__(
        self, stream: io.BufferedReader, suffix: str, counter: HashingCounter, file: BinaryIO | None, offset: int
    ) -> None:
        self._name, self._open = COMPRESSIONS[suffix]
        self._members = self._open(stream)
        self._counter = counter
        self._file = file
        self._offset = offset
        self._output = memoryview(b"")
        self._is_open = False  # the member, if content is not to be confirmed
        self._confirmed: deque[bytes] = deque()
        self._second_pass: Members | None = None
        self._second_pass_bytes = 0
        self._written = (0, 0)  # write_time of the file before the first pass over the member

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._output:
            chunk = self._next_chunk()
            if chunk is None:
                return 0
            self._output = memoryview(chunk)
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

    def _next_chunk(self) -> bytes | None:
        """Return the next content, which may be empty between two members; None at the end."""
        if self._file is None:
            if not self._is_open and not self._open_member():
                return None
            chunk = self._members.read_chunk()
            self._is_open = bool(chunk)
            return chunk
        if self._confirmed:
            return self._confirmed.popleft()
        if self._second_pass is not None:
            return self._read_again(self._second_pass, self._file)
        return b"" if self._confirm_member(self._file) else None

    def _open_member(self) -> bool:
        if not self._members.open_member():
            return False
        if not self._members.is_checked:
            self._counter.unchecked = self._name
        return True

    def _confirm_member(self, file: BinaryIO) -> bool:
        """Decompress the next member to its end; hold its content, or prepare a second pass over it."""
        self._written = write_time(file)
        held: list[bytes] = []
        size = lost_lines = 0
        try:
            if not self._open_member():
                return False
            while chunk := self._members.read_chunk():
                size += len(chunk)
                held.append(chunk)
                if size > _HELD_BYTES:
                    lost_lines += sum(each.count(b"\n") for each in held)
                    held.clear()
        except DamagedFileError as exc:
            exc.lost_lines += lost_lines + sum(each.count(b"\n") for each in held)
            raise
        if size <= _HELD_BYTES:
            self._confirmed.extend(held)
            return True
        held.clear()
        self._second_pass = self._open(open_at(file, self._offset + self._members.begin))
        self._second_pass_bytes = size
        if not self._second_pass.open_member():
            raise ChangedFileError("it was truncated while it was read; run again once it no longer changes")
        return True

    def _read_again(self, members: Members, file: BinaryIO) -> bytes:
        try:
            chunk = members.read_chunk()
        except DamagedFileError as exc:
            raise ChangedFileError(f"it reads differently the second time ({exc}); check the disk") from exc
        self._second_pass_bytes -= len(chunk)
        if not chunk:
            self._second_pass = None
            check_unchanged(file, self._written)
            assert not self._second_pass_bytes
        return chunk


def decompress_stream(
    stream: io.BufferedReader, suffix: str, counter: HashingCounter, file: BinaryIO | None, *, offset: int = 0
) -> io.BufferedReader:
    """Return the content of a compressed file as a stream.

    Args:
        stream: the compressed file, at its beginning.
        suffix: its compression.
        counter: its `unchecked` is set if a member has no checksum.
        file: the same file, open for a second pass, to return only confirmed content; None to return all content at
            once, and an error at the end of a damaged member.
        offset: where `stream` begins in the file.

    Returns:
        A stream whose reads raise DamagedFileError, or ChangedFileError if the file changes in the meantime.
    """
    return io.BufferedReader(_DecompressedStream(stream, suffix, counter, file, offset), BUFFER_BYTES)
