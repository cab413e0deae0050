"""Direct I/O: large files written past the page cache at disk speed.

Buffered writes copy every byte once more, make the writer wait for other processes' writeback, and evict pages that a
training job needs. With O_DIRECT the disk reads our memory, where position, length and address are multiples of
`ALIGN`. So a large file's bytes are copied into aligned blocks, which threads write while the caller copies, and
hashes, the next ones; the last bytes, less than `ALIGN`, are written through the page cache. The file's bytes are the
same either way, and so is durability: nothing counts as written before its fsync.

All files share the threads and the blocks, which exist while a large file is open. A few files keep the block that they
are filling; when hundreds are open (a conversion), the others submit what they have at the end of every write. Small
files are written through the page cache, and so are all on a file system that refuses O_DIRECT; it is tried once, and
`direct_io_unsupported_reason` returns the reason.

Cost: one copy of the bytes, besides the disk; memory: `MAX_BLOCKS` blocks, reused, and less than `COALESCE_BYTES` per
file.
"""

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from lt_ckpt import files

ALIGN = 4096
"""Alignment that satisfies every file system and disk with O_DIRECT."""

BLOCK_BYTES = 2 * 2**20
"""Bytes per write request."""

WRITER_THREADS = 4
"""Writer threads: enough requests in flight to keep a disk busy, none of them large."""

MAX_BLOCKS = 16
"""Blocks being filled or written, of all files together."""

MAX_BLOCK_OWNERS = 8
"""Files that may keep a partial block until more bytes come; fewer than `MAX_BLOCKS`, or writers would deadlock."""

COALESCE_BYTES = 64 * 2**10
"""Any other file buffers up to this many bytes: small writes cost a disk as much as large ones."""

MIN_DIRECT_BYTES = 2**20
"""Smaller files are not worth a thread."""

HUGE_PAGE_BYTES = 2 * 2**20
"""Huge page size. A disk request takes a limited number of memory segments, so small pages mean small requests; with
huge pages a disk was read and written up to twice as fast."""

_free_blocks: list[np.ndarray] = []
_unsupported_devices: dict[int, str] = {}
"""File system (`st_dev`) that refused O_DIRECT → reason."""


def acquire_block(n_bytes: int) -> np.ndarray:
    """Return an aligned block of memory (uint8), reusing a free one if possible."""
    for index, block in enumerate(_free_blocks):
        if len(block) == n_bytes:
            with suppress(IndexError):  # another thread may take it meanwhile
                taken = _free_blocks.pop(index)
                if len(taken) == n_bytes:
                    return taken
            break
    # Private: a forked process gets its own.
    pages = mmap.mmap(-1, n_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    skip = -memory.ctypes.data % HUGE_PAGE_BYTES
    return memory[skip : skip + n_bytes]


def release_block(block: np.ndarray) -> None:
    """Return a block to the pool."""
    if sum(map(len, _free_blocks)) + len(block) <= MAX_BLOCKS * BLOCK_BYTES:
        _free_blocks.append(block)


def enable_direct_io(descriptor: int) -> bool:
    """Make reads and writes of a descriptor bypass the page cache.

    Returns:
        False if the system or the file system does not support it.
    """
    flag = getattr(os, "O_DIRECT", 0)
    device = os.fstat(descriptor).st_dev
    if not flag:
        _unsupported_devices[device] = f"{os.uname().sysname} has no O_DIRECT"
    if device in _unsupported_devices:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flag)
    except OSError as exc:
        handle_direct_io_error(descriptor, exc)
        return False
    return True


def disable_direct_io(descriptor: int) -> None:
    """Make reads and writes of a descriptor use the page cache again."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)


def handle_direct_io_error(descriptor: int, exc: OSError) -> None:
    """Record that the file system refuses O_DIRECT; re-raise any other error."""
    if exc.errno not in (errno.EINVAL, errno.ENOTSUP):
        raise exc
    _unsupported_devices[os.fstat(descriptor).st_dev] = f"its file system refuses O_DIRECT ({exc.strerror})"


def direct_io_unsupported_reason(path: Path) -> str:
    """Return why files beside an existing file use the page cache; empty if they do not.

    Raises:
        OSError: The file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return "" if enable_direct_io(descriptor) else _unsupported_devices[os.fstat(descriptor).st_dev]
    finally:
        os.close(descriptor)


class DirectFileWriter:
    """New file written once, front to back, by one thread.

    Args:
        path: The file to make.
        n_bytes: Bytes that will be written in all.

    Raises:
        OSError: (every method) The system refuses; from `write` and `sync` also errors of earlier writes.
    """

    def __init__(self, path: Path, n_bytes: int) -> None:
        self._remaining = n_bytes
        self._uses_direct_io = n_bytes >= MIN_DIRECT_BYTES
        self._started = False
        self._head = b""
        self._blocks: _BlockWriter | None = None
        self._descriptor = files.create_file(path)

    def write(self, data: bytes | memoryview) -> None:
        """Write the next bytes; the caller may reuse the memory once this returns."""
        view = memoryview(data)
        self._remaining -= len(view)
        assert self._remaining >= 0, "more bytes than were announced"
        if not self._started:
            if self._uses_direct_io and not self._head and self._remaining and len(view) < MIN_DIRECT_BYTES:
                self._head = bytes(view)  # a header: hundreds of files may wait for their tensors
                return
            self._start()
        self._write_bytes(view)
        if not self._remaining:
            self._drain()

    def _start(self) -> None:
        self._started = True
        if self._uses_direct_io and enable_direct_io(self._descriptor):
            self._blocks = _BlockWriter(self._descriptor)
        self._write_bytes(memoryview(self._head))

    def _write_bytes(self, view: memoryview) -> None:
        if self._blocks is None:
            files.write_all(self._descriptor, view)
        else:
            self._blocks.append(view)

    def _drain(self) -> None:
        """Wait for the threads that write this file, if any, and release its block writer."""
        blocks, self._blocks = self._blocks, None
        if blocks is not None:
            blocks.drain()

    def sync(self) -> None:
        """Fsync the file; all announced bytes must have been written."""
        assert self._remaining == 0, f"{self._remaining} bytes have not come"
        files.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file, once; unsynced bytes may or may not be on the disk."""
        if self._descriptor < 0:
            return
        try:
            if self._blocks is not None:
                self._blocks.cancel()
                self._drain()
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


class WritableFile(Protocol):
    """File being written front to back: a `DirectFileWriter`, or one that also looks at what is written."""

    def write(self, data: bytes | memoryview) -> None:
        """Write the next bytes; the caller may reuse the memory once this returns."""
        ...

    def sync(self) -> None:
        """Fsync the file; all announced bytes must have been written."""
        ...

    def close(self) -> None:
        """Close the file, once."""
        ...


CreateFile = Callable[[Path, int], WritableFile]
"""Creates a file of that many bytes."""


class _WriterPool:
    """Threads that write the blocks of all files, and the budget of blocks. They end with the last file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_files = 0
        self._threads: list[threading.Thread] = []
        self.free_blocks = threading.Semaphore(MAX_BLOCKS)
        """Blocks that may still be acquired."""
        self.block_owners = threading.Semaphore(MAX_BLOCK_OWNERS)
        self.queue: SimpleQueue[tuple[_BlockWriter, np.ndarray, int, int] | None] = SimpleQueue()

    def add_file(self) -> None:
        """Register a file; start the threads for the first one."""
        with self._lock:
            self._n_files += 1
            while len(self._threads) < WRITER_THREADS:
                # A daemon: a disk that hangs must not keep the process from ending.
                thread = threading.Thread(target=self._run, name="lt-ckpt-write", daemon=True)
                thread.start()
                self._threads.append(thread)

    def remove_file(self) -> None:
        """Unregister a file; end the threads after the last one."""
        with self._lock:
            self._n_files -= 1
            if not self._n_files:
                for _ in self._threads:
                    self.queue.put(None)
                while self._threads:
                    self._threads.pop().join()

    def _run(self) -> None:
        while (item := self.queue.get()) is not None:
            file, block, n_bytes, position = item
            file.write_block(block, n_bytes, position)
            release_block(block)
            self.free_blocks.release()
            file.done.put(None)


_writer_pool = _WriterPool()


def _reset_writers_after_fork() -> None:
    """Replace the pool in a forked process, which has no threads and blocks that are never released."""
    global _writer_pool
    _writer_pool = _WriterPool()


os.register_at_fork(after_in_child=_reset_writers_after_fork)


class _BlockWriter:
    """Blocks of one file: filled by the caller, written by `_WriterPool`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._direct = descriptor, True
        self._writers = _writer_pool
        self._coalesced = b""
        self._block: np.ndarray | None = None
        self._filled = self._position = self._n_queued = 0
        self._failure: BaseException | None = None
        self._cancelled = False
        self.done: SimpleQueue[None] = SimpleQueue()
        """Receives a token for every block that has been written."""
        self._writers.add_file()
        self._owns_block = self._writers.block_owners.acquire(blocking=False)

    def append(self, data: memoryview) -> None:
        """Copy bytes into blocks and submit the full ones."""
        if self._block is None and len(self._coalesced) + len(data) < COALESCE_BYTES:
            self._coalesced += data
            return
        for source in (np.frombuffer(self._coalesced, np.uint8), np.frombuffer(data, np.uint8)):
            self._fill(source)
        self._coalesced = b""
        if not self._owns_block:
            self._flush()

    def _fill(self, source: np.ndarray) -> None:
        done = 0
        while done < len(source):
            if self._block is None:
                self._writers.free_blocks.acquire()
                self._block = acquire_block(BLOCK_BYTES)
                self._raise_failure()
            n = min(len(source) - done, len(self._block) - self._filled)
            np.copyto(self._block[self._filled : self._filled + n], source[done : done + n])
            done += n
            self._filled += n
            if self._filled == len(self._block):
                self._submit_block(self._filled)

    def _flush(self) -> None:
        """Submit all bytes but the last ones, less than `ALIGN`, which are kept."""
        if self._block is not None:
            aligned = self._filled // ALIGN * ALIGN
            self._coalesced = self._block[aligned : self._filled].tobytes()
            self._submit_block(aligned)

    def _submit_block(self, n_bytes: int) -> None:
        assert self._block is not None
        self._writers.queue.put((self, self._block, n_bytes, self._position))
        self._position += n_bytes
        self._n_queued += 1
        self._block, self._filled = None, 0

    def cancel(self) -> None:
        """Make the threads write nothing more of this file."""
        self._cancelled = True

    def drain(self) -> None:
        """Wait until everything is written."""
        try:
            self._flush()
            for _ in range(self._n_queued):
                self.done.get()
            if self._coalesced and self._failure is None and not self._cancelled:
                self._disable_direct_io()
                self._write(memoryview(self._coalesced), self._position)
        finally:
            if self._owns_block:
                self._writers.block_owners.release()
            self._writers.remove_file()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None and not self._cancelled:
            raise self._failure

    def write_block(self, block: np.ndarray, n_bytes: int, position: int) -> None:
        """Write a block in one of the threads; after a failure nothing more, so that no waiter hangs."""
        if self._failure is None and not self._cancelled:
            try:
                self._write(block.data[:n_bytes], position)
            except BaseException as exc:  # noqa: BLE001 - the caller's thread raises it
                self._failure = exc

    def _write(self, view: memoryview, position: int) -> None:
        done = 0
        while done < len(view):
            if self._direct and done % ALIGN:
                self._disable_direct_io()  # a partial write ended off the alignment
            try:
                done += os.pwrite(self._descriptor, view[done:], position + done)
            except OSError as exc:
                if not self._direct:
                    raise
                handle_direct_io_error(self._descriptor, exc)
                self._disable_direct_io()

    def _disable_direct_io(self) -> None:
        disable_direct_io(self._descriptor)
        self._direct = False
