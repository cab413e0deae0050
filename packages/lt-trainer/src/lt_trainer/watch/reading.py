"""What the files of a run say now. Only what was appended since the last look is read.

Cost of a look: one `stat` per file and the new lines; the first one reads all of metrics.jsonl.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lt_trainer.errors import RunDirError
from lt_trainer.jsonl import NOT_FINITE
from lt_trainer.monitor.node import FOLDER as MONITOR
from lt_trainer.records import begins_start, newest_way

KEPT_EVENTS = 200
RATE_RECORDS = 20
"""Over how many records the speed for the remaining time is taken."""


class Follower:
    """The objects of a JSON-lines file that grows; a last line without its newline is left for later."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self) -> list[dict[str, Any]]:
        """The objects since the last call; lines that are none are left out."""
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._at:  # a torn line was cut off by a new start: there was nothing behind it
                    self._at = file.tell()
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._at += end
        found = []
        for line in data[:end].splitlines():
            try:
                values = json.loads(line)
            except ValueError:
                continue
            if isinstance(values, dict):
                found.append(
                    {
                        name: NOT_FINITE.get(value, value) if isinstance(value, str) else value
                        for name, value in values.items()
                    }
                )
        return found


@dataclass(frozen=True, kw_only=True)
class View:
    """What is known of a run at one time."""

    path: Path
    state: str
    """"running", "done" or "stopped by SIGTERM": what the run itself has said last."""
    quiet_s: float
    """Seconds since anything was written; nan when nothing was."""
    max_steps: int
    """0 where the recipe is not known."""
    train: list[Mapping[str, Any]] = field(default_factory=list)
    """Training records of the way that counts."""
    validation: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The newest record of each set."""
    nodes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The newest sample of each node, by file name."""
    events: list[Mapping[str, Any]] = field(default_factory=list)
    device: str = ""

    @property
    def step(self) -> int:
        """Updates done, as far as reported."""
        return self.train[-1]["step"] if self.train else 0

    @property
    def remaining_s(self) -> float:
        """Seconds to the last step at the speed of the newest records of this start; nan where that is not known."""
        recent = self.train[-RATE_RECORDS:]
        for index in range(len(recent) - 1, 0, -1):
            if begins_start(recent[index - 1], recent[index]):
                recent = recent[index:]
                break
        if len(recent) < 2 or not self.max_steps:
            return math.nan
        first, last = recent[0], recent[-1]
        done, seconds = last["step"] - first["step"], last["elapsed_s"] - first["elapsed_s"]
        return (self.max_steps - last["step"]) * seconds / done if done > 0 else math.nan


class Watcher:
    """Looks at one run directory again and again.

    Args:
        path: the run directory.
        clock: seconds since 1970.

    Raises:
        RunDirError: it is none.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        if not (path / ".lt-run").exists():
            raise RunDirError(f"{path} is not a run directory (it has no .lt-run); give the folder that run.out names")
        self._path, self._clock = path, clock
        self._metrics, self._events = Follower(path / "metrics.jsonl"), Follower(path / "events.jsonl")
        self._nodes: dict[str, Follower] = {}
        self._records: list[Mapping[str, Any]] = []
        self._seen_events: list[Mapping[str, Any]] = []
        self._samples: dict[str, Mapping[str, Any]] = {}
        self._state, self._device = "not started", ""

    def look(self) -> View:
        """What the run's files say now."""
        new = self._metrics.read()
        if new:
            self._records = newest_way([*self._records, *new])
        for event in self._events.read():
            self._take(event)
        for path in sorted((self._path / MONITOR).glob("node*.jsonl")):
            for sample in self._nodes.setdefault(path.stem, Follower(path)).read()[-1:]:
                self._samples[path.stem] = sample
        return View(
            path=self._path,
            state=self._state,
            quiet_s=self._quiet_s(),
            max_steps=self._max_steps(),
            train=[record for record in self._records if "loss" in record],
            validation={str(r.get("val_set", "")): r for r in self._records if "val_loss" in r},
            nodes=dict(self._samples),
            events=list(self._seen_events),
            device=self._device,
        )

    def _take(self, event: Mapping[str, Any]) -> None:
        self._seen_events = [*self._seen_events[-KEPT_EVENTS:], event]
        kind = event.get("event")
        if kind == "start":
            self._state = "running"
            self._device = str(event.get("device", ""))
        elif kind == "stop":
            self._state = f"stopped by {event.get('signal')}"
        elif kind == "done":
            self._state = "done"

    def _quiet_s(self) -> float:
        times = [
            path.stat().st_mtime for name in ("metrics.jsonl", "events.jsonl") if (path := self._path / name).exists()
        ]
        return max(self._clock() - max(times), 0.0) if times else math.nan

    def _max_steps(self) -> int:
        try:
            recipe = json.loads((self._path / "recipe.json").read_bytes())["recipe"]
            return int(recipe["schedule"]["max_steps"])
        except (OSError, ValueError, KeyError):
            return 0
