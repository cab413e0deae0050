"""Mirror of a run's checkpoints in S3, as seen by the ranks of the run.

    download_latest  at the start, on all ranks: download the bucket's newest checkpoint if it is newer than the local
    start            start the upload thread of rank 0 (`lt_ckpt.Mirror`)
    log_progress     at each step boundary: log what the thread has done
    finish           at the end, on all ranks: wait for pending uploads, report what is missing

Training does not depend on the bucket: while it is unreachable the run continues with a warning, and uploads are
retried with increasing delays. There are two exceptions. A run without a local checkpoint must know whether the bucket
has one, or it would start again from nothing: it ends if the bucket is unreachable. And a completed run must have its
last checkpoint in the bucket: otherwise it ends with 75, so that a rerun uploads it, or with 64 if that needs user
action.

Only rank 0 accesses the bucket. The other ranks wait in short collectives, so that neither collectives nor watchdogs
time out; a stop signal to any rank ends the wait.

On a stop, the mirror has three quarters of `fault_tolerance.grace_period_s`, counted from the signal. At the end it has
unlimited time while bytes are uploaded, and `fault_tolerance.grace_period_s` while none are.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_ckpt import Checkpoint, CheckpointError, CheckpointManifest, Mirror, list_steps
from lt_ckpt.folders import COMMIT, random_id
from lt_ckpt.s3.client import S3Folder, UnreachableError
from lt_ckpt.s3.download import download_latest, read_latest_manifest
from lt_ckpt.s3.mirror import MirrorProblem
from lt_ckpt.s3.owner import NotOwnerError, Owner, ensure_owner
from lt_ckpt.s3.upload import UploadReport, check_upload_access
from lt_ckpt.summary import format_bytes
from lt_trainer.checkpointing.mirror_identity import resolve_mirror_name
from lt_trainer.config.sections import Recipe
from lt_trainer.constants import EXIT_REQUEUE, EXIT_USER
from lt_trainer.engine import Engine
from lt_trainer.errors import MirrorError, RecipeError
from lt_trainer.resilience.rank_sync import run_with_keepalive
from lt_trainer.resilience.stop_signals import StopSignals
from lt_trainer.run_directory.run_dir import RunDir, read_mirror_name

if TYPE_CHECKING:
    from lt_trainer.observability.run_logger import RunLogger

POLL_INTERVAL_S = 0.2
"""Interval of synchronizations while rank 0 waits for bytes."""
PROGRESS_LOG_INTERVAL_S = 30.0
"""Interval of log messages during a long download."""
ERROR_EXIT_TIMEOUT_S = 10.0
"""Time for an upload after an error that ends the run."""
STOPPED = "stopped by a signal"
"""Result of a download that a stop signal has ended."""


class StopRequested(Exception):
    """Stop signal `number` received while waiting for the bucket."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class RunMirror:
    """Mirror of one run on one rank; a context around training. No-op without `checkpoint.mirror_url`.

    Args:
        recipe: Recipe.
        values: Recipe as nested tables.
        run_dir: Run directory, on rank 0.
        engine: Engine, for its control collectives.
        logger: Logger.
        stop: Stop signals of this process.
        heartbeat: Watchdog heartbeat of the main thread.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        values: Mapping[str, Any],
        run_dir: RunDir | None,
        engine: Engine,
        logger: "RunLogger",
        stop: StopSignals,
        heartbeat: Callable[[], None],
    ) -> None:
        self._recipe, self._url, self._values, self._run_dir = recipe, recipe.checkpoint.mirror_url, values, run_dir
        self._grace_s = recipe.fault_tolerance.grace_period_s
        self._hang_timeout_s = recipe.fault_tolerance.hang_timeout_s
        self._control, self._is_rank0 = engine.control, engine.topology.rank == 0
        self._logger, self._stop, self._heartbeat = logger, stop, heartbeat
        self._mirror: Mirror | None = None
        self._owner: Owner | None = None
        self._is_owner = False
        self._damaged: list[str] = []
        self._reports: deque[MirrorProblem | UploadReport] = deque()
        self._stop_signal = 0
        """Stop signal of any rank, synchronized while waiting."""
        self._download_progress, self._last_progress_log = (0, 0), time.monotonic()

    def download_latest(self, local: Checkpoint | None) -> Path | None:
        """Download the bucket's newest valid checkpoint if it is newer than `local`; on all ranks.

        Returns:
            Its folder in the run directory; None if there is none, or no mirror.

        Raises:
            MirrorError: the bucket belongs to another run; or cannot be used, and there is no local checkpoint.
            RecipeError: the bucket has a checkpoint, but checkpoint.resume is false.
            StopRequested: a stop signal was received.
        """
        if not self._url:
            return None
        step, report = -1 if local is None else local.step, list[Callable[[], None]]()
        action = partial(self._download_latest, step, report)
        result = run_with_keepalive(self._control, self._is_rank0, action, self._on_poll, POLL_INTERVAL_S)
        for log in report:
            log()
        if result == STOPPED:
            raise StopRequested(self._stop_signal)
        return Path(result) if result else None

    def _download_latest(self, step: int, report: list[Callable[[], None]]) -> str:
        """Download in a thread of rank 0; return the path, and append to `report` what the main thread logs."""
        assert self._run_dir is not None
        root, field = S3Folder(self._url), f"checkpoint.mirror_url = {self._url!r}"
        try:
            check_upload_access(root)
            owner = self._set_owner(resolve_mirror_name(root, self._run_dir.path, self._values))
            ensure_owner(root, owner, allow_takeover=True)
            self._is_owner = True
            done, rejected = download_latest(
                root,
                self._run_dir.checkpoints,
                after_step=step,
                validate_manifest=partial(_check_resume_allowed, self._recipe),
                progress=self._on_progress,
                check_stop=self._raise_if_stopped,
            )
        except StopRequested:
            return STOPPED
        except NotOwnerError as exc:
            raise MirrorError(f"{field}: {exc}") from exc
        except CheckpointError as exc:
            if step < 0:
                raise MirrorError(
                    f"{field}: {exc}. There is no checkpoint in {self._run_dir.path}, and the mirror may have one; "
                    "rerun when it is available, or remove checkpoint.mirror_url to start from nothing",
                    retryable=isinstance(exc, UnreachableError),
                ) from exc
            then = "the run continues with local checkpoints, and the mirror is retried"
            report.append(partial(self._warn, str(exc), f"the mirror cannot be used: {exc}; {then}"))
            return ""
        self._damaged = [item.url.rpartition("/")[2] for item in rejected if item.damaged]
        for item in rejected:
            text = f"{item.url} is not used: {item.reason}"
            report.append(partial(self._warn, text, text))
        if done is None:
            return ""
        size = {"bytes": done.n_bytes, "seconds": done.seconds}
        text = f"downloaded {done.url} to {done.path}: {_format_rate(**size)}, verified"
        report.append(partial(self._logger.log_event, "mirror_downloaded", url=done.url, path=str(done.path), **size))
        report.append(partial(self._logger.log_message, text))
        return str(done.path)

    def _set_owner(self, name: str) -> Owner:
        assert self._run_dir is not None
        if name != read_mirror_name(self._run_dir.path):
            self._run_dir.write_mirror_name(name)
        self._owner = Owner(run=name, holder=random_id())
        return self._owner

    def _on_progress(self, done: int, total: int, unit: str) -> None:
        self._download_progress = (done, total)

    def _raise_if_stopped(self) -> None:
        if self._stop_signal:
            raise StopRequested(self._stop_signal)

    def _on_poll(self) -> None:
        """Synchronize stop signals and log progress, on all ranks, while rank 0 downloads."""
        self._stop_signal = self._stop_signal or self._control.all_reduce_max(self._stop.received)
        done, total = self._download_progress
        if total and time.monotonic() - self._last_progress_log > PROGRESS_LOG_INTERVAL_S:
            self._last_progress_log = time.monotonic()
            part = f"{format_bytes(done)} of {format_bytes(total)}"
            self._logger.log_message(f"downloading a checkpoint from {self._url}: {part}")

    def _warn(self, problem: str, text: str, **values: Any) -> None:
        self._logger.log_event("mirror_problem", message=problem, **values)
        self._logger.log_message(f"warning: {text}")

    def start(self) -> None:
        """Start uploading committed checkpoints (rank 0)."""
        if self._run_dir is None or not self._url:
            return
        # without an owner the bucket was unreachable: the mirror checks it before uploading
        owner = self._owner or self._set_owner(read_mirror_name(self._run_dir.path) or random_id())
        self._mirror = Mirror(
            self._run_dir.checkpoints,
            S3Folder(self._url),
            owner=owner,
            already_claimed=self._is_owner,
            keep_last=self._recipe.checkpoint.mirror_keep_last,
            keep_every=self._recipe.checkpoint.mirror_keep_every,
            overwrite=True,  # a remote checkpoint of this run and the same step is older
            force_upload=self._damaged,
            on_event=self._reports.append,
        )

    def notify(self, path: Path) -> None:
        """Queue a committed checkpoint."""
        if self._mirror is not None:
            self._mirror.notify(path)

    def protected(self) -> AbstractContextManager[Collection[Path]]:
        """Context with the checkpoints that retention must not delete while it is open."""
        return nullcontext(()) if self._mirror is None else self._mirror.pause_uploads()

    def log_progress(self) -> None:
        """Log uploads and problems since the last call; called by the main thread."""
        while self._reports:
            item = self._reports.popleft()
            if isinstance(item, MirrorProblem):
                then = "it is not retried" if item.final else "it is retried while the run continues"
                text = f"{item.path.name} is not in the mirror: {item.message}; {then}"
                self._warn(item.message, text, path=str(item.path), final=item.final)
                continue
            name, size = item.url.rpartition("/")[2], {"bytes": item.n_bytes, "seconds": item.seconds}
            step, sent, kept = int(name.removeprefix("step-")), len(item.uploaded), len(item.skipped)
            self._logger.log_event("mirror_uploaded", step=step, url=item.url, sent=sent, kept=kept, **size)
            self._logger.log_message(f"uploaded {name} to the mirror: {_format_rate(**size)}")

    def finish(self) -> int:
        """Wait until all checkpoints are uploaded, or the time is up; on all ranks.

        Returns:
            0 if the newest checkpoint is in the bucket; 75 if a rerun may upload it; 64 if that needs user action.

        Raises:
            PeerError: another rank exited.
        """
        if not self._url:
            return 0
        mirror, n_progress, since, stopped_at = self._mirror, -1, time.monotonic(), 0.0
        is_waiting = True
        while is_waiting:
            is_waiting = mirror is not None and not mirror.finish(POLL_INTERVAL_S)
            self.log_progress()
            self._heartbeat()
            now = time.monotonic()
            if self._control.all_reduce_max(self._stop.received):
                stopped_at = self._stop.received_at or stopped_at or now  # another rank may have received it
                is_overdue = now - stopped_at > 0.75 * self._grace_s
            else:
                if mirror is not None and mirror.progress_count != n_progress:
                    n_progress, since = mirror.progress_count, now
                is_overdue = now - since > self._grace_s
            is_waiting = self._control.broadcast(is_waiting and not is_overdue)
        self._mirror = None
        return self._control.broadcast(0 if mirror is None else self._close_and_report(mirror))

    def _close_and_report(self, mirror: Mirror) -> int:
        missing = mirror.close(0, stop_timeout_s=min(30.0, self._grace_s / 8, self._hang_timeout_s / 4))
        self.log_progress()
        if not missing:
            self._logger.log_message(f"all checkpoints are in {self._url}")
            return 0
        # A checkpoint that has to be retried blocks all later ones.
        problems = [
            problem
            for problem in mirror.problems
            if problem.path in (missing[-1], mirror.root) or (problem.path in missing and not problem.final)
        ]
        reason = problems[-1].message if problems else "there was no time left to upload it"
        needs_user = bool(problems) and not problems[-1].transient
        committed = (path for _, path in list_steps(mirror.root) if (path / COMMIT).is_file())
        is_newest, names = missing[-1] == next(committed, None), [path.name for path in missing]
        self._logger.log_event("mirror_incomplete", names=names, newest=is_newest, message=reason)
        self._logger.log_message(
            f"warning: not in the mirror {self._url}: {', '.join(names)} ({reason}); the files are in {mirror.root}; "
            + ("fix this, then rerun" if needs_user else "rerun to upload it")
        )
        return 0 if not is_newest else EXIT_USER if needs_user else EXIT_REQUEUE

    def __enter__(self) -> "RunMirror":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        mirror, self._mirror = self._mirror, None
        if mirror is None:
            return
        assert error is not None, "a run without an error has finished its mirror"
        timeout_s = min(ERROR_EXIT_TIMEOUT_S, self._hang_timeout_s / 4)
        try:
            missing = mirror.close(timeout_s, stop_timeout_s=timeout_s)
        except CheckpointError as exc:  # becomes a note of the error that ends the run
            error.add_note(f"the mirror could not be finished: {exc}")
            return
        self.log_progress()
        if missing:
            error.add_note(f"not in the mirror {self._url} yet: {', '.join(path.name for path in missing)}")


def check_mirror(recipe: Recipe, values: Mapping[str, Any]) -> str:
    """Check the mirror as a run would at its start, and describe it; for `lt train check`, on rank 0.

    Args:
        recipe: Recipe.
        values: Recipe as nested tables.

    Raises:
        MirrorError: the mirror belongs to another run.
        RecipeError: the bucket has a checkpoint from which the run may not resume.
        CheckpointError: no permission to write, list, read or delete.
    """
    root = S3Folder(recipe.checkpoint.mirror_url)
    check_upload_access(root)
    resolve_mirror_name(root, Path(recipe.run.dir), values)
    newest = read_latest_manifest(root)
    if newest is not None:
        _check_resume_allowed(recipe, newest[1])
    described = f"newest checkpoint {newest[0].rpartition('/')[2]}" if newest else "no checkpoint yet"
    return f"permissions to write, list, read and delete in {root.url}; {described}"


def _check_resume_allowed(recipe: Recipe, manifest: CheckpointManifest) -> None:
    url = recipe.checkpoint.mirror_url
    if not recipe.checkpoint.resume:
        raise RecipeError(
            f"{url} already has checkpoints (newest: step {manifest.step})",
            values={"checkpoint.resume": False, "checkpoint.mirror_url": url},
            remedy="set checkpoint.mirror_url to a new folder for a new run, or remove checkpoint.resume",
        )


def _format_rate(*, bytes: int, seconds: float) -> str:
    return f"{format_bytes(bytes)} in {seconds:.1f} s ({format_bytes(round(bytes / max(seconds, 1e-9)))}/s)"
