"""Big reads at the speed of the disk: past the page cache, several requests in flight, in order.

`read_ahead` yields the bytes of stretches of files block by block; while one block is used, threads read the next ones
into aligned memory. `fill` copies from these blocks into buffers that lie anywhere. Stretches need not be aligned: a
block begins and ends on a multiple of `direct.ALIGN`, and what was read beyond the stretch is not shown.

Where a file system refuses O_DIRECT (`lt_ckpt.direct`), the same reads go through the page cache.

Cost: one copy of the bytes, beside the disk, and at most `ALIGN` bytes more read at either end of a stretch; memory:
`AHEAD` + 1 blocks, kept for the next reading.
"""

import mmap
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lt_ckpt import direct, files
from lt_ckpt.errors import storage

AHEAD = 3
"""Requests in flight."""

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


class _File:
    """A file that is being read; closed when nobody reads it any more."""

    def __init__(self, path: Path) -> None:
        self.path, self.users = path, 0
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.direct = direct.switch_on(self.descriptor)
        except BaseException:
            os.close(self.descriptor)
            raise

    def read(self, block: mmap.mmap, begin: int, n_bytes: int) -> None:
        """Reads at least `n_bytes` from the aligned position `begin` on into an aligned block."""
        view = memoryview(block)
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
        if done < n_bytes:  # refused; or cut off: then the rest cannot be read, and the error says so
            self._read_buffered(view[done:n_bytes], begin + done)

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
    block: mmap.mmap
    file: _File
    done: Future[None]


def _pieces(stretch: Stretch) -> Iterator[tuple[int, int]]:
    """Cuts a stretch where blocks end: (begin, bytes)."""
    position, end = stretch.begin, stretch.begin + stretch.n_bytes
    while position < end:
        aligned = position - position % direct.ALIGN
        n_bytes = min(end, aligned + direct.BLOCK_BYTES) - position
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
    pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="lt-ckpt-read")
    current: _File | None = None

    def let_go(file: _File) -> None:
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
        view = memoryview(request.block)[request.skip : request.skip + request.n_bytes]
        yield request.stretch, request.begin, view
        direct.give_block(request.block)

    try:
        for index, stretch in enumerate(stretches):
            if current is None or current.path != stretch.path:
                before, current = current, None
                if before is not None:
                    let_go(before)
                with storage("reading", stretch.path):
                    current = _File(stretch.path)
            for begin, n_bytes in _pieces(stretch):
                if len(waiting) > AHEAD:
                    yield from show(finish())
                skip, block = begin % direct.ALIGN, direct.take_block()
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

    Raises:
        CheckpointError: A file cannot be read, or ends too early.
    """
    ordered = sorted(runs, key=lambda run: (str(run.path), run.begin))
    groups: list[list[Run]] = []
    ends: list[int] = []
    for run in ordered:
        # A gap smaller than what is read in any case is no reason to begin anew.
        if groups and groups[-1][0].path == run.path and run.begin <= ends[-1] + direct.ALIGN:
            groups[-1].append(run)
            ends[-1] = max(ends[-1], run.begin + len(run.buffer))
        else:
            groups.append([run])
            ends.append(run.begin + len(run.buffer))
    stretches = [Stretch(g[0].path, g[0].begin, end - g[0].begin) for g, end in zip(groups, ends, strict=True)]
    with closing(read_ahead(stretches)) as blocks:
        for index, position, view in blocks:
            _scatter(groups[index], position, view)


def _scatter(runs: list[Run], position: int, view: memoryview) -> None:
    """Copies what a block holds of some runs; drops the runs that are done with."""
    end = position + len(view)
    source = np.frombuffer(view, np.uint8)
    for run in runs:
        begin, until = max(run.begin, position), min(run.begin + len(run.buffer), end)
        if run.begin >= end:
            break
        if begin < until:
            target = np.frombuffer(run.buffer, np.uint8)
            np.copyto(target[begin - run.begin : until - run.begin], source[begin - position : until - position])
    runs[:] = [run for run in runs if run.begin + len(run.buffer) > end]
