"""What the files of a run directory tell, as one value; of a run that goes on as well as of one that is over.

Steps that were done again (after a kill, or a way back) count once, with what was reported of them last.
Cost: metrics.jsonl and events.jsonl are read whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_trainer.errors import RecipeError, RunDirError
from lt_trainer.jsonl import read_jsonl
from lt_trainer.recipe import Recipe, from_dict
from lt_trainer.records import begins_start, newest_way

KINDS = {
    "checkpoint": "checkpoint",
    "stop": "stop",
    "resume": "resume",
    "skipped": "skipped step",
    "rewind": "way back",
    "done": "done",
}
"""Events that stand at a step, and how they are called; in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event that stands at a step."""

    step: int
    kind: str
    """One of `KINDS`."""
    time: str
    """ISO 8601, UTC."""
    text: str
    """What there is to say of it, such as the signal of a stop; may be empty."""


@dataclass(frozen=True, kw_only=True)
class History:
    """A run as its files tell it."""

    path: Path
    name: str
    state: str
    """"not started", "running or killed", "done" or "stopped by SIGTERM"."""
    train: Sequence[Mapping[str, Any]]
    """Training records of the way that counts, by rising step."""
    validation: Mapping[str, Sequence[Mapping[str, Any]]]
    """Validation records by set ("" for the only one)."""
    left: int
    """Training records of ways that were left: steps that were done again."""
    seconds: float
    """Training time of all starts, as far as reported; with what was lost by kills."""
    marks: Sequence[Mark]
    events: Sequence[Mapping[str, Any]]
    tables: Mapping[str, Any]
    """The recipe as nested tables; empty where there is none."""
    toml: str
    """The recipe as text, each value with its origin."""
    environment: Mapping[str, Any]

    @property
    def start(self) -> Mapping[str, Any]:
        """The newest start event: device, world, peak; empty before the first."""
        return next((event for event in reversed(self.events) if event.get("event") == "start"), {})

    @property
    def data(self) -> Mapping[str, Any]:
        """The newest event that says where the rows stand; empty before the first."""
        return next((event for event in reversed(self.events) if event.get("event") == "data"), {})

    @property
    def step(self) -> int:
        """Updates done, as far as reported."""
        return max(
            (*(record["step"] for record in self.train[-1:]), *(mark.step for mark in self.marks[-1:])), default=0
        )

    @property
    def max_steps(self) -> int:
        """Updates that the recipe asks for; 0 where it is not known."""
        return int(self.tables.get("schedule", {}).get("max_steps", 0))

    def recipe(self) -> Recipe:
        """The recipe as a value.

        Raises:
            RecipeError: this version of lt-trainer does not know all of it, or there is none.
        """
        if not self.tables:
            raise RecipeError(f"{self.path} has no recipe.json", remedy="start the run once more to have it written")
        return from_dict(self.tables, source=str(self.path / "recipe.json"))


def read_run(path: str | Path, *, name: str = "") -> History:
    """Read a run directory.

    Args:
        path: the folder that `run.out` names.
        name: how the run is called; the folder's name where it is empty.

    Raises:
        RunDirError: no run directory, or one with a damaged file in it.
    """
    path = Path(path)
    if not (path / ".lt-run").exists():
        raise RunDirError(f"{path} is not a run directory (it has no .lt-run); give the folder that run.out names")
    records = read_jsonl(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
    events = read_jsonl(path / "events.jsonl") if (path / "events.jsonl").exists() else []
    kept = newest_way(records)
    train = [record for record in kept if "loss" in record]
    validation: dict[str, list[Mapping[str, Any]]] = {}
    for record in kept:
        if "val_loss" in record:
            validation.setdefault(str(record.get("val_set", "")), []).append(record)
    return History(
        path=path,
        name=name or path.resolve().name,
        state=_state(events),
        train=train,
        validation={one: _once(found) for one, found in validation.items()},
        left=sum("loss" in record for record in records) - len(train),
        seconds=_seconds(records),
        marks=[_mark(event) for event in events if event.get("event") in KINDS and type(event.get("step")) is int],
        events=events,
        tables=_json(path / "recipe.json").get("recipe", {}),
        toml=_text(path / "recipe.toml"),
        environment=_json(path / "environment.json"),
    )


def names_of(paths: Sequence[str | Path]) -> list[str]:
    """A name for each run: its folder's, with as many folders above it as tell them apart.

    Example:
        >>> names_of(["a/run", "b/run", "other"])
        ['a/run', 'b/run', 'other']
    """
    parts = [Path(path).resolve().parts for path in paths]
    names = []
    for own in parts:
        depth = 1
        while depth < len(own) and sum(other[-depth:] == own[-depth:] for other in parts) > 1:
            depth += 1
        names.append("/".join(own[-depth:]))
    return names


def _state(events: Sequence[Mapping[str, Any]]) -> str:
    for event in reversed(events):
        if event.get("event") == "done":
            return "done"
        if event.get("event") == "stop":
            return f"stopped by {event.get('signal')}"
        if event.get("event") == "start":
            return "running or killed"
    return "not started"


def _seconds(records: Sequence[Mapping[str, Any]]) -> float:
    """Each start counts its seconds from 0: the last of each start, summed."""
    total = last = 0.0
    before: Mapping[str, Any] | None = None
    for record in records:
        begins = "loss" in record and before is not None and begins_start(before, record)
        if begins or record["elapsed_s"] < last:
            total += last
        last = record["elapsed_s"]
        before = record if "loss" in record else before
    return total + last


def _once(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last record of each step, by rising step: a start that goes on may validate the same step again."""
    return sorted({record["step"]: record for record in records}.values(), key=lambda record: record["step"])


def _mark(event: Mapping[str, Any]) -> Mark:
    kind = event["event"]
    text = ""
    if kind == "stop":
        text = str(event.get("signal", ""))
    elif kind == "rewind":
        text = f"from step {event.get('from_step')}"
    elif kind == "skipped":
        text = f"loss {event.get('loss')}, grad norm {event.get('grad_norm')}"
    return Mark(step=event["step"], kind=kind, time=str(event.get("time", "")), text=text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except OSError as exc:
        raise RunDirError(f"cannot read {path}: {exc.strerror}; mend its permissions") from exc


def _json(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        values = json.loads(text) if text else {}
    except ValueError as exc:
        raise RunDirError(f"{path} is damaged ({exc}); start the run once more to have it written anew") from exc
    if not isinstance(values, dict):
        raise RunDirError(f"{path} is damaged (no table); start the run once more to have it written anew")
    return values
