"""Background mirror of a run's checkpoints to a bucket, and retention there.

A thread looks for committed checkpoints (every few seconds, and at once after `notify`) and uploads those that are not
there yet, lowest step first. It never touches a save: it only reads what is committed. What fails is reported, kept in
`problems` and tried again at the next look; boto3 itself retries requests with growing pauses. Given up are only a
checkpoint whose own bytes are damaged, and a folder that another process owns; of a checkpoint that retention removes
while it is uploaded no object stays. While the caller's retention works inside `pause_uploads`, the checkpoint being
uploaded is protected and no other upload begins; waiting ones are not protected, or a slow connection would fill the
disk.

Cost: a listing of the folder every few seconds, a few requests per checkpoint, two reads of what is uploaded.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.discovery import list_steps
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.folders import CHECKPOINT_FILE, COMMIT, MANIFEST, STEP_FOLDER, step_folder_name
from lt_ckpt.records import NXD_DONE_MARKER
from lt_ckpt.s3.checkpoint_list import MAX_COMMIT_BYTES, list_checkpoint
from lt_ckpt.s3.owner import NotOwnerError, Owner, ensure_owner
from lt_ckpt.s3.transfer import list_remote_steps, read_complete
from lt_data.errors import DataError
from lt_data.remote.file_list import DamagedError
from lt_data.remote.s3_folder import RemoteError, S3Folder, UnreachableError
from lt_data.remote.upload import upload

STOP_TIMEOUT_S = 60.0
"""How long `close` waits for a request in flight after its timeout."""


class _StoppedError(Exception):
    """Stop of the mirror whose close timeout is over."""


@dataclass(frozen=True, kw_only=True)
class MirrorProblem:
    """Failure of the mirror.

    Attributes:
        path: The checkpoint concerned, or the folder of checkpoints.
        message: The error.
        transient: The store could not be reached: it may recover by itself.
        final: It is not retried.
    """

    path: Path
    message: str
    transient: bool = False
    final: bool = False


@dataclass(frozen=True, kw_only=True)
class MirrorUpload:
    """Checkpoint that is in the bucket now.

    Attributes:
        path: The checkpoint.
        url: Its address.
        sent: Number of files sent.
        kept: Number of files that were there already.
        n_bytes: Bytes sent.
        seconds: Duration.
    """

    path: Path
    url: str
    sent: int
    kept: int
    n_bytes: int
    seconds: float


def _is_in_checkpoint(name: str) -> bool:
    folder, _, inside = name.partition("/")
    return STEP_FOLDER.fullmatch(folder) is not None and CHECKPOINT_FILE.fullmatch(inside) is not None


def delete_remote_checkpoint(folder: S3Folder) -> bool:
    """Delete a checkpoint in a bucket, or a part of one; its commit object goes first.

    Returns:
        False, with nothing touched, if any object there does not have the name of a checkpoint's file.
    """
    names, commits = set(folder.objects()), {COMMIT, NXD_DONE_MARKER}
    if not all(map(CHECKPOINT_FILE.fullmatch, names)):
        return False
    folder.delete(names & commits)
    folder.delete(names - commits)
    return True


def prune_remote(root: S3Folder, *, keep_last: int, keep_every: int = 0) -> list[str]:
    """Delete old checkpoints below an address.

    Kept are the newest `keep_last` complete ones, and complete ones of steps that `keep_every` divides (except step 0).
    Before anything is deleted, the objects of those are checked, newest first, until one checkpoint is intact. If none
    is, the newest intact one of the others stays too; if there is no intact one at all, nothing is deleted. Other
    objects stay.

    Returns:
        The addresses of the deleted checkpoints.

    Raises:
        RemoteError: S3 refuses or cannot be reached.
    """
    assert keep_last >= 1, "nothing would be kept"
    complete: list[S3Folder] = []
    removable: list[S3Folder] = []
    for step, folder in list_remote_steps(root):
        is_multiple = bool(keep_every) and step > 0 and step % keep_every == 0
        if (len(complete) < keep_last or is_multiple) and _is_complete(folder):
            complete.append(folder)
        elif len(complete) >= keep_last:
            removable.append(folder)
    if not removable:
        return []
    intact = next((folder for folder in (*complete, *removable) if _is_complete(folder, by_digests=True)), None)
    if intact is None:
        return []
    return [folder.url for folder in removable if folder is not intact and delete_remote_checkpoint(folder)]


def _is_complete(folder: S3Folder, *, by_digests: bool = False) -> bool:
    """Return True if all files are there with their sizes, and as they were uploaded if that is asked for."""
    try:
        listed, _ = read_complete(folder)
        return not by_digests or all(folder.digest(name) == file.digest for name, file in listed.files.items())
    except RemoteError:
        raise
    except (CheckpointError, DataError):
        return False


class Mirror:
    """Uploads new checkpoints of a folder to a bucket, in a thread of its own, until `close`.

    Attributes:
        root: The folder of checkpoints.
        url: The address below which they are uploaded, each under its own name.
        progress_count: Increases while bytes are read for upload.
        problems: Problems so far, oldest first; one that repeats itself counts once.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        bucket: S3Folder,
        *,
        owner: Owner,
        already_claimed: bool = False,
        keep_last: int = 0,
        keep_every: int = 0,
        force_upload: Collection[str] = (),
        poll_interval_s: float = 10.0,
        on_event: Callable[[MirrorProblem | MirrorUpload], None] = lambda _: None,
    ) -> None:
        """Start the mirror.

        Args:
            root: The folder of checkpoints; it need not exist yet.
            bucket: The folder in a bucket; no request is made yet: see `check_upload_access`.
            owner: The run and the process that uploads. What the bucket has of a step is replaced by another checkpoint
                of it.
            already_claimed: The folder was already claimed for the owner (`lt_ckpt.s3.owner.ensure_owner`).
            keep_last: Number of complete checkpoints to keep in the bucket; 0: all.
            keep_every: Also keep those whose step is a multiple of this; 0: none.
            force_upload: Names of checkpoints found damaged in the bucket, to be uploaded again completely.
            poll_interval_s: Seconds between two looks at the folder.
            on_event: Called with each new problem and each finished upload, in the mirror's thread.
        """
        self.root = Path(os.path.abspath(root))
        self._bucket, self.url, self.progress_count = bucket, bucket.url, 0
        self.problems: list[MirrorProblem] = []
        self._owner, self._claimed, self._is_cleared = owner, already_claimed, False
        self._keep_last, self._keep_every = keep_last, keep_every
        self._force_upload, self._on_event, self._poll_interval_s = set(force_upload), on_event, poll_interval_s
        self._pause_lock = threading.Lock()
        """Held while the caller's retention works, and while the next checkpoint to upload is chosen."""
        self._wake, self._closing, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._current: Path | None = None
        self._mirrored: dict[Path, bytes] = {}
        """Checkpoint → its COMMIT when it was uploaded."""
        self._given_up: dict[Path, bytes] = {}
        self._thread_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lt-ckpt-mirror", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Look for new checkpoints at once; returns at once."""
        self._wake.set()

    @contextmanager
    def pause_uploads(self) -> Iterator[tuple[Path, ...]]:
        """Yield the checkpoint being uploaded, for `prune(protect=...)`; meanwhile no other upload begins."""
        with self._pause_lock:
            yield () if self._current is None else (self._current,)

    def finish(self, timeout_s: float) -> bool:
        """Let it end after the current checkpoints; wait up to `timeout_s` and return True if it has ended."""
        if not self._closing.is_set():
            self._closing.set()
            self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self, timeout_s: float = 600.0, *, stop_timeout_s: float = STOP_TIMEOUT_S) -> tuple[Path, ...]:
        """Upload what is committed and not there yet, for at most `timeout_s`, and end.

        Args:
            timeout_s: Seconds for the remaining uploads.
            stop_timeout_s: Seconds for a request in flight to end after that; then the thread is abandoned.

        Returns:
            The checkpoints that are not in the bucket; empty if all are. `problems` has the reasons.

        Raises:
            CheckpointError: The folder of checkpoints cannot be read.
        """
        self.finish(timeout_s)
        self._stop.set()
        self._wake.set()
        self._thread.join(stop_timeout_s)
        if self._thread_error is not None:
            raise self._thread_error
        return tuple(path for path, commit in self._list_candidates() if self._mirrored.get(path) != commit)

    def _run(self) -> None:
        try:
            is_last_round = False
            while not self._stop.is_set():
                # before the look at the folder: nothing committed by then is missed
                is_last_round = is_last_round or self._closing.is_set()
                if self._upload_pending() and is_last_round:
                    return
                self._wake.wait(self._poll_interval_s)
                self._wake.clear()
        except BaseException as exc:
            self._thread_error = exc
            text = f"the mirror has failed and has stopped uploading: {type(exc).__name__}: {exc}"
            self._on_event(MirrorProblem(path=self.root, message=text, final=True))
            raise
        finally:
            self._current = None

    def _upload_pending(self) -> bool:
        """Upload what is pending, lowest step first; return False at the first that must be tried again."""
        try:
            found = self._list_candidates()
        except CheckpointError as exc:
            self._record_problem(self.root, exc)
            return False
        pending = [
            (path, commit)
            for path, commit in found
            if commit not in (self._mirrored.get(path), self._given_up.get(path))
        ]
        return all(self._upload_checkpoint(path, commit) for path, commit in pending)

    def _list_candidates(self) -> list[tuple[Path, bytes]]:
        """Return the committed checkpoints that retention in the bucket keeps, lowest step first, with their COMMIT."""
        found: list[tuple[Path, bytes]] = []
        newer = 0
        for step, path in list_steps(self.root):
            if path.name != step_folder_name(step):
                continue  # moved aside
            with translate_os_errors("reading", path), suppress(FileNotFoundError):
                commit = files.read_bounded(path / COMMIT, MAX_COMMIT_BYTES)
                is_multiple = bool(self._keep_every) and step > 0 and step % self._keep_every == 0
                if not self._keep_last or newer < self._keep_last or is_multiple:
                    found.append((path, commit))
                newer += 1
        return found[::-1]

    def _upload_checkpoint(self, path: Path, commit: bytes) -> bool:
        """Upload a checkpoint; return False if it must be tried again."""
        with self._pause_lock:
            self._current = path
        folder = self._bucket.subfolder(path.name)
        try:
            self._ensure_owner()
            with translate_os_errors("uploading", path):
                self._send(path, commit, folder)
            self._mirrored[path] = commit
            if self._keep_last:
                prune_remote(self._bucket, keep_last=self._keep_last, keep_every=self._keep_every)
        except _StoppedError:
            return False
        except (CheckpointError, DataError) as exc:
            return self._handle_failure(path, commit, folder, exc)
        finally:
            self._current = None
        return True

    def _ensure_owner(self) -> None:
        """Make sure that this process owns the folder; the first time abort what killed ones have left."""
        ensure_owner(self._bucket, self._owner, allow_takeover=not self._claimed)
        self._claimed = True
        if not self._is_cleared:
            self._bucket.abort_unfinished(_is_in_checkpoint)
            self._is_cleared = True

    def _send(self, path: Path, commit: bytes, folder: S3Folder) -> None:
        force = path.name in self._force_upload
        there = folder.read(COMMIT, MAX_COMMIT_BYTES)
        if there == commit and not force:
            return
        start, has_others, listed = time.monotonic(), False, list_checkpoint(path, self._report_progress)
        if force or there is not None or folder.digest(MANIFEST) not in ("", listed.files[MANIFEST].digest):
            has_others = not delete_remote_checkpoint(folder)
        done = upload(path, folder, files=listed, overwrite=has_others, progress=lambda *_: self._report_progress())
        self._force_upload.discard(path.name)
        seconds = time.monotonic() - start
        sent, kept = len(done.sent), len(done.kept)
        self._on_event(
            MirrorUpload(path=path, url=done.url, sent=sent, kept=kept, n_bytes=done.n_bytes, seconds=seconds)
        )

    def _handle_failure(self, path: Path, commit: bytes, folder: S3Folder, exc: CheckpointError | DataError) -> bool:
        """Record why a checkpoint was not uploaded, or retention failed; return False if it must be tried again."""
        is_removed = not (path / COMMIT).exists()
        final = is_removed or isinstance(exc, DamagedError | NotOwnerError)
        if is_removed:
            try:
                if folder.read(COMMIT, MAX_COMMIT_BYTES) is None:
                    delete_remote_checkpoint(folder)
                exc = CheckpointError("was removed before it was uploaded; the bucket has nothing of it")
            except RemoteError as error:
                exc = CheckpointError(f"was removed while it was uploaded, and parts remain in the bucket: {error}")
        if final:
            self._given_up[path] = commit
        self._record_problem(path, exc, final=final)
        return final or self._mirrored.get(path) == commit

    def _report_progress(self) -> None:
        if self._stop.is_set():
            raise _StoppedError
        self.progress_count += 1

    def _record_problem(self, path: Path, exc: CheckpointError | DataError, *, final: bool = False) -> None:
        transient = isinstance(exc, UnreachableError)
        problem = MirrorProblem(path=path, message=str(exc), transient=transient, final=final)
        if problem not in self.problems[-1:]:
            self.problems = [*self.problems[-99:], problem]
            self._on_event(problem)
