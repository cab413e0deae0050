"""The checkpoints of a run in a bucket, brought there in the background while the run goes on.

A thread looks for committed checkpoints (every few seconds, and at once when it is told of one) and uploads those that
are not there yet, lowest step first. It never touches a save: it reads what is committed, nothing else. What goes wrong
is told, noted in `problems` and tried again, with growing pauses. Passed over are only a checkpoint whose own bytes are
damaged, one for which something else stands at its address, and one that retention has removed meanwhile; of the last
no file stays in the bucket. While the caller's retention works inside `sparing`, the checkpoint that is being uploaded
is spared and no other upload begins; those that wait are not spared, or a slow line would fill the disk.

With an `owner` the folder is this run's alone (`lt_ckpt.s3.owner`): the mirror looks before each checkpoint, sends
nothing when it belongs to another run or when another process has gone on with this one, and gives up the parts of
uploads that a killed process has left.

One process of a run has a mirror. Cost: a listing of the folder each few seconds, a few requests for each checkpoint,
one read of what is uploaded, and the memory of an upload (see `lt_ckpt.s3.client`).
"""

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.discover import list_steps
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.folders import COMMIT, MANIFEST, STEP_FOLDER, step_name
from lt_ckpt.records import DONE, LISTED
from lt_ckpt.s3.client import S3Folder, ServiceError, UnreachableError
from lt_ckpt.s3.contents import DamagedError
from lt_ckpt.s3.fetching import intact, remote_steps, whole
from lt_ckpt.s3.owner import ForeignError, Owner, hold
from lt_ckpt.s3.parcel import MAX_COMMIT_BYTES
from lt_ckpt.s3.sending import OccupiedError, Uploaded, upload

MAX_PAUSE_S = 300.0
MAX_DOUBLINGS = 30
MAX_PROBLEMS = 100
STOP_S = 60.0
"""How long `close` waits, when the time is up, for a request that is under way."""


class _StoppedError(Exception):
    """The mirror is being closed and the time is up."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that went wrong.

    Attributes:
        path: With which checkpoint, or the folder of checkpoints.
        message: What.
        passing: The store could not be reached: it may pass without anybody's doing.
        final: It is not tried again.
        times: How many times in a row.
    """

    path: Path
    message: str
    passing: bool = False
    final: bool = False
    times: int = 1

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def _ours(name: str) -> bool:
    """Tells whether an object in a checkpoint's folder has a name that a checkpoint's file has."""
    return name in (COMMIT, MANIFEST) or any(pattern.fullmatch(name) for pattern in LISTED)


def _part_of_ours(name: str) -> bool:
    folder, _, inside = name.partition("/")
    return STEP_FOLDER.fullmatch(folder) is not None and _ours(inside)


def erase(folder: S3Folder) -> bool:
    """Deletes a checkpoint in a bucket, or a part of one; what says that it is whole goes first.

    Returns:
        False, and nothing is touched, when anything there is not of a name that a checkpoint's file has.
    """
    names = set(folder.sizes())
    if not all(_ours(name) for name in names):
        return False
    folder.delete(names & {COMMIT, DONE})
    folder.delete(names - {COMMIT, DONE})
    return True


def prune_remote(url: str | S3Folder, *, last: int, every: int = 0) -> list[str]:
    """Deletes old checkpoints below an address.

    Kept are the newest `last` that are whole, and whole ones of steps that `every` divides (step 0 aside). Before
    anything goes, the objects of those are looked at, newest first, until all of one are as they were uploaded: that
    one stays, whatever the numbers say. Nothing is deleted while fewer than `last` are whole. What is not of ours
    stays.

    Returns:
        The addresses of those that are gone.

    Raises:
        CheckpointError: `last` below 1 or `every` below 0.
        ServiceError: The store refuses or cannot be reached.
    """
    if last < 1 or every < 0:
        raise CheckpointError(f"prune_remote: last must be >= 1 and every >= 0, are {last} and {every}")
    standing: list[S3Folder] = []
    doomed: list[S3Folder] = []
    for step, folder in remote_steps(url):
        due = bool(every) and step > 0 and step % every == 0
        if len(standing) >= last and not due:
            doomed.append(folder)
        elif _is(whole, folder):
            standing.append(folder)
        elif len(standing) >= last:
            doomed.append(folder)
    if not doomed:
        return []
    if not any(_is(intact, folder) for folder in standing):
        good = next((folder for folder in doomed if _is(intact, folder)), None)
        doomed = [folder for folder in doomed if good is not None and folder.url != good.url]
    return [folder.url for folder in doomed if erase(folder)]


def _is(check: Callable[[S3Folder], object], folder: S3Folder) -> bool:
    try:
        check(folder)
    except ServiceError:
        raise
    except CheckpointError:
        return False
    return True


class Mirror:
    """Keeps a bucket up to date with a folder of checkpoints, in a thread of its own, until `close`.

    Attributes:
        root: The folder of checkpoints.
        url: The address below which they go, each under its own name.
        progress: Grows while bytes are read to be sent.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        url: str | S3Folder,
        *,
        owner: Owner | None = None,
        held: bool = False,
        keep_last: int = 0,
        keep_every: int = 0,
        may_replace: bool = False,
        distrusted: Collection[str] = (),
        poll_s: float = 10.0,
        pause_s: float = 5.0,
        told: Callable[[Problem | Uploaded], None] = lambda _: None,
    ) -> None:
        """Begins at once.

        Args:
            root: The folder of checkpoints; it need not be there yet.
            url: `s3://bucket/folder`.
            owner: The run and the process that it sends for; without one nobody looks whose the folder is.
            held: The folder was taken for the owner already (`lt_ckpt.s3.owner.hold`).
            keep_last: Keep only so many whole ones in the bucket; 0: all.
            keep_every: Also keep those whose step is a multiple of this; 0: none.
            may_replace: Let another checkpoint of the same step in the bucket give way.
            distrusted: Names of checkpoints in the bucket that were found damaged: they are sent anew as a whole.
            poll_s: Seconds between two looks at the folder.
            pause_s: Seconds before something is tried again; doubled each time, to five minutes.
            told: Hears of each problem when it is new and of each upload when it is done, in the mirror's own thread.

        Raises:
            CheckpointError: The address is none, or boto3 is missing. Nothing is asked yet: see `try_address`.
        """
        if keep_last < 0 or keep_every < 0:
            raise CheckpointError(f"mirror: keep_last and keep_every must be >= 0, are {keep_last} and {keep_every}")
        self.root = Path(os.path.abspath(root))
        self._bucket = url if isinstance(url, S3Folder) else S3Folder(url)
        self.url, self.progress = self._bucket.url, 0
        self._owner, self._held, self._swept = owner, held, False
        self._keep_last, self._keep_every, self._may_replace = keep_last, keep_every, may_replace
        self._distrusted, self._told = set(distrusted), told
        self._poll_s, self._pause_s = poll_s, pause_s
        self._lock = threading.Lock()
        self._sparing = threading.Lock()
        """Held while the caller's retention works, and while the checkpoint to be uploaded is chosen."""
        self._wake, self._closing, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._current: Path | None = None
        self._there: dict[Path, bytes] = {}
        self._passed: dict[Path, bytes] = {}
        self._awaited: dict[Path, bytes] = {}
        self._announced: dict[Path, bool] = {}
        """Those of `notify`, and whether they may still go away unseen."""
        self._problems: list[Problem] = []
        self._uploaded: list[Uploaded] = []
        self._bug: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lt-ckpt-mirror", daemon=True)
        self._thread.start()

    def notify(self, path: str | os.PathLike[str]) -> None:
        """Tells it of a new checkpoint, so that it need not find it by itself; returns at once."""
        announced = Path(os.path.abspath(path))
        assert announced.parent == self.root, "a checkpoint of this mirror's folder"
        with self._lock:
            self._announced[announced] = True
        self._wake.set()

    @contextmanager
    def sparing(self) -> Iterator[tuple[Path, ...]]:
        """Gives the checkpoint that is being uploaded, for `prune(protect=...)`; meanwhile no other upload begins."""
        with self._sparing:
            yield () if self._current is None else (self._current,)

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

    def finish(self, timeout_s: float) -> bool:
        """Lets it end when what is committed now is there; waits for that at most so long, and tells whether it is."""
        if not self._closing.is_set():
            self._closing.set()
            self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self, timeout_s: float = 600.0, *, stop_s: float = STOP_S) -> tuple[Path, ...]:
        """Uploads what is committed and not there yet, for at most so long, and ends.

        Args:
            timeout_s: Seconds for what is not there yet.
            stop_s: Seconds that a request under way may take to end when the time is up; the thread is left alone then.

        Returns:
            The checkpoints that are not in the bucket; none when all is well. `problems` tells why.

        Raises:
            CheckpointError: The folder of checkpoints cannot be read.
        """
        self.finish(timeout_s)
        self._stop.set()
        self._wake.set()
        self._thread.join(stop_s)
        if self._bug is not None:
            raise self._bug
        return tuple(path for path, commit in self._candidates() if self._there.get(path) != commit)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as exc:
            self._bug = exc
            text = f"the mirror has failed, and sends nothing more: {type(exc).__name__}: {exc}"
            self._told(Problem(path=self.root, message=text, final=True))
            raise
        finally:
            self._current = None

    def _work(self) -> None:
        in_vain, last = 0, False
        while not self._stop.is_set():
            if self._closing.is_set() and not last:  # asked before the look: nothing committed by then is missed
                in_vain, last = 0, True
            if self._round():
                if last:
                    return
                in_vain, pause = 0, self._poll_s
            else:
                # Doubled a limited number of times: after days the power itself would be too large for a float.
                pause = min(self._pause_s * 2 ** min(in_vain, MAX_DOUBLINGS), MAX_PAUSE_S)
                in_vain += 1
            self._wake.wait(pause)
            self._wake.clear()

    def _round(self) -> bool:
        """Uploads all that waits; False when something has to be tried again."""
        try:
            found = self._candidates()
        except CheckpointError as exc:
            self._note(self.root, exc)
            return False
        waiting = {
            path: commit for path, commit in found if commit not in (self._there.get(path), self._passed.get(path))
        }
        self._miss(dict(found))
        self._awaited = waiting
        return all(self._bring(path, commit) for path, commit in waiting.items())

    def _miss(self, found: dict[Path, bytes]) -> None:
        """Notes what has waited to be uploaded, or was announced, and is not there any more."""
        missed = {path for path, commit in self._awaited.items() if not self._settled(path, commit)}
        with self._lock:
            unseen = {path for path, open_ in self._announced.items() if open_ and path not in self._awaited}
            missed.update(path for path in unseen if self._due(path) and not self._settled(path))
            gone = {path for path in missed | unseen if path not in found and not path.exists()}
            self._announced.update(dict.fromkeys(unseen & (gone | set(found)), False))
        for path in sorted(missed & gone):
            self._note(path, CheckpointError("was removed before its turn to be uploaded came"), final=True)

    def _settled(self, path: Path, commit: bytes | None = None) -> bool:
        """Whether this checkpoint, or without a COMMIT one of its step, is in the bucket or given up for good."""
        ends = [ends[path] for ends in (self._there, self._passed) if path in ends]
        return bool(ends) if commit is None else commit in ends

    def _due(self, path: Path) -> bool:
        """Whether retention in the bucket would keep this checkpoint, judged by the newer ones that were announced."""
        newer = sum(path.name < other.name for other in self._announced)
        return self._belongs(int(path.name.rpartition("-")[2]), newer)

    def _belongs(self, step: int, newer: int) -> bool:
        """Whether retention in the bucket keeps a checkpoint that has so many newer ones."""
        multiple = self._keep_every and step and step % self._keep_every == 0
        return not self._keep_last or newer < self._keep_last or bool(multiple)

    def _candidates(self) -> list[tuple[Path, bytes]]:
        """Returns the committed checkpoints that belong in the bucket, lowest step first, with their COMMIT."""
        found: list[tuple[Path, bytes]] = []
        newer = 0
        for step, path in list_steps(self.root):
            if path.name != step_name(step):
                continue  # one that was moved aside
            with storage("reading", path), suppress(FileNotFoundError):
                commit = files.read_small(path / COMMIT, MAX_COMMIT_BYTES)
                if self._belongs(step, newer):
                    found.append((path, commit))
                newer += 1
        return found[::-1]

    def _bring(self, path: Path, commit: bytes) -> bool:
        """Uploads a checkpoint; False when it has to be tried again."""
        with self._sparing:
            self._current = path
        folder = self._bucket.below(path.name)
        try:
            self._hold()
            anew = path.name in self._distrusted
            if anew or folder.read(COMMIT, MAX_COMMIT_BYTES) != commit:
                done = upload(path, folder, replace=self._may_replace, anew=anew, stop=self._go_on)
                self._distrusted.discard(path.name)
                with self._lock:
                    self._uploaded.append(done)
                self._told(done)
        except _StoppedError:
            return False
        except CheckpointError as exc:
            return self._failed(path, commit, folder, exc)
        finally:
            self._current = None
        self._there[path] = commit
        if self._keep_last:
            try:
                prune_remote(self._bucket, last=self._keep_last, every=self._keep_every)
            except ServiceError as exc:
                self._note(path, exc)
        return True

    def _hold(self) -> None:
        """Makes sure that the folder is ours to write to."""
        if self._owner is None:
            return
        hold(self._bucket, self._owner, first=not self._held)
        self._held = True
        if not self._swept:
            self._bucket.abort_unfinished(_part_of_ours)
            self._swept = True

    def _failed(self, path: Path, commit: bytes, folder: S3Folder, exc: CheckpointError) -> bool:
        """Notes why a checkpoint was not uploaded; False when it has to be tried again."""
        if not (path / COMMIT).exists():
            self._passed[path] = commit
            text = "was removed before it was uploaded; nothing of it is in the bucket"
            try:
                if folder.read(COMMIT, MAX_COMMIT_BYTES) is None:
                    erase(folder)
            except ServiceError as error:
                text = f"was removed while it was uploaded, and a part of it stays: {error}"
            self._note(path, CheckpointError(text), final=True)
            return True
        final = isinstance(exc, DamagedError | OccupiedError | ForeignError)
        self._note(path, exc, final=final)
        if final:
            self._passed[path] = commit
        return final

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise _StoppedError
        self.progress += 1

    def _note(self, path: Path, exc: CheckpointError, *, final: bool = False) -> None:
        found = Problem(path=path, message=str(exc), passing=isinstance(exc, UnreachableError), final=final)
        with self._lock:
            last = self._problems[-1] if self._problems else None
            known = last is not None and (last.path, last.message) == (path, found.message)
            if last is not None and known:
                self._problems[-1] = replace(last, times=last.times + 1)
            else:
                self._problems = [*self._problems, found][-MAX_PROBLEMS:]
        if not known:
            self._told(found)
