"""Big files written past the page cache, at the speed of the disk.

A file system that buffers copies every byte once more, makes the writer wait for the writeback of others, and throws
out of memory what a training job needs there. With O_DIRECT the disk reads our memory, in which position, length and
address are multiples of `ALIGN`. So a big file's bytes are copied into aligned blocks, which a thread writes while the
caller copies, and hashes, what comes next; the last bytes, less than `ALIGN`, go the ordinary way. The file holds the
same bytes either way, and what makes them durable is the same: nothing counts as written before its fsync.

Where a file system refuses O_DIRECT, files are written through the page cache; `refusal` tells so. It is asked once.

Cost: one copy of the bytes, beside the disk; memory: `RINGS` times `RING_BLOCKS` blocks at most, kept for the next
file. Further files that are written at the same time, and small ones, are written by the caller, as the bytes come.
"""

import errno
import fcntl
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from lt_ckpt import files

ALIGN = 4096
"""What every file system and disk that knows O_DIRECT is content with."""

BLOCK_BYTES = 4 * 2**20
"""Bytes that are handed to the disk at once; more makes it no faster."""

RING_BLOCKS = 3
"""Blocks of a file that is being written: one is filled, one is written, one waits."""

RINGS = 2
"""Files that are written directly at the same time."""

DIRECT_FROM_BYTES = 2**20
"""Smaller files are not worth a thread."""

HUGE_BYTES = 2 * 2**20
"""A page of the larger kind. A disk takes a limited number of pieces of memory at once, so that small pages mean small
requests; with these a disk was read and written up to twice as fast."""

_rings = threading.Semaphore(RINGS)
_spare: list[np.ndarray] = []
_refusals: dict[int, str] = {}
"""File systems (`st_dev`) that have refused O_DIRECT, and in which words."""


def take_block(n_bytes: int) -> np.ndarray:
    """Returns an aligned block of memory (uint8), a used one if there is one."""
    for index, block in enumerate(_spare):
        if len(block) == n_bytes:
            with suppress(IndexError):  # another thread may take it meanwhile
                taken = _spare.pop(index)
                if len(taken) == n_bytes:
                    return taken
            break
    # Private: a forked process has its own.
    pages = mmap.mmap(-1, n_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    skip = -memory.ctypes.data % HUGE_BYTES
    return memory[skip : skip + n_bytes]


def give_block(block: np.ndarray) -> None:
    """Keeps a block for the next file."""
    if sum(map(len, _spare)) + len(block) <= RINGS * RING_BLOCKS * BLOCK_BYTES:
        _spare.append(block)


def switch_on(descriptor: int) -> bool:
    """Makes reads or writes through a descriptor go past the page cache.

    Returns:
        False when the system or the file system has nothing of that kind.
    """
    flag = getattr(os, "O_DIRECT", 0)
    device = os.fstat(descriptor).st_dev
    if not flag:
        _refusals[device] = f"{os.uname().sysname} has no O_DIRECT"
    if device in _refusals:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flag)
    except OSError as exc:
        refused(descriptor, exc)
        return False
    return True


def switch_off(descriptor: int) -> None:
    """Makes reads or writes through a descriptor go through the page cache again."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)


def refused(descriptor: int, exc: OSError) -> None:
    """Notes that the file system does not want this; raises the error again when it says something else."""
    if exc.errno not in (errno.EINVAL, errno.ENOTSUP):
        raise exc
    _refusals[os.fstat(descriptor).st_dev] = f"its file system refuses O_DIRECT ({exc.strerror})"


def refusal(path: Path) -> str:
    """Tells why files beside an existing file go through the page cache; empty when they do not.

    Raises:
        OSError: The file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return "" if switch_on(descriptor) else _refusals[os.fstat(descriptor).st_dev]
    finally:
        os.close(descriptor)


class NewFile:
    """A new file that is written once, from its beginning to its end.

    Args:
        path: The file to make.
        n_bytes: What will be written in all.

    Raises:
        OSError: (every method) The system refuses; from `write` and `sync` also what a write before met with.
    """

    def __init__(self, path: Path, n_bytes: int) -> None:
        self._left = n_bytes
        self._big = n_bytes >= DIRECT_FROM_BYTES
        self._begun = False
        self._head = b""
        self._ring: _Ring | None = None
        self._descriptor = files.create(path)

    def write(self, data: bytes | memoryview) -> None:
        """Takes the next bytes; the memory is the caller's again when this returns."""
        view = memoryview(data)
        self._left -= len(view)
        assert self._left >= 0, "more bytes than were announced"
        if not self._begun:
            if self._big and not self._head and self._left and len(view) < DIRECT_FROM_BYTES:
                self._head = bytes(view)  # a header: hundreds of files may wait with it for their turn to get tensors
                return
            self._begin()
        self._put(view)
        if not self._left:
            self._drain()

    def _begin(self) -> None:
        self._begun = True
        if self._big and _rings.acquire(blocking=False):
            try:
                if switch_on(self._descriptor):
                    self._ring = _Ring(self._descriptor)
            finally:
                if self._ring is None:
                    _rings.release()
        self._put(memoryview(self._head))

    def _put(self, view: memoryview) -> None:
        if self._ring is None:
            files.write_all(self._descriptor, view)
        else:
            self._ring.put(view)

    def _drain(self) -> None:
        """Waits for the thread, if there is one, and lets it go."""
        ring, self._ring = self._ring, None
        if ring is not None:
            try:
                ring.drain()
            finally:
                _rings.release()

    def sync(self) -> None:
        """Puts the file on the disk; all bytes must have come."""
        assert self._left == 0, f"{self._left} bytes have not come"
        files.fsync(self._descriptor)

    def close(self) -> None:
        """Lets go of the file; what was not synced may or may not be on the disk."""
        try:
            if self._ring is not None:
                self._ring.give_up()
                self._drain()
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


class _Ring:
    """Blocks that travel between the caller, who fills them, and a thread, which writes them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._direct = descriptor, True
        self._free: SimpleQueue[np.ndarray | None] = SimpleQueue()
        self._full: SimpleQueue[tuple[np.ndarray, int, int] | None] = SimpleQueue()
        self._block: np.ndarray | None = None
        self._filled = self._position = 0
        self._failure: BaseException | None = None
        self._given_up = False
        for _ in range(RING_BLOCKS):
            self._free.put(None)  # memory is taken when it is needed
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._write_blocks, name="lt-ckpt-write", daemon=True)
        self._thread.start()

    def put(self, data: memoryview) -> None:
        """Copies bytes into blocks."""
        source, done = np.frombuffer(data, np.uint8), 0
        while done < len(source):
            if self._block is None:
                block = self._free.get()
                self._block = take_block(BLOCK_BYTES) if block is None else block
                self._raise()
            n = min(len(source) - done, len(self._block) - self._filled)
            np.copyto(self._block[self._filled : self._filled + n], source[done : done + n])
            done += n
            self._filled += n
            if self._filled == len(self._block):
                self._hand_over()

    def _hand_over(self) -> None:
        assert self._block is not None
        self._full.put((self._block, self._filled, self._position))
        self._position += self._filled
        self._block, self._filled = None, 0

    def give_up(self) -> None:
        """Makes the thread write nothing more."""
        self._given_up = True

    def drain(self) -> None:
        """Waits until everything is written."""
        if self._block is not None:
            self._hand_over()
        self._full.put(None)
        self._thread.join()
        for _ in range(RING_BLOCKS):
            block = self._free.get()
            if block is not None:
                give_block(block)
        self._raise()

    def _raise(self) -> None:
        if self._failure is not None and not self._given_up:
            raise self._failure

    def _write_blocks(self) -> None:
        """The thread. After a failure it goes on returning blocks, so that nobody waits for one in vain."""
        while (item := self._full.get()) is not None:
            block, n_bytes, position = item
            if self._failure is None and not self._given_up:
                try:
                    self._write(block.data[:n_bytes], position)
                except BaseException as exc:  # noqa: BLE001 - the caller's thread raises it
                    self._failure = exc
            self._free.put(block)

    def _write(self, view: memoryview, position: int) -> None:
        done = 0
        while done < len(view):
            aligned = (len(view) - done) // ALIGN * ALIGN
            if self._direct and (not aligned or done % ALIGN):
                self._go_buffered()  # the file's tail, or the system took an odd part
            try:
                part = view[done : done + aligned] if self._direct else view[done:]
                done += os.pwrite(self._descriptor, part, position + done)
            except OSError as exc:
                if not self._direct:
                    raise
                refused(self._descriptor, exc)
                self._go_buffered()

    def _go_buffered(self) -> None:
        switch_off(self._descriptor)
        self._direct = False
