"""The checkpoints of a run in a bucket, brought there in the background while the run goes on.

A thread looks for committed checkpoints (every few seconds, and at once when it is told of one) and uploads those that
are not there yet, lowest step first. It never touches a save: it reads what is committed, nothing else. What goes wrong
is noted in `problems` and tried again, with growing pauses. Passed over are only a checkpoint whose own bytes are
damaged, one for which something else stands at its address, and one that retention has removed meanwhile; of the last
no file stays in the bucket. `protect` names the checkpoint that is being uploaded, so that the caller's retention can
spare it; those that wait are not protected, or a slow line would fill the disk.

One process of a run has a mirror. Cost: a listing of the folder each few seconds, a few requests for each checkpoint,
one read of what is uploaded, and the memory of an upload (see `lt_ckpt.s3.client`).
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.discover import list_steps
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.folders import COMMIT, MANIFEST, step_name
from lt_ckpt.records import MARK_FILE, PART_FILE, TENSOR_FILE, TOKENIZER_FILE
from lt_ckpt.s3.client import S3Folder, ServiceError
from lt_ckpt.s3.contents import DamagedError
from lt_ckpt.s3.fetching import remote_steps, whole
from lt_ckpt.s3.parcel import MAX_COMMIT_BYTES
from lt_ckpt.s3.sending import OccupiedError, Uploaded, upload

MAX_PAUSE_S = 300.0
MAX_PROBLEMS = 100
STOP_S = 60.0
"""How long `close` waits, when the time is up, for a request that is under way."""


class _StoppedError(Exception):
    """The mirror is being closed and the time is up."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that went wrong: with which checkpoint, what, and how many times in a row."""

    path: Path
    message: str
    times: int = 1


def erase(folder: S3Folder) -> bool:
    """Deletes a checkpoint in a bucket, or a part of one; its COMMIT goes first.

    Returns:
        False, and nothing is touched, when anything there is not of a name that a checkpoint's file has.
    """
    names = set(folder.sizes())
    patterns = (TENSOR_FILE, PART_FILE, TOKENIZER_FILE, MARK_FILE)
    rest = names - {COMMIT, MANIFEST}
    if not all(any(pattern.fullmatch(name) for pattern in patterns) for name in rest):
        return False
    folder.delete(names & {COMMIT})
    folder.delete(names - {COMMIT})
    return True


def prune_remote(url: str | S3Folder, *, last: int) -> list[str]:
    """Deletes old checkpoints below an address: those older than the newest `last` that are whole.

    Nothing is deleted while fewer than `last` are whole. What is not of ours stays.

    Returns:
        The addresses of those that are gone.
    """
    if last < 1:
        raise CheckpointError(f"prune_remote: last must be >= 1, is {last}")
    kept = 0
    gone: list[str] = []
    for _, folder in remote_steps(url):
        if kept >= last:
            if erase(folder):
                gone.append(folder.url)
            continue
        try:
            whole(folder)
        except ServiceError:
            raise
        except CheckpointError:
            continue
        kept += 1
    return gone


class Mirror:
    """Keeps a bucket up to date with a folder of checkpoints, in a thread of its own, until `close`.

    Attributes:
        root: The folder of checkpoints.
        url: The address below which they go, each under its own name.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        url: str,
        *,
        keep_last: int = 0,
        may_replace: bool = False,
        poll_s: float = 10.0,
        pause_s: float = 5.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Begins at once.

        Args:
            root: The folder of checkpoints; it need not be there yet.
            url: `s3://bucket/folder`.
            keep_last: Keep only so many whole ones in the bucket; 0: all.
            may_replace: Let another checkpoint of the same step in the bucket give way.
            poll_s: Seconds between two looks at the folder.
            pause_s: Seconds before something is tried again; doubled each time, to five minutes.
            say: Told each problem when it is new and each upload when it is done, in the mirror's own thread.

        Raises:
            CheckpointError: The address is none, or boto3 is missing. Nothing is asked yet: see `try_address`.
        """
        if keep_last < 0:
            raise CheckpointError(f"mirror: keep_last must be >= 0, is {keep_last}")
        self.root = Path(os.path.abspath(root))
        self._bucket = S3Folder(url)
        self.url = self._bucket.url
        self._keep_last, self._may_replace, self._say = keep_last, may_replace, say
        self._poll_s, self._pause_s = poll_s, pause_s
        self._lock = threading.Lock()
        self._wake, self._closing, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._current: Path | None = None
        self._there: dict[Path, bytes] = {}
        self._passed: dict[Path, bytes] = {}
        self._problems: list[Problem] = []
        self._uploaded: list[Uploaded] = []
        self._bug: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lt-ckpt-mirror", daemon=True)
        self._thread.start()

    def notify(self, path: str | os.PathLike[str]) -> None:
        """Tells it of a new checkpoint, so that it need not find it by itself; returns at once."""
        assert Path(os.path.abspath(path)).parent == self.root, "a checkpoint of this mirror's folder"
        self._wake.set()

    def protect(self) -> tuple[Path, ...]:
        """Returns the checkpoint that is being uploaded, for `prune(protect=...)`."""
        with self._lock:
            return () if self._current is None else (self._current,)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What went wrong so far, oldest first; the newest hundred."""
        with self._lock:
            return tuple(self._problems)

    @property
    def uploaded(self) -> tuple[Uploaded, ...]:
        """What was uploaded so far."""
        with self._lock:
            return tuple(self._uploaded)

    def close(self, timeout_s: float = 600.0) -> tuple[Path, ...]:
        """Uploads what is committed and not there yet, for at most so long, and ends.

        Returns:
            The checkpoints that are not in the bucket; none when all is well. `problems` tells why.

        Raises:
            CheckpointError: The folder of checkpoints cannot be read.
        """
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        self._stop.set()
        self._wake.set()
        self._thread.join(STOP_S)
        if self._bug is not None:
            raise self._bug
        return tuple(path for path, commit in self._candidates() if self._there.get(path) != commit)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as exc:
            self._bug = exc
            raise
        finally:
            with self._lock:
                self._current = None

    def _work(self) -> None:
        in_vain = 0
        while not self._stop.is_set():
            last = self._closing.is_set()  # asked before the look, so that nothing committed by then is missed
            if self._round():
                if last:
                    return
                in_vain, pause = 0, self._poll_s
            else:
                in_vain, pause = in_vain + 1, min(self._pause_s * 2**in_vain, MAX_PAUSE_S)
            self._wake.wait(pause)
            self._wake.clear()

    def _round(self) -> bool:
        """Uploads all that waits; False when something has to be tried again."""
        try:
            waiting = self._candidates()
        except CheckpointError as exc:
            self._note(self.root, str(exc))
            return False
        return all(
            self._bring(path, commit)
            for path, commit in waiting
            if commit not in (self._there.get(path), self._passed.get(path))
        )

    def _candidates(self) -> list[tuple[Path, bytes]]:
        """Returns the committed checkpoints that belong in the bucket, lowest step first, with their COMMIT."""
        found: list[tuple[Path, bytes]] = []
        for step, path in list_steps(self.root):
            if path.name != step_name(step):
                continue  # one that was moved aside
            with storage("reading", path), suppress(FileNotFoundError):
                found.append((path, files.read_small(path / COMMIT, MAX_COMMIT_BYTES)))
        return found[: self._keep_last or None][::-1]

    def _bring(self, path: Path, commit: bytes) -> bool:
        """Uploads a checkpoint; False when it has to be tried again."""
        with self._lock:
            self._current = path
        folder = self._bucket.below(path.name)
        try:
            if folder.read(COMMIT, MAX_COMMIT_BYTES) != commit:
                done = upload(path, folder, replace=self._may_replace, stop=self._go_on)
                with self._lock:
                    self._uploaded.append(done)
                self._say(f"uploaded {path.name} to {folder.url}")
        except _StoppedError:
            return False
        except CheckpointError as exc:
            return self._failed(path, commit, folder, exc)
        finally:
            with self._lock:
                self._current = None
        self._there[path] = commit
        if self._keep_last:
            try:
                prune_remote(self._bucket, last=self._keep_last)
            except ServiceError as exc:
                self._note(path, str(exc))
        return True

    def _failed(self, path: Path, commit: bytes, folder: S3Folder, exc: CheckpointError) -> bool:
        """Notes why a checkpoint was not uploaded; False when it has to be tried again."""
        if not (path / COMMIT).exists():
            try:
                if folder.read(COMMIT, MAX_COMMIT_BYTES) is None:
                    erase(folder)
            except ServiceError as error:
                self._note(path, f"was removed while it was uploaded, and a part of it stays: {error}")
                return True
            self._note(path, "was removed before it was uploaded; nothing of it is in the bucket")
            return True
        self._note(path, str(exc))
        if isinstance(exc, DamagedError | OccupiedError):
            self._passed[path] = commit
            return True
        return False

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise _StoppedError

    def _note(self, path: Path, message: str) -> None:
        with self._lock:
            last = self._problems[-1] if self._problems else None
            known = last is not None and (last.path, last.message) == (path, message)
            if last is not None and known:
                self._problems[-1] = replace(last, times=last.times + 1)
            else:
                self._problems = [*self._problems, Problem(path=path, message=message)][-MAX_PROBLEMS:]
        if not known:
            self._say(f"{path}: {message}")
