"""Blocks on the local disk, at most so many bytes of them, shared by any number of processes.

    FOLDER/usage              8 bytes: what the blocks take; the lock of the cache
    FOLDER/blocks/KEY/NUMBER  one block; its modification time is when it was last read

A block is written under another name and renamed, so that who reads it sees all of it. Its bytes are counted before
they are written, and counting, renaming and making room are done under the lock; a process that is killed in between
leaves the count too high, never too low. When the count would go over the limit, the blocks are counted again and those
read longest ago go, down to nine tenths. Files on their way are locked by who writes them: those of the dead can
be recognized and removed.

Nothing is synced: what a crash of the machine leaves is found by its hash when a process reads a block for the first
time. Cost: some 20 µs for each read; one look at every block for each tenth of the limit that comes in.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lt_data.errors import DataError
from lt_data.remote.contents import BLOCK_BYTES, block_digest
from lt_data.storage import translate_os_errors

_OWN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

LEAST_BYTES = 16 * BLOCK_BYTES
TMP = ".tmp"


class BlockCache:
    """The cache in a folder.

    Args:
        folder: where; made if it is not there. It holds nothing else.
        limit: bytes that all blocks may take together.

    Raises:
        DataError: the limit is too low, or the folder cannot be written.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        if limit < LEAST_BYTES:
            raise DataError(f"cache_bytes={limit}: at least {LEAST_BYTES}")
        self.folder = folder
        self.limit = limit
        self._known: dict[tuple[str, int], tuple[int, int]] = {}  # blocks whose hash was right: device and inode
        with translate_os_errors("write", folder):
            (folder / "blocks").mkdir(parents=True, exist_ok=True)
            (folder / "usage").touch()

    def read(self, key: str, number: int, begin: int, end: int, size: int, digest: bytes | None) -> bytes | None:
        """The bytes [begin, end) of a block; None where it is not there, or is not what it must be.

        Args:
            key: of the file that the block is of: another content has another key.
            number: of the block in it.
            begin: first byte, counted in the block.
            end: one past the last one.
            size: bytes of the block.
            digest: its hash, as far as it is known.
        """
        path = self._path(key, number)
        try:
            with translate_os_errors("read", path):
                descriptor = os.open(path, os.O_RDONLY | _OWN)
        except DataError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                return None
            raise
        try:
            with translate_os_errors("read", path):
                found = os.fstat(descriptor)
                seen = (found.st_dev, found.st_ino)
                good = found.st_size == size
                if good and digest is not None and self._known.get((key, number)) != seen:
                    good = block_digest(os.pread(descriptor, size, 0)) == digest
                data = os.pread(descriptor, end - begin, begin) if good else b""
                if not good or len(data) != end - begin:  # a crash of the machine, or a failing disk
                    with suppress(FileNotFoundError):
                        path.unlink()
                    return None
                self._known[key, number] = seen
                with suppress(FileNotFoundError, PermissionError):  # PermissionError: the cache of another user
                    os.utime(descriptor)
                return data
        finally:
            os.close(descriptor)

    def write(self, key: str, number: int, data: bytes) -> None:
        """Keep a block, if there is room for it."""
        path = self._path(key, number)
        with translate_os_errors("write", path):
            descriptor = self._begin(path, len(data))
            if descriptor is None:
                return
            at, tmp = descriptor
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(at, view) :]
                with self._locked():  # a file that is renamed under its eyes would be left out by a count
                    tmp.rename(path)
            except BaseException:
                tmp.unlink(missing_ok=True)
                raise
            finally:
                os.close(at)

    def usage(self) -> int:
        """Bytes that the blocks take, counted again."""
        with translate_os_errors("read", self.folder), self._locked() as lock:
            return self._recount(lock, self.limit)

    def _path(self, key: str, number: int) -> Path:
        return self.folder / "blocks" / key / f"{number:08d}"

    def _begin(self, path: Path, n_bytes: int) -> tuple[int, Path] | None:
        """Count a block and open a file of its size; None where it is there already or there is no room."""
        with self._locked() as lock:
            if path.exists():
                return None
            counted = os.pread(lock, 8, 0)
            total = int.from_bytes(counted, "little") if len(counted) == 8 else self.limit
            if total + n_bytes > self.limit:
                total = self._recount(lock, min(self.limit - n_bytes, self.limit // 10 * 9))
            if total + n_bytes > self.limit:
                return None
            path.parent.mkdir(exist_ok=True)
            tmp = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TMP}")
            os.pwrite(lock, (total + n_bytes).to_bytes(8, "little"), 0)
            descriptor = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OWN, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.ftruncate(descriptor, n_bytes)
            return descriptor, tmp

    @contextmanager
    def _locked(self) -> Iterator[int]:
        descriptor = os.open(self.folder / "usage", os.O_RDWR | os.O_CREAT | _OWN, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _recount(self, lock: int, goal: int) -> int:
        """Count the blocks, remove those read longest ago until the goal is met; gives back what is left."""
        blocks: list[tuple[int, int, Path]] = []
        total = 0
        for folder, _, names in os.walk(self.folder / "blocks"):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):
                    found = path.stat()
                    if not name.endswith(TMP):
                        blocks.append((found.st_mtime_ns, found.st_size, path))
                    elif is_of_the_dead(path):
                        path.unlink()
                        continue
                    total += found.st_size
        for _, size, path in sorted(blocks):
            if total <= goal:
                break
            path.unlink(missing_ok=True)
            total -= size
        os.pwrite(lock, total.to_bytes(8, "little"), 0)
        return total


def is_of_the_dead(tmp: Path) -> bool:
    """Whether the process that was writing a file has ended: it held the file's lock."""
    descriptor = os.open(tmp, os.O_RDONLY | _OWN)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)
