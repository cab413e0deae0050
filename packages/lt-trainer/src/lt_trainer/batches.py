"""Where a run's rows come from, as the loop asks for them: batch after batch, with a position that can be saved.

Streams of stores, mixtures, buckets and random rows are one kind (`StreamBatches`): their rows are made ahead in a
thread, and the position is that of the last batch handed out. A user's own loader is the other (`loading.py`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from lt_data import Prefetcher, Stream, StreamState
from lt_trainer.data import TrainingData, open_stream, position, step_batch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lt_trainer.control import Control
    from lt_trainer.engine import StepBatch, Topology
    from lt_trainer.recipe import Recipe


class Batches(Protocol):
    """Batch after batch of this rank."""

    @property
    def state(self) -> StreamState:
        """The position after the last batch."""
        ...

    def saved(self) -> StreamState:
        """What a checkpoint keeps: the position and what else is needed to go on; asked by all ranks together."""
        ...

    def next_batch(self) -> StepBatch:
        """This rank's part of the next step."""
        ...

    def go_back(self, state: StreamState) -> None:
        """Take up the step of an earlier state, and go on with the rows behind those that were read since."""
        ...

    def close(self) -> None:
        """End what works ahead."""
        ...


class StreamBatches:
    """A stream's rows as step batches, made ahead in a thread."""

    def __init__(
        self, recipe: Recipe, data: TrainingData, topology: Topology, state: StreamState | None = None
    ) -> None:
        self._open = partial(open_stream, recipe, data, topology)
        self._depth = recipe.data.prefetch
        self._work = partial(step_batch, micro_batch=recipe.batch.micro_batch, seq_len=recipe.data.seq_len)
        self._start(self._open(state))

    def _start(self, stream: Stream) -> None:
        self._stream = stream
        self._ahead: Prefetcher[StepBatch] | None = None

    @property
    def state(self) -> StreamState:
        """The position after the last batch that was handed out."""
        return self._stream.state if self._ahead is None else self._ahead.state

    def saved(self) -> StreamState:
        """The position is all that is needed."""
        return self.state

    def next_batch(self) -> StepBatch:
        """This rank's rows of the next step."""
        if not self._depth:
            return self._work(self._stream.next())
        if self._ahead is None:  # not before the first batch is asked for: a start that fails leaves no thread
            self._ahead = Prefetcher(self._stream, depth=self._depth, work=self._work)
        return self._ahead.next()

    def go_back(self, state: StreamState) -> None:
        """Take up the step of an earlier state; the rows read since are skipped."""
        to_row = self.state.row
        self.close()
        stream = self._open(state)
        stream.skip(to_row - state.row)
        self._start(stream)

    def close(self) -> None:
        """End the thread."""
        if self._ahead is not None:
            self._ahead.close()


def open_batches(
    recipe: Recipe,
    data: TrainingData,
    topology: Topology,
    control: Control,
    saved: Mapping[str, Any] | None = None,
) -> Batches:
    """The batches of this rank, from the start or from where a checkpoint's data state stands; all ranks call it.

    Args:
        recipe: Of the run.
        data: What the recipe names, opened.
        topology: Where this rank stands.
        control: How ranks meet.
        saved: A checkpoint's data state.

    Raises:
        DataError: the state belongs to other data, or to another order of it.
        LoaderError: a loader cannot be made, or cannot go on.
    """
    if recipe.data.kind == "loader":
        from lt_trainer.loading import LoaderBatches

        return LoaderBatches(recipe, topology, control, saved)
    return StreamBatches(recipe, data, topology, None if saved is None else position(saved))
