"""Background mirror of a run's checkpoints to a bucket.

A thread looks for committed checkpoints (every few seconds, and at once after `notify`) and uploads those that are not
there yet, lowest step first. It never touches a save: it only reads what is committed. Failures are reported, kept in
`problems` and retried with exponential backoff. Skipped are only a checkpoint whose own bytes are damaged, one whose
address holds something else, and one that retention has removed meanwhile; of the last no object stays in the bucket.
While the caller's retention works inside `pause_uploads`, the checkpoint being uploaded is protected and no other
upload begins; waiting ones are not protected, or a slow connection would fill the disk.

With an `owner` the folder belongs to this run alone (`lt_ckpt.s3.owner`): the mirror checks before each checkpoint,
uploads nothing if the folder belongs to another run or another process has resumed this one, and aborts the multipart
uploads that a killed process has left.

One process of a run has a mirror. Cost: a listing of the folder every few seconds, a few requests per checkpoint, one
read of what is uploaded, and the memory of an upload (see `lt_ckpt.s3.client`).
"""

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.discovery import list_steps
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.folders import COMMIT, MANIFEST, STEP_FOLDER, step_folder_name
from lt_ckpt.records import MANIFEST_FILE_PATTERNS, NXD_DONE_MARKER
from lt_ckpt.s3.client import S3Folder, ServiceError, UnreachableError
from lt_ckpt.s3.download import check_complete, check_intact, list_remote_steps
from lt_ckpt.s3.file_digest import DamagedError
from lt_ckpt.s3.folder_manifest import MAX_COMMIT_BYTES
from lt_ckpt.s3.owner import NotOwnerError, Owner, ensure_owner
from lt_ckpt.s3.upload import DestinationExistsError, UploadReport, upload

MAX_RETRY_DELAY_S = 300.0
MAX_BACKOFF_EXPONENT = 30
MAX_PROBLEMS = 100
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
        repeats: Number of consecutive occurrences.
    """

    path: Path
    message: str
    transient: bool = False
    final: bool = False
    repeats: int = 1

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def _is_checkpoint_file(name: str) -> bool:
    """Return True if an object's name is one of a checkpoint's file."""
    return name in (COMMIT, MANIFEST) or any(pattern.fullmatch(name) for pattern in MANIFEST_FILE_PATTERNS)


def _is_checkpoint_object(name: str) -> bool:
    folder, _, inside = name.partition("/")
    return STEP_FOLDER.fullmatch(folder) is not None and _is_checkpoint_file(inside)


def delete_remote_checkpoint(folder: S3Folder) -> bool:
    """Delete a checkpoint in a bucket, or a part of one; its commit object goes first.

    Returns:
        False, with nothing touched, if any object there does not have the name of a checkpoint's file.
    """
    names = set(folder.list_sizes())
    if not all(_is_checkpoint_file(name) for name in names):
        return False
    folder.delete(names & {COMMIT, NXD_DONE_MARKER})
    folder.delete(names - {COMMIT, NXD_DONE_MARKER})
    return True


def prune_remote(url: str | S3Folder, *, keep_last: int, keep_every: int = 0) -> list[str]:
    """Delete old checkpoints below an address.

    Kept are the newest `keep_last` complete ones, and complete ones of steps that `keep_every` divides (except step 0).
    Before anything is deleted, the objects of those are checked, newest first, until one checkpoint is intact: that one
    always stays. Nothing is deleted while fewer than `keep_last` are complete. Other objects stay.

    Returns:
        The addresses of the deleted checkpoints.

    Raises:
        CheckpointError: `keep_last` below 1 or `keep_every` below 0.
        ServiceError: The store refuses or cannot be reached.
    """
    if keep_last < 1 or keep_every < 0:
        given = f"keep_last = {keep_last}, keep_every = {keep_every}"
        raise CheckpointError(f"{given}: keep_last must be >= 1 and keep_every >= 0")
    complete: list[S3Folder] = []
    removable: list[S3Folder] = []
    for step, folder in list_remote_steps(url):
        is_multiple = bool(keep_every) and step > 0 and step % keep_every == 0
        if len(complete) >= keep_last and not is_multiple:
            removable.append(folder)
        elif _passes(check_complete, folder):
            complete.append(folder)
        elif len(complete) >= keep_last:
            removable.append(folder)
    if not removable:
        return []
    if not any(_passes(check_intact, folder) for folder in complete):
        intact = next((folder for folder in removable if _passes(check_intact, folder)), None)
        removable = [folder for folder in removable if intact is not None and folder.url != intact.url]
    return [folder.url for folder in removable if delete_remote_checkpoint(folder)]


def _passes(check: Callable[[S3Folder], object], folder: S3Folder) -> bool:
    try:
        check(folder)
    except ServiceError:
        raise
    except CheckpointError:
        return False
    return True


class Mirror:
    """Uploads new checkpoints of a folder to a bucket, in a thread of its own, until `close`.

    Attributes:
        root: The folder of checkpoints.
        url: The address below which they are uploaded, each under its own name.
        progress_count: Increases while bytes are read for upload.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        url: str | S3Folder,
        *,
        owner: Owner | None = None,
        already_claimed: bool = False,
        keep_last: int = 0,
        keep_every: int = 0,
        overwrite: bool = False,
        force_upload: Collection[str] = (),
        poll_interval_s: float = 10.0,
        retry_delay_s: float = 5.0,
        on_event: Callable[[MirrorProblem | UploadReport], None] = lambda _: None,
    ) -> None:
        """Start the mirror.

        Args:
            root: The folder of checkpoints; it need not exist yet.
            url: `s3://bucket/folder`.
            owner: The run and the process that uploads; None: ownership is not checked.
            already_claimed: The folder was already claimed for the owner (`lt_ckpt.s3.owner.ensure_owner`).
            keep_last: Number of complete checkpoints to keep in the bucket; 0: all.
            keep_every: Also keep those whose step is a multiple of this; 0: none.
            overwrite: Replace a different checkpoint of the same step in the bucket.
            force_upload: Names of checkpoints found damaged in the bucket, to be uploaded again completely.
            poll_interval_s: Seconds between two scans of the folder.
            retry_delay_s: Seconds before a retry; doubled each time, up to five minutes.
            on_event: Called with each new problem and each finished upload, in the mirror's thread.

        Raises:
            CheckpointError: Invalid address, or boto3 is missing. No request is made yet: see `check_upload_access`.
        """
        if keep_last < 0 or keep_every < 0:
            raise CheckpointError(f"keep_last = {keep_last}, keep_every = {keep_every}: must be >= 0")
        self.root = Path(os.path.abspath(root))
        self._bucket = url if isinstance(url, S3Folder) else S3Folder(url)
        self.url, self.progress_count = self._bucket.url, 0
        self._owner, self._claimed, self._stale_uploads_aborted = owner, already_claimed, False
        self._keep_last, self._keep_every, self._overwrite = keep_last, keep_every, overwrite
        self._force_upload, self._on_event = set(force_upload), on_event
        self._poll_interval_s, self._retry_delay_s = poll_interval_s, retry_delay_s
        self._lock = threading.Lock()
        self._pause_lock = threading.Lock()
        """Held while the caller's retention works, and while the next checkpoint to upload is chosen."""
        self._wake, self._closing, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._current: Path | None = None
        self._mirrored: dict[Path, bytes] = {}
        self._skipped: dict[Path, bytes] = {}
        self._pending: dict[Path, bytes] = {}
        self._announced: dict[Path, bool] = {}
        """Checkpoint of `notify` → whether it has not been seen in the folder yet."""
        self._problems: list[MirrorProblem] = []
        self._uploads: list[UploadReport] = []
        self._thread_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lt-ckpt-mirror", daemon=True)
        self._thread.start()

    def notify(self, path: str | os.PathLike[str]) -> None:
        """Announce a new checkpoint, so that it need not be discovered; returns at once."""
        announced = Path(os.path.abspath(path))
        assert announced.parent == self.root, "a checkpoint of this mirror's folder"
        with self._lock:
            self._announced[announced] = True
        self._wake.set()

    @contextmanager
    def pause_uploads(self) -> Iterator[tuple[Path, ...]]:
        """Yield the checkpoint being uploaded, for `prune(protect=...)`; meanwhile no other upload begins."""
        with self._pause_lock:
            yield () if self._current is None else (self._current,)

    @property
    def problems(self) -> tuple[MirrorProblem, ...]:
        """Problems so far, oldest first; the newest hundred."""
        with self._lock:
            return tuple(self._problems)

    @property
    def uploads(self) -> tuple[UploadReport, ...]:
        """Uploads so far."""
        with self._lock:
            return tuple(self._uploads)

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
            self._run_loop()
        except BaseException as exc:
            self._thread_error = exc
            text = f"the mirror has failed and has stopped uploading: {type(exc).__name__}: {exc}"
            self._on_event(MirrorProblem(path=self.root, message=text, final=True))
            raise
        finally:
            self._current = None

    def _run_loop(self) -> None:
        n_failures, is_last_round = 0, False
        while not self._stop.is_set():
            if (
                self._closing.is_set() and not is_last_round
            ):  # checked before the scan: nothing committed by then is missed
                n_failures, is_last_round = 0, True
            if self._upload_pending():
                if is_last_round:
                    return
                n_failures, delay = 0, self._poll_interval_s
            else:
                # The exponent is limited: after days the power itself would overflow a float.
                delay = min(self._retry_delay_s * 2 ** min(n_failures, MAX_BACKOFF_EXPONENT), MAX_RETRY_DELAY_S)
                n_failures += 1
            self._wake.wait(delay)
            self._wake.clear()

    def _upload_pending(self) -> bool:
        """Upload all pending checkpoints; return False if something must be retried."""
        try:
            found = self._list_candidates()
        except CheckpointError as exc:
            self._record_problem(self.root, exc)
            return False
        pending = {
            path: commit for path, commit in found if commit not in (self._mirrored.get(path), self._skipped.get(path))
        }
        self._note_removed(dict(found))
        self._pending = pending
        return all(self._upload_checkpoint(path, commit) for path, commit in pending.items())

    def _note_removed(self, found: dict[Path, bytes]) -> None:
        """Record checkpoints that were pending or announced and no longer exist."""
        missed = {path for path, commit in self._pending.items() if not self._is_settled(path, commit)}
        with self._lock:
            unseen = {
                path for path, unseen_so_far in self._announced.items() if unseen_so_far and path not in self._pending
            }
            missed.update(path for path in unseen if self._would_be_retained(path) and not self._is_settled(path))
            removed = {path for path in missed | unseen if path not in found and not path.exists()}
            self._announced.update(dict.fromkeys(unseen & (removed | set(found)), False))
        for path in sorted(missed & removed):
            self._record_problem(path, CheckpointError("was removed before its turn to be uploaded came"), final=True)

    def _is_settled(self, path: Path, commit: bytes | None = None) -> bool:
        """Return True if this checkpoint (without `commit`, any of its step) is mirrored or given up."""
        outcomes = [outcomes[path] for outcomes in (self._mirrored, self._skipped) if path in outcomes]
        return bool(outcomes) if commit is None else commit in outcomes

    def _would_be_retained(self, path: Path) -> bool:
        """Return True if retention in the bucket would keep this checkpoint, by the announced newer ones."""
        newer = sum(path.name < other.name for other in self._announced)
        return self._is_retained(int(path.name.rpartition("-")[2]), newer)

    def _is_retained(self, step: int, newer: int) -> bool:
        """Return True if retention in the bucket keeps a checkpoint that has `newer` newer ones."""
        multiple = self._keep_every and step and step % self._keep_every == 0
        return not self._keep_last or newer < self._keep_last or bool(multiple)

    def _list_candidates(self) -> list[tuple[Path, bytes]]:
        """Return the committed checkpoints to be mirrored, lowest step first, with their COMMIT."""
        found: list[tuple[Path, bytes]] = []
        newer = 0
        for step, path in list_steps(self.root):
            if path.name != step_folder_name(step):
                continue  # moved aside
            with translate_os_errors("reading", path), suppress(FileNotFoundError):
                commit = files.read_bounded(path / COMMIT, MAX_COMMIT_BYTES)
                if self._is_retained(step, newer):
                    found.append((path, commit))
                newer += 1
        return found[::-1]

    def _upload_checkpoint(self, path: Path, commit: bytes) -> bool:
        """Upload a checkpoint; return False if it must be retried."""
        with self._pause_lock:
            self._current = path
        folder = self._bucket.subfolder(path.name)
        try:
            self._ensure_owner()
            force = path.name in self._force_upload
            if force or folder.read(COMMIT, MAX_COMMIT_BYTES) != commit:
                report = upload(path, folder, overwrite=self._overwrite, force=force, check_stop=self._report_progress)
                self._force_upload.discard(path.name)
                with self._lock:
                    self._uploads.append(report)
                self._on_event(report)
        except _StoppedError:
            return False
        except CheckpointError as exc:
            return self._handle_failure(path, commit, folder, exc)
        finally:
            self._current = None
        self._mirrored[path] = commit
        if self._keep_last:
            try:
                prune_remote(self._bucket, keep_last=self._keep_last, keep_every=self._keep_every)
            except ServiceError as exc:
                self._record_problem(path, exc)
        return True

    def _ensure_owner(self) -> None:
        """Make sure that this process owns the folder; abort stale uploads once."""
        if self._owner is None:
            return
        ensure_owner(self._bucket, self._owner, allow_takeover=not self._claimed)
        self._claimed = True
        if not self._stale_uploads_aborted:
            self._bucket.abort_multipart_uploads(_is_checkpoint_object)
            self._stale_uploads_aborted = True

    def _handle_failure(self, path: Path, commit: bytes, folder: S3Folder, exc: CheckpointError) -> bool:
        """Record why a checkpoint was not uploaded; return False if it must be retried."""
        if not (path / COMMIT).exists():
            self._skipped[path] = commit
            text = "was removed before it was uploaded; the bucket has nothing of it"
            try:
                if folder.read(COMMIT, MAX_COMMIT_BYTES) is None:
                    delete_remote_checkpoint(folder)
            except ServiceError as error:
                text = f"was removed while it was uploaded, and part of it remains in the bucket: {error}"
            self._record_problem(path, CheckpointError(text), final=True)
            return True
        final = isinstance(exc, DamagedError | DestinationExistsError | NotOwnerError)
        self._record_problem(path, exc, final=final)
        if final:
            self._skipped[path] = commit
        return final

    def _report_progress(self) -> None:
        if self._stop.is_set():
            raise _StoppedError
        self.progress_count += 1

    def _record_problem(self, path: Path, exc: CheckpointError, *, final: bool = False) -> None:
        problem = MirrorProblem(path=path, message=str(exc), transient=isinstance(exc, UnreachableError), final=final)
        with self._lock:
            last = self._problems[-1] if self._problems else None
            known = last is not None and (last.path, last.message) == (path, problem.message)
            if last is not None and known:
                self._problems[-1] = replace(last, repeats=last.repeats + 1)
            else:
                self._problems = [*self._problems, problem][-MAX_PROBLEMS:]
        if not known:
            self._on_event(problem)
