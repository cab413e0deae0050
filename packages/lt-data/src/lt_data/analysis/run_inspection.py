"""Inspection of the rows that step N of a training run read, from its run directory and the store.

Two files are read:

    RUN/recipe.json     {"recipe": {...}}: data.store, data.seq_len, data.packing, data.document_mask, data.shuffle
    RUN/events.jsonl    one JSON object per line; those with "event": "data" record the run's position in the sequence

A `data` event is written at every start, resume and rollback. From its `step` S (completed steps) and `row` R on, step
S + k reads the positions R + (k - 1) B to R + k B - 1 of the global sequence, where B is its `global_batch_size`. A
later event replaces it from its own step on, even if the run was at a later step before; so for step N the last event
in file order with `step` < N applies. Its fingerprint must match the current rows; of a store that was appended to, it
names the generation that was read.

With a batch size ramp-up the event has a `ramp` (lt_data.BatchRamp as JSON), which gives the rows of step S + k. If the
rows are not those of one pack, the event's `rows` describe them:

    {"kind": "mixture", "stores": {NAME: FOLDER}, "phases": [{"from_row": 0, "weights": {NAME: W}}], "max_epochs": {}}
    {"kind": "buckets", "store": FOLDER, "min_seq_len": TOKENS, "phases": [] or as above, by row length}
    any other kind: rows without a token store, such as synthetic ones, which cannot be inspected

Cost: the two files and RUN/metrics.jsonl are read completely.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lt_data import strict_json
from lt_data.analysis.inspection import InspectedRow, inspect_batch
from lt_data.errors import DataError
from lt_data.file_names import to_local_name, to_portable_name
from lt_data.packing.packs import open_pack
from lt_data.storage import read_regular, translate_os_errors
from lt_data.store.generations import locate_generation
from lt_data.store.token_store import TokenStore
from lt_data.streaming.buckets import Buckets
from lt_data.streaming.mixture import Mixture
from lt_data.streaming.phases import Phase
from lt_data.streaming.ramp import BatchRamp
from lt_data.streaming.rows import RowReader
from lt_data.streaming.stream import (
    RowSource,
    Stream,
    StreamState,
    diff_fingerprints,
    sequence_fingerprint,
    stores_read,
)

RECIPE_FILE, EVENTS_FILE, METRICS_FILE = "recipe.json", "events.jsonl", "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class DataEvent:
    """Position of a run in the global sequence at a start, resume or rollback.

    Attributes:
        step: completed steps.
        row: first position of the next step.
        global_batch_size: rows per step from here on.
        dp_size: data-parallel ranks.
        seed: seed of the shuffle.
        fingerprint: fingerprint of the sequence.
        skipped: ranges [start, end) of skipped positions.
        ramp: batch size ramp-up to `global_batch_size`; None without one.
        rows: description of the rows, if they are not those of the recipe's store.
    """

    step: int
    row: int
    global_batch_size: int
    dp_size: int
    seed: int
    fingerprint: str
    skipped: tuple[tuple[int, int], ...] = ()
    ramp: BatchRamp | None = None
    rows: Mapping[str, Any] = field(default_factory=dict)

    def state_before(self, step: int) -> StreamState:
        """Return the stream's state before a step (the first is 1)."""
        done = step - 1
        if self.ramp is None:
            read = (done - self.step) * self.global_batch_size
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
    """Rows of a step of a run.

    Attributes:
        step: the step, from 1.
        recorded: whether the run's files record the step; if not, the rows are those that it would read.
        last_recorded: the last step that the run's files record.
        event: the data event that applies.
        stores: folder of each token store, by the name of the mixture's source; "" for a single store.
        batch_rows: rows of the step over all ranks.
        rows: the requested rows.
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
        """Folder of the token store, or of a mixture's first store."""
        return next(iter(self.stores.values()))

    @property
    def first_position(self) -> int:
        """Position of the step's first row in the global sequence."""
        return self.event.state_before(self.step).row

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        event = self.event
        return {
            "step": self.step,
            "recorded": self.recorded,
            "last_recorded": self.last_recorded,
            **({"store": to_portable_name(str(self.stores[""]))} if "" in self.stores else {}),
            **(
                {}
                if "" in self.stores
                else {"stores": {name: to_portable_name(str(p)) for name, p in self.stores.items()}}
            ),
            "first_position": self.first_position,
            "batch_rows": self.batch_rows,
            "global_batch_size": event.global_batch_size,
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
    """Inspect the rows that a step of a run read.

    Args:
        run: the run directory.
        step: the step, from 1.
        store: the token store, if it is no longer at the path in the recipe.
        sources: likewise the stores of a mixture, by the names of its sources.
        rows: indices of rows in the global batch, from 0; default: all.

    Raises:
        DataError: not a run directory, no such step, no data event before it, a store that is missing or not the one
            that was read, or no such row.
    """
    run = Path(run)
    if step < 1:
        raise DataError(f"step = {step}: the first step of a run is 1")
    data = _read_data_section(run)
    events = list(_read_jsonl(run / EVENTS_FILE))
    event, after = find_data_event(events, step, str(run / EVENTS_FILE))
    reader = _open_rows(run, data, event, store, sources or {})
    fingerprint = sequence_fingerprint(reader, shuffle=data["shuffle"], position=event.row)
    if changed := diff_fingerprints(event.fingerprint, fingerprint):
        folders = ", ".join(map(str, _store_folders(reader).values()))
        raise DataError(
            f"{folders}: not the rows that step {step} of {run} read ({'; '.join(changed)}); give the run's store with "
            f"--store, and check the data section of {run / RECIPE_FILE}"
        )
    state = event.state_before(step)
    # The event's fingerprint covers the phases up to its row; more may have begun before the step.
    at_step = sequence_fingerprint(reader, shuffle=data["shuffle"], position=state.row)
    stream = Stream(
        reader,
        global_batch_size=event.global_batch_size,
        dp_size=event.dp_size,
        seed=event.seed,
        shuffle=data["shuffle"],
        state=replace(state, fingerprint=at_step),
        ramp=event.ramp,
    )
    last = _find_last_recorded_step(run, after)
    return StepReport(
        step=step,
        recorded=step <= last,
        last_recorded=last,
        event=event,
        stores=_store_folders(reader),
        batch_rows=stream.global_rows(stream.state, stream.batch_size_at(stream.state.step)).size,
        rows=inspect_batch(stream, rows),
    )


def find_data_event(
    events: Sequence[tuple[int, Mapping[str, Any]]], step: int, source: str
) -> tuple[DataEvent, list[Mapping[str, Any]]]:
    """Return the data event that applies to a step.

    Args:
        events: line number and values of each event, in file order.
        step: the step, from 1.
        source: name of the file, for errors.

    Returns:
        The event, and all events from it on.

    Raises:
        DataError: no data event before the step, or a damaged one.
    """
    match: tuple[DataEvent, int] | None = None
    for i, (line, values) in enumerate(events):
        if values.get("event") == "data":
            event = _parse_data_event(values, f"{source}:{line}")
            if event.step < step:
                match = event, i
    if match is None:
        raise DataError(
            f"{source}: no data event before step {step}, so its rows are unknown: the run has not started to train, "
            "or was made by a version without data events"
        )
    event, i = match
    return event, [values for _, values in events[i:]]


def _parse_data_event(values: Mapping[str, Any], source: str) -> DataEvent:
    numbers: dict[str, Any] = {
        name: values.get(name) for name in ("step", "row", "global_batch_size", "dp_size", "seed")
    }
    fingerprint = values.get("fingerprint")
    problem = f"{source}: not a data event of this version: {dict(values)!r}"
    if not all(type(number) is int for number in numbers.values()) or not isinstance(fingerprint, str):
        raise DataError(problem)
    try:
        skipped = tuple((int(start), int(end)) for start, end in values.get("skipped", ()))
    except (TypeError, ValueError) as exc:
        raise DataError(problem) from exc
    ramp, kind = values.get("ramp"), values.get("rows", {})
    if not isinstance(kind, Mapping) or not isinstance(ramp, Mapping | None):
        raise DataError(problem)
    event = DataEvent(
        **numbers,
        fingerprint=fingerprint,
        skipped=skipped,
        ramp=None if ramp is None else BatchRamp.from_dict(ramp),
        rows=kind,
    )
    if min(event.step, event.row) < 0 or min(event.global_batch_size, event.dp_size) < 1:
        raise DataError(problem)
    return event


def _find_last_recorded_step(run: Path, events: Sequence[Mapping[str, Any]]) -> int:
    """Return the last step of these events and of the last metrics record."""
    metrics = list(_read_jsonl(run / METRICS_FILE)) if (run / METRICS_FILE).exists() else []
    records = [*events, *(values for _, values in metrics[-1:])]
    return max((record["step"] for record in records if type(record.get("step")) is int), default=0)


def _read_data_section(run: Path) -> dict[str, Any]:
    """Read the recipe's data section, which determines the rows."""
    path = run / RECIPE_FILE
    if not path.is_file():
        raise DataError(f"{run}: not a run directory (no {RECIPE_FILE}); give the folder of run.dir")
    with translate_os_errors("read the run's", path):
        content = read_regular(path)
    try:
        data = strict_json.load_object(content, str(path), "give another run directory")["recipe"]["data"]
        kinds = {"store": str, "seq_len": int, "packing": str, "document_mask": bool, "shuffle": bool}
        kinds |= {"packs": str} if "packs" in data else {}
        wrong = [name for name, kind in kinds.items() if type(data[name]) is not kind]
    except (TypeError, KeyError) as exc:
        raise DataError(f"{path}: not the recipe of a run ({type(exc).__name__}: {exc})") from exc
    if wrong:
        raise DataError(f"{path}: not the recipe of a run: data.{wrong[0]} is {data[wrong[0]]!r}")
    return data


def _open_rows(
    run: Path,
    data: Mapping[str, Any],
    event: DataEvent,
    store: str | Path | None,
    sources: Mapping[str, str | Path],
) -> RowReader | Mixture | Buckets:
    """Open the rows that the run read."""
    spec = event.rows
    kind = spec.get("kind")
    if kind not in (None, "mixture", "buckets"):
        raise DataError(f"{run}: from step {event.step + 1} on it read {kind} rows, which have no token store")
    seq_len, mask, packs = data["seq_len"], data["document_mask"], data.get("packs", "")
    unknown = sorted(set(sources) - set(spec.get("stores", ())))
    if unknown or (kind == "mixture" and store is not None):
        option = f"source {unknown[0]!r}" if unknown else "--store"
        names = ", ".join(spec.get("stores", ())) or "none"
        raise DataError(f"{option}: the sources of the run's mixture are: {names}; give one with --source NAME=FOLDER")
    read = stores_read(event.fingerprint)
    try:
        phases = tuple(Phase(weights=phase["weights"], from_row=phase["from_row"]) for phase in spec.get("phases", ()))
        if kind == "mixture":
            opened = {
                name: _open_store(
                    run, f"the source {name}", path, sources.get(name), "--source NAME=FOLDER", packs, read.get(name)
                )
                for name, path in spec["stores"].items()
            }
            readers = {
                name: RowReader(
                    opened_store, open_pack(opened_store, seq_len=seq_len, mode=data["packing"]), document_mask=mask
                )
                for name, opened_store in opened.items()
            }
            return Mixture(readers, phases, max_epochs=spec["max_epochs"])
        path = spec["store"] if kind == "buckets" else data["store"]
        opened_store = _open_store(run, "data.store", path, store, "--store", packs, read.get(""))
        if kind is None:
            index = open_pack(opened_store, seq_len=seq_len, mode=data["packing"])
            return RowReader(opened_store, index, document_mask=mask)
        index = open_pack(opened_store, seq_len=seq_len, mode="buckets", min_seq_len=spec["min_seq_len"])
        return Buckets(
            opened_store, index, global_batch_size=event.global_batch_size, weights=phases or None, document_mask=mask
        )
    except (KeyError, TypeError, AttributeError) as exc:
        raise DataError(f"{run / EVENTS_FILE}: not rows of this version ({exc!r}): {dict(spec)!r}") from exc


def _open_store(
    run: Path, field: str, recorded: str, override: str | Path | None, option: str, packs: str, read: str | None
) -> TokenStore:
    """Open a store, as the generation that was read (`read` begins its fingerprint)."""
    path = Path(to_local_name(recorded) if override is None else override)
    try:
        return TokenStore((read and locate_generation(path, read)) or path, packs=packs)
    except DataError as exc:
        if override is not None:
            raise
        note = "" if path.is_absolute() else ", relative to the working directory of the run"
        file = run / (RECIPE_FILE if field == "data.store" else EVENTS_FILE)
        raise DataError(
            f"{exc}; {file} has {field} = {recorded!r}{note}: give the store's folder with {option}"
        ) from exc


def _store_folders(source: RowSource) -> dict[str, Path]:
    """Return the folder of each store, by the name of the mixture's source; "" for a single store."""
    if isinstance(source, Mixture):
        return {name: reader.store.path for name, reader in source.sources.items()}
    return {"": source.locate(0)[0].store.path}


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and object of each line; an incomplete last line is ignored."""
    with translate_os_errors("read the run's", path):
        content = read_regular(path)
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        yield number, strict_json.load_object(line, f"{path}:{number}", "remove the line")
