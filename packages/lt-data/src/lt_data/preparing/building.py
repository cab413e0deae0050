"""A folder that takes hours to build: a kill, a power cut or a full disk at any moment leaves something to go on from.

Beside the target T lies T.building while the work goes on, and after it was cut off:

    lock         held (flock) by the process at work; the system takes it away when that process ends, however it ends
    journal      what the job is, then one record per finished piece (lt_data.preparing.journal)
    store/       what becomes T
    old/         the former T, from the moment when it is replaced until all is done
    *.side       files that grow in step with the journal

The order that makes it safe: a piece and its folder are synced, then the side files, then a record with the sizes of
these is added and synced. Whoever opens the folder again finds finished pieces in the records, cuts the side files to
the sizes in the last one and takes away what no record knows. At the end all is synced, the journal says so, and the
store is renamed to T, with what stood there put into `old` first. Only then the rest is removed.
"""

import fcntl
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from lt_data.errors import DataError
from lt_data.preparing.journal import Journal
from lt_data.storage import fsync, fsync_folder, fsync_tree, make_folder, open_at, os_errors, remove_tree
from lt_data.store.manifest import FILE_NAME, read_manifest

SUFFIX = ".building"
_LOCK, _JOURNAL, _STORE, _OLD, _SIDE = "lock", "journal", "store", "old", ".side"
_ATTEMPTS = 100  # at taking a lock that another process is just giving back


class Building:
    """The folder of a job at work; made by `building`.

    Attributes:
        target: where the result is to stand.
        path: the folder.
        content: what becomes the result.
        records: of the finished pieces, in order; those that were found and those that were added.
        published: whether the result stands at its place.
    """

    def __init__(self, target: Path, lock: int, *, fresh: bool) -> None:
        self.target = target
        self.path = target.with_name(target.name + SUFFIX)
        self.content = self.path / _STORE
        self.published = False
        self._old = self.path / _OLD
        self._lock = lock
        self._sides: dict[str, BinaryIO] = {}
        self._journal = Journal(self.path / _JOURNAL, even_damaged=fresh)

    @property
    def begun(self) -> bool:
        """Whether a job was begun here, by this process or an earlier one."""
        return bool(self._journal.records)

    @property
    def going_on(self) -> bool:
        """Whether there is something that the same job can go on from."""
        return self.begun and self._journal.records[0]["resumable"] and bool(self.records)

    @property
    def records(self) -> list[dict[str, Any]]:
        """One record per finished piece."""
        return [record for record in self._journal.records[1:] if "finished" not in record]

    def side(self, name: str, folder: Path | None = None) -> BinaryIO:
        """A file that grows with the records: open at its end as of the last one.

        Args:
            name: its name.
            folder: where it is kept if it belongs to the result.
        """
        size = self.records[-1]["sides"].get(name, 0) if self.records else 0
        path = self.path / f"{name}{_SIDE}" if folder is None else folder / name
        with os_errors("open", path):
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                raise DataError(f"{path}: {found} bytes, the journal says {size}: {self._damaged}")
            self._sides[name] = open_at(path, size)
        return self._sides[name]

    def add(self, record: Mapping[str, Any], folders: Sequence[Path]) -> None:
        """Note that a piece is finished.

        Args:
            record: what is needed to go on after it.
            folders: where its files were made; the files are synced already.
        """
        sizes: dict[str, int] = {}
        with os_errors("write", self.path):
            for name, file in self._sides.items():
                file.flush()
                fsync(file.fileno())
                sizes[name] = file.tell()
            for folder in (*folders, self.path):
                fsync_folder(folder)
        self._journal.append({**record, "sides": sizes})

    def publish(self, fingerprint: str, *, replace: bool) -> None:
        """Put the result in its place and remove the rest.

        Args:
            fingerprint: of the result; by it an interrupted move is recognized.
            replace: whether something of ours stands there that is to be replaced.

        Raises:
            DataError: the file system refuses; what stood at the place stands there.
        """
        with os_errors("write", self.path):
            for file in self._sides.values():
                file.flush()
                fsync(file.fileno())
                file.close()
            self._sides.clear()
            fsync_tree(self.content)
            fsync_folder(self.path)
        self._journal.append({"finished": fingerprint})
        with os_errors("move the finished folder to", self.target):
            replaced = replace and self.target.exists()
            moved = False
            try:
                if replaced:
                    self.target.rename(self._old)
                self.content.rename(self.target)
                moved = True
                fsync_folder(self.target.parent)
                fsync_folder(self.path)
            except OSError:
                if moved:
                    self.target.rename(self.content)
                if replaced and self._old.exists():
                    self._old.rename(self.target)
                raise
        self.published = True
        with os_errors("remove what is left of the finished work in", self.path):
            self._remove()

    @property
    def _damaged(self) -> str:
        return "it was changed from outside; start afresh (--fresh)"

    def _begin(self, job: Mapping[str, Any], *, resumable: bool, fresh: bool) -> None:
        """Find out what is there, and go on with it or start."""
        records = self._journal.records
        finished = records[-1].get("finished") if len(records) > 1 else None
        if finished and _fingerprint(self.target) == finished and not self._differs():
            with os_errors("remove what is left of the finished work in", self.path):
                if self._old.exists():
                    remove_tree(self._old)
                if not fresh:
                    self.published = True
                    self._remove()
                    return
        header: dict[str, Any] = records[0] if records else {"resumable": False}
        if header["resumable"] and not fresh:
            if not resumable:
                raise DataError(f"{self.path} holds another job that was cut off: finish it, or start afresh (--fresh)")
            if changed := _changes(header["job"], job):
                raise DataError(
                    f"{self.path} holds a job that was cut off, and it was another one: {'; '.join(changed)}. Go on "
                    "with what it was, or start afresh (--fresh)"
                )
            return
        with os_errors("write", self.path):
            self._discard()
        self._journal.append({"job": dict(job), "resumable": resumable})
        with os_errors("write", self.path):
            fsync_folder(self.path)

    def _differs(self) -> bool:
        """Whether what was built is still here and is not what stands at the target.

        A file system that does not move a folder at once may show it at both places after a power cut.
        """
        if not self.content.exists():
            return False
        manifests = [folder / FILE_NAME for folder in (self.content, self.target)]
        return not all(path.is_file() for path in manifests) or manifests[0].read_bytes() != manifests[1].read_bytes()

    def _discard(self) -> None:
        """Take away all but the lock and an empty journal, and put back what was moved aside."""
        if self._old.exists():
            if self.target.exists():
                raise DataError(
                    f"{self._old} holds the store that stood at {self.target}, where something else stands now: "
                    "move one of them away"
                )
            self._old.rename(self.target)
            fsync_folder(self.target.parent)
        self._journal.clear()
        if self.content.exists():
            remove_tree(self.content)
        for side in self.path.glob(f"*{_SIDE}"):
            side.unlink()

    def _remove(self) -> None:
        """Remove the folder; the result stands, or there is none and nothing is kept."""
        if self._old.exists():
            assert self.published
            remove_tree(self._old)
        if self.content.exists():
            remove_tree(self.content)
        for side in self.path.glob(f"*{_SIDE}"):
            side.unlink()
        (self.path / _JOURNAL).unlink()
        (self.path / _LOCK).unlink()
        self.path.rmdir()

    def _leave(self, *, keep: bool) -> None:
        for file in (*self._sides.values(), self._journal):
            with suppress(OSError):  # a full disk may refuse what is buffered; no record counts on it
                file.close()
        if not keep and not self.published and not self._old.exists():
            with suppress(OSError):  # the error that ended the work is the one to tell; what stays is cleared next time
                self._remove()
        os.close(self._lock)


@contextmanager
def building(target: Path, *, job: Mapping[str, Any], resumable: bool, fresh: bool = False) -> Iterator[Building]:
    """Open the folder in which `target` is built, to begin or to go on.

    When the block ends by an error, what is finished is kept if the job can go on from it, else all is removed.

    Args:
        target: where the result is to stand.
        job: what the job is, as JSON values: it goes on only if that has not changed.
        resumable: whether the same job can go on later.
        fresh: throw away what an earlier job left.

    Raises:
        DataError: another process is at work there, an earlier job was another one, or the file system refuses.
    """
    target = Path(os.path.abspath(target))
    lock = _take_lock(target)
    try:
        opened = Building(target, lock, fresh=fresh)
    except BaseException:
        _give_up(target, lock)
        raise
    keep = opened.begun
    try:
        opened._begin(job, resumable=resumable, fresh=fresh)
        keep = False
        yield opened
    except DataError as exc:
        keep = keep or opened.going_on
        if opened.going_on and not opened.published:
            raise DataError(
                f"{exc}. {len(opened.records)} finished shards are kept in {opened.path}: the same command goes on "
                "after them"
            ) from exc
        raise
    except BaseException:
        keep = keep or opened.going_on
        raise
    finally:
        opened._leave(keep=keep)


def _take_lock(target: Path) -> int:
    """The lock of the folder, which is made if need be. A folder that is not one of ours is not touched."""
    path = target.with_name(target.name + SUFFIX)
    for _ in range(_ATTEMPTS):
        with os_errors("create", path):
            if path.exists():
                _check_ours(path)
            make_folder(path)
            try:
                lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # its owner has just finished and removed the folder
                continue
            except OSError:
                with suppress(OSError):  # not empty: it was there before
                    path.rmdir()
                raise
        try:
            with os_errors("lock (flock)", path / _LOCK):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as exc:
                    owner = os.pread(lock, 200, 0).decode(errors="replace").strip() or "it has just begun"
                    raise DataError(
                        f"another process is at work on {target} ({owner}): wait for it, or choose another place"
                    ) from exc
        except BaseException:
            os.close(lock)
            raise
        if _is_file(path / _LOCK, lock):
            try:
                with os_errors("write", path / _LOCK):
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            except BaseException:
                _give_up(target, lock)
                raise
            return lock
        os.close(lock)
    raise DataError(f"{path}: other processes come and go there; choose another place")


def _give_up(target: Path, lock: int) -> None:
    """Let go of a folder that cannot be used, and remove it if nothing was begun in it."""
    path = target.with_name(target.name + SUFFIX)
    with suppress(OSError):  # the error that led here is the one to tell
        if {*os.listdir(path)} <= {_LOCK, _JOURNAL} and (
            not (path / _JOURNAL).exists() or not (path / _JOURNAL).stat().st_size
        ):
            (path / _JOURNAL).unlink(missing_ok=True)
            (path / _LOCK).unlink()
            path.rmdir()
    os.close(lock)


def _is_file(path: Path, descriptor: int) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _check_ours(path: Path) -> None:
    known = {_LOCK, _JOURNAL, _STORE, _OLD}
    foreign = [path.name] if not path.is_dir() else os.listdir(path)
    if foreign := sorted(name for name in foreign if name not in known and not name.endswith(_SIDE)):
        raise DataError(f"{path}: holds {', '.join(foreign[:3])}, which is not ours: move that away")


def _fingerprint(store: Path) -> str | None:
    return read_manifest(store).fingerprint if (store / FILE_NAME).is_file() else None


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = [*before, *(name for name in now if name not in before)]
    changed = [name for name in names if before.get(name) != now.get(name)]
    return [f"{name} was {_short(before.get(name))} and is {_short(now.get(name))}" for name in changed]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
