"""The endless sequence of training rows, and any data-parallel rank's part of it, from a state of one number.

The global sequence has one row per position p = 0, 1, 2, ...: of one pack, epoch p // n_rows in the order of that
epoch's own keyed permutation, `perm(seed, epoch)(p % n_rows)`; of several, see lt_data.streaming.mixture and
lt_data.streaming.buckets. Step after step takes the next `global_batch` rows; of these, rank r of R takes the r-th of
R equal parts. The sequence depends on neither R nor the batch size (with buckets: not on R), so a run that stops at
position p goes on at p with any of them, and sees each row exactly once per epoch. The state is p, and a fingerprint
so that it never goes on over other data.

Cost: nothing is held or scanned; a batch costs its rows.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from lt_data.errors import DataError
from lt_data.streaming.ramp import BatchRamp
from lt_data.streaming.rows import RowReader, Rows, TokenRows


class RowSource(Protocol):
    """Numbered rows and an endless sequence of them: a `RowReader`, a `Mixture` or `Buckets`."""

    @property
    def n_rows(self) -> int:
        """Positions in which everything is read once, or would be if the weights were those of the sizes."""
        ...

    def fingerprint_at(self, position: int) -> str:
        """What the sequence up to a position is made of: words `key:value`, separated by spaces."""
        ...

    def rows_at(self, position: int, count: int, *, seed: int, shuffle: bool) -> np.ndarray:
        """Numbers of the rows at some positions (int64)."""
        ...

    def epochs_at(self, position: int, count: int) -> np.ndarray:
        """Which pass over its source each of the rows that `rows_at` gives belongs to, from 0 (int64)."""
        ...

    def labels_in(self, rows: np.ndarray) -> int:
        """Positions with a label in some rows together."""
        ...

    def compact(self, rows: np.ndarray) -> TokenRows:
        """Some rows, in this order."""
        ...

    def locate(self, row: int) -> tuple[RowReader, int]:
        """The reader that has a row, and its number there."""
        ...


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """Where a stream stands.

    Attributes:
        step: batches given so far.
        row: position in the global sequence of the next row.
        seed: of the shuffle.
        fingerprint: what the sequence is made of, in words.
        skipped: ranges [start, end) of positions that were jumped over.
    """

    step: int
    row: int
    seed: int
    fingerprint: str
    skipped: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {**asdict(self), "skipped": [list(part) for part in self.skipped]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "StreamState":
        """Read what `to_json` gave.

        Raises:
            DataError: a field is missing, unknown or of another type.
        """
        try:
            state = cls(**{**values, "skipped": tuple((start, end) for start, end in values.get("skipped", ()))})
        except (TypeError, ValueError) as exc:
            raise DataError(f"not the state of a stream ({exc}): {dict(values)!r}") from exc
        numbers = (state.step, state.row, state.seed, *(n for part in state.skipped for n in part))
        if not all(type(n) is int for n in numbers) or min(state.step, state.row) < 0:
            raise DataError(f"not the state of a stream: {dict(values)!r}")
        return state


@dataclass(frozen=True, eq=False)
class StreamBatch:
    """One rank's part of a global batch.

    Attributes:
        tokens: this rank's rows as the store holds them, [global_batch / dp_size, seq_len].
        valid_tokens: positions with a label in the *global* batch.
        row_ids: numbers of this rank's rows in the pack, mixture or buckets (int64).
        step: number of the batch, from 0.
        state: of the stream after this batch.
    """

    tokens: TokenRows
    valid_tokens: int
    row_ids: np.ndarray
    step: int
    state: StreamState

    @cached_property
    def rows(self) -> Rows:
        """The same rows as int32 arrays, made when first asked for."""
        return self.tokens.widen()


class Stream:
    """Batches of one data-parallel rank. Tensor, pipeline and context-parallel peers use the same rank.

    Args:
        reader: the rows: of one pack, a mixture, or buckets.
        global_batch: rows per step over all ranks; with buckets, in rows of the longest bucket.
        ramp: how the batch grows to `global_batch`, by the number of the step; None: it is always that.
        dp_rank: this rank.
        dp_size: ranks that share the batch.
        seed: of the shuffle.
        shuffle: False: the order of the pack, in every epoch.
        state: where to go on; its batch size and ranks may have been others.

    Attributes:
        state: before the next batch.

    Raises:
        DataError: the batch cannot be divided, or the state belongs to another sequence; what differs is named.
    """

    def __init__(
        self,
        reader: RowSource,
        *,
        global_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        state: StreamState | None = None,
        ramp: BatchRamp | None = None,
    ) -> None:
        if global_batch < 1 or dp_size < 1 or global_batch % dp_size:
            raise DataError(
                f"global_batch={global_batch} over dp_size={dp_size} ranks: give a multiple of the ranks, so that all "
                "have the same number of rows"
            )
        if ramp is not None and (ramp.final != global_batch or ramp.start % dp_size or ramp.increment % dp_size):
            raise DataError(
                f"a batch that grows from {ramp.start} by {ramp.increment} to {ramp.final} rows, with "
                f"global_batch={global_batch} over dp_size={dp_size} ranks: it must end at global_batch, and each step "
                "have a multiple of the ranks"
            )
        if not 0 <= dp_rank < dp_size:
            raise DataError(f"dp_rank={dp_rank}: from 0 to dp_size - 1 = {dp_size - 1}")
        if not reader.n_rows:
            raise DataError("the pack has no rows")
        self.reader = reader
        self.global_batch = global_batch
        self.ramp = ramp
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.seed = seed
        self.shuffle = shuffle
        row = state.row if state else 0
        fingerprint = sequence_fingerprint(reader, shuffle=shuffle, position=row)
        self.state = state or StreamState(step=0, row=0, seed=seed, fingerprint=fingerprint)
        _check_same(self.state, seed, fingerprint)
        self.global_rows(self.state, self.batch_rows(self.state.step))  # says now what the first batch would say

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in the rows of the pack; `epoch_remainder` rows are left over.

        A mixture's rows are those of all its sources together; how often each was read tells `Mixture.epochs`.
        """
        return self.reader.n_rows // self.global_batch

    @property
    def epoch_remainder(self) -> int:
        """Rows left over by `steps_per_epoch` batches; not dropped: the next batch takes them first."""
        return self.reader.n_rows % self.global_batch

    def next(self) -> StreamBatch:
        """The next batch of this rank."""
        state = self.state
        rows = self.global_rows(state, self.batch_rows(state.step))
        part = rows.size // self.dp_size
        own = rows[self.dp_rank * part : (self.dp_rank + 1) * part]
        after = self.ahead(1)
        batch = StreamBatch(
            tokens=self.reader.compact(own),
            valid_tokens=self.reader.labels_in(rows),
            row_ids=own,
            step=state.step,
            state=after,
        )
        self.state = after
        return batch

    def skip(self, n_rows: int) -> None:
        """Jump over the next rows of the global sequence, on all ranks alike, and note it in the state."""
        if n_rows < 0:
            raise DataError(f"skip n_rows={n_rows}: at least 0")
        begin, end = self.state.row, self.state.row + n_rows
        skipped = self.state.skipped
        if skipped and skipped[-1][1] == begin:
            begin, skipped = skipped[-1][0], skipped[:-1]
        if n_rows:
            moved = self._moved(self.state, end, skipped=(*skipped, (begin, end)))
            self.global_rows(moved, self.batch_rows(moved.step))  # where no batch can begin nothing is skipped
            self.state = moved

    def ahead(self, batches: int) -> StreamState:
        """The state some batches later, computed; nothing is read and the stream stays where it is."""
        step = self.state.step + batches
        rows = (
            batches * self.global_batch
            if self.ramp is None
            else self.ramp.rows_before(step) - self.ramp.rows_before(self.state.step)
        )
        return self._moved(self.state, self.state.row + rows, step=step)

    def batch_rows(self, step: int) -> int:
        """Rows of a step (from 0) over all ranks; with buckets, in rows of the longest bucket."""
        return self.global_batch if self.ramp is None else self.ramp.rows_of(step)

    def global_rows(self, state: StreamState, n_rows: int) -> np.ndarray:
        """Numbers of the next `n_rows` rows of the global sequence (int64). Changes nothing."""
        return self.reader.rows_at(state.row, n_rows, seed=self.seed, shuffle=self.shuffle)

    def _moved(self, state: StreamState, row: int, **changes: Any) -> StreamState:
        fingerprint = sequence_fingerprint(self.reader, shuffle=self.shuffle, position=row)
        return replace(state, row=row, fingerprint=fingerprint, **changes)


def sequence_fingerprint(reader: RowSource, *, shuffle: bool, position: int = 0) -> str:
    """What a global sequence up to a position is made of, in words: the rows' fingerprint and the kind of order."""
    return f"{reader.fingerprint_at(position)} order:{'shuffled-1' if shuffle else 'pack'}"


def changed_parts(before: str, now: str) -> list[str]:
    """Which parts of a sequence's fingerprint differ, in words; empty when the two are equal."""
    if before == now:
        return []
    old, new = _parts(before), _parts(now)
    keys = [*new, *(key for key in old if key not in new)]
    named = [f"{key}: {old.get(key)} before, {new.get(key)} now" for key in keys if old.get(key) != new.get(key)]
    return named or [f"{before!r} before, {now!r} now"]


def _parts(fingerprint: str) -> dict[str, str]:
    named = (part.partition(":") for part in fingerprint.split())
    return {key: value for key, _, value in named}


def _check_same(state: StreamState, seed: int, fingerprint: str) -> None:
    changed = [f"seed: {state.seed} before, {seed} now"] if state.seed != seed else []
    changed += changed_parts(state.fingerprint, fingerprint)
    if changed:
        raise DataError(
            f"the data state belongs to another sequence of rows ({'; '.join(changed)}): go on with the data and the "
            "seed it was saved with, or start without it"
        )
