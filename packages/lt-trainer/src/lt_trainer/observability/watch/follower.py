"""Incremental reader of a run's files; each poll reads only what was appended.

Cost of a poll: one `stat` per file and the new lines; the first one reads all of metrics.jsonl.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lt_trainer.errors import RunDirError
from lt_trainer.files import open_regular, parse_json, read_json
from lt_trainer.run_directory.jsonl import NON_FINITE
from lt_trainer.run_directory.records import drop_superseded_records, is_first_of_start
from lt_trainer.run_directory.typed_records import event_problem, is_int, record_problem, sample_problem

MAX_EVENTS = 200
SPEED_WINDOW = 20
"""Number of records for the speed in the remaining time."""


class JsonlFollower:
    """Reader of a growing JSON Lines file; an incomplete last line is left for the next read.

    Args:
        path: file.
        problem: says what is wrong with an object, "" for nothing.
    """

    def __init__(self, path: Path, problem: Callable[[Mapping[str, Any]], str] = lambda values: "") -> None:
        self._path, self._problem, self._offset = path, problem, 0

    def read(self) -> list[dict[str, Any]]:
        """Return the objects since the last call; ignore other lines."""
        try:
            with open_regular(self._path) as file:
                if file.seek(0, 2) < self._offset:  # a new start truncated an incomplete last line
                    self._offset = file.tell()
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise RunDirError(f"cannot read {self._path}: {exc.strerror}; pass the folder of a run") from exc
        end = data.rfind(b"\n") + 1
        self._offset += end
        objects = []
        for line in data[:end].splitlines():
            try:
                values = parse_json(line)
            except ValueError:
                continue
            if not isinstance(values, dict):
                continue
            values = {
                name: NON_FINITE.get(value, value) if isinstance(value, str) else value
                for name, value in values.items()
            }
            if not self._problem(values):
                objects.append(values)
        return objects


@dataclass(frozen=True, kw_only=True)
class RunView:
    """Snapshot of a run."""

    path: Path
    state: str
    """"running", "completed" or "stopped by SIGTERM", from the run's last event."""
    idle_s: float
    """Seconds since the last write; nan if there was none."""
    max_steps: int
    """0 if the recipe is unknown."""
    train: list[Mapping[str, Any]] = field(default_factory=list)
    """Training records without superseded ones."""
    validation: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Newest record of each set."""
    nodes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Newest sample of each node, by file name."""
    events: list[Mapping[str, Any]] = field(default_factory=list)
    device: str = ""

    @property
    def step(self) -> int:
        """Last reported step."""
        return self.train[-1]["step"] if self.train else 0

    @property
    def remaining_s(self) -> float:
        """Seconds to the last step at the speed of the newest records of this start; nan if unknown."""
        recent = self.train[-SPEED_WINDOW:]
        for index in range(len(recent) - 1, 0, -1):
            if is_first_of_start(recent[index - 1], recent[index]):
                recent = recent[index:]
                break
        if len(recent) < 2 or not self.max_steps:
            return math.nan
        first, last = recent[0], recent[-1]
        steps, seconds = last["step"] - first["step"], last["elapsed_s"] - first["elapsed_s"]
        return (self.max_steps - last["step"]) * seconds / steps if steps > 0 else math.nan


class RunWatcher:
    """Poller of a run directory.

    Args:
        path: run directory.
        clock: Unix time in seconds.

    Raises:
        RunDirError: not a run directory.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        if not (path / ".lt-run").exists():
            raise RunDirError(f"{path} is not a run directory (it has no .lt-run); pass the folder in run.dir")
        self._path, self._clock = path, clock
        self._metrics = JsonlFollower(path / "metrics.jsonl", record_problem)
        self._events = JsonlFollower(path / "events.jsonl", event_problem)
        self._nodes: dict[str, JsonlFollower] = {}
        self._records: list[Mapping[str, Any]] = []
        self._seen_events: list[Mapping[str, Any]] = []
        self._samples: dict[str, Mapping[str, Any]] = {}
        self._state, self._device = "not started", ""

    def poll(self) -> RunView:
        """Read new lines and return the current view."""
        new = self._metrics.read()
        if new:
            self._records = drop_superseded_records([*self._records, *new])
        for event in self._events.read():
            self._apply_event(event)
        for path in sorted((self._path / "monitor").glob("node*.jsonl")):
            for sample in self._nodes.setdefault(path.stem, JsonlFollower(path, sample_problem)).read()[-1:]:
                self._samples[path.stem] = sample
        return RunView(
            path=self._path,
            state=self._state,
            idle_s=self._idle_s(),
            max_steps=self._max_steps(),
            train=[record for record in self._records if "loss" in record],
            validation={str(r.get("val_set", "")): r for r in self._records if "val_loss" in r},
            nodes=dict(self._samples),
            events=list(self._seen_events),
            device=self._device,
        )

    def _apply_event(self, event: Mapping[str, Any]) -> None:
        self._seen_events = [*self._seen_events[-MAX_EVENTS:], event]
        kind = event.get("event")
        if kind == "start":
            self._state = "running"
            self._device = str(event.get("device", ""))
        elif kind == "stop":
            self._state = f"stopped by {event.get('signal')}"
        elif kind == "completed":
            self._state = "completed"

    def _idle_s(self) -> float:
        times = [
            path.stat().st_mtime for name in ("metrics.jsonl", "events.jsonl") if (path := self._path / name).exists()
        ]
        return max(self._clock() - max(times), 0.0) if times else math.nan

    def _max_steps(self) -> int:
        try:
            max_steps = read_json(self._path / "recipe.json")["recipe"]["schedule"]["max_steps"]
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        return max_steps if is_int(max_steps) else 0
