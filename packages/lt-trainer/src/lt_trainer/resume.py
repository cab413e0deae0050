"""Where a run goes on: behind its newest valid checkpoint, or behind the rows that led it astray.

Every time a position is taken up, an event `data` says which rows the steps from there on read: step S + k (k from 1)
reads the positions R + (k - 1) * B to R + k * B - 1 of the global sequence; where the batch grows, or the rows are not
of one store, the event says that too. With it, `lt data inspect` finds the documents of any step long after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lt_ckpt import Checkpoint
from lt_trainer.batches import Batches, open_batches
from lt_trainer.data import TrainingData, position_facts
from lt_trainer.errors import RecipeError
from lt_trainer.loop import NothingToGoBackTo

if TYPE_CHECKING:
    from lt_model import LlamaConfig
    from lt_trainer.engine import Engine
    from lt_trainer.journal import RunJournal, SilentJournal
    from lt_trainer.mirroring import Mirroring
    from lt_trainer.recipe import Recipe
    from lt_trainer.saving import Checkpoints


@dataclass(frozen=True, kw_only=True)
class Position:
    """Finds checkpoints, restores them into the engine and opens the data behind them."""

    recipe: Recipe
    data: TrainingData
    engine: Engine
    checkpoints: Checkpoints
    journal: RunJournal | SilentJournal
    mirroring: Mirroring
    model: LlamaConfig
    go_on: Callable[[], None]
    """Tells the watchdog that this rank goes on."""

    def first(self) -> Batches:
        """The batches to start with: behind the newest valid checkpoint, which is restored, or from the beginning.

        Where the run has a mirror with a newer valid checkpoint, that one is brought here and taken.

        Raises:
            RecipeError: there are checkpoints, and the recipe does not want to go on from them; or of another model.
            DataError: the checkpoint belongs to other data, or to another order of it.
            MirrorError: the mirror is another run's, or has to be asked and cannot be.
            Stopped: a stop signal came while the mirror was waited for.
        """
        checkpoint = self._newest()
        brought = self.mirroring.bring(checkpoint)
        if brought is not None:  # its bytes were verified on the way
            checkpoint = Checkpoint.open(brought)
        if checkpoint is None:
            return self._anew()
        if not self.recipe.checkpoint.resume:
            raise RecipeError(
                f"run.out = {self.recipe.run.out!r} already holds checkpoints (newest: {checkpoint.path.name})",
                values={"checkpoint.resume": self.recipe.checkpoint.resume},
                remedy="set run.out to a new folder to start from nothing, or leave checkpoint.resume out to go on",
            )
        batches = self._restored(checkpoint)
        self.journal.event("resume", step=checkpoint.step, path=str(checkpoint.path))
        self.journal.say(f"resuming after step {checkpoint.step} from {checkpoint.path}")
        if self.recipe.model.init_from:
            self.journal.say(f"model.init_from = {self.recipe.model.init_from!r} is not read: this run goes on")
        return batches

    def _anew(self) -> Batches:
        """The first batches of a run that starts with initial weights, or with those of `model.init_from`."""
        batches = self._batches(None)
        options, engine = self.recipe.model, self.engine
        if options.init_from:
            from lt_trainer.pretrained import open_pretrained

            with open_pretrained(
                options, self.model, self.data.tokenizer_files, engine.control, engine.topology.rank, self.go_on
            ) as pretrained:
                engine.load_weights(pretrained)
                self.journal.event("init_from", address=options.init_from, model=pretrained.about)
                self.journal.say(pretrained.describe())
        return batches

    def go_back(self, batches: Batches) -> None:
        """Restore the newest checkpoint; the batches go on at its step, with the rows behind those that were read.

        Raises:
            NothingToGoBackTo: there is no checkpoint.
        """
        checkpoint = self._newest()
        if checkpoint is None:
            raise NothingToGoBackTo("no checkpoint was saved yet")
        from_step = batches.state.step
        batches.go_back(self.checkpoints.stream_state(checkpoint))
        self.engine.restore(checkpoint)
        self._note(batches)
        first, last = batches.state.skipped[-1]
        self.journal.event("rewind", step=checkpoint.step, from_step=from_step, rows=[first, last])
        self.journal.say(
            f"back to {checkpoint.path.name} from step {from_step}; the rows at positions {first} to {last - 1} are "
            "skipped"
        )

    def _newest(self) -> Checkpoint | None:
        said: list[str] = []
        checkpoint = self.checkpoints.find(self.engine.control, self.engine.topology.rank, said.append)
        for text in said:
            self.journal.say(text)
        return checkpoint

    def _restored(self, checkpoint: Checkpoint) -> Batches:
        batches = self._batches(self.checkpoints.data_state(checkpoint))  # refuses other data before a tensor is read
        self.engine.restore(checkpoint)
        return batches

    def _batches(self, saved: Mapping[str, Any] | None) -> Batches:
        batches = open_batches(self.recipe, self.data, self.engine.topology, self.engine.control, saved)
        self._note(batches)
        return batches

    def _note(self, batches: Batches) -> None:
        """Say in the events where the rows of the steps from here on stand."""
        self.journal.event(
            "data",
            global_batch=self.recipe.batch.global_batch,
            dp_size=self.engine.topology.dp_size,
            **batches.state.to_json(),
            **position_facts(self.recipe),
        )
