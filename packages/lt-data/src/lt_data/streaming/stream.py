"""Endless sequence of training rows, sharded over data-parallel ranks, whose state is one position.

The global sequence has one row per position p = 0, 1, 2, ...: for one pack the row `perm(seed, epoch)(p % n_rows)` of
epoch p // n_rows, with a keyed permutation per epoch; for several see lt_data.streaming.mixture. Each step takes the
next `global_batch_size` rows. The sequence depends on neither the number of ranks nor the batch size, so a run that
stops at position p resumes at p with other values of them, and reads each row exactly once per epoch. The state is p,
and a fingerprint that prevents resuming with other data.

A step's rows are dealt micro-step by micro-step: with micro-batches of B rows, micro-step k has its rows k B R to
(k + 1) B R, and rank r of R the r-th B of these. So what joins the rows of a micro-step, such as a balancing loss of
experts, joins the same ones wherever B R is the same. Without a micro-batch size a step is one micro-step.

Cost: nothing is stored or scanned; a batch costs its rows.
"""

import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import numpy as np

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.streaming.ramp import BatchRamp
from lt_data.streaming.rows import RowReader, Rows, TokenRows


class RowSource(Protocol):
    """Numbered rows in an endless sequence: a `RowReader` or a `Mixture`."""

    @property
    def n_rows(self) -> int:
        """Positions of one epoch, or of one epoch with weights proportional to the sizes."""
        ...

    @property
    def seq_len(self) -> int:
        """Tokens in a row."""
        ...

    def fingerprint_at(self, position: int) -> Mapping[str, str]:
        """Return the fingerprint of the sequence up to a position: what its rows and their order depend on."""
        ...

    def rows_at(self, position: int, count: int, *, seed: int, shuffle: bool) -> np.ndarray:
        """Return the row indices at `count` positions (int64)."""
        ...

    def epochs_at(self, position: int, count: int) -> np.ndarray:
        """Return the epoch of its source, from 0, of each row that `rows_at` returns (int64)."""
        ...

    def count_labels(self, rows: np.ndarray) -> int:
        """Return the total number of labels in some rows."""
        ...

    def read_token_rows(self, rows: np.ndarray) -> TokenRows:
        """Read some rows, in this order."""
        ...

    def locate(self, row: int) -> tuple[str, RowReader, int]:
        """Return the source of a row ("" if there is only one), its reader, and the row index there."""
        ...


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """State of a stream.

    Attributes:
        step: batches so far.
        row: position of the next row in the global sequence.
        seed: seed of the shuffle.
        fingerprint: fingerprint of the sequence up to `row`.
        skipped: ranges [start, end) of skipped positions.
    """

    step: int
    row: int
    seed: int
    fingerprint: Mapping[str, str] = field(hash=False)
    skipped: tuple[tuple[int, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {**asdict(self), "skipped": [list(part) for part in self.skipped]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StreamState":
        """Restore a state from the values of `to_dict`.

        Raises:
            DataError: a field is missing, unknown, of another type or negative.
        """
        state = strict_json.parse(cls, values, "not the state of a stream", "give what to_dict returned")
        if not all(0 <= n < 2**62 for n in (state.step, state.row, *chain(*state.skipped))):
            raise DataError(f"not the state of a stream: {values!r}; give what to_dict returned")
        return state


@dataclass(frozen=True, eq=False)
class StreamBatch:
    """One rank's part of a global batch.

        >>> batch = Stream(rows, global_batch_size=8, dp_size=2).next()
        >>> batch.rows.input_ids.shape, batch.row_ids.size, batch.step
        ((4, 64), 4, 0)

    Attributes:
        reader: where its rows are read from.
        valid_tokens: positions with a label in the *global* batch; 0: there is nothing to train on.
        row_ids: indices of this rank's rows in the pack or mixture, by micro-batch (int64).
        step: index of the batch, from 0.
        state: state of the stream after this batch.
    """

    reader: RowSource
    valid_tokens: int
    row_ids: np.ndarray
    step: int
    state: StreamState

    def read(self, rows: slice) -> TokenRows:
        """Read some of this rank's rows, in the store's dtype."""
        return self.reader.read_token_rows(self.row_ids[rows])

    @cached_property
    def tokens(self) -> TokenRows:
        """All of this rank's rows in the store's dtype [n, seq_len]; `next` has read them."""
        return self.read(slice(None))

    @cached_property
    def rows(self) -> Rows:
        """The same rows as int32 arrays, converted on first access."""
        return self.tokens.to_int32()


class Stream:
    """Batches of one data-parallel rank. Tensor, pipeline and context-parallel peers use the same rank.

        >>> stream = Stream(rows, global_batch_size=8, dp_rank=0, dp_size=2, seed=1)
        >>> stream.next().rows.input_ids.shape
        (4, 64)
        >>> Stream(rows, global_batch_size=16, seed=1, state=stream.state).state.row  # goes on there
        8

    Args:
        reader: the rows: one pack or a mixture.
        global_batch_size: rows per step over all ranks.
        ramp: batch size ramp-up to `global_batch_size`; None: a constant batch size.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.
        micro_batch_size: rows of a rank's micro-batch, of which a rank's rows are a multiple; None: all its rows.
        seed: seed of the shuffle.
        shuffle: False: the order of the pack, in every epoch.
        state: state to resume from, or the values of its `to_dict`; its batch size and number of ranks may differ.

    Attributes:
        state: state before the next batch.

    Iterating over it yields the batches of `next`, without end.

    Raises:
        DataError: a number is not an integer, the batch cannot be divided, or the state belongs to another sequence;
            the message names the differences.
    """

    def __init__(
        self,
        reader: RowSource,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        state: StreamState | Mapping[str, Any] | None = None,
        ramp: BatchRamp | None = None,
    ) -> None:
        global_batch_size = _integer("global_batch_size", global_batch_size)
        dp_rank, dp_size, seed = (
            _integer(name, value) for name, value in (("dp_rank", dp_rank), ("dp_size", dp_size), ("seed", seed))
        )
        unit, unit_name = dp_size, f"dp_size = {dp_size}"
        if micro_batch_size is not None:
            micro_batch_size = _integer("micro_batch_size", micro_batch_size)
            unit, unit_name = dp_size * micro_batch_size, f"{unit_name} x micro_batch_size = {micro_batch_size}"
        if global_batch_size < 1 or unit < 1 or global_batch_size % unit:
            raise DataError(
                f"global_batch_size = {global_batch_size}: must be a positive multiple of {unit_name}, so that "
                "all ranks have the same number of rows"
            )
        if ramp is not None and (ramp.final != global_batch_size or ramp.start % unit or ramp.increment % unit):
            raise DataError(
                f"batch ramp from {ramp.start} by {ramp.increment} to {ramp.final} rows: it must end at "
                f"global_batch_size = {global_batch_size}, with a multiple of {unit_name} rows in each step"
            )
        if not 0 <= dp_rank < dp_size:
            raise DataError(f"dp_rank = {dp_rank}: from 0 to dp_size - 1 = {dp_size - 1}")
        if not reader.n_rows:
            raise DataError("the pack has no rows")
        self.reader = reader
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.ramp = ramp
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.seed = seed
        self.shuffle = shuffle
        if state is None:
            state = StreamState(step=0, row=0, seed=seed, fingerprint=sequence_fingerprint(reader, shuffle=shuffle))
        self.restore(state)

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in the rows of the pack; `epoch_remainder` rows remain.

        A mixture's rows are those of all its sources; `Mixture.epochs` returns the epochs of each source.
        """
        return self.reader.n_rows // self.global_batch_size

    @property
    def epoch_remainder(self) -> int:
        """Rows that remain after `steps_per_epoch` batches; the next batch begins with them."""
        return self.reader.n_rows % self.global_batch_size

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> StreamBatch:
        return self.next()

    def next(self) -> StreamBatch:
        """Return the next batch of this rank, whose rows have been read."""
        batch = self._next_batch()
        assert batch.tokens is not None  # read before the state moves on
        self.state = batch.state
        return batch

    def take(self) -> StreamBatch:
        """Return the next batch of this rank, whose rows are read when they are asked for."""
        batch = self._next_batch()
        self.state = batch.state
        return batch

    def _next_batch(self) -> StreamBatch:
        state = self.state
        rows = self.global_rows(state, self.batch_size_at(state.step))
        own = rows[self.ranks_of_rows(rows.size) == self.dp_rank]
        return StreamBatch(
            reader=self.reader,
            valid_tokens=self.reader.count_labels(rows),
            row_ids=own,
            step=state.step,
            state=self.state_after(1),
        )

    def skip(self, n_rows: int) -> None:
        """Skip the next rows of the global sequence, the same on all ranks, and record it in the state."""
        n_rows = _integer("skip n_rows", n_rows)
        if n_rows < 0:
            raise DataError(f"skip n_rows = {n_rows}: at least 0")
        begin, end = self.state.row, self.state.row + n_rows
        skipped = self.state.skipped
        if skipped and skipped[-1][1] == begin:
            begin, skipped = skipped[-1][0], skipped[:-1]
        if n_rows:
            moved = self._advance(self.state, end, skipped=(*skipped, (begin, end)))
            self.global_rows(
                moved, self.batch_size_at(moved.step)
            )  # raises, and skips nothing, where no batch can begin
            self.state = moved

    def restore(self, state: StreamState | Mapping[str, Any]) -> None:
        """Continue at a state, also one of another batch size or number of ranks.

        Raises:
            DataError: not a state, one of another sequence, or no batch can begin there; the stream stays where it is.
        """
        if not isinstance(state, StreamState):
            state = StreamState.from_dict(state)
        now = {"seed": str(self.seed), **sequence_fingerprint(self.reader, shuffle=self.shuffle, position=state.row)}
        before = {"seed": str(state.seed), **state.fingerprint}
        changed = [
            f"{key}: {before.get(key)} before, {now.get(key)} now"
            for key in {**now, **before}
            if before.get(key) != now.get(key)
        ]
        if changed:
            raise DataError(
                f"the data state belongs to another sequence of rows ({'; '.join(changed)}): resume with the data and "
                "seed that it was saved with, or start without it"
            )
        self.global_rows(state, self.batch_size_at(state.step))
        self.state = state

    def state_after(self, n_batches: int) -> StreamState:
        """Return the state `n_batches` later; reads nothing and does not advance the stream."""
        n_batches = _integer("n_batches", n_batches)
        step = self.state.step + n_batches
        rows = (
            n_batches * self.global_batch_size
            if self.ramp is None
            else self.ramp.rows_before(step) - self.ramp.rows_before(self.state.step)
        )
        return self._advance(self.state, self.state.row + rows, step=step)

    def batch_size_at(self, step: int) -> int:
        """Return the rows of a step (from 0) over all ranks."""
        return self.global_batch_size if self.ramp is None else self.ramp.batch_size_at(step)

    def ranks_of_rows(self, n_rows: int) -> np.ndarray:
        """Return the data-parallel rank that reads each of the rows of a step (int64 [n_rows])."""
        micro_batch_size = self.micro_batch_size or n_rows // self.dp_size
        return np.arange(n_rows) // micro_batch_size % self.dp_size

    def global_rows(self, state: StreamState, n_rows: int) -> np.ndarray:
        """Return the indices of the next `n_rows` rows of the global sequence (int64)."""
        return self.reader.rows_at(state.row, n_rows, seed=self.seed, shuffle=self.shuffle)

    def _advance(self, state: StreamState, row: int, **changes: Any) -> StreamState:
        fingerprint = sequence_fingerprint(self.reader, shuffle=self.shuffle, position=row)
        return replace(state, row=int(row), fingerprint=fingerprint, **changes)


def _integer(name: str, value: int) -> int:
    """Return an integer of any kind, such as numpy's, as an int, which JSON can hold."""
    try:
        return int(operator.index(value))
    except TypeError as exc:
        raise DataError(f"{name} = {value!r}: give an integer") from exc


def sequence_fingerprint(reader: RowSource, *, shuffle: bool, position: int = 0) -> dict[str, str]:
    """Return the fingerprint of a global sequence up to a position: rows and order."""
    return {**reader.fingerprint_at(position), "order": "shuffled-1" if shuffle else "pack"}
