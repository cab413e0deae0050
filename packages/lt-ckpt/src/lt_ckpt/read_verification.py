"""Verification of bytes while they are read: every range of a file that has a stored checksum.

A `TensorReader` hands each run of bytes that it reads to a `ReadVerifier`, which updates the checksum of the range that
they belong to and compares it once the range is complete. Parts of a CRC-32 may come in any order: those of neighboring
bytes are combined. An xxh3 hash needs its bytes front to back: a part that a thread read before another thread finished
the part in front of it is copied and waits. A SHA-256, of a whole file, costs as much as reading: a thread of its own
computes it from copies, while others read on; short gaps, like headers, which no reader of tensors reads, it reads
itself. `finish` reads what was left of ranges that were begun (padding, or parts that nobody needs), so that nothing
passes that has not been compared as a whole.

Cost: the checksum of each byte once, and for SHA-256 a copy; no further read where ranges are read whole; memory: an
entry per range, and for one that threads are reading at most `MAX_PARKED_BYTES`, for SHA-256 twice that.
"""

import hashlib
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from lt_ckpt import direct_io, files
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.torchfile.crc import combine_crc32, crc32

MAX_PARKED_BYTES = 32 * 2**20
"""Bytes of a range that may wait for those in front of them; beyond that they are read again by `finish`."""

MAX_GAP_BYTES = 2**18
"""Longest gap in front of a part that is read for the hash of a whole file: a header, padding, a small tensor."""

SHA256_DIGITS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChecksum:
    """Range of a file and its checksum from the time of writing: a CRC-32, an xxh3_128 or a SHA-256.

    Attributes:
        byte_offset: First byte in the file.
        n_bytes: Bytes of the range.
        name: The content, for messages: `record 'data/0'`, `tensor weights/model.norm.weight`.
        expected: CRC-32 as a number, or xxh3_128 (32 digits) or SHA-256 (64) as hexadecimal text.
    """

    byte_offset: int
    n_bytes: int
    name: str
    expected: int | str


FindChecksums = Callable[[str], Sequence[StoredChecksum]]
"""File of a source → the checksums of its ranges, by position; empty if the file has none."""


class _RangeState(Protocol):
    """Checksum of a range whose bytes come in parts."""

    def add(self, begin: int, part: memoryview) -> None:
        """Take bytes at a position of the range; those taken before are skipped."""
        ...

    def missing(self) -> list[tuple[int, int]]:
        """Return the parts that have not come: (begin, end)."""
        ...

    def value(self) -> int | str:
        """Return the checksum of the complete range."""
        ...


class _CrcState:
    """CRC-32 of parts in any order."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes, self._lock = n_bytes, threading.Lock()
        self._parts: list[tuple[int, int, int]] = []
        """(begin, end, CRC), sorted; neighbors are joined."""

    def _gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for part_begin, part_end, _ in self._parts:
            if begin < min(part_begin, end):
                found.append((begin, min(part_begin, end)))
            begin = max(begin, part_end)
        return [*found, *([(begin, end)] if begin < end else [])]

    def add(self, begin: int, part: memoryview) -> None:
        with self._lock:
            gaps = self._gaps(begin, begin + len(part))
        for first, end in gaps:
            value = crc32(part[first - begin : end - begin], 0)
            with self._lock:
                if self._gaps(first, end) == [(first, end)]:  # no other thread read the same bytes meanwhile
                    self._insert(first, end, value)

    def _insert(self, begin: int, end: int, value: int) -> None:
        at = bisect_left(self._parts, (begin, end, 0))
        if at < len(self._parts) and self._parts[at][0] == end:
            _, after_end, after = self._parts.pop(at)
            value, end = combine_crc32(value, after, after_end - end), after_end
        if at and self._parts[at - 1][1] == begin:
            at -= 1
            before_begin, _, before = self._parts.pop(at)
            value, begin = combine_crc32(before, value, end - begin), before_begin
        self._parts.insert(at, (begin, end, value))

    def missing(self) -> list[tuple[int, int]]:
        with self._lock:
            return self._gaps(0, self._n_bytes)

    def value(self) -> int:
        return self._parts[0][2] if self._parts else 0


class _BackgroundSha256:
    """SHA-256 of bytes that are copied, computed by a thread of its own."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lt-ckpt-sha256")
        self._room = threading.BoundedSemaphore(MAX_PARKED_BYTES // direct_io.BLOCK_BYTES)

    def update(self, data: memoryview) -> None:
        """Copy bytes and queue them; wait while `MAX_PARKED_BYTES` are queued."""
        for begin in range(0, len(data), direct_io.BLOCK_BYTES):
            part = data[begin : begin + direct_io.BLOCK_BYTES]
            self._room.acquire()
            block = direct_io.acquire_block(direct_io.BLOCK_BYTES)
            np.copyto(block[: len(part)], np.frombuffer(part, np.uint8))
            self._pool.submit(self._hash_block, block, len(part))

    def _hash_block(self, block: np.ndarray, n_bytes: int) -> None:
        self._digest.update(block.data[:n_bytes])
        direct_io.release_block(block)
        self._room.release()

    def hexdigest(self) -> str:
        """Wait for what is queued; return the hash. No more bytes may come."""
        self._pool.shutdown(wait=True)
        return self._digest.hexdigest()


class _HashState:
    """Hash of parts that come nearly in order.

    Args:
        n_bytes: Bytes of the range.
        digest: The hash without any bytes.
        read_gap: Returns bytes of the range at a position: those that no reader needs, between parts.
    """

    def __init__(
        self,
        n_bytes: int,
        digest: xxhash.xxh3_128 | _BackgroundSha256,
        read_gap: Callable[[int, int], bytes] | None,
    ) -> None:
        self._n_bytes, self._lock = n_bytes, threading.Lock()
        self._digest, self._position, self._read_gap = digest, 0, read_gap
        self._parked: dict[int, tuple[np.ndarray, int]] = {}
        """Position → a reused block with the bytes that wait, and their number; fresh memory would cost more."""
        self._parked_bytes = 0

    def add(self, begin: int, part: memoryview) -> None:
        with self._lock:
            gap = begin - self._position
            if 0 < gap <= MAX_GAP_BYTES and self._read_gap is not None:
                self._update(memoryview(self._read_gap(self._position, gap)))
            if begin > self._position:
                if self._parked_bytes + len(part) <= MAX_PARKED_BYTES and begin not in self._parked:
                    self._park(begin, part)
                return
            self._update(part[self._position - begin :])
            while (parked := self._parked.pop(self._position, None)) is not None:
                block, n_bytes = parked
                self._parked_bytes -= n_bytes
                self._update(block.data[:n_bytes])
                direct_io.release_block(block)

    def _park(self, begin: int, part: memoryview) -> None:
        block = direct_io.acquire_block(max(direct_io.BLOCK_BYTES, 1 << (len(part) - 1).bit_length()))
        np.copyto(block[: len(part)], np.frombuffer(part, np.uint8))
        self._parked[begin] = block, len(part)
        self._parked_bytes += len(part)

    def _update(self, part: memoryview) -> None:
        self._digest.update(part)
        self._position += len(part)

    def missing(self) -> list[tuple[int, int]]:
        with self._lock:
            return [(self._position, self._n_bytes)] if self._position < self._n_bytes else []

    def value(self) -> str:
        return self._digest.hexdigest()


class ReadVerifier:
    """Compares what is read of a source's files with their checksums; thread-safe.

    Args:
        root: Folder of the files.
        find_checksums: Returns the checksums of a file; called once per file, at its first read.
    """

    def __init__(self, root: Path, find_checksums: FindChecksums) -> None:
        self._root, self._find_checksums, self._lock = root, find_checksums, threading.Lock()
        self._checksums: dict[str, tuple[list[int], Sequence[StoredChecksum]]] = {}
        """File → begins of its ranges, and the ranges."""
        self._states: dict[tuple[str, int], _RangeState | None] = {}
        """(file, index of the range) → what has come of it; None once it was compared."""

    def add(self, file: str, position: int, data: memoryview) -> None:
        """Take bytes that were read at a position of a file.

        Raises:
            CheckpointError: A range is complete and differs from its checksum.
        """
        begins, checksums = self._file_checksums(file)
        end = position + len(data)
        for index in range(max(0, bisect_right(begins, position) - 1), bisect_left(begins, end)):
            stored = checksums[index]
            first, last = max(position, stored.byte_offset), min(end, stored.byte_offset + stored.n_bytes)
            if first < last:
                self._add_part(
                    file, index, stored, first - stored.byte_offset, data[first - position : last - position]
                )

    def _file_checksums(self, file: str) -> tuple[list[int], Sequence[StoredChecksum]]:
        with self._lock:
            if file not in self._checksums:
                found = self._find_checksums(file)
                self._checksums[file] = [stored.byte_offset for stored in found], found
            return self._checksums[file]

    def _add_part(self, file: str, index: int, stored: StoredChecksum, begin: int, part: memoryview) -> None:
        with self._lock:
            if (file, index) not in self._states:
                self._states[file, index] = _make_state(self._root / file, stored)
            state = self._states[file, index]
        if state is None:
            return
        state.add(begin, part)
        if not state.missing():
            self._states[file, index] = None
            _check_value(self._root / file, stored, state.value())

    def finish(self) -> None:
        """Read the rest of the ranges that were begun, and compare them; no other thread may still be reading.

        Raises:
            CheckpointError: A range differs from its checksum.
        """
        for (file, index), state in list(self._states.items()):
            if state is not None:
                stored = self._checksums[file][1][index]
                for begin, end in state.missing():
                    for at, block in _read_blocks(self._root / file, stored.byte_offset + begin, end - begin):
                        self.add(file, at, block)


def check_range(path: Path, stored: StoredChecksum, count_bytes: Callable[[int], None]) -> None:
    """Read a range of a file and compare it with its checksum.

    Raises:
        CheckpointError: It differs, or cannot be read.
    """
    state = _make_state(path, stored)
    for at, block in _read_blocks(path, stored.byte_offset, stored.n_bytes):
        state.add(at - stored.byte_offset, block)
        count_bytes(len(block))
    _check_value(path, stored, state.value())


def _make_state(path: Path, stored: StoredChecksum) -> _RangeState:
    if isinstance(stored.expected, int):
        return _CrcState(stored.n_bytes)
    if len(stored.expected) < SHA256_DIGITS:
        return _HashState(stored.n_bytes, xxhash.xxh3_128(), None)

    def read_gap(begin: int, n_bytes: int) -> bytes:
        return b"".join(bytes(block) for _, block in _read_blocks(path, stored.byte_offset + begin, n_bytes))

    return _HashState(stored.n_bytes, _BackgroundSha256(), read_gap)


def _check_value(path: Path, stored: StoredChecksum, value: int | str) -> None:
    """Raise a CheckpointError if a range does not have its stored checksum."""
    if value != stored.expected:
        raise CheckpointError(f"{path}: the bytes of {stored.name} differ from their checksum; the file is damaged")


def _read_blocks(path: Path, position: int, n_bytes: int) -> Iterator[tuple[int, memoryview]]:
    with translate_os_errors("reading", path):
        descriptor = files.open_for_reading(path)
        try:
            buffer = memoryview(bytearray(min(n_bytes, files.BLOCK_BYTES)))
            for start in range(0, n_bytes, files.BLOCK_BYTES):
                block = buffer[: min(files.BLOCK_BYTES, n_bytes - start)]
                files.read_exactly(descriptor, position + start, block, path)
                yield position + start, block
        finally:
            os.close(descriptor)
