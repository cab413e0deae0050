"""Checkpoints of a run: collective save in the foreground or background, retention, search for the newest.

A save over `lt_ckpt`: rank 0 begins it (`begin_save`) and broadcasts the folder, every rank writes its own bytes there
(`write_rank_files`), rank 0 commits when all parts are there (`commit_save`) and prunes old checkpoints. A rank that
fails tells the others, so that none waits for it.

With `checkpoint.async_save` the ranks agree on the folder, each copies its state into reserved host memory, and
training continues; a thread per rank writes the copy, and rank 0's thread commits (`lt_ckpt.AsyncRankSaver`). The
threads communicate only through the folder. The main threads synchronize at two places: the stop synchronization of
each step includes whether a save has failed on any rank (`poll` is local), and `finish` ends the save in flight on all
ranks like a blocking one: with the checkpoint, or with the same error on all. `finish` precedes the next save, a stop,
the end and a rollback, so at most one save is in flight. If an error ends the run, the save in flight is completed if
possible. Saves at a stop and at the end are blocking.

Cost: two short exchanges on the control group; for saves in the background also host memory for a copy of the state.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil

from lt_ckpt.async_save import AsyncRankSaver
from lt_ckpt.checkpoint import Checkpoint
from lt_ckpt.discovery import find_latest_valid, prune_checkpoints
from lt_ckpt.errors import CheckpointError, SaveCancelledError, translate_os_errors
from lt_ckpt.manifest import CheckpointManifest, CheckpointMetadata
from lt_ckpt.save import begin_save, commit_save, discard_save, write_rank_files
from lt_trainer.config.recipe import to_dict
from lt_trainer.constants import GIB
from lt_trainer.data.training_data import STORES
from lt_trainer.errors import PeerError, RecipeError
from lt_trainer.files import write_atomic
from lt_trainer.resilience.rank_sync import attempt_on_all_ranks, run_on_rank0
from lt_trainer.toml import format_value

if TYPE_CHECKING:
    from lt_data.streaming.stream import StreamState
    from lt_model import ModelConfig
    from lt_trainer.checkpointing.mirror import RunMirror
    from lt_trainer.config.sections import Recipe
    from lt_trainer.engine import Engine, Snapshot
    from lt_trainer.observability.run_logger import RunLogger

POLL_INTERVAL_S = 0.2
"""Interval of watchdog heartbeats while the main thread waits for a save."""
PEER_LOST_TIMEOUT_S = 10.0
"""Time that rank 0, after losing another rank, waits for parts that may be almost complete."""


class Checkpoints:
    """Checkpoints of one run on one rank; a context around training.

    Args:
        root: Folder of the checkpoints, which exists.
        recipe: Recipe.
        model: Architecture.
        tokenizer_files: Files of the tokenizer, which every checkpoint carries.
        engine: Engine to save.
        log: Logger of the run.
        mirror: Mirror that hears of committed checkpoints.
        heartbeat: Called while the main thread waits for bytes to be written.
    """

    def __init__(
        self,
        root: Path,
        recipe: Recipe,
        model: ModelConfig,
        tokenizer_files: Mapping[str, bytes],
        engine: Engine,
        log: RunLogger,
        mirror: RunMirror,
        heartbeat: Callable[[], None],
    ) -> None:
        self.root = root
        self.hf_files: dict[str, bytes] = {}
        """config.json and generation_config.json of the model that the run began with, saved with every checkpoint."""
        self.stores: dict[str, str] = {}
        """Fingerprint of each store that the run reads, by field of the recipe; saved with every checkpoint."""
        self._recipe, self._model, self._tokenizer_files = recipe, model, tokenizer_files
        self._engine, self._log, self._mirror, self._heartbeat = engine, log, mirror, heartbeat
        self._control, self._rank = engine.control, engine.topology.rank
        self._writer = AsyncRankSaver(engine.allocate_host_memory) if recipe.checkpoint.async_save else None
        self._in_flight: tuple[int, Path] | None = None
        """Step and folder of the save in flight."""
        self._committed: tuple[int, Path] | None = None
        """Committed by rank 0, not reported yet."""

    def check_room(self) -> None:
        """Check before the first step that every rank can write here and that a checkpoint fits; collective.

        Raises:
            CheckpointError: on all ranks.
        """
        n_bytes = sum(self._control.all_gather(self._engine.state_bytes()))

        def try_to_write() -> None:
            probe = self.root / f".probe-{self._rank:05}"
            with translate_os_errors("testing a save", self.root):
                write_atomic(probe, b"\0")
                probe.unlink()
            free = shutil.disk_usage(self.root).free
            if free < n_bytes:
                raise CheckpointError(
                    f"{self.root}: a checkpoint needs {n_bytes} bytes ({n_bytes / GIB:.2f} GiB), {free} are free; free "
                    "some space on that disk, or set run.dir to a folder on another one"
                )

        attempt_on_all_ranks(self._control, try_to_write)

    def reserve_memory(self) -> None:
        """Reserve the host memory for asynchronous saves, before the first step; collective.

        Every rank reads the available memory before any reserves, and the copies of all ranks of a node must fit.

        Raises:
            RecipeError: not enough memory on a node; or CheckpointError: on another rank's.
        """
        if self._writer is None:
            return
        writer, node = self._writer, os.uname().nodename
        needs = self._control.all_gather([node, self._engine.state_bytes(), psutil.virtual_memory().available])
        copies = [required for name, required, _ in needs if name == node]
        available = min(free for name, _, free in needs if name == node)

        def reserve() -> None:
            try:
                if sum(copies) > available:
                    raise MemoryError(
                        f"{len(copies)} rank(s) need {sum(copies) / GIB:.2f} GiB on {node}, {available / GIB:.2f} GiB "
                        "are available"
                    )
                writer.reserve(self._engine.state().shards)
            except MemoryError as exc:
                raise RecipeError(
                    f"no host memory for a copy of the state: {exc}",
                    values={"checkpoint.async_save": True},
                    remedy="set checkpoint.async_save to false, or use a machine with more memory",
                ) from exc

        attempt_on_all_ranks(self._control, reserve)

    def save(self, position: StreamState, *, wait: bool) -> None:
        """Save the engine state at a position of the data; with `wait`, block until the checkpoint is committed.

        Raises:
            CheckpointError: this save, or the one in flight, failed on a rank; all ranks raise.
        """
        self.finish()
        begin = partial(begin_save, self.root, step=position.step, world_size=self._engine.topology.world_size)
        tmp = Path(run_on_rank0(self._control, self._rank == 0, lambda: str(begin())))
        snapshot = self._engine.state()
        commit = partial(self._commit, tmp, self._metadata(position, snapshot))
        files: dict[str, Any] = {"rank": self._rank, "shards": snapshot.shards, "writer": snapshot.file_layout}
        if self._writer is not None and not wait:
            self._writer.start(tmp, **files, on_written=commit if self._rank == 0 else None)
            self._in_flight = position.step, tmp
            return
        try:
            attempt_on_all_ranks(self._control, lambda: write_rank_files(tmp, **files))
        except CheckpointError:
            self._discard(tmp)
            raise
        run_on_rank0(self._control, self._rank == 0, lambda: commit() or "")
        self._report_committed()

    def _metadata(self, position: StreamState, snapshot: Snapshot) -> CheckpointMetadata:
        topology = self._engine.topology
        return CheckpointMetadata(
            step=position.step,
            recipe=to_dict(self._recipe),
            model=self._model.to_dict(),
            scalars=snapshot.scalars,
            data=position.to_dict() | ({STORES: dict(self.stores)} if self.stores else {}),
            tokenizer_files=self._tokenizer_files,
            hf_files=dict(self.hf_files),
            layout={"world": topology.world_size, "dp_size": topology.dp_size, **snapshot.layout_metadata},
            optimizer=snapshot.optimizer,
        )

    def _commit(
        self, tmp: Path, metadata: CheckpointMetadata, is_cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Commit once all parts are there, and delete checkpoints by the retention options; on rank 0."""
        try:
            path = commit_save(
                tmp,
                world_size=self._engine.topology.world_size,
                metadata=metadata,
                timeout_s=self._recipe.fault_tolerance.hang_timeout_s,
                is_cancelled=is_cancelled,
            )
        except CheckpointError:
            self._discard(tmp)
            raise
        self._committed = metadata.step, path
        options = self._recipe.checkpoint
        with self._mirror.protected() as protected:
            prune_checkpoints(self.root, keep_last=options.keep_last, keep_every=options.keep_every, protect=protected)

    def _discard(self, tmp: Path) -> None:
        """Delete what a failed save left behind, on rank 0; errors are ignored."""
        if self._rank == 0:
            with suppress(CheckpointError):
                discard_save(tmp)

    def poll(self) -> bool:
        """Return True if the save in flight is known to have failed on this rank; report a committed one."""
        self._report_committed()
        return self._writer is not None and self._writer.has_failed

    def _report_committed(self) -> None:
        committed, self._committed = self._committed, None
        if committed is not None:
            step, path = committed
            self._log.log_event("checkpoint", step=step, path=str(path))
            self._mirror.notify()

    def finish(self, *, cancel: bool = False) -> None:
        """Wait for the save in flight on all ranks; with `cancel`, end it, since it cannot succeed.

        Raises:
            CheckpointError: it failed on a rank; all ranks raise.
        """
        if self._in_flight is None or self._writer is None:
            return
        writer, (_, tmp) = self._writer, self._in_flight
        if cancel:
            writer.cancel()
        self._wait_until_written(writer)
        if self._control.all_reduce_max(int(writer.has_failed)):
            writer.cancel()

        def wait() -> None:
            with suppress(SaveCancelledError):  # the failed rank tells why
                writer.wait()

        try:
            attempt_on_all_ranks(self._control, wait)
        except CheckpointError:
            self._discard(tmp)
            raise
        finally:
            self._in_flight = None
            self._report_committed()

    def _wait_until_written(self, writer: AsyncRankSaver) -> None:
        """Wait for this rank's files; the watchdog hears of bytes that are written and of nothing else."""
        previous = -1
        while not writer.wait_until_written(POLL_INTERVAL_S):
            if writer.progress_count != previous:
                previous = writer.progress_count
                self._heartbeat()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._in_flight is None or self._writer is None:
            return
        assert error is not None, "a run without an error has finished its saves"
        self._wait_until_written(self._writer)
        timeout_s = self._recipe.fault_tolerance.hang_timeout_s / 2
        timer = Timer(
            min(PEER_LOST_TIMEOUT_S, timeout_s) if isinstance(error, PeerError) else timeout_s, self._writer.cancel
        )
        timer.start()
        try:
            self._writer.wait()
        except BaseException as exc:  # noqa: BLE001 - becomes a note of the error that ends the run
            error.add_note(f"the save in flight, of step {self._in_flight[0]}, failed: {exc}")
        timer.cancel()
        self._report_committed()

    def find_latest(self, skip: Collection[Path] = ()) -> Checkpoint | None:
        """Return the newest valid checkpoint, the same on every rank; log damaged newer ones.

        Those in `skip` are passed over: a rank could not read them.
        """

        def find() -> str:
            latest, rejected = find_latest_valid(self.root, skip=skip)
            for checkpoint in rejected:
                self._log.log_message(f"checkpoint {checkpoint.path} is not used: {checkpoint.reason}")
            return str(latest.path) if latest else ""

        path = run_on_rank0(self._control, self._rank == 0, find)
        return Checkpoint.open(path) if path else None

    def data_state(self, manifest: CheckpointManifest, place: str) -> Mapping[str, Any]:
        """Return the data state of a checkpoint, after checking that it has this run's model.

        Raises:
            RecipeError: the checkpoint has another model.
        """
        saved, model = dict(manifest.model), self._model.to_dict()
        differences = [
            f"{key}: {format_value(saved.get(key))} there, {format_value(model.get(key))} here"
            for key in sorted(saved | model)
            if saved.get(key) != model.get(key)
        ]
        if differences:
            raise RecipeError(
                f"{place} is a checkpoint of another model ({'; '.join(differences)}); set run.dir to a new "
                "folder, or restore the [model] section that this run was started with"
            )
        assert manifest.data is not None, "a training checkpoint has a data position"
        return manifest.data
