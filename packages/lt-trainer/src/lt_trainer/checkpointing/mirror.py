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

On a stop, the mirror has three quarters of `fault_tolerance.grace_period_s`, counted from the signal or, at the end,
from the last bytes before it. Otherwise it has unlimited time while bytes are uploaded, and
`fault_tolerance.grace_period_s` while none are.

A run gets a name, 16 random hex digits, when it first has a mirror; the name is in the run directory (mirror.json) and
in the bucket. If both have one, the names must match. Where one has none (a new machine, a new mirror), the newest
checkpoint in the bucket must be of the same recipe, except for paths, parallelism and other options that do not change
the training.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_ckpt import Checkpoint, CheckpointError, list_steps
from lt_ckpt.folders import COMMIT, random_id
from lt_ckpt.s3.mirror import Mirror, MirrorProblem, MirrorUpload
from lt_ckpt.s3.owner import NotOwnerError, Owner, ensure_owner, read_owner
from lt_ckpt.s3.transfer import check_upload_access, download_latest, find_latest_remote
from lt_ckpt.summary import format_bytes
from lt_data import DataError
from lt_data.remote.s3_folder import S3Folder, UnreachableError
from lt_trainer.config.recipe import to_dict
from lt_trainer.config.section import flatten
from lt_trainer.config.sections import Recipe
from lt_trainer.constants import EXIT_REQUEUE, EXIT_USER
from lt_trainer.engine import Engine
from lt_trainer.errors import MirrorError, RecipeError
from lt_trainer.resilience.rank_sync import run_with_keepalive
from lt_trainer.resilience.stop_signals import StopSignals
from lt_trainer.run_directory.run_dir import RunDir, read_mirror_name
from lt_trainer.toml import format_value

if TYPE_CHECKING:
    from lt_trainer.observability.run_logger import RunLogger

POLL_INTERVAL_S = 0.2
"""Interval of synchronizations while rank 0 waits for bytes."""
ERROR_EXIT_TIMEOUT_S = 10.0
"""Time for an upload after an error that ends the run."""

UNCHECKED = re.compile(
    r"(parallel|checkpoint|metrics|fault_tolerance|engine)\..*|run\.dir|model\.preset|batch\.micro_batch_size"
    r"|data\.(store|validation|prefetch|(mixture|validation_sets)\.[^.]+\.store)"
)
"""Fields that may differ on a new machine; store contents are compared when the data is opened."""


class StopRequested(Exception):
    """Stop signal (the argument) received while waiting for the bucket."""


class RunMirror:
    """Mirror of one run on one rank; a context around training. No-op without `checkpoint.mirror_url`.

    Args:
        recipe: Recipe.
        run_dir: Run directory, on rank 0.
        engine: Engine, for its control collectives.
        logger: Logger.
        stop: Stop signals of this process.
        heartbeat: Watchdog heartbeat of the main thread.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_dir: RunDir | None,
        engine: Engine,
        logger: "RunLogger",
        stop: StopSignals,
        heartbeat: Callable[[], None],
    ) -> None:
        self._recipe, self._url, self._run_dir = recipe, recipe.checkpoint.mirror_url, run_dir
        self._grace_s = recipe.fault_tolerance.grace_period_s
        self._hang_timeout_s = recipe.fault_tolerance.hang_timeout_s
        self._control, self._is_rank0 = engine.control, engine.topology.rank == 0
        self._logger, self._stop, self._heartbeat = logger, stop, heartbeat
        self._mirror: Mirror | None = None
        self._owner: Owner | None = None
        self._is_owner = False
        self._damaged: list[str] = []
        self._reports: deque[MirrorProblem | MirrorUpload] = deque()
        self._stop_signal = 0
        """Stop signal of any rank, synchronized while waiting."""

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
        report: list[tuple[str, str, dict[str, Any]]] = []
        action = partial(self._download_latest, -1 if local is None else local.step, report)
        path = run_with_keepalive(self._control, self._is_rank0, action, self._on_poll, POLL_INTERVAL_S)
        for kind, text, values in report:
            self._tell(kind, text, **values)
        if self._stop_signal:
            raise StopRequested(self._stop_signal)
        return Path(path) if path else None

    def _download_latest(self, step: int, report: list[tuple[str, str, dict[str, Any]]]) -> str:
        """Download in a thread of rank 0; return the path, and append to `report` what the main thread logs."""
        assert self._run_dir is not None
        root, field, start = S3Folder(self._url), f"checkpoint.mirror_url = {format_value(self._url)}", time.monotonic()
        try:
            check_upload_access(root)
            owner = self._set_owner(resolve_mirror_name(root, self._recipe)[0])
            ensure_owner(root, owner, allow_takeover=True)
            self._is_owner = True
            done, rejected = download_latest(
                root, self._run_dir.checkpoints, after_step=step, progress=self._raise_if_stopped
            )
        except StopRequested:
            return ""
        except NotOwnerError as exc:
            raise MirrorError(f"{field}: {exc}") from exc
        except (CheckpointError, DataError) as exc:
            if step < 0:
                raise MirrorError(
                    f"{field}: {exc}. There is no checkpoint in {self._run_dir.path}, and the mirror may have one; "
                    "rerun when it is available, or remove checkpoint.mirror_url to start from nothing",
                    retryable=isinstance(exc, UnreachableError),
                ) from exc
            then = "the run continues with local checkpoints, and the mirror is retried"
            text = f"warning: the mirror cannot be used: {exc}; {then}"
            report.append(("mirror_problem", text, {"message": str(exc)}))
            return ""
        self._damaged = [item.url.rpartition("/")[2] for item in rejected if item.damaged]
        for item in rejected:
            text = f"{item.url} is not used: {item.reason}"
            report.append(("mirror_problem", f"warning: {text}", {"message": text}))
        if done is None:
            return ""
        url, seconds = f"{root.url}/{done.path.name}", time.monotonic() - start
        values = {"url": url, "path": str(done.path), "bytes": done.n_bytes, "seconds": seconds}
        text = f"downloaded {url} to {done.path}: {_format_rate(done.n_bytes, seconds)}, verified"
        report.append(("mirror_downloaded", text, values))
        return str(done.path)

    def _set_owner(self, name: str) -> Owner:
        assert self._run_dir is not None
        if name != read_mirror_name(self._run_dir.path):
            self._run_dir.write_mirror_name(name)
        self._owner = Owner(run=name, holder=random_id())
        return self._owner

    def _raise_if_stopped(self, *_: object) -> None:
        if self._stop_signal:
            raise StopRequested(self._stop_signal)

    def _on_poll(self) -> None:
        """Synchronize stop signals, on all ranks, while rank 0 downloads."""
        self._stop_signal = self._stop_signal or self._control.all_reduce_max(self._stop.received)

    def _tell(self, kind: str, text: str, **values: Any) -> None:
        self._logger.log_event(kind, **values)
        self._logger.log_message(text)

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
            force_upload=self._damaged,
            on_event=self._reports.append,
        )

    def notify(self) -> None:
        """Upload a checkpoint that was just committed."""
        if self._mirror is not None:
            self._mirror.notify()

    def protected(self) -> AbstractContextManager[Collection[Path]]:
        """Context with the checkpoints that retention must not delete while it is open."""
        return nullcontext(()) if self._mirror is None else self._mirror.pause_uploads()

    def log_progress(self) -> None:
        """Log uploads and problems since the last call; called by the main thread."""
        while self._reports:
            item = self._reports.popleft()
            if isinstance(item, MirrorProblem):
                then = "it is not retried" if item.final else "it is retried while the run continues"
                text = f"warning: {item.path.name} is not in the mirror: {item.message}; {then}"
                self._tell("mirror_problem", text, message=item.message, path=str(item.path), final=item.final)
                continue
            values = {"url": item.url, "sent": item.sent, "kept": item.kept, "bytes": item.n_bytes}
            text = f"uploaded {item.path.name} to the mirror: {_format_rate(item.n_bytes, item.seconds)}"
            step = int(item.path.name.removeprefix("step-"))
            self._tell("mirror_uploaded", text, step=step, **values, seconds=item.seconds)

    def finish(self) -> int:
        """Wait until all checkpoints are uploaded, or the time is up; on all ranks.

        Returns:
            0 if the newest checkpoint is in the bucket; 75 if a rerun may upload it; 64 if that needs user action.

        Raises:
            PeerError: another rank exited.
        """
        if not self._url:
            return 0
        mirror, n_progress, is_waiting = self._mirror, -1, True
        since = self._stop.received_at or time.monotonic()  # of the stop, or of the last bytes
        while is_waiting:
            is_waiting = mirror is not None and not mirror.finish(POLL_INTERVAL_S)
            self.log_progress()
            self._heartbeat()
            is_stopped = bool(self._control.all_reduce_max(self._stop.received))
            if mirror is not None and mirror.progress_count != n_progress and not is_stopped:
                n_progress, since = mirror.progress_count, time.monotonic()
            is_overdue = time.monotonic() - since > self._grace_s * (0.75 if is_stopped else 1)
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
        text = (
            f"warning: not in the mirror {self._url}: {', '.join(names)} ({reason}); the files are in {mirror.root}; "
            + ("fix this, then rerun" if needs_user else "rerun to upload it")
        )
        self._tell("mirror_incomplete", text, names=names, newest=is_newest, message=reason)
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


def check_mirror(recipe: Recipe) -> str:
    """Check the mirror as a run would at its start, and describe it; for `lt train check`, on rank 0.

    Raises:
        MirrorError: the mirror belongs to another run.
        RecipeError: the bucket has a checkpoint from which the run may not resume.
        DataError: no permission to write, list, read or delete.
    """
    root = S3Folder(recipe.checkpoint.mirror_url)
    check_upload_access(root)
    _, described = resolve_mirror_name(root, recipe)
    return f"permissions to write, list, read and delete in {root.url}; {described}"


def _format_rate(n_bytes: int, seconds: float) -> str:
    return f"{format_bytes(n_bytes)} in {seconds:.1f} s ({format_bytes(round(n_bytes / max(seconds, 1e-9)))}/s)"


def recipe_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the differences of two recipes (nested tables) that change the training."""
    remote, local = flatten(there), flatten(here)
    return [
        f"{name}: {format_value(remote[name])} there, {format_value(local[name])} here"
        for name in sorted(remote.keys() & local.keys())
        if remote[name] != local[name] and not UNCHECKED.fullmatch(name)
    ]


def resolve_mirror_name(root: S3Folder, recipe: Recipe) -> tuple[str, str]:
    """Check that this run may use the mirror; return the run's name, and what its newest checkpoint is.

    Args:
        root: Folder in the bucket.
        recipe: Recipe; its run directory may not exist yet.

    Raises:
        MirrorError: the mirror belongs to another run.
        RecipeError: the mirror has a checkpoint, but checkpoint.resume is false.
        RemoteError: S3 rejects requests or is unreachable.
    """
    name, owner, newest = read_mirror_name(Path(recipe.run.dir)), read_owner(root), find_latest_remote(root)
    field, remedy = (
        f"checkpoint.mirror_url = {format_value(root.url)}",
        "set checkpoint.mirror_url to a folder of its own",
    )
    if name and owner is not None and name != owner.run:
        raise MirrorError(f"{field}: belongs to another run (its name is {owner.run}, not {name}); {remedy}")
    if newest is None:
        return name or random_id(), "no checkpoint yet"
    address, manifest = newest
    if not recipe.checkpoint.resume:
        raise RecipeError(
            f"{root.url} already has checkpoints (newest: step {manifest.step})",
            values={"checkpoint.resume": False, "checkpoint.mirror_url": root.url},
            remedy="set checkpoint.mirror_url to a new folder for a new run, or remove checkpoint.resume",
        )
    if not (name and owner) and (differences := recipe_differences(manifest.recipe, to_dict(recipe))):
        raise MirrorError(
            f"{field}: has a run with another recipe ({'; '.join(differences)}); {remedy}, or restore these values: "
            "they can be changed once the run has been downloaded"
        )
    return name or (random_id() if owner is None else owner.run), f"newest checkpoint {address.rpartition('/')[2]}"
