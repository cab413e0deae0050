"""Step batches of one rank, with a position that can be saved.

`StreamBatches` serves stores, mixtures and synthetic rows: a thread prefetches rows, and the position is that
of the last batch returned. `LoaderBatches` (lt_trainer.data.custom_loader) serves custom loaders.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from lt_data import Stream
from lt_data.streaming.prefetch import Prefetcher
from lt_data.streaming.stream import StreamState
from lt_trainer.config.sections import Recipe
from lt_trainer.control import Control
from lt_trainer.data.custom_loader import LoaderBatches
from lt_trainer.data.generations import resume_state
from lt_trainer.data.training_data import TrainingData, open_stream, to_step_batch
from lt_trainer.engine import StepBatch, Topology


class StreamBatches:
    """Step batches of a stream, prefetched by a thread."""

    def __init__(
        self, recipe: Recipe, data: TrainingData, topology: Topology, state: StreamState | None = None
    ) -> None:
        self._open = partial(open_stream, recipe, data, topology)
        self._depth, size = recipe.data.prefetch, recipe.batch.micro_batch_size
        self._to_step_batch = partial(to_step_batch, micro_batch_size=size)
        self._stream: Stream = self._open(state)
        self._prefetcher: Prefetcher[StepBatch] | None = None

    @property
    def state(self) -> StreamState:
        """Position after the last batch returned."""
        return self._stream.state if self._prefetcher is None else self._prefetcher.state

    def checkpoint_state(self) -> StreamState:
        """Return the position; a stream has no other state."""
        return self.state

    def next_batch(self) -> StepBatch:
        """Return this rank's rows of the next step."""
        if not self._depth:
            return self._to_step_batch(self._stream.next())
        if self._prefetcher is None:  # started with the first batch, so that a failed start leaves no thread
            self._prefetcher = Prefetcher(self._stream, self._to_step_batch, depth=self._depth)
        return self._prefetcher.next()

    def rollback(self, state: StreamState) -> None:
        """Return to the step of an earlier state; the rows read since are skipped."""
        to_row = self.state.row
        self.close()
        self._stream, self._prefetcher = self._open(state), None
        self._stream.skip(to_row - state.row)

    def close(self) -> None:
        """Stop the thread."""
        if self._prefetcher is not None:
            self._prefetcher.close()


Batches = StreamBatches | LoaderBatches


def open_batches(
    recipe: Recipe, data: TrainingData, topology: Topology, control: Control, saved: Mapping[str, Any] | None = None
) -> Batches:
    """Open this rank's batches, at the start or at a checkpoint's data state; collective.

    Args:
        recipe: Recipe.
        data: Opened data of the recipe.
        topology: Place of this rank.
        control: Control collectives.
        saved: Data state of a checkpoint.

    Raises:
        DataError: the state belongs to other data, or to another order of it.
        LoaderError: a custom loader cannot be created or resumed.
    """
    if recipe.data.source_kind == "loader":
        return LoaderBatches(recipe, topology, control, saved)
    return StreamBatches(recipe, data, topology, None if saved is None else resume_state(recipe, data, saved))
