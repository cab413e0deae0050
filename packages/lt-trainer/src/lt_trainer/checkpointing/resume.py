"""Restores a run from its newest valid checkpoint, at the start and on rollbacks.

Each time, an event `data` records which rows the following steps read: step S + k (k from 1) reads the positions
R + (k - 1) * B to R + k * B - 1 of the global sequence; with a batch ramp or several stores, the event has these too.
So `lt data inspect` can find the documents of any step later.

A store that was appended to is read as the checkpoint has read it (`lt_trainer.data.generations`).

Rank 0 verifies a checkpoint before the others read it. Where a rank finds damage all the same while it reads its part,
all ranks take the next older valid checkpoint, which overwrites what they have read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lt_ckpt import Checkpoint
from lt_trainer.data.batches import Batches, open_batches
from lt_trainer.data.generations import changed_generations, reopen_data, resume_state
from lt_trainer.data.training_data import TrainingData, data_event_fields
from lt_trainer.errors import NoCheckpointError, RecipeError, RestoreError

if TYPE_CHECKING:
    from lt_data import StreamState
    from lt_model import LlamaConfig
    from lt_trainer.checkpointing.checkpoint_manager import CheckpointManager
    from lt_trainer.checkpointing.mirror import RunMirror
    from lt_trainer.config.sections import Recipe
    from lt_trainer.engine import Engine


T = TypeVar("T")


class RestoreLogger(Protocol):
    """Logger of what a run starts from."""

    def log_message(self, text: str) -> None:
        """Log a sentence for the user."""
        ...

    def log_event(self, kind: str, **values: Any) -> None:
        """Log an event."""
        ...


@dataclass(kw_only=True)
class RunRestorer:
    """Finds checkpoints, restores them into the engine and opens the data at their position."""

    recipe: Recipe
    data: TrainingData
    """From a restored checkpoint on, with the generations of the stores that it has read."""
    engine: Engine
    checkpoint_manager: CheckpointManager
    logger: RestoreLogger
    mirror: RunMirror | None
    """None to start from what is on this machine (`lt train check`)."""
    model: LlamaConfig
    heartbeat: Callable[[], None]
    """Watchdog heartbeat of the main thread."""

    def restore_or_start(self) -> Batches:
        """Restore the newest valid checkpoint, or start from initial weights; return the batches.

        Downloads the newest checkpoint of the mirror if it is newer.

        Raises:
            RecipeError: there are checkpoints, but checkpoint.resume is false; or they have another model.
            DataError: the checkpoint belongs to other data, or to another order of it.
            MirrorError: the mirror is another run's, or is required but unavailable.
            StopRequested: a stop signal was received during the download.
        """
        checkpoint = self._find_latest()
        downloaded = None if self.mirror is None else self.mirror.download_latest(checkpoint)
        if downloaded is not None:  # verified during the download
            checkpoint = Checkpoint.open(downloaded)
        if checkpoint is None:
            return self._start_fresh()
        if not self.recipe.checkpoint.resume:
            raise RecipeError(
                f"run.dir = {self.recipe.run.dir!r} already has checkpoints (newest: {checkpoint.path.name})",
                values={"checkpoint.resume": self.recipe.checkpoint.resume},
                remedy="set run.dir to a new folder for a new run, or remove checkpoint.resume to resume",
            )
        checkpoint, batches = self._restore_newest(checkpoint, self._restore)
        self.logger.log_event("resume", step=checkpoint.step, path=str(checkpoint.path))
        self.logger.log_message(f"resuming after step {checkpoint.step} from {checkpoint.path}")
        self._log_generations(checkpoint)
        if self.recipe.model.init_from:
            self.logger.log_message(f"model.init_from = {self.recipe.model.init_from!r} is not read when a run resumes")
        return batches

    def _start_fresh(self) -> Batches:
        """Start with initial weights, or with those of `model.init_from`; return the batches."""
        batches = self._open_batches(None)
        self._log_data_event(batches)
        options, engine = self.recipe.model, self.engine
        if options.init_from:
            from lt_trainer.checkpointing.pretrained import open_pretrained

            with open_pretrained(
                options, self.model, self.data.tokenizer_files, engine.control, engine.topology.rank, self.heartbeat
            ) as pretrained:
                engine.load_weights(pretrained)
                pretrained.check_finite(engine.control)
                self.checkpoint_manager.carry_hf_files(pretrained.hf_files())
                self.logger.log_event("init_from", address=options.init_from, model=pretrained.metadata)
                self.logger.log_message(pretrained.describe())
        return batches

    def rollback(self, batches: Batches) -> None:
        """Restore the newest checkpoint; the batches return to its step, after the rows already read.

        Raises:
            NoCheckpointError: there is no checkpoint.
            RestoreError: a rank cannot read its part, and there is no older checkpoint.
        """
        newest = self._find_latest()
        if newest is None:
            raise NoCheckpointError("there is no checkpoint yet")
        from_step = batches.state.step

        def restore(checkpoint: Checkpoint) -> StreamState:
            saved = self.checkpoint_manager.data_state(checkpoint)  # raises before tensors are read
            state = resume_state(self.recipe, self.data, saved)
            self.engine.restore(checkpoint)
            return state

        checkpoint, state = self._restore_newest(newest, restore)
        batches.rollback(state)
        self._log_data_event(batches)
        first, last = batches.state.skipped[-1]
        self.logger.log_event("rollback", step=checkpoint.step, from_step=from_step, rows=[first, last])
        self.logger.log_message(
            f"rollback from step {from_step} to {checkpoint.path.name}; skipping the rows at positions {first} to "
            f"{last - 1}"
        )

    def _restore_newest(self, newest: Checkpoint, restore: Callable[[Checkpoint], T]) -> tuple[Checkpoint, T]:
        """Restore a checkpoint or, where a rank cannot read its part, older ones; return it and the result.

        Raises:
            RestoreError: no older checkpoint can be read either.
        """
        checkpoint, unreadable = newest, []
        while True:
            try:
                return checkpoint, restore(checkpoint)
            except RestoreError as exc:
                self.logger.log_message(f"checkpoint {checkpoint.path} is not used: {exc}")
                unreadable.append(checkpoint.path)
                older = self._find_latest(unreadable)
                if older is None:
                    raise
                checkpoint = older

    def _find_latest(self, unreadable: Sequence[Path] = ()) -> Checkpoint | None:
        messages: list[str] = []
        control, rank = self.engine.control, self.engine.topology.rank
        checkpoint = self.checkpoint_manager.find_latest(control, rank, messages.append, skip=unreadable)
        for text in messages:
            self.logger.log_message(text)
        return checkpoint

    def _restore(self, checkpoint: Checkpoint) -> Batches:
        saved = self.checkpoint_manager.data_state(checkpoint)
        self.data = reopen_data(self.recipe, self.data, saved)
        batches = self._open_batches(saved)  # raises before tensors are read
        try:
            self.checkpoint_manager.carry_hf_files(checkpoint.hf_files())
            self.engine.restore(checkpoint)
        except BaseException:
            batches.close()
            raise
        self._log_data_event(batches)
        return batches

    def _log_generations(self, checkpoint: Checkpoint) -> None:
        """Log which stores have a newer generation than the run reads, and which change theirs now."""
        for field in sorted(self.data.older):
            self.logger.log_message(
                f"{field}: reads {self.data.paths[field]}, as before, although the store has a newer generation; name "
                "that in the recipe to take it"
            )
        changed = changed_generations(self.recipe, self.data, checkpoint.manifest.data)
        for field, (before, now) in changed.items():
            self.logger.log_message(f"{field}: from step {checkpoint.step + 1} on {now}, before {before}")

    def _open_batches(self, saved: Mapping[str, Any] | None) -> Batches:
        self.checkpoint_manager.record_stores(self.data.fingerprints)
        return open_batches(self.recipe, self.data, self.engine.topology, self.engine.control, saved)

    def _log_data_event(self, batches: Batches) -> None:
        """Log the event that identifies the rows of the following steps."""
        self.logger.log_event(
            "data",
            global_batch_size=self.recipe.batch.global_batch_size,
            dp_size=self.engine.topology.dp_size,
            **batches.state.to_dict(),
            **data_event_fields(self.recipe),
        )
