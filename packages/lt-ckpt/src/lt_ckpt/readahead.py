"""Big reads at the speed of the disk: past the page cache, with several requests in flight.

`read_ahead` yields the bytes of stretches of files block by block, in order; while one is used, threads read the next
ones into aligned memory. `fill` reads into buffers that lie anywhere, in no order. Nothing need be aligned: a block
begins and ends on a multiple of `direct.ALIGN`, and what was read beyond what is wanted is not shown.

Where a file system refuses O_DIRECT (`lt_ckpt.direct`), the same reads go through the page cache.

Cost: one copy of the bytes, beside the disk, and at most `ALIGN` bytes more read at either end of a stretch; memory:
`THREADS` + 1 blocks, kept for the next reading.
"""

import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lt_ckpt import direct, files
from lt_ckpt.errors import CheckpointError, storage

BLOCK_BYTES = 2 * 2**20
"""Bytes that are read at once."""

THREADS = 6
"""Threads that read or copy: some of them copy while enough of them read."""

WORTH_BYTES = 8 * 2**20
"""Less than this in all is read the ordinary way."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of a file, side by side."""

    path: Path
    begin: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a file that are wanted in a buffer."""

    path: Path
    begin: int
    buffer: memoryview


class DirectFile:
    """A file that is being read past the page cache, where its file system can."""

    def __init__(self, path: Path) -> None:
        self.path, self.users = path, 0
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.direct = direct.switch_on(self.descriptor)
        except BaseException:
            os.close(self.descriptor)
            raise

    def read(self, block: np.ndarray, begin: int, n_bytes: int) -> None:
        """Reads at least `n_bytes` from the aligned position `begin` on into an aligned block."""
        view = block.data
        rounded = -(-n_bytes // direct.ALIGN) * direct.ALIGN
        done = 0
        while self.direct and done < n_bytes and done % direct.ALIGN == 0:
            try:
                got = os.preadv(self.descriptor, [view[done:rounded]], begin + done)
            except OSError as exc:
                direct.refused(self.descriptor, exc)
                break
            if not got:
                break
            done += got
        if done < n_bytes:
            size = os.fstat(self.descriptor).st_size
            if size < begin + n_bytes:
                missing = begin + n_bytes - size
                raise CheckpointError(
                    f"{self.path}: ends at byte {size}, at least {missing} are missing; the file is truncated"
                )
            self._read_buffered(view[done:n_bytes], begin + done)  # refused, or an odd part was read

    def read_into(self, begin: int, buffer: memoryview) -> None:
        """Fills a buffer that lies anywhere from any position on, through a block.

        Raises:
            CheckpointError: The file ends too early.
        """
        block, target = direct.take_block(BLOCK_BYTES), np.frombuffer(buffer, np.uint8)
        try:
            for position, n_bytes in _pieces(Stretch(self.path, begin, len(buffer))):
                skip = position % direct.ALIGN
                self.read(block, position - skip, skip + n_bytes)
                np.copyto(target[position - begin : position - begin + n_bytes], block[skip : skip + n_bytes])
        finally:
            direct.give_block(block)

    def close(self) -> None:
        """Lets go of the file."""
        os.close(self.descriptor)

    def _read_buffered(self, view: memoryview, begin: int) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            files.read_exactly(descriptor, begin, view, self.path)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Request:
    """A block that a thread is reading."""

    stretch: int
    begin: int
    """Where the wanted bytes begin in the file."""
    skip: int
    """Bytes of the block before them."""
    n_bytes: int
    block: np.ndarray
    file: DirectFile
    done: Future[None]


def _pieces(stretch: Stretch) -> Iterator[tuple[int, int]]:
    """Cuts a stretch where blocks end: (begin, bytes)."""
    position, end = stretch.begin, stretch.begin + stretch.n_bytes
    while position < end:
        aligned = position - position % direct.ALIGN
        n_bytes = min(end, aligned + BLOCK_BYTES) - position
        yield position, n_bytes
        position += n_bytes


def read_ahead(stretches: Iterable[Stretch]) -> Generator[tuple[int, int, memoryview], None, None]:
    """Reads stretches of files.

    Args:
        stretches: What to read, in the order wanted; best one file after the other, forwards.

    Yields:
        The number of the stretch, the position in its file, and the bytes from there on. Their memory is reused when
        the next ones are asked for.

    Raises:
        CheckpointError: A file cannot be read, or ends too early.
    """
    waiting: deque[_Request] = deque()
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="lt-ckpt-read")
    current: DirectFile | None = None

    def let_go(file: DirectFile) -> None:
        if file.users == 0 and file is not current:
            os.close(file.descriptor)

    def finish() -> _Request:
        request = waiting.popleft()
        try:
            with storage("reading", request.file.path):
                request.done.result()
        finally:
            request.file.users -= 1
            let_go(request.file)
        return request

    def show(request: _Request) -> Iterator[tuple[int, int, memoryview]]:
        view = request.block.data[request.skip : request.skip + request.n_bytes]
        yield request.stretch, request.begin, view
        direct.give_block(request.block)

    try:
        for index, stretch in enumerate(stretches):
            if current is None or current.path != stretch.path:
                before, current = current, None
                if before is not None:
                    let_go(before)
                with storage("reading", stretch.path):
                    current = DirectFile(stretch.path)
            for begin, n_bytes in _pieces(stretch):
                if len(waiting) >= THREADS:
                    yield from show(finish())
                skip, block = begin % direct.ALIGN, direct.take_block(BLOCK_BYTES)
                current.users += 1
                done = pool.submit(current.read, block, begin - skip, skip + n_bytes)
                waiting.append(_Request(index, begin, skip, n_bytes, block, current, done))
        while waiting:
            yield from show(finish())
    finally:
        pool.shutdown(cancel_futures=True)
        last, current = current, None
        open_files = {id(file): file for file in (*(request.file for request in waiting), last) if file is not None}
        for file in open_files.values():
            os.close(file.descriptor)


def fill(runs: Sequence[Run]) -> None:
    """Fills buffers from files, each file forwards, neighbours together.

    Each thread takes the next block, reads it and copies from it, so that nobody waits for another thread's turn.

    Raises:
        CheckpointError: A file cannot be read, or ends too early.
    """
    tasks, lock = _tasks(runs), threading.Lock()
    failed = threading.Event()

    def work() -> None:
        block, file = direct.take_block(BLOCK_BYTES), None
        try:
            while not failed.is_set():
                with lock:
                    task = next(tasks, None)
                if task is None:
                    break
                with storage("reading", task.path):
                    if file is None or file.path != task.path:
                        if file is not None:
                            os.close(file.descriptor)
                        file = None
                        file = DirectFile(task.path)
                    skip = task.begin % direct.ALIGN
                    file.read(block, task.begin - skip, skip + task.n_bytes)
                _scatter(task, block.data[skip : skip + task.n_bytes])
        except BaseException:
            failed.set()
            raise
        finally:
            if file is not None:
                os.close(file.descriptor)
            direct.give_block(block)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="lt-ckpt-read") as pool:
        workers = [pool.submit(work) for _ in range(THREADS)]
    for worker in workers:
        worker.result()


@dataclass(frozen=True, slots=True)
class _Task:
    """A block to be read, and the runs that begin or go on in it."""

    path: Path
    begin: int
    n_bytes: int
    runs: list[Run]


def _tasks(runs: Sequence[Run]) -> Iterator[_Task]:
    ordered = sorted(runs, key=lambda run: (str(run.path), run.begin))
    first = 0
    while first < len(ordered):
        path, begin = ordered[first].path, ordered[first].begin
        end, last = begin, first
        # A gap smaller than what is read in any case is no reason to begin anew.
        while last < len(ordered) and ordered[last].path == path and ordered[last].begin <= end + direct.ALIGN:
            end = max(end, ordered[last].begin + len(ordered[last].buffer))
            last += 1
        low = first
        for position, n_bytes in _pieces(Stretch(path, begin, end - begin)):
            while low < last and ordered[low].begin + len(ordered[low].buffer) <= position:
                low += 1
            high = low
            while high < last and ordered[high].begin < position + n_bytes:
                high += 1
            yield _Task(path, position, n_bytes, ordered[low:high])
        first = last


def _scatter(task: _Task, view: memoryview) -> None:
    """Copies what a block holds of the runs."""
    source, end = np.frombuffer(view, np.uint8), task.begin + task.n_bytes
    for run in task.runs:
        begin, until = max(run.begin, task.begin), min(run.begin + len(run.buffer), end)
        if begin < until:
            target = np.frombuffer(run.buffer, np.uint8)
            np.copyto(target[begin - run.begin : until - run.begin], source[begin - task.begin : until - task.begin])
