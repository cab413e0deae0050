"""Custom data loader: `data.loader = "module:function"`.

The function is called once on every rank, with keyword arguments only:

    function(recipe=..., rank=..., world=..., dp_rank=..., dp_size=..., seed=...)

`recipe` is the recipe as nested tables. It returns an iterable of this dp_rank's rows. Each item has one or more rows:
a mapping or an object with `input_ids` and `labels` ([T] or [n, T], integers), and optionally `position_ids` and
`doc_ids`, as in `lt_data.Rows`: a document is a run of equal numbers. Labels are already shifted, -100 where there is
none. Ranks with the same dp_rank must return the same rows; this is checked. Every dp_rank supplies equally many rows
per step, and an item must not cross steps.

An iterable is restarted when it ends; an iterator that ends is an error. A loader with `state_dict` and
`load_state_dict` (JSON-serializable) resumes exactly: its state is saved on every rank with a checkpoint. A loader
without them cannot be resumed, or its rows are read again up to the position (`data.loader_resume`). After a rollback
the loader continues with its next rows.

Every row is validated before training. An error on one rank ends all ranks, in the collective that sums the labels of
the global batch: one small gather per step.

Shapes: M micro-batches, B rows per micro-batch, T positions per row.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lt_data import Rows, StreamState
from lt_trainer.config.recipe import to_dict
from lt_trainer.data.document_boundaries import find_document_starts
from lt_trainer.data.loader_factory import import_loader_factory
from lt_trainer.data.training_data import IGNORE_INDEX, parse_stream_state, to_micro_batches
from lt_trainer.errors import LoaderError, RecipeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lt_trainer.config.sections.recipe import Recipe
    from lt_trainer.control import Control
    from lt_trainer.engine import StepBatch, Topology

ROW_FIELDS = ("input_ids", "labels", "position_ids", "doc_ids")


@dataclass(frozen=True, kw_only=True)
class LoaderState(StreamState):
    """Position with the loader states of all ranks, by dp_rank."""

    loader: Mapping[str, Any] = field(default_factory=dict)


class LoaderBatches:
    """Step batches of a custom loader.

    Raises:
        LoaderError: on all ranks, if the loader of one cannot be created or resumed.
    """

    def __init__(self, recipe: Recipe, topology: Topology, control: Control, saved: Mapping[str, Any] | None) -> None:
        self._recipe, self._topology, self._control = recipe, topology, control
        self._ramp = recipe.batch.batch_ramp(recipe.data.seq_len)
        self._items: Iterator[Any] | None = None
        self._rows_read = 0
        """Rows that this rank's loader has returned so far."""
        self._max_documents_per_row = 1
        """A power of two, so that compiled blocks are recompiled only a few times."""
        self._loader: Any = None
        self.state = StreamState(step=0, row=0, seed=recipe.run.seed, fingerprint="")
        self._gather_or_raise(lambda: self._create_loader(saved))

    def _create_loader(self, saved: Mapping[str, Any] | None) -> tuple[int, int]:
        recipe, topology = self._recipe, self._topology
        factory = import_loader_factory(recipe.data.loader)
        try:
            self._loader = factory(
                recipe=to_dict(recipe),
                rank=topology.rank,
                world=topology.world_size,
                dp_rank=topology.dp_rank,
                dp_size=topology.dp_size,
                seed=recipe.run.seed,
            )
        except Exception as exc:
            raise self._error(f"raised an error when called: {type(exc).__name__}: {exc}") from exc
        if not hasattr(self._loader, "__iter__"):
            raise self._error(f"returned {type(self._loader).__name__}, which is not iterable")
        fingerprint = f"loader:{recipe.data.loader} seq_len:{recipe.data.seq_len}"
        self.state = replace(self.state, fingerprint=fingerprint)
        if saved is not None:
            self._resume(saved)
        if self._is_stateful:
            self._loader_state()  # reject an unserializable state before the first step
        return 0, 0

    @property
    def _is_stateful(self) -> bool:
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    def _resume(self, saved: Mapping[str, Any]) -> None:
        topology = self._topology
        state = parse_stream_state(saved)
        for name, saved_value, value in (
            ("seed", state.seed, self.state.seed),
            ("rows", state.fingerprint, self.state.fingerprint),
        ):
            if saved_value != value:
                raise self._error(f"the checkpoint belongs to other rows: its {name} is {saved_value}, not {value}")
        states = saved.get("loader", {}).get("states", {})
        self.state = state
        if self._is_stateful and states:
            if len(states) != topology.dp_size:
                raise self._error(
                    f"the checkpoint has loader states of {len(states)} data-parallel ranks, the run has "
                    f"{topology.dp_size}; resume with {len(states)}"
                )
            self._loader.load_state_dict(states[str(topology.dp_rank)])
            self._rows_read = state.row // topology.dp_size
            return
        if self._recipe.data.loader_resume == "error":
            raise self._error(
                "has no state_dict and load_state_dict, so the run cannot be resumed; implement both, or set "
                "data.loader_resume to 'replay' to read its rows again up to the position"
            )
        if state.row % topology.dp_size:
            raise self._error(
                f"the {state.row} rows read so far are not divisible by {topology.dp_size} data-parallel ranks; resume "
                "with as many ranks as before"
            )
        while self._rows_read < state.row // topology.dp_size:
            self._rows_read += len(self._check_item(self._next_item())[0].input_ids)
        if self._rows_read != state.row // topology.dp_size:
            raise self._error(f"an item crosses row {state.row}, the position of the checkpoint, when read again")

    def checkpoint_state(self) -> StreamState:
        """Return position and loader states of all ranks; collective."""
        own = {"dp_rank": self._topology.dp_rank, "state": self._loader_state() if self._is_stateful else None}
        states = {str(entry["dp_rank"]): entry["state"] for entry in self._control.all_gather(own)}
        known = {name: states[name] for name in sorted(states, key=int) if states[name] is not None}
        return LoaderState(**vars(self.state), loader={"states": known} if known else {})

    def _loader_state(self) -> Any:
        state = self._loader.state_dict()
        try:
            if json.loads(json.dumps(state)) == state:
                return state
        except (TypeError, ValueError):
            pass
        raise self._error(
            "its state_dict is not JSON-serializable; return dicts with string keys, lists, numbers, strings"
        )

    def next_batch(self) -> StepBatch:
        """Return this rank's rows of the next step, with the label count of all ranks."""
        rows: list[tuple[Rows, np.ndarray]] = []
        total = self._gather_or_raise(lambda: self._read_step_rows(rows))
        state, n_rows = self.state, self._rows_per_step
        if not total:
            raise self._error(f"step {state.step + 1} has no labels on any rank")
        self.state = replace(state, step=state.step + 1, row=state.row + n_rows)
        joined = Rows(*(np.concatenate([getattr(part, name) for part, _ in rows]) for name in ROW_FIELDS))
        starts = np.concatenate([part_starts for _, part_starts in rows])
        if not self._recipe.data.document_mask:
            starts[:, 1:] = False
        n_documents = int(starts.sum(axis=1).max())
        self._max_documents_per_row = max(self._max_documents_per_row, 1 << (n_documents - 1).bit_length())
        return to_micro_batches(
            joined,
            np.flatnonzero(starts),
            self._max_documents_per_row,
            micro_batch_size=self._recipe.batch.micro_batch_size,
            valid_tokens=total,
        )

    @property
    def _rows_per_step(self) -> int:
        return self._recipe.batch.global_batch_size if self._ramp is None else self._ramp.batch_size_at(self.state.step)

    def _read_step_rows(self, into: list[tuple[Rows, np.ndarray]]) -> tuple[int, int]:
        """Append this rank's rows of a step to `into`; return their number of labels and a checksum."""
        wanted = self._rows_per_step // self._topology.dp_size
        labels = n_rows = checksum = 0
        while n_rows < wanted:
            rows, starts = self._check_item(self._next_item())
            n = len(rows.input_ids)
            if n_rows + n > wanted:
                raise self._error(
                    f"an item of {n} rows crosses a step boundary (steps take {wanted} rows per data-parallel rank); "
                    "return single rows, or a divisor of that number"
                )
            into.append((rows, starts))
            n_rows, self._rows_read = n_rows + n, self._rows_read + n
            labels += int((rows.labels != IGNORE_INDEX).sum())
            for name in ROW_FIELDS:
                checksum = zlib.crc32(getattr(rows, name), checksum)
        return labels, checksum

    def _next_item(self) -> Any:
        """Return the next item; restart an iterable that has ended."""
        for is_restarted in (False, True):
            if self._items is None:
                self._items = iter(self._loader)
            try:
                return next(self._items)
            except StopIteration:
                is_iterator = self._items is self._loader
                self._items = None
                if is_restarted or is_iterator:
                    raise self._error(f"ended after {self._rows_read} rows") from None
            except Exception as exc:
                raise self._error(f"failed at row {self._rows_read}: {type(exc).__name__}: {exc}") from exc
        raise AssertionError("the second iteration returns or raises")

    def _check_item(self, item: Any) -> tuple[Rows, np.ndarray]:
        """Return an item as int32 arrays [n, T], and its document starts (bool [n, T]).

        Raises:
            LoaderError: names the row, counted from this rank's first.
        """
        row, seq_len, vocab = self._rows_read, self._recipe.data.seq_len, self._recipe.model.vocab_size
        arrays = {name: self._array(item, name, row) for name in ROW_FIELDS}
        ids, labels = arrays["input_ids"], arrays["labels"]
        if ids is None or labels is None:
            name = "input_ids" if ids is None else "labels"
            raise self._error(f"row {row} has no {name}")
        if ids.ndim != 2 or ids.shape[1] != seq_len or not len(ids):
            shape = list(np.shape(_get_field(item, "input_ids")))
            raise self._error(f"row {row}: input_ids have shape {shape}; expected [{seq_len}] or [n, {seq_len}]")
        docs = arrays["doc_ids"]
        if docs is None:
            docs = np.zeros(ids.shape, np.int64)
        positions = arrays["position_ids"]
        lows = {"input_ids": 0, "labels": IGNORE_INDEX, "position_ids": 0, "doc_ids": -1}
        highs = {"input_ids": vocab, "labels": vocab, "position_ids": seq_len, "doc_ids": seq_len}
        found = dict(
            zip(ROW_FIELDS, (ids, labels, np.zeros_like(ids) if positions is None else positions, docs), strict=True)
        )
        for name, array in found.items():
            if array.shape != ids.shape:
                raise self._error(f"row {row}: {name} differ in shape from input_ids")
            is_invalid = (array < lows[name]) | (array >= highs[name])
            if name == "labels":
                is_invalid |= (array < 0) & (array != IGNORE_INDEX)
            if is_invalid.any():
                i, t = (int(index) for index in np.argwhere(is_invalid)[0])
                also = f" (or {IGNORE_INDEX})" if name == "labels" else ""
                low = 0 if name == "labels" else lows[name]
                raise self._error(
                    f"row {row + i}, position {t}: {name} = {int(array[i, t])} is not in {low}..{highs[name] - 1}{also}"
                )
        try:
            starts = find_document_starts(docs)
        except ValueError as exc:
            problem = "doc_ids return to an earlier document of the row; number each document once"
            raise self._error(f"row {row + exc.args[0]}: {problem}") from None
        if positions is None:
            found["position_ids"] = _document_positions(starts)
        return Rows(*(found[name].astype(np.int32) for name in ROW_FIELDS)), starts

    def _array(self, item: Any, name: str, row: int) -> np.ndarray | None:
        """Return a field as integers [n, T]; None if the item does not have it."""
        value = _get_field(item, name)
        if value is None:
            return None
        array = np.asarray(value)
        if array.dtype.kind not in "iu":
            raise self._error(f"row {row}: {name} have dtype {array.dtype}; expected integers")
        return (array[None] if array.ndim == 1 else array).astype(np.int64)

    def rollback(self, state: StreamState) -> None:
        """Return to the step of an earlier state; the loader continues, so the rows read since are skipped."""
        begin, end = state.row, self.state.row
        before = state.skipped
        if before and before[-1][1] == begin:
            begin, before = before[-1][0], before[:-1]
        self.state = replace(self.state, step=state.step, skipped=(*before, (begin, end)))

    def close(self) -> None:
        """Close the iterator, if it can be closed."""
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
        self._items = None

    def _gather_or_raise(self, action: Callable[[], tuple[int, int]]) -> int:
        """Return the sum of the labels that `action` counts, over the data-parallel ranks; collective.

        Raises:
            LoaderError: on all ranks, if `action` failed on one, or ranks with the same dp_rank have different rows.
        """
        failure: LoaderError | RecipeError | None = None
        labels, checksum, error = 0, 0, ""
        try:
            labels, checksum = action()
        except (LoaderError, RecipeError) as exc:
            failure, error = exc, str(exc)
        own = {"dp_rank": self._topology.dp_rank, "rows": [labels, checksum], "error": error}
        gathered = self._control.all_gather(own)
        if failure is not None:
            raise failure
        first: dict[int, int] = {}
        for rank, entry in enumerate(gathered):
            if entry["error"]:
                raise LoaderError(f"rank {rank}: {entry['error']}")
            peer = first.setdefault(entry["dp_rank"], rank)
            if entry["rows"] != gathered[peer]["rows"]:
                raise self._error(
                    f"ranks {peer} and {rank} have the same dp_rank {entry['dp_rank']}, but their loaders returned "
                    f"different rows for step {self.state.step + 1}; select rows by dp_rank, not by rank"
                )
        return sum(gathered[rank]["rows"][0] for rank in first.values())

    def _error(self, text: str) -> LoaderError:
        return LoaderError(f"data.loader = {self._recipe.data.loader!r}, dp_rank {self._topology.dp_rank}: {text}")


def _get_field(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _document_positions(starts: np.ndarray) -> np.ndarray:
    """Return positions relative to each document's start, from document starts (bool [n, T])."""
    places = np.arange(starts.shape[1])
    return places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
