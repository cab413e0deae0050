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
from lt_trainer.constants import GIB
from lt_trainer.control import Control
from lt_trainer.data.custom_loader import LoaderBatches
from lt_trainer.data.generations import resume_state
from lt_trainer.data.step_parts import PARTS_IN_PASSING, StreamStep, rows_per_part
from lt_trainer.data.training_data import TrainingData, open_stream
from lt_trainer.engine import Topology

STREAM_POSITION_BYTES = 20
"""Four int32 arrays, and the id in the store's dtype."""
LOADER_POSITION_BYTES = 32
"""The loader's items as four int32 arrays, and these joined."""


class StreamBatches:
    """Step batches of a stream, prefetched by a thread."""

    def __init__(
        self, recipe: Recipe, data: TrainingData, topology: Topology, state: StreamState | None = None
    ) -> None:
        self._open = partial(open_stream, recipe, data, topology)
        self._depth, size = recipe.data.prefetch, recipe.batch.micro_batch_size
        self._to_step = partial(StreamStep, micro_batch_size=size, read_ahead=self._depth > 0)
        self._stream: Stream = self._open(state)
        self._prefetcher: Prefetcher[StreamStep] | None = None

    @property
    def state(self) -> StreamState:
        """Position after the last batch returned."""
        return self._stream.state if self._prefetcher is None else self._prefetcher.state

    def checkpoint_state(self) -> StreamState:
        """Return the position; a stream has no other state."""
        return self.state

    def next_batch(self) -> StreamStep:
        """Return this rank's rows of the next step."""
        if not self._depth:
            return self._to_step(self._stream.take())
        if self._prefetcher is None:  # started with the first batch, so that a failed start leaves no thread
            self._prefetcher = Prefetcher(self._stream, self._to_step, depth=self._depth)
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


def describe_held_rows(recipe: Recipe, dp_size: int, *, n_steps: int = 1) -> str:
    """Return how many rows a rank has in a step and how much memory its rows take at most.

    Args:
        recipe: Recipe.
        dp_size: Number of data-parallel ranks.
        n_steps: Steps that are held before the first of them is trained.
    """
    seq_len, n_rows = recipe.data.seq_len, recipe.batch.global_batch_size // dp_size
    if recipe.data.source_kind == "loader":
        n_held, position_bytes, how = n_steps * n_rows, LOADER_POSITION_BYTES, "held together, as of any data.loader"
    else:
        part_rows = rows_per_part(recipe.batch.micro_batch_size, seq_len)
        n_further = PARTS_IN_PASSING if n_rows > part_rows else 0
        n_held = (n_steps + recipe.data.prefetch + n_further) * min(n_rows, part_rows)
        position_bytes, how = STREAM_POSITION_BYTES, "made as they are needed"
    gib = n_held * seq_len * position_bytes / GIB
    return f"{n_rows:,} rows of {seq_len:,} positions a step and rank, {how}: up to {gib:.3g} GiB of host memory"


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
