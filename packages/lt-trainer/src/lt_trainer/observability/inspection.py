"""Inspection of the rows that step N of a training run read: `lt train inspect`, from the run's events and the stores.

A `data` event is written at every start, resume and rollback, with the recipe's sections `data` and `batch` and the
fingerprints of the stores. From its `step` S (completed steps) and `row` R on, step S + k reads the positions that the
stream gives to its k-th batch. A later event replaces it from its own step on, even if the run was at a later step
before; so for step N the last event in file order with `step` < N applies.

Cost: events.jsonl is read completely, of the rows only the requested ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lt_data import DataError, Stream
from lt_data.analysis.inspection import InspectedRow, inspect_batch
from lt_trainer.config.recipe import from_dict
from lt_trainer.config.sections import Recipe
from lt_trainer.data.training_data import generation_paths, open_rows, open_stores, parse_stream_state
from lt_trainer.errors import RecipeError, RunDirError
from lt_trainer.run_directory.jsonl import read_jsonl, read_last_object

STATE_FIELDS = ("step", "row", "seed", "fingerprint", "skipped")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Rows of a step of a run."""

    step: int
    last_recorded: int
    """The last step that the run's files record; of later ones, the rows are those that it would read."""
    position: int
    """Position of the first row in the global sequence."""
    batch_rows: int
    """Rows of the step over all ranks."""
    dp_size: int
    seed: int
    fingerprint: Mapping[str, str]
    stores: Mapping[str, str]
    """Folder of each token store, by field of the recipe."""
    rows: tuple[InspectedRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)


def inspect_step(
    run: str | Path, step: int, *, stores: Mapping[str, str | Path] | None = None, rows: Sequence[int] | None = None
) -> StepReport:
    """Inspect the rows that a step of a run read.

    Args:
        run: Run directory.
        step: Step, from 1.
        stores: Folders of stores that have moved, by the name of a mixture's source; "" of a single store.
        rows: Indices of rows in the global batch, from 0; all by default.

    Raises:
        RunDirError: not a run directory, or no data event before the step.
        DataError: a store is missing or not the one that was read, or no such row.
    """
    file = Path(run) / "events.jsonl"
    events = read_jsonl(file)
    places = [i for i, event in enumerate(events) if event["event"] == "data" and event["step"] < step]
    if step < 1 or not places:
        raise RunDirError(f"{file}: no data event before step {step}, so its rows are unknown; steps count from 1")
    event = events[places[-1]]
    table = {name: event[name] for name in ("data", "batch")}
    if not (event["data"].get("store") or event["data"].get("mixture")):
        raise RunDirError(f"{file}: step {step} read rows of a loader, or synthetic ones, which have no token store")
    recipe = _with_stores(from_dict(table, source=str(file)), stores or {})
    try:
        paths = generation_paths(recipe.data, event["stores"])
        opened = open_stores(recipe.data, paths)
        reader = open_rows(recipe, opened, 0)
        stream = Stream(
            reader,  # type: ignore[arg-type]  # not None: there are stores
            global_batch_size=recipe.batch.global_batch_size,
            micro_batch_size=recipe.batch.micro_batch_size,
            dp_size=event["dp_size"],
            seed=event["seed"],
            shuffle=recipe.data.shuffle,
            ramp=recipe.batch.batch_ramp(recipe.data.seq_len),
            state=parse_stream_state({name: event[name] for name in STATE_FIELDS}),
        )
    except (DataError, RecipeError) as exc:
        remedy = "give the folder of a store that has moved with --store [NAME=]FOLDER"
        raise DataError(f"step {step} of {run}: {exc}; {remedy}") from exc
    stream.state = stream.state_after(step - 1 - event["step"])
    recorded = [*events[places[-1] :], read_last_object(file.with_name("metrics.jsonl"))]
    return StepReport(
        step=step,
        last_recorded=max(one.get("step", 0) for one in recorded),
        position=stream.state.row,
        batch_rows=stream.batch_size_at(step - 1),
        dp_size=stream.dp_size,
        seed=stream.seed,
        fingerprint=stream.state.fingerprint,
        stores={field: str(store.path) for field, store in opened.items()},
        rows=inspect_batch(stream, rows),
    )


def _with_stores(recipe: Recipe, stores: Mapping[str, str | Path]) -> Recipe:
    """Return the recipe without validation data, with other folders of some stores."""
    data = recipe.data
    if unknown := sorted(stores.keys() - ({*data.mixture} or {""})):
        names = ", ".join(f"{name}=FOLDER" for name in data.mixture) or "FOLDER"
        raise DataError(f"--store {unknown[0]}=...: the run's stores are given as {names}")
    mixture = {
        name: source.model_copy(update={"store": str(stores.get(name, source.store))})
        for name, source in data.mixture.items()
    }
    changes = {"store": str(stores.get("", data.store)), "mixture": mixture, "validation": "", "validation_sets": {}}
    return recipe.model_copy(update={"data": data.model_copy(update=changes)})
