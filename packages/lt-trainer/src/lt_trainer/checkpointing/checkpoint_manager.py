"""Checkpoints of a run: collective save, retention, and search for the newest.

A save costs two short exchanges on the control group (the folder's name out, the result back); every rank writes its
own bytes, and rank 0 commits when all parts are there. A rank that fails tells the others, so that none waits for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    PreflightReport,
    begin_preflight,
    begin_save,
    commit_save,
    discard_save,
    find_latest_valid,
    finish_preflight,
    list_steps,
    prune_checkpoints,
    write_preflight,
    write_rank_files,
)
from lt_data import StreamState
from lt_trainer.data.training_data import STORES
from lt_trainer.errors import RecipeError
from lt_trainer.resilience.rank_sync import run_on_rank0

if TYPE_CHECKING:
    from lt_ckpt import CheckpointManifest
    from lt_model import LlamaConfig
    from lt_trainer.config.sections import Recipe
    from lt_trainer.control import Control
    from lt_trainer.engine import Engine, Snapshot


@dataclass(frozen=True, kw_only=True)
class CheckpointManager:
    """Checkpoints of one run directory."""

    root: Path
    recipe: Recipe
    model: LlamaConfig
    tokenizer_files: Mapping[str, bytes]
    recipe_values: Mapping[str, Any]
    hf_files: dict[str, bytes] = field(default_factory=dict)
    """config.json and generation_config.json of the model that the run began with; see `carry_hf_files`."""
    stores: dict[str, str] = field(default_factory=dict)
    """Fingerprint of each store; see `record_stores`."""
    protected: Callable[[], AbstractContextManager[Collection[Path]]] = lambda: nullcontext(())
    """Context with the checkpoints that retention must not delete while it is open."""

    def carry_hf_files(self, found: Mapping[str, bytes]) -> None:
        """Save these files with every checkpoint from now on, for its export."""
        self.hf_files.clear()
        self.hf_files.update(found)

    def record_stores(self, fingerprints: Mapping[str, str]) -> None:
        """Record with every checkpoint from now on which stores the run reads, by field of the recipe."""
        self.stores.clear()
        self.stores.update(fingerprints)

    def save(self, engine: Engine, stream: StreamState) -> Path:
        """Save engine state and stream position as step `stream.step`; return the folder on every rank.

        Raises:
            CheckpointError: a rank could not write its part (disk full, folder missing); all ranks raise.
        """
        topology, control = engine.topology, engine.control
        tmp = self.begin_save(engine, stream.step)
        snapshot = engine.state()
        failure = _catch_checkpoint_error(
            lambda: write_rank_files(tmp, rank=topology.rank, shards=snapshot.shards, writer=snapshot.file_layout)
        )
        if control.all_reduce_max(int(failure is not None)):
            if topology.rank == 0:
                self.discard(tmp)
            raise failure or peer_write_error(tmp)
        metadata = self.metadata(engine, stream, snapshot)

        def commit_or_discard() -> str:
            try:
                return str(self.commit(tmp, metadata, world_size=topology.world_size))
            except CheckpointError:
                self.discard(tmp)
                raise

        path = Path(run_on_rank0(control, topology.rank == 0, commit_or_discard))
        if topology.rank == 0:
            self.prune()
        return path

    def begin_save(self, engine: Engine, step: int) -> Path:
        """Create the folder of a save; return it on every rank."""
        topology, control = engine.topology, engine.control
        return Path(
            run_on_rank0(
                control,
                topology.rank == 0,
                lambda: str(begin_save(self.root, step=step, world_size=topology.world_size)),
            )
        )

    def metadata(self, engine: Engine, stream: StreamState, snapshot: Snapshot) -> CheckpointMetadata:
        """Return the checkpoint metadata."""
        topology = engine.topology
        return CheckpointMetadata(
            step=stream.step,
            recipe=self.recipe_values,
            model=self.model.to_dict(),
            scalars=snapshot.scalars,
            data=stream.to_dict() | ({STORES: dict(self.stores)} if self.stores else {}),
            tokenizer_files=self.tokenizer_files,
            hf_files=dict(self.hf_files),
            layout={"world": topology.world_size, "dp_size": topology.dp_size, **snapshot.layout_metadata},
            optimizer=snapshot.optimizer,
        )

    def commit(
        self,
        tmp: Path,
        metadata: CheckpointMetadata,
        *,
        world_size: int,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Path:
        """Commit a save once all parts are there (rank 0)."""
        return commit_save(
            tmp,
            world_size=world_size,
            metadata=metadata,
            timeout_s=self.recipe.fault_tolerance.hang_timeout_s,
            is_cancelled=is_cancelled,
        )

    def prune(self) -> None:
        """Delete checkpoints by the retention options (rank 0)."""
        options = self.recipe.checkpoint
        with self.protected() as protected:
            prune_checkpoints(self.root, keep_last=options.keep_last, keep_every=options.keep_every, protect=protected)

    def discard(self, tmp: Path) -> None:
        """Delete what a failed save left behind (rank 0); errors are ignored."""
        with suppress(CheckpointError):
            discard_save(tmp)

    def preflight(self, engine: Engine) -> PreflightReport:
        """Test a small save in the folder, leaving nothing; return the same report on every rank.

        Raises:
            CheckpointError: a rank cannot write there, rank 0 does not see another rank's file, or a checkpoint does
                not fit; all ranks raise.
        """
        topology, control, is_rank0 = engine.topology, engine.control, engine.topology.rank == 0
        tmp = Path(
            run_on_rank0(control, is_rank0, lambda: str(begin_preflight(self.root, world_size=topology.world_size)))
        )
        failure = _catch_checkpoint_error(
            lambda: write_preflight(tmp, rank=topology.rank, required_bytes=engine.state_bytes())
        )
        if control.all_reduce_max(int(failure is not None)):
            if is_rank0:
                self.discard(tmp)
            raise failure or peer_write_error(tmp)
        timeout_s = self.recipe.fault_tolerance.hang_timeout_s

        def finish() -> str:
            report = finish_preflight(tmp, world_size=topology.world_size, timeout_s=timeout_s)
            return json.dumps([report.required_bytes, report.free_bytes, report.buffered_io_reason])

        required_bytes, free_bytes, reason = json.loads(run_on_rank0(control, is_rank0, finish))
        return PreflightReport(
            root=self.root, required_bytes=required_bytes, free_bytes=free_bytes, buffered_io_reason=reason
        )

    def missing_bytes(self, report: PreflightReport) -> int:
        """Return the space missing for all checkpoints that the run keeps; 0 if there is enough."""
        n_missing = max_checkpoints_on_disk(self.recipe) - len(list_steps(self.root))
        return max(0, n_missing * report.required_bytes - report.free_bytes)

    def find_latest(
        self, control: Control, rank: int, log: Callable[[str], None], *, skip: Collection[Path] = ()
    ) -> Checkpoint | None:
        """Return the newest valid checkpoint, the same on every rank; log damaged newer ones.

        Those in `skip` are passed over: a rank could not read them.
        """

        def find() -> str:
            latest, rejected = find_latest_valid(self.root, skip=skip)
            for checkpoint in rejected:
                log(f"checkpoint {checkpoint.path} is not used: {checkpoint.reason}")
            return str(latest.path) if latest else ""

        path = run_on_rank0(control, rank == 0, find)
        return Checkpoint.open(path) if path else None

    def data_state(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """Return the data state of a checkpoint, after checking that it has this run's model.

        Raises:
            RecipeError: the checkpoint has another model.
        """
        self.check_model(checkpoint.manifest, str(checkpoint.path))
        assert checkpoint.manifest.data is not None, "a training checkpoint has a data position"
        return checkpoint.manifest.data

    def check_model(self, manifest: CheckpointManifest, place: str) -> None:
        """Raise RecipeError if a checkpoint's manifest has another model than this run."""
        saved, model = dict(manifest.model), self.model.to_dict()
        differences = [
            f"{key}: {saved.get(key)!r} there, {model.get(key)!r} here"
            for key in sorted(saved | model)
            if saved.get(key) != model.get(key)
        ]
        if differences:
            raise RecipeError(
                f"{place} is a checkpoint of another model ({'; '.join(differences)}); set run.dir to a new "
                "folder, or restore the [model] section that this run was started with"
            )


def max_checkpoints_on_disk(recipe: Recipe) -> int:
    """Return the maximum number of checkpoints in the folder at a time, with the one being written."""
    options, last = recipe.checkpoint, recipe.schedule.max_steps
    n_saved = 1 + ((last - 1) // options.interval if options.interval else 0)
    period = math.lcm(options.interval, options.keep_every)
    n_kept = (last - 1) // period if period else 0
    return min(n_saved, options.keep_last + 1 + n_kept)


def _catch_checkpoint_error(action: Callable[[], None]) -> CheckpointError | None:
    try:
        action()
    except CheckpointError as exc:
        return exc
    return None


def peer_write_error(tmp: Path) -> CheckpointError:
    """Return the error for ranks whose own part of a save succeeded."""
    return CheckpointError(f"{tmp}: another rank could not write its part; see the log of that rank")
