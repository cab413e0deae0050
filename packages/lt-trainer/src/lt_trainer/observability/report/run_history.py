"""History of a running or finished run, read from its run directory.

Steps repeated after a kill or rollback count once, with their last record.
Cost: reads all of metrics.jsonl and events.jsonl.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_trainer.config.recipe import from_dict
from lt_trainer.config.sections.recipe import Recipe
from lt_trainer.errors import RecipeError, RunDirError
from lt_trainer.files import parse_json, read_text
from lt_trainer.run_directory.records import drop_superseded_records, is_first_of_start
from lt_trainer.run_directory.typed_records import (
    ENVIRONMENT_FIELDS,
    RECIPE_FIELDS,
    Kind,
    is_int,
    read_events,
    read_metrics,
    table_problem,
)

EVENT_TITLES = {
    "checkpoint": "checkpoint",
    "stop": "stop",
    "resume": "resume",
    "step_skipped": "skipped step",
    "rollback": "rollback",
    "completed": "completed",
}
"""Displayed title of each event with a step, in display order."""


@dataclass(frozen=True, kw_only=True)
class ReportEvent:
    """Event with a step."""

    step: int
    kind: str
    """One of `EVENT_TITLES`."""
    time: str
    """ISO 8601, UTC."""
    text: str
    """Details, such as the signal of a stop; may be empty."""


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """Records, events, recipe and environment of a run."""

    path: Path
    name: str
    state: str
    """"not started", "running or killed", "completed" or "stopped by SIGTERM"."""
    train: Sequence[Mapping[str, Any]]
    """Training records without superseded ones, by increasing step."""
    validation: Mapping[str, Sequence[Mapping[str, Any]]]
    """Validation records by set ("" for the only one)."""
    evaluation: Mapping[str, Sequence[Mapping[str, Any]]]
    """Evaluation records by task."""
    n_superseded: int
    """Number of training records of steps that were repeated later."""
    training_seconds: float
    """Reported training time of all starts, including time lost by kills."""
    step_events: Sequence[ReportEvent]
    events: Sequence[Mapping[str, Any]]
    recipe_table: Mapping[str, Any]
    """Recipe as nested tables; empty if there is none."""
    recipe_toml: str
    """Recipe as TOML with the origin of each value."""
    environment: Mapping[str, Any]

    @property
    def start_event(self) -> Mapping[str, Any]:
        """Newest start event (device, world, peak); empty before the first."""
        return next((event for event in reversed(self.events) if event.get("event") == "start"), {})

    @property
    def devices(self) -> str:
        """Number and name of the devices; empty if unknown."""
        return " x ".join(str(self.start_event[name]) for name in ("world", "device") if name in self.start_event)

    @property
    def data_event(self) -> Mapping[str, Any]:
        """Newest event with the data position; empty before the first."""
        return next((event for event in reversed(self.events) if event.get("event") == "data"), {})

    @property
    def step(self) -> int:
        """Last reported step."""
        steps = (*(record["step"] for record in self.train[-1:]), *(event.step for event in self.step_events[-1:]))
        return max(steps, default=0)

    @property
    def max_steps(self) -> int:
        """Number of steps in the recipe; 0 if unknown."""
        return int(self.recipe_table.get("schedule", {}).get("max_steps", 0))

    def recipe(self) -> Recipe:
        """Return the parsed recipe.

        Raises:
            RecipeError: there is none, or this version of lt-trainer cannot parse it.
        """
        if not self.recipe_table:
            raise RecipeError(f"{self.path} has no recipe.json", remedy="start the run again to rewrite it")
        return from_dict(self.recipe_table, source=str(self.path / "recipe.json"))


def read_run(path: str | Path, *, name: str = "") -> RunHistory:
    """Read a run directory.

    Args:
        path: run directory (run.dir).
        name: displayed name; the folder's name if empty.

    Raises:
        RunDirError: not a run directory, or a damaged file.
    """
    path = Path(path)
    if not (path / ".lt-run").exists():
        raise RunDirError(f"{path} is not a run directory (it has no .lt-run); pass the folder in run.dir")
    records = read_metrics(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
    events = read_events(path / "events.jsonl") if (path / "events.jsonl").exists() else []
    kept = drop_superseded_records(records)
    train = [record for record in kept if "loss" in record]
    validation: dict[str, list[Mapping[str, Any]]] = {}
    evaluation: dict[str, list[Mapping[str, Any]]] = {}
    for record in kept:
        if "eval_task" in record:
            evaluation.setdefault(str(record["eval_task"]), []).append(record)
        if "val_loss" in record:
            validation.setdefault(str(record.get("val_set", "")), []).append(record)
    return RunHistory(
        path=path,
        name=name or Path(os.path.realpath(path)).name,
        state=_state(events),
        train=train,
        validation={set_name: _last_per_step(set_records) for set_name, set_records in validation.items()},
        evaluation={task: _last_per_step(task_records) for task, task_records in evaluation.items()},
        n_superseded=sum("loss" in record for record in records) - len(train),
        training_seconds=_seconds(records),
        step_events=[
            _report_event(event) for event in events if event.get("event") in EVENT_TITLES and is_int(event.get("step"))
        ],
        events=events,
        recipe_table=_json(path / "recipe.json", RECIPE_FIELDS).get("recipe", {}),
        recipe_toml=_text(path / "recipe.toml"),
        environment=_json(path / "environment.json", ENVIRONMENT_FIELDS),
    )


def unique_names(paths: Sequence[str | Path]) -> list[str]:
    """Return a unique name per run: the folder's name with as many parent folders as needed.

    Example:
        >>> unique_names(["a/run", "b/run", "other"])
        ['a/run', 'b/run', 'other']
    """
    all_parts = [Path(os.path.realpath(path)).parts for path in paths]
    names = []
    for parts in all_parts:
        depth = 1
        while depth < len(parts) and sum(other[-depth:] == parts[-depth:] for other in all_parts) > 1:
            depth += 1
        names.append("/".join(parts[-depth:]))
    return names


def _state(events: Sequence[Mapping[str, Any]]) -> str:
    for event in reversed(events):
        if event.get("event") == "completed":
            return "completed"
        if event.get("event") == "stop":
            return f"stopped by {event.get('signal')}"
        if event.get("event") == "start":
            return "running or killed"
    return "not started"


def _seconds(records: Sequence[Mapping[str, Any]]) -> float:
    """Return the sum of the last elapsed_s of each start; every start counts from 0."""
    total = last = 0.0
    previous: Mapping[str, Any] | None = None
    for record in (record for record in records if "elapsed_s" in record):
        is_first = "loss" in record and previous is not None and is_first_of_start(previous, record)
        if is_first or record["elapsed_s"] < last:
            total += last
        last = record["elapsed_s"]
        previous = record if "loss" in record else previous
    return total + last


def _last_per_step(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last record of each step, in order; a resumed start may validate a step again."""
    return sorted({record["step"]: record for record in records}.values(), key=lambda record: record["step"])


def _report_event(event: Mapping[str, Any]) -> ReportEvent:
    kind = event["event"]
    text = ""
    if kind == "stop":
        text = str(event.get("signal", ""))
    elif kind == "rollback":
        text = f"from step {event.get('from_step')}"
    elif kind == "step_skipped":
        text = f"loss {event.get('loss')}, grad norm {event.get('grad_norm')}"
    return ReportEvent(step=event["step"], kind=kind, time=str(event.get("time", "")), text=text)


def _text(path: Path) -> str:
    try:
        return read_text(path, errors="replace") if path.exists() else ""
    except OSError as exc:
        raise RunDirError(f"cannot read {path}: {exc.strerror}; fix its permissions") from exc


def _json(path: Path, fields: Mapping[str, Kind]) -> dict[str, Any]:
    text = _text(path)
    try:
        values = parse_json(text) if text else {}
    except ValueError as exc:
        raise RunDirError(f"{path} is damaged ({exc}); start the run again to rewrite it") from exc
    problem = table_problem(values, fields) if isinstance(values, dict) else "not a JSON object"
    if problem:
        raise RunDirError(f"{path} is damaged ({problem}); start the run again to rewrite it")
    return values
