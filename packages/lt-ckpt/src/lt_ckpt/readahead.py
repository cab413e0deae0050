"""Large reads at disk speed: past the page cache, with several requests in flight.

`read_ahead` yields the bytes of file ranges block by block, in order; while one is used, threads read the next ones
into aligned memory. `read_ranges` reads into arbitrary buffers, in no order. Nothing need be aligned: a block begins
and ends on a multiple of `direct_io.ALIGN`, and excess bytes are hidden.

Where a file system refuses O_DIRECT (`lt_ckpt.direct_io`), the same reads go through the page cache.

Cost: one copy of the bytes, besides the disk, and at most `ALIGN` extra bytes at either end of a range; memory:
`READER_THREADS` + 1 blocks, reused.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lt_ckpt import direct_io, files
from lt_ckpt.errors import CheckpointError, translate_os_errors

BLOCK_BYTES = 2 * 2**20
"""Bytes per read request."""

READER_THREADS = 6
"""Threads that read or copy: some copy while enough of them read."""

MIN_READ_AHEAD_BYTES = 8 * 2**20
"""Less than this in all is read through the page cache."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Contiguous bytes of a file."""

    path: Path
    byte_offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Contiguous bytes of a file to read into a buffer; then a thread calls `on_read`."""

    path: Path
    byte_offset: int
    buffer: memoryview
    on_read: Callable[[], None] = lambda: None


class DirectFileReader:
    """File read past the page cache where its file system supports it."""

    def __init__(self, path: Path) -> None:
        self.path, self.n_pending_reads = path, 0
        self.descriptor = files.open_for_reading(path)
        try:
            self.direct = direct_io.enable_direct_io(self.descriptor)
        except BaseException:
            os.close(self.descriptor)
            raise

    def read(self, block: np.ndarray, begin: int, n_bytes: int) -> None:
        """Read at least `n_bytes` from the aligned position `begin` into an aligned block."""
        view = block.data
        rounded = -(-n_bytes // direct_io.ALIGN) * direct_io.ALIGN
        done = 0
        while self.direct and done < n_bytes and done % direct_io.ALIGN == 0:
            try:
                n_read = os.preadv(self.descriptor, [view[done:rounded]], begin + done)
            except OSError as exc:
                direct_io.handle_direct_io_error(self.descriptor, exc)
                break
            if not n_read:
                break
            done += n_read
        if done < n_bytes:
            size = os.fstat(self.descriptor).st_size
            if size < begin + n_bytes:
                missing = begin + n_bytes - size
                raise CheckpointError(
                    f"{self.path}: ends at byte {size}, at least {missing} are missing; the file is truncated"
                )
            self._read_buffered(
                view[done:n_bytes], begin + done
            )  # direct I/O refused, or a partial read ended off the alignment

    def read_into(self, begin: int, buffer: memoryview) -> None:
        """Read from any position into any buffer, through an aligned block.

        Raises:
            CheckpointError: The file ends too early.
        """
        block, target = direct_io.acquire_block(BLOCK_BYTES), np.frombuffer(buffer, np.uint8)
        try:
            for position, n_bytes in _split_at_blocks(FileRange(self.path, begin, len(buffer))):
                skip = position % direct_io.ALIGN
                self.read(block, position - skip, skip + n_bytes)
                np.copyto(target[position - begin : position - begin + n_bytes], block[skip : skip + n_bytes])
        finally:
            direct_io.release_block(block)

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)

    def _read_buffered(self, view: memoryview, begin: int) -> None:
        descriptor = files.open_for_reading(self.path)
        try:
            files.read_exactly(descriptor, begin, view, self.path)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Request:
    """Block being read by a thread."""

    range_index: int
    byte_offset: int
    """Position in the file of the requested bytes."""
    skip: int
    """Bytes of the block before them, read for alignment."""
    n_bytes: int
    block: np.ndarray
    file: DirectFileReader
    done: Future[None]


def _split_at_blocks(file_range: FileRange) -> Iterator[tuple[int, int]]:
    """Split a range at block ends: yield (position, bytes)."""
    position, end = file_range.byte_offset, file_range.byte_offset + file_range.n_bytes
    while position < end:
        aligned = position - position % direct_io.ALIGN
        n_bytes = min(end, aligned + BLOCK_BYTES) - position
        yield position, n_bytes
        position += n_bytes


def read_ahead(ranges: Iterable[FileRange]) -> Generator[tuple[int, int, memoryview], None, None]:
    """Read ranges of files in order.

    Args:
        ranges: What to read, in the requested order; best one file after the other, front to back.

    Yields:
        The index of the range, the position in its file, and the bytes from there on. Their memory is reused for the
            next
        ones.

    Raises:
        CheckpointError: A file cannot be read, or ends too early.
    """
    waiting: deque[_Request] = deque()
    pool = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="lt-ckpt-read")
    current: DirectFileReader | None = None

    def close_if_unused(file: DirectFileReader) -> None:
        if file.n_pending_reads == 0 and file is not current:
            os.close(file.descriptor)

    def pop_finished() -> _Request:
        request = waiting.popleft()
        try:
            with translate_os_errors("reading", request.file.path):
                request.done.result()
        finally:
            request.file.n_pending_reads -= 1
            close_if_unused(request.file)
        return request

    def yield_bytes(request: _Request) -> Iterator[tuple[int, int, memoryview]]:
        view = request.block.data[request.skip : request.skip + request.n_bytes]
        yield request.range_index, request.byte_offset, view
        direct_io.release_block(request.block)

    try:
        for index, file_range in enumerate(ranges):
            if current is None or current.path != file_range.path:
                previous, current = current, None
                if previous is not None:
                    close_if_unused(previous)
                with translate_os_errors("reading", file_range.path):
                    current = DirectFileReader(file_range.path)
            for begin, n_bytes in _split_at_blocks(file_range):
                if len(waiting) >= READER_THREADS:
                    yield from yield_bytes(pop_finished())
                skip, block = begin % direct_io.ALIGN, direct_io.acquire_block(BLOCK_BYTES)
                current.n_pending_reads += 1
                done = pool.submit(current.read, block, begin - skip, skip + n_bytes)
                waiting.append(_Request(index, begin, skip, n_bytes, block, current, done))
        while waiting:
            yield from yield_bytes(pop_finished())
    finally:
        pool.shutdown(cancel_futures=True)
        last, current = current, None
        open_files = {id(file): file for file in (*(request.file for request in waiting), last) if file is not None}
        for file in open_files.values():
            os.close(file.descriptor)


def read_ranges(ranges: Sequence[ReadRange]) -> None:
    """Fill buffers from files, each file front to back, neighboring ranges together.

    Each thread takes the next block, reads it and copies from it, so that no thread waits for another.

    Raises:
        CheckpointError: A file cannot be read, or ends too early; or an error of an `on_read`.
    """
    tasks, lock = _make_tasks(ranges), threading.Lock()
    remaining = {id(read_range): len(read_range.buffer) for read_range in ranges}
    failed = threading.Event()

    def work() -> None:
        block, file = direct_io.acquire_block(BLOCK_BYTES), None
        try:
            while not failed.is_set():
                with lock:
                    task = next(tasks, None)
                if task is None:
                    break
                with translate_os_errors("reading", task.path):
                    if file is None or file.path != task.path:
                        if file is not None:
                            os.close(file.descriptor)
                        file = None
                        file = DirectFileReader(task.path)
                    skip = task.byte_offset % direct_io.ALIGN
                    file.read(block, task.byte_offset - skip, skip + task.n_bytes)
                for read_range, n_bytes in _scatter(task, block.data[skip : skip + task.n_bytes]):
                    with lock:
                        remaining[id(read_range)] -= n_bytes
                        is_complete = not remaining[id(read_range)]
                    if is_complete:
                        read_range.on_read()
        except BaseException:
            failed.set()
            raise
        finally:
            if file is not None:
                os.close(file.descriptor)
            direct_io.release_block(block)

    with ThreadPoolExecutor(READER_THREADS, thread_name_prefix="lt-ckpt-read") as pool:
        workers = [pool.submit(work) for _ in range(READER_THREADS)]
    for worker in workers:
        worker.result()


@dataclass(frozen=True, slots=True)
class _Task:
    """Block to read, and the ranges that overlap it."""

    path: Path
    byte_offset: int
    n_bytes: int
    ranges: list[ReadRange]


def _make_tasks(ranges: Sequence[ReadRange]) -> Iterator[_Task]:
    ordered = sorted(ranges, key=lambda file_range: (str(file_range.path), file_range.byte_offset))
    first = 0
    while first < len(ordered):
        path, begin = ordered[first].path, ordered[first].byte_offset
        end, last = begin, first
        # A gap smaller than the alignment is read anyway.
        while last < len(ordered) and ordered[last].path == path and ordered[last].byte_offset <= end + direct_io.ALIGN:
            end = max(end, ordered[last].byte_offset + len(ordered[last].buffer))
            last += 1
        low = first
        for position, n_bytes in _split_at_blocks(FileRange(path, begin, end - begin)):
            while low < last and ordered[low].byte_offset + len(ordered[low].buffer) <= position:
                low += 1
            high = low
            while high < last and ordered[high].byte_offset < position + n_bytes:
                high += 1
            yield _Task(path, position, n_bytes, ordered[low:high])
        first = last


def _scatter(task: _Task, view: memoryview) -> Iterator[tuple[ReadRange, int]]:
    """Copy a block's bytes into the buffers of its ranges; yield each range and the number of bytes."""
    source, end = np.frombuffer(view, np.uint8), task.byte_offset + task.n_bytes
    for file_range in task.ranges:
        begin, stop = (
            max(file_range.byte_offset, task.byte_offset),
            min(file_range.byte_offset + len(file_range.buffer), end),
        )
        if begin < stop:
            target = np.frombuffer(file_range.buffer, np.uint8)
            np.copyto(
                target[begin - file_range.byte_offset : stop - file_range.byte_offset],
                source[begin - task.byte_offset : stop - task.byte_offset],
            )
            yield file_range, stop - begin
