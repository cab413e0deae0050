"""A loader of the user's own: `data.loader = "module:function"`.

The function is called once on every rank, with keywords alone:

    function(recipe=..., rank=..., world=..., dp_rank=..., dp_size=..., seed=...)

`recipe` is the whole recipe as nested tables. It returns an iterable of this dp_rank's rows, each item one row or
several: a mapping, or an object, with `input_ids` and `labels` ([T], or [n, T]; whole numbers), and if it likes
`position_ids` and `doc_ids`, which mean what they mean in `lt_data.Rows`. Labels are those to predict at each
position, shifted already, -100 where there is none. Ranks that share a dp_rank must give the same rows, which is
checked. A step takes as many rows from each dp_rank, and items must not cross steps.

An iterable that ends is walked again from its beginning; an iterator that ends is an error. An object with `state_dict`
and `load_state_dict` (values that JSON can hold) goes on exactly: its state is taken on every rank when a checkpoint is
saved. One without is refused when a run goes on, or its rows are read again up to the position (`data.loader_resume`).
After a way back the loader just goes on: the rows behind those that led astray are the next ones.

Every row is checked before it is trained on. What is wrong on one rank ends all of them, in the exchange that adds up
the labels of the global batch: one small gather per step.

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
from lt_trainer.data import IGNORE, micro_batches, position
from lt_trainer.errors import LoaderError, RecipeError
from lt_trainer.loader_factory import find_factory
from lt_trainer.recipe import to_dict

if TYPE_CHECKING:
    from collections.abc import Callable

    from lt_trainer.control import Control
    from lt_trainer.engine import StepBatch, Topology
    from lt_trainer.recipe import Recipe

FIELDS = ("input_ids", "labels", "position_ids", "doc_ids")


@dataclass(frozen=True, kw_only=True)
class LoaderState(StreamState):
    """A position with the states of all ranks' loaders: by dp_rank, None for a loader that has none."""

    loader: Mapping[str, Any] = field(default_factory=dict)


class LoaderBatches:
    """The rows of a user's loader as step batches.

    Raises:
        LoaderError: on all ranks, where one's loader cannot be made, or cannot go on where the state stands.
    """

    def __init__(self, recipe: Recipe, topology: Topology, control: Control, saved: Mapping[str, Any] | None) -> None:
        self._recipe, self._topology, self._control = recipe, topology, control
        self._ramp = recipe.batch.grows(recipe.data.seq_len)
        self._items: Iterator[Any] | None = None
        self._drawn = 0
        """Rows that this rank's loader has given, since its first."""
        self._loader: Any = None
        self.state = StreamState(step=0, row=0, seed=recipe.run.seed, fingerprint="")
        self._together(lambda: self._make(saved))

    def _make(self, saved: Mapping[str, Any] | None) -> tuple[int, int]:
        recipe, topology = self._recipe, self._topology
        factory = find_factory(recipe.data.loader)
        try:
            self._loader = factory(
                recipe=to_dict(recipe),
                rank=topology.rank,
                world=topology.world,
                dp_rank=topology.dp_rank,
                dp_size=topology.dp_size,
                seed=recipe.run.seed,
            )
        except Exception as exc:
            raise self._error(f"failed when it was called: {type(exc).__name__}: {exc}") from exc
        if not hasattr(self._loader, "__iter__"):
            raise self._error(f"gave {type(self._loader).__name__}, which cannot be iterated over")
        fingerprint = f"loader:{recipe.data.loader} seq_len:{recipe.data.seq_len}"
        self.state = replace(self.state, fingerprint=fingerprint)
        if saved is not None:
            self._go_on(saved)
        if self._stateful:
            self._own_state()  # what cannot be saved is said before the first step
        return 0, 0

    @property
    def _stateful(self) -> bool:
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    def _go_on(self, saved: Mapping[str, Any]) -> None:
        topology = self._topology
        state = position(saved)
        for what, there, here in (
            ("seed", state.seed, self.state.seed),
            ("rows", state.fingerprint, self.state.fingerprint),
        ):
            if there != here:
                raise self._error(f"the checkpoint belongs to other rows: {what} {there} there, {here} here")
        states = saved.get("loader", {}).get("states", {})
        self.state = state
        if self._stateful and states:
            if len(states) != topology.dp_size:
                raise self._error(
                    f"the checkpoint holds the states of {len(states)} data-parallel ranks, and the run has "
                    f"{topology.dp_size}: go on with {len(states)}"
                )
            self._loader.load_state_dict(states[str(topology.dp_rank)])
            self._drawn = state.row // topology.dp_size
            return
        if self._recipe.data.loader_resume == "refuse":
            raise self._error(
                "has no state_dict and load_state_dict, so that a run cannot go on where it stopped: give it both, or "
                "set data.loader_resume to 'replay' to read its rows again up to there"
            )
        if state.row % topology.dp_size:
            raise self._error(
                f"{state.row} rows were read, which {topology.dp_size} data-parallel ranks cannot have shared: go on "
                "with as many ranks as before"
            )
        while self._drawn < state.row // topology.dp_size:
            self._drawn += len(self._checked(self._item()).input_ids)
        if self._drawn != state.row // topology.dp_size:
            raise self._error(f"its items cross the border of {state.row} rows when they are read again")

    def saved(self) -> StreamState:
        """The position and every rank's own state; all ranks ask."""
        own = {"dp_rank": self._topology.dp_rank, "state": self._own_state() if self._stateful else None}
        states = {str(one["dp_rank"]): one["state"] for one in self._control.gather(own)}
        known = {name: states[name] for name in sorted(states, key=int) if states[name] is not None}
        return LoaderState(**vars(self.state), loader={"states": known} if known else {})

    def _own_state(self) -> Any:
        state = self._loader.state_dict()
        try:
            if json.loads(json.dumps(state)) == state:
                return state
        except (TypeError, ValueError):
            pass
        raise self._error("its state_dict holds what JSON cannot: give back dicts with text keys, lists, numbers, text")

    def next_batch(self) -> StepBatch:
        """This rank's rows of the next step; the labels of all ranks are counted."""
        rows: list[Rows] = []
        total = self._together(lambda: self._draw(rows))
        state, n_rows = self.state, self._rows_of_step
        if not total:
            raise self._error(f"no position of step {state.step + 1} has a label, on any rank")
        self.state = replace(state, step=state.step + 1, row=state.row + n_rows)
        joined = Rows(*(np.concatenate([getattr(part, name) for part in rows]) for name in FIELDS))
        return micro_batches(joined, self._recipe.batch.micro_batch, total)

    @property
    def _rows_of_step(self) -> int:
        return self._recipe.batch.global_batch if self._ramp is None else self._ramp.rows_of(self.state.step)

    def _draw(self, into: list[Rows]) -> tuple[int, int]:
        """Take this rank's rows of a step; returns how many positions have a label, and a checksum of the rows."""
        wanted = self._rows_of_step // self._topology.dp_size
        labels = have = checksum = 0
        while have < wanted:
            rows = self._checked(self._item())
            n = len(rows.input_ids)
            if have + n > wanted:
                raise self._error(
                    f"an item of {n} rows crosses the border of a step, which takes {wanted} rows of each "
                    "data-parallel rank: give rows one by one, or a divisor of that at a time"
                )
            into.append(rows)
            have, self._drawn = have + n, self._drawn + n
            labels += int((rows.labels != IGNORE).sum())
            for name in FIELDS:
                checksum = zlib.crc32(getattr(rows, name), checksum)
        return labels, checksum

    def _item(self) -> Any:
        """The next item; an iterable that has ended is walked again."""
        for again in (False, True):
            if self._items is None:
                self._items = iter(self._loader)
            try:
                return next(self._items)
            except StopIteration:
                once = self._items is self._loader
                self._items = None
                if again or once:
                    raise self._error(f"ended after {self._drawn} rows") from None
            except Exception as exc:
                raise self._error(f"failed at row {self._drawn}: {type(exc).__name__}: {exc}") from exc
        raise AssertionError("the second round returns or raises")

    def _checked(self, item: Any) -> Rows:
        """An item as int32 arrays [n, T].

        Raises:
            LoaderError: naming the row, counted from this rank's first.
        """
        row, seq_len, vocab = self._drawn, self._recipe.data.seq_len, self._recipe.model.vocab_size
        arrays = {name: self._array(item, name, row) for name in FIELDS}
        ids, labels = arrays["input_ids"], arrays["labels"]
        if ids is None or labels is None:
            name = "input_ids" if ids is None else "labels"
            raise self._error(f"row {row} has no {name}")
        if ids.ndim != 2 or ids.shape[1] != seq_len or not len(ids):
            shape = list(np.shape(_part(item, "input_ids")))
            raise self._error(f"row {row}: input_ids have the shape {shape}; give [{seq_len}] or [n, {seq_len}]")
        docs = arrays["doc_ids"]
        if docs is None:
            docs = np.zeros(ids.shape, np.int64)
        positions = arrays["position_ids"]
        if positions is None:
            positions = _positions(docs) if docs.shape == ids.shape else docs
        lows = {"input_ids": 0, "labels": IGNORE, "position_ids": 0, "doc_ids": -1}
        highs = {"input_ids": vocab, "labels": vocab, "position_ids": seq_len, "doc_ids": seq_len}
        found = dict(zip(FIELDS, (ids, labels, positions, docs), strict=True))
        for name, array in found.items():
            if array.shape != ids.shape:
                raise self._error(f"row {row}: {name} have another shape than input_ids")
            wrong = (array < lows[name]) | (array >= highs[name])
            if name == "labels":
                wrong |= (array < 0) & (array != IGNORE)
            if wrong.any():
                i, t = (int(place) for place in np.argwhere(wrong)[0])
                also = f" (or {IGNORE})" if name == "labels" else ""
                low = 0 if name == "labels" else lows[name]
                raise self._error(
                    f"row {row + i}, position {t}: {name} = {int(array[i, t])}, which is not in "
                    f"{low}..{highs[name] - 1}{also}"
                )
        return Rows(*(found[name].astype(np.int32) for name in FIELDS))

    def _array(self, item: Any, name: str, row: int) -> np.ndarray | None:
        """One field as whole numbers [n, T]; None where the item does not have it."""
        part = _part(item, name)
        if part is None:
            return None
        array = np.asarray(part)
        if array.dtype.kind not in "iu":
            raise self._error(f"row {row}: {name} are of type {array.dtype}; give whole numbers")
        return (array[None] if array.ndim == 1 else array).astype(np.int64)

    def go_back(self, state: StreamState) -> None:
        """Take up the step of an earlier state; the loader goes on, so the rows read since are skipped."""
        begin, end = state.row, self.state.row
        before = state.skipped
        if before and before[-1][1] == begin:
            begin, before = before[-1][0], before[:-1]
        self.state = replace(self.state, step=state.step, skipped=(*before, (begin, end)))

    def close(self) -> None:
        """Close the iterator, where it can be."""
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
        self._items = None

    def _together(self, action: Callable[[], tuple[int, int]]) -> int:
        """The sum of the labels that `action` counts over the data-parallel ranks; all ranks call it.

        Raises:
            LoaderError: on all ranks, when one's action has failed, or ranks that share a dp_rank have other rows.
        """
        failure: LoaderError | RecipeError | None = None
        labels, checksum, word = 0, 0, ""
        try:
            labels, checksum = action()
        except (LoaderError, RecipeError) as exc:
            failure, word = exc, str(exc)
        mine = {"dp_rank": self._topology.dp_rank, "rows": [labels, checksum], "error": word}
        found = self._control.gather(mine)
        if failure is not None:
            raise failure
        first: dict[int, int] = {}
        for rank, one in enumerate(found):
            if one["error"]:
                raise LoaderError(f"rank {rank}: {one['error']}")
            peer = first.setdefault(one["dp_rank"], rank)
            if one["rows"] != found[peer]["rows"]:
                raise self._error(
                    f"ranks {peer} and {rank} share the data-parallel rank {one['dp_rank']}, and their loaders gave "
                    f"different rows for step {self.state.step + 1}: choose rows by dp_rank, not by rank"
                )
        return sum(found[rank]["rows"][0] for rank in first.values())

    def _error(self, text: str) -> LoaderError:
        return LoaderError(f"data.loader = {self._recipe.data.loader!r}, dp_rank {self._topology.dp_rank}: {text}")


def _part(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _positions(docs: np.ndarray) -> np.ndarray:
    """Positions counted from each document's first, for numbers of documents [n, T]."""
    places = np.arange(docs.shape[1])
    starts = np.ones(docs.shape, bool)
    starts[:, 1:] = docs[:, 1:] != docs[:, :-1]
    return places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
