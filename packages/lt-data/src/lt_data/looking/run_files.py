"""What step N of a training run read, from the files of its run directory and the store.

Two files are read, as documented data:

    RUN/recipe.json     {"recipe": {...}}: data.store, data.seq_len, data.pack, data.document_mask, data.shuffle
    RUN/events.jsonl    one JSON object per line; those with "event": "data" say where the run stood in the sequence

A `data` event is written at every start, resume and rewind. From its `step` S (steps done so far) and `row` R on, step
S + k reads the positions R + (k - 1) B to R + k B - 1 of the global sequence, B its `global_batch`. A later event takes
over from its own step on, also where that is an earlier step than the run had reached; so for step N the last event in
file order with `step` < N decides. Its fingerprint must be that of the rows found now.

Where the batch grows, the event has a `ramp` (lt_data.BatchRamp as JSON), and step S + k reads as many rows as it says.
Where the rows are not those of one pack, the event's `rows` say what they are:

    {"kind": "mixture", "stores": {NAME: FOLDER}, "phases": [{"from_row": 0, "weights": {NAME: W}}], "max_epochs": {}}
    {"kind": "buckets", "store": FOLDER, "shortest": TOKENS, "phases": [] or as above, by the length of rows}
    any other kind: rows that are in no token store, such as random ones; nothing can be said of them

Cost: the two files and RUN/metrics.jsonl are read whole.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lt_data.errors import DataError
from lt_data.looking.inspection import InspectedRow, inspect_batch
from lt_data.names import local, portable
from lt_data.packing.packs import open_pack
from lt_data.storage import os_errors
from lt_data.store.token_store import TokenStore
from lt_data.streaming.buckets import Buckets
from lt_data.streaming.mixture import Mixture
from lt_data.streaming.phases import Phase
from lt_data.streaming.ramp import BatchRamp
from lt_data.streaming.rows import RowReader
from lt_data.streaming.stream import RowSource, Stream, StreamState, changed_parts, sequence_fingerprint

RECIPE, EVENTS, METRICS = "recipe.json", "events.jsonl", "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class DataEvent:
    """Where a run stood in the global sequence when it started, went on or went back.

    Attributes:
        step: steps done.
        row: position that the next step reads first.
        global_batch: rows per step from here on.
        dp_size: ranks that share them.
        seed: of the shuffle.
        fingerprint: of the sequence.
        skipped: ranges [start, end) of positions that were jumped over.
        ramp: how the batch grows to `global_batch`; None where it does not.
        rows: what the rows are, where they are not those of the recipe's one store.
    """

    step: int
    row: int
    global_batch: int
    dp_size: int
    seed: int
    fingerprint: str
    skipped: tuple[tuple[int, int], ...] = ()
    ramp: BatchRamp | None = None
    rows: Mapping[str, Any] = field(default_factory=dict)

    def state_before(self, step: int) -> StreamState:
        """The stream's state before step `step` (the first is 1)."""
        done = step - 1
        if self.ramp is None:
            read = (done - self.step) * self.global_batch
        else:
            read = self.ramp.rows_before(done) - self.ramp.rows_before(self.step)
        return StreamState(
            step=done,
            row=self.row + read,
            seed=self.seed,
            fingerprint=self.fingerprint,
            skipped=self.skipped,
        )


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a step of a run read.

    Attributes:
        step: the step, from 1.
        recorded: whether the run's files show that it came so far; else this is what it would read.
        last_recorded: the last step of which the run's files tell.
        event: what decides.
        stores: folder of each token store, by the name of the mixture's source; "" where there is only one.
        batch_rows: rows of the step over all ranks.
        rows: the rows asked for.
    """

    step: int
    recorded: bool
    last_recorded: int
    event: DataEvent
    stores: Mapping[str, Path]
    batch_rows: int
    rows: tuple[InspectedRow, ...]

    @property
    def store(self) -> Path:
        """Folder of the token store; of a mixture's first."""
        return next(iter(self.stores.values()))

    @property
    def first_position(self) -> int:
        """Position in the global sequence of the step's first row."""
        return self.event.state_before(self.step).row

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        event = self.event
        return {
            "step": self.step,
            "recorded": self.recorded,
            "last_recorded": self.last_recorded,
            **({"store": portable(str(self.stores[""]))} if "" in self.stores else {}),
            **({} if "" in self.stores else {"stores": {name: portable(str(p)) for name, p in self.stores.items()}}),
            "first_position": self.first_position,
            "batch_rows": self.batch_rows,
            "global_batch": event.global_batch,
            "dp_size": event.dp_size,
            "seed": event.seed,
            "skipped": [list(part) for part in event.skipped],
            "fingerprint": event.fingerprint,
            "rows": [row.to_dict() for row in self.rows],
        }


def inspect_step(
    run: str | Path,
    step: int,
    *,
    store: str | Path | None = None,
    sources: Mapping[str, str | Path] | None = None,
    rows: Sequence[int] | None = None,
) -> StepReport:
    """Say what a step of a run read.

    Args:
        run: the run directory.
        step: which step, from 1.
        store: the token store, where it is no longer found under the name in the recipe.
        sources: likewise stores of a mixture, by the names of its sources.
        rows: numbers of rows in the global batch, from 0; all when not given.

    Raises:
        DataError: not a run directory, no step of that number, no data event before it, a store that is not found or
            not the one that was read, or no such row.
    """
    run = Path(run)
    if step < 1:
        raise DataError(f"step={step}: a run's first step is 1")
    data = _data_section(run)
    events = list(_lines(run / EVENTS))
    event, after = deciding_event(events, step, str(run / EVENTS))
    reader = _rows(run, data, event, store, sources or {})
    fingerprint = sequence_fingerprint(reader, shuffle=data["shuffle"], position=event.row)
    if changed := changed_parts(event.fingerprint, fingerprint):
        folders = ", ".join(map(str, _folders(reader).values()))
        raise DataError(
            f"{folders}: not the rows that step {step} of {run} read ({'; '.join(changed)}): give the store "
            f"that the run read with --store, and look at the data section of {run / RECIPE}"
        )
    state = event.state_before(step)
    # The event's fingerprint tells of the phases that had begun at its row; more may have begun before the step.
    at_step = sequence_fingerprint(reader, shuffle=data["shuffle"], position=state.row)
    stream = Stream(
        reader,
        global_batch=event.global_batch,
        dp_size=event.dp_size,
        seed=event.seed,
        shuffle=data["shuffle"],
        state=replace(state, fingerprint=at_step),
        ramp=event.ramp,
    )
    last = _last_recorded(run, after)
    return StepReport(
        step=step,
        recorded=step <= last,
        last_recorded=last,
        event=event,
        stores=_folders(reader),
        batch_rows=stream.global_rows(stream.state, stream.batch_rows(stream.state.step)).size,
        rows=inspect_batch(stream, rows),
    )


def deciding_event(
    events: Sequence[tuple[int, Mapping[str, Any]]], step: int, source: str
) -> tuple[DataEvent, list[Mapping[str, Any]]]:
    """The data event that decides what a step read.

    Args:
        events: line number and values of each event, in file order.
        step: the step, from 1.
        source: name of the file, for errors.

    Returns:
        The event, and all events from it on.

    Raises:
        DataError: there is none before the step, or a data event is damaged.
    """
    found: tuple[DataEvent, int] | None = None
    for i, (line, values) in enumerate(events):
        if values.get("event") == "data":
            event = _data_event(values, f"{source}:{line}")
            if event.step < step:
                found = event, i
    if found is None:
        raise DataError(
            f"{source}: no data event before step {step}, so nothing says what it read: the run has not begun to "
            "train, or was made by a version that did not write them"
        )
    event, i = found
    return event, [values for _, values in events[i:]]


def _data_event(values: Mapping[str, Any], source: str) -> DataEvent:
    numbers: dict[str, Any] = {name: values.get(name) for name in ("step", "row", "global_batch", "dp_size", "seed")}
    fingerprint = values.get("fingerprint")
    damaged = f"{source}: not a data event that this version reads: {dict(values)!r}"
    if not all(type(number) is int for number in numbers.values()) or not isinstance(fingerprint, str):
        raise DataError(damaged)
    try:
        skipped = tuple((int(start), int(end)) for start, end in values.get("skipped", ()))
    except (TypeError, ValueError) as exc:
        raise DataError(damaged) from exc
    ramp, kind = values.get("ramp"), values.get("rows", {})
    if not isinstance(kind, Mapping) or not isinstance(ramp, Mapping | None):
        raise DataError(damaged)
    event = DataEvent(
        **numbers,
        fingerprint=fingerprint,
        skipped=skipped,
        ramp=None if ramp is None else BatchRamp.from_json(ramp),
        rows=kind,
    )
    if min(event.step, event.row) < 0 or min(event.global_batch, event.dp_size) < 1:
        raise DataError(damaged)
    return event


def _last_recorded(run: Path, events: Sequence[Mapping[str, Any]]) -> int:
    """The last step of which these events, or the last metrics record, tell."""
    metrics = list(_lines(run / METRICS)) if (run / METRICS).exists() else []
    records = [*events, *(values for _, values in metrics[-1:])]
    return max((record["step"] for record in records if type(record.get("step")) is int), default=0)


def _data_section(run: Path) -> dict[str, Any]:
    """The settings of the recipe that decide which rows there are."""
    path = run / RECIPE
    if not path.is_file():
        raise DataError(f"{run}: no {RECIPE} in it, so it is no run directory; give the folder that run.out named")
    with os_errors("read the run's", path):
        content = path.read_bytes()
    try:
        data = json.loads(content)["recipe"]["data"]
        kinds = {"store": str, "seq_len": int, "pack": str, "document_mask": bool, "shuffle": bool}
        wrong = [name for name, kind in kinds.items() if type(data[name]) is not kind]
    except (ValueError, TypeError, KeyError) as exc:
        raise DataError(f"{path}: not the recipe of a run ({type(exc).__name__}: {exc})") from exc
    if wrong:
        raise DataError(f"{path}: not the recipe of a run: data.{wrong[0]} is {data[wrong[0]]!r}")
    return data


def _rows(
    run: Path,
    data: Mapping[str, Any],
    event: DataEvent,
    store: str | Path | None,
    sources: Mapping[str, str | Path],
) -> RowReader | Mixture | Buckets:
    """What the run read, opened anew."""
    how = event.rows
    kind = how.get("kind")
    if kind not in (None, "mixture", "buckets"):
        raise DataError(f"{run}: from step {event.step + 1} on it read {kind} rows, which are in no token store")
    seq_len, mask = data["seq_len"], data["document_mask"]
    unknown = sorted(set(sources) - set(how.get("stores", ())))
    if unknown or (kind == "mixture" and store is not None):
        given = f"source {unknown[0]!r}" if unknown else "--store"
        names = ", ".join(how.get("stores", ())) or "none"
        raise DataError(f"{given}: the sources of the run's mixture are: {names}; give one with --source NAME=FOLDER")
    try:
        phases = tuple(Phase(weights=phase["weights"], from_row=phase["from_row"]) for phase in how.get("phases", ()))
        if kind == "mixture":
            opened = {
                name: _opened(run, f"the source {name}", path, sources.get(name), "--source NAME=FOLDER")
                for name, path in how["stores"].items()
            }
            readers = {
                name: RowReader(one, open_pack(one, seq_len=seq_len, mode=data["pack"]), document_mask=mask)
                for name, one in opened.items()
            }
            return Mixture(readers, phases, max_epochs=how["max_epochs"])
        one = _opened(run, "data.store", how["store"] if kind == "buckets" else data["store"], store, "--store")
        if kind is None:
            return RowReader(one, open_pack(one, seq_len=seq_len, mode=data["pack"]), document_mask=mask)
        index = open_pack(one, seq_len=seq_len, mode="buckets", shortest=how["shortest"])
        return Buckets(one, index, global_batch=event.global_batch, weights=phases or None, document_mask=mask)
    except (KeyError, TypeError, AttributeError) as exc:
        raise DataError(f"{run / EVENTS}: not rows that this version reads ({exc!r}): {dict(how)!r}") from exc


def _opened(run: Path, what: str, recorded: str, given: str | Path | None, option: str) -> TokenStore:
    path = Path(local(recorded) if given is None else given)
    try:
        return TokenStore.open(path)
    except DataError as exc:
        if given is not None:
            raise
        where = "" if path.is_absolute() else ", a path relative to the folder in which the run was started"
        file = run / (RECIPE if what == "data.store" else EVENTS)
        raise DataError(
            f"{exc}; {file} says {what} = {recorded!r}{where}: give the store's folder with {option}"
        ) from exc


def _folders(source: RowSource) -> dict[str, Path]:
    """The folder of each store, by the name of the mixture's source; "" where there is only one."""
    if isinstance(source, Mixture):
        return {name: reader.store.path for name, reader in source.sources.items()}
    return {"": source.locate(0)[0].store.path}


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of each line; a last line without its end is left out, its writer is at it or was killed."""
    with os_errors("read the run's", path):
        content = path.read_bytes()
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            values = json.loads(line)
        except ValueError as exc:
            raise DataError(f"{path}:{number}: not a JSON object ({exc}); remove the line") from exc
        if not isinstance(values, dict):
            raise DataError(f"{path}:{number}: not a JSON object; remove the line")
        yield number, values
