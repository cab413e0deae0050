"""Big files written past the page cache, at the speed of the disk.

A file system that buffers copies every byte once more, makes the writer wait for the writeback of others, and throws
out of memory what a training job needs there. With O_DIRECT the disk reads our memory, in which position, length and
address are multiples of `ALIGN`. So a big file's bytes are copied into aligned blocks, which threads write while the
caller copies, and hashes, what comes next; the last bytes, less than `ALIGN`, go the ordinary way. The file holds the
same bytes either way, and what makes them durable is the same: nothing counts as written before its fsync.

All files share the threads and the blocks, which are there for as long as a big file is open. A few files keep the
block that they are filling; when hundreds are open (a conversion), the others hand over what they have at the end of
every write. Small files are written through the page cache, and so are all where a file system refuses O_DIRECT; it is
asked once, and `refusal` tells.

Cost: one copy of the bytes, beside the disk; memory: `BLOCKS` blocks, kept for the next file, and less than
`GATHER_BYTES` for each file.
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

BLOCK_BYTES = 2 * 2**20
"""Bytes that are handed to the disk at once."""

THREADS = 4
"""Threads that write: enough requests for the disk, and none of them large."""

BLOCKS = 16
"""Blocks that are being filled or written, of all files together."""

HOLDERS = 8
"""Files that may keep a block that is not full until more bytes come; fewer than `BLOCKS`, or nobody could go on."""

GATHER_BYTES = 64 * 2**10
"""Any other file gathers fewer bytes than this until more come: small writes cost a disk as much as large ones."""

DIRECT_FROM_BYTES = 2**20
"""Smaller files are not worth a thread."""

HUGE_BYTES = 2 * 2**20
"""A page of the larger kind. A disk takes a limited number of pieces of memory at once, so that small pages mean small
requests; with these a disk was read and written up to twice as fast."""

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
    if sum(map(len, _spare)) + len(block) <= BLOCKS * BLOCK_BYTES:
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
    """A new file that is written once, from its beginning to its end, by one thread.

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
        self._blocks: _Blocks | None = None
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
        if self._big and switch_on(self._descriptor):
            self._blocks = _Blocks(self._descriptor)
        self._put(memoryview(self._head))

    def _put(self, view: memoryview) -> None:
        if self._blocks is None:
            files.write_all(self._descriptor, view)
        else:
            self._blocks.put(view)

    def _drain(self) -> None:
        """Waits for the threads, if they write this file, and lets them go."""
        blocks, self._blocks = self._blocks, None
        if blocks is not None:
            blocks.drain()

    def sync(self) -> None:
        """Puts the file on the disk; all bytes must have come."""
        assert self._left == 0, f"{self._left} bytes have not come"
        files.fsync(self._descriptor)

    def close(self) -> None:
        """Lets go of the file, once; what was not synced may or may not be on the disk."""
        if self._descriptor < 0:
            return
        try:
            if self._blocks is not None:
                self._blocks.give_up()
                self._drain()
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


class _Writers:
    """The threads that write the blocks of all files, and the blocks' number. They end with the last file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._threads: list[threading.Thread] = []
        self.room = threading.Semaphore(BLOCKS)
        """Blocks that may still be taken."""
        self.holders = threading.Semaphore(HOLDERS)
        self.queue: SimpleQueue[tuple[_Blocks, np.ndarray, int, int] | None] = SimpleQueue()

    def join(self) -> None:
        """One file more."""
        with self._lock:
            self._users += 1
            while len(self._threads) < THREADS:
                # A daemon: a disk that hangs must not keep the process from ending.
                thread = threading.Thread(target=self._work, name="lt-ckpt-write", daemon=True)
                thread.start()
                self._threads.append(thread)

    def leave(self) -> None:
        """One file less."""
        with self._lock:
            self._users -= 1
            if not self._users:
                for _ in self._threads:
                    self.queue.put(None)
                while self._threads:
                    self._threads.pop().join()

    def _work(self) -> None:
        while (item := self.queue.get()) is not None:
            file, block, n_bytes, position = item
            file.write(block, n_bytes, position)
            give_block(block)
            self.room.release()
            file.done.put(None)


_writers = _Writers()


def _forget_writers() -> None:
    """A forked process has no threads, and blocks that nobody will give back."""
    global _writers
    _writers = _Writers()


os.register_at_fork(after_in_child=_forget_writers)


class _Blocks:
    """The blocks of one file: filled by the caller, written by `_Writers`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._direct = descriptor, True
        self._writers = _writers
        self._gathered = b""
        self._block: np.ndarray | None = None
        self._filled = self._position = self._n_queued = 0
        self._failure: BaseException | None = None
        self._given_up = False
        self.done: SimpleQueue[None] = SimpleQueue()
        """Gets a token for every block that has been written."""
        self._writers.join()
        self._holds = self._writers.holders.acquire(blocking=False)

    def put(self, data: memoryview) -> None:
        """Copies bytes into blocks, and hands them over."""
        if self._block is None and len(self._gathered) + len(data) < GATHER_BYTES:
            self._gathered += data
            return
        for source in (np.frombuffer(self._gathered, np.uint8), np.frombuffer(data, np.uint8)):
            self._fill(source)
        self._gathered = b""
        if not self._holds:
            self._flush()

    def _fill(self, source: np.ndarray) -> None:
        done = 0
        while done < len(source):
            if self._block is None:
                self._writers.room.acquire()
                self._block = take_block(BLOCK_BYTES)
                self._raise()
            n = min(len(source) - done, len(self._block) - self._filled)
            np.copyto(self._block[self._filled : self._filled + n], source[done : done + n])
            done += n
            self._filled += n
            if self._filled == len(self._block):
                self._hand_over(self._filled)

    def _flush(self) -> None:
        """Hands over all but what is less than `ALIGN`, which is gathered."""
        if self._block is not None:
            aligned = self._filled // ALIGN * ALIGN
            self._gathered = self._block[aligned : self._filled].tobytes()
            self._hand_over(aligned)

    def _hand_over(self, n_bytes: int) -> None:
        assert self._block is not None
        self._writers.queue.put((self, self._block, n_bytes, self._position))
        self._position += n_bytes
        self._n_queued += 1
        self._block, self._filled = None, 0

    def give_up(self) -> None:
        """Makes the threads write nothing more of this file."""
        self._given_up = True

    def drain(self) -> None:
        """Waits until everything is written."""
        try:
            self._flush()
            for _ in range(self._n_queued):
                self.done.get()
            if self._gathered and self._failure is None and not self._given_up:
                self._go_buffered()
                self._write(memoryview(self._gathered), self._position)
        finally:
            if self._holds:
                self._writers.holders.release()
            self._writers.leave()
        self._raise()

    def _raise(self) -> None:
        if self._failure is not None and not self._given_up:
            raise self._failure

    def write(self, block: np.ndarray, n_bytes: int, position: int) -> None:
        """Writes a block, in one of the threads; after a failure nothing more, so that nobody waits in vain."""
        if self._failure is None and not self._given_up:
            try:
                self._write(block.data[:n_bytes], position)
            except BaseException as exc:  # noqa: BLE001 - the caller's thread raises it
                self._failure = exc

    def _write(self, view: memoryview, position: int) -> None:
        done = 0
        while done < len(view):
            if self._direct and done % ALIGN:
                self._go_buffered()  # the system took an odd part
            try:
                done += os.pwrite(self._descriptor, view[done:], position + done)
            except OSError as exc:
                if not self._direct:
                    raise
                refused(self._descriptor, exc)
                self._go_buffered()

    def _go_buffered(self) -> None:
        switch_off(self._descriptor)
        self._direct = False
