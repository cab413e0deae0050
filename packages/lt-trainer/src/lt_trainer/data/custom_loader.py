"""Custom data loader: `data.loader = "module:function"`.

The function is called once on every rank, with keyword arguments only:

    function(recipe=..., rank=..., world=..., dp_rank=..., dp_size=..., seed=...)

`recipe` is the recipe as nested tables. It returns an iterable of this dp_rank's rows. Each item has one or more rows:
a mapping or an object with `input_ids` and `labels` ([T] or [n, T], integers), and optionally `position_ids` and
`doc_ids`, as rows of lt-data: a document is a run of equal numbers. Labels are already shifted, -100 where there is
none. Refused are labels that equal the input ids of their own positions, and other keys, such as attention_mask. Ranks
with the same dp_rank must return the same rows: rows are selected by dp_rank, never by rank. Every dp_rank supplies
equally many rows per step, and an item must not cross steps.

An iterable is restarted when it ends; an iterator that ends is an error. A loader with `state_dict` and
`load_state_dict` (JSON-serializable) resumes exactly: its state is saved on every rank with a checkpoint. A loader
without them cannot be resumed, or its rows are read again up to the position (`data.loader_resume`). After a rollback
the loader continues with its next rows.

Every row is validated before training. An error on one rank, also one that the loader raises, ends all ranks in the
collective that sums the labels of the global batch: one small gather per step.

Shapes: M micro-batches, B rows per micro-batch, T positions per row.
"""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lt_data.streaming.rows import Rows
from lt_data.streaming.stream import StreamState
from lt_trainer.config.recipe import to_dict
from lt_trainer.config.sections import Recipe
from lt_trainer.control import Control
from lt_trainer.data.document_boundaries import find_document_starts
from lt_trainer.data.loader_factory import import_loader_factory
from lt_trainer.data.training_data import IGNORE_INDEX, ROW_FIELDS, parse_stream_state, to_micro_batches
from lt_trainer.engine import StepBatch, Topology
from lt_trainer.errors import LoaderError, TrainerError
from lt_trainer.toml import format_value


@dataclass(frozen=True, kw_only=True)
class LoaderState(StreamState):
    """Position with the loader states of all ranks, by dp_rank; none for a loader without state."""

    loader: Mapping[str, Any] = field(default_factory=dict)


class LoaderBatches:
    """Step batches of a custom loader.

    Raises:
        LoaderError: on all ranks, if the loader of one cannot be created or resumed.
    """

    def __init__(self, recipe: Recipe, topology: Topology, control: Control, saved: Mapping[str, Any] | None) -> None:
        self._recipe, self._topology, self._control = recipe, topology, control
        self._ramp = recipe.batch.batch_ramp(recipe.data.seq_len)
        self._rows_read = 0
        """Rows that this rank's loader has returned so far."""
        self._is_shift_checked = False
        self._max_documents_per_row = 1
        """A power of two, so that compiled blocks are recompiled only a few times."""
        self._loader: Any = None
        self._items = self._iterate()
        fingerprint = {"loader": recipe.data.loader, "seq_len": str(recipe.data.seq_len)}
        self.state = StreamState(step=0, row=0, seed=recipe.run.seed, fingerprint=fingerprint)
        self._gather(lambda: self._open_loader(saved))

    def _open_loader(self, saved: Mapping[str, Any] | None) -> None:
        place = dict(vars(self._topology))
        function = import_loader_factory(self._recipe.data.loader)
        self._loader = function(
            recipe=to_dict(self._recipe), seed=self._recipe.run.seed, world=place.pop("world_size"), **place
        )
        if saved is not None:
            self._resume(parse_stream_state(saved), saved.get("loader", {}))
        self._loader_state()  # reject an unserializable state before the first step

    def _resume(self, state: StreamState, states: Mapping[str, Any]) -> None:
        expected, dp_size = self.state, self._topology.dp_size
        self.state, end = state, state.row // dp_size
        before, now = ({**one.fingerprint, "seed": one.seed} for one in (state, expected))
        if before != now:
            raise LoaderError(f"the checkpoint belongs to other rows: {before}, the run's are {now}")
        if len(states) not in (0, dp_size) or state.row % dp_size:
            found = f"{state.row} rows, loader states of {len(states)} data-parallel ranks"
            raise LoaderError(f"the checkpoint ({found}) does not fit {dp_size} data-parallel ranks")
        if states and hasattr(self._loader, "load_state_dict"):
            self._loader.load_state_dict(states[str(self._topology.dp_rank)])
            self._rows_read = end
        elif self._recipe.data.loader_resume == "error":
            raise LoaderError(
                "has no state_dict and load_state_dict, so the run cannot be resumed; implement both, or set "
                "data.loader_resume to 'replay' to read its rows again up to the position"
            )
        for _ in self._read_until(end):
            pass

    def _loader_state(self) -> Any:
        """Return the loader's state; None if it has none."""
        if not (hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")):
            return None
        state = self._loader.state_dict()
        if json.loads(json.dumps(state)) != state:
            raise LoaderError("its state_dict has more than dicts with string keys, lists, numbers and strings")
        return state

    def checkpoint_state(self) -> StreamState:
        """Return position and loader states of all ranks; collective."""
        states = {str(dp_rank): state for dp_rank, state in self._gather(self._loader_state).items()}
        return LoaderState(**vars(self.state), loader={} if None in states.values() else states)

    def next_batch(self) -> StepBatch:
        """Return this rank's rows of the next step, with the label count of all ranks."""
        state, items, recipe = self.state, list[Rows](), self._recipe
        n_rows = recipe.batch.global_batch_size if self._ramp is None else self._ramp.batch_size_at(state.step)

        def read() -> int:
            items.extend(self._read_until(self._rows_read + n_rows // self._topology.dp_size))
            return sum(int((rows.labels != IGNORE_INDEX).sum()) for rows in items)

        n_labels = sum(self._gather(read).values())
        self.state = replace(state, step=state.step + 1, row=state.row + n_rows)
        rows = Rows(*(np.concatenate([getattr(part, name) for part in items]) for name in ROW_FIELDS))
        starts = find_document_starts(rows.doc_ids)
        starts[:, 1:] &= recipe.data.document_mask
        n_documents = int(starts.sum(axis=1).max())
        self._max_documents_per_row = max(self._max_documents_per_row, 1 << (n_documents - 1).bit_length())
        size, bound = recipe.batch.micro_batch_size, self._max_documents_per_row
        return to_micro_batches(rows, np.flatnonzero(starts), bound, micro_batch_size=size, valid_tokens=n_labels)

    def _read_until(self, end: int) -> Iterator[Rows]:
        """Yield the items up to row `end` of this rank, checked, as int32 arrays [n, T]."""
        while self._rows_read < end:
            rows = self._check(next(self._items))
            self._rows_read += len(rows.labels)
            yield rows
            if self._rows_read > end:
                n = len(rows.labels)
                raise LoaderError(f"an item of {n} rows crosses a step boundary, row {end} of this rank's")

    def _iterate(self) -> Generator[Any]:
        """Yield the loader's items; an iterable that has ended is restarted, an iterator or an empty one is not."""
        n_before = -1
        while n_before < self._rows_read and (n_before < 0 or not hasattr(self._loader, "__next__")):
            n_before = self._rows_read
            yield from self._loader
        raise LoaderError(f"ended after {self._rows_read} rows")

    def _check(self, item: Any) -> Rows:
        """Return an item as `_read_until` yields it."""
        row, seq_len, ids = self._rows_read, self._recipe.data.seq_len, (0, self._recipe.model.vocab_size)
        _check_keys(item, row)
        bounds = {"input_ids": ids, "labels": ids, "position_ids": (0, seq_len), "doc_ids": (-1, seq_len)}
        found: dict[str, np.ndarray] = {}
        for name, (low, high) in bounds.items():
            value = item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)
            if value is None and name in ("position_ids", "doc_ids"):
                continue
            array = np.atleast_2d(np.asarray(value))
            n = len(found.get("input_ids", array))
            if array.dtype.kind not in "iu" or array.shape != (n, seq_len) or not n:
                words = "missing" if value is None else f"{array.dtype} {list(np.shape(value))}"
                raise LoaderError(f"row {row}: {name} are {words}; expected integers [{seq_len}] or [n, {seq_len}]")
            found[name] = array = array.astype(np.int64)
            is_label = (name == "labels") & (array == IGNORE_INDEX)
            for i, t in np.argwhere(((array < low) | (array >= high)) & ~is_label)[:1]:
                problem = f"{name} = {array[i, t]} is not in {low}..{high - 1}"
                raise LoaderError(f"row {row + i}, position {t}: {problem}")
        if not self._is_shift_checked:
            self._is_shift_checked = _check_shift(found["input_ids"], found["labels"], row)
        found.setdefault("doc_ids", np.zeros_like(found["input_ids"]))
        try:
            starts = find_document_starts(found["doc_ids"])
        except ValueError as exc:
            raise LoaderError(f"row {row + exc.args[0]}: doc_ids return to an earlier document of the row") from None
        places = np.arange(seq_len)
        found.setdefault("position_ids", places - np.maximum.accumulate(np.where(starts, places, 0), axis=1))
        return Rows(*(found[name].astype(np.int32) for name in ROW_FIELDS))

    def rollback(self, state: StreamState) -> None:
        """Return to the step of an earlier state; the loader continues, so the rows read since are skipped."""
        begin, before = state.row, state.skipped
        if before and before[-1][1] == begin:
            begin, before = before[-1][0], before[:-1]
        self.state = replace(self.state, step=state.step, skipped=(*before, (begin, self.state.row)))

    def close(self) -> None:
        """Close the loader's iterator, if it can be closed."""
        self._items.close()

    def _gather(self, action: Callable[[], Any]) -> dict[int, Any]:
        """Return what `action` returns on each data-parallel rank; collective.

        Raises:
            LoaderError: on all ranks, if `action` failed on one, in the loader's own code or here.
        """
        value, error, failure = None, "", None
        try:
            value = action()
        except Exception as exc:  # noqa: BLE001 - a custom loader may raise anything; it ends all ranks below
            what = str(exc) if isinstance(exc, TrainerError) else f"{type(exc).__name__}: {exc}"
            error, failure = f"after {self._rows_read} rows of dp_rank {self._topology.dp_rank}: {what}", exc
        gathered = self._control.all_gather([self._topology.dp_rank, value, error])
        for _, _, problem in gathered:
            if problem:
                raise LoaderError(f"data.loader = {format_value(self._recipe.data.loader)}, {problem}") from failure
        return {dp_rank: value for dp_rank, value, _ in gathered}


def _check_keys(item: Any, row: int) -> None:
    """Raise LoaderError if a mapping has keys that no row has."""
    if not isinstance(item, Mapping):
        return
    for key in item:
        if key not in ROW_FIELDS:
            expected = "a row has input_ids, labels and, optionally, position_ids and doc_ids"
            raise LoaderError(f"row {row}: unknown key {key}: {expected}; padding is marked by labels of -100 instead")


def _check_shift(input_ids: np.ndarray, labels: np.ndarray, row: int) -> bool:
    """Return whether rows [n, T] have labels to check.

    Raises:
        LoaderError: the labels are the input ids of the same positions, and not those of the next ones.
    """
    has_label = labels != IGNORE_INDEX
    is_same = labels == input_ids
    is_next = labels[:, :-1] == input_ids[:, 1:]
    if has_label.any() and is_same[has_label].all() and not is_next[has_label[:, :-1]].all():
        problem = "labels are equal to input_ids, and a model would learn to repeat its input"
        remedy = "shift them: the label of a position is the input id of the next one, and -100 at the end"
        raise LoaderError(f"row {row}: {problem}; {remedy}")
    return bool(has_label.any())
