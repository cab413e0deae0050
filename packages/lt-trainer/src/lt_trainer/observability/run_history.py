"""What a run has recorded, from its files: for the report and for `lt train watch`.

Only JSON files of the run directory are read. Steps repeated after a kill or rollback count once, with their last
record. Each poll reads only what was appended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_trainer.config.section import flatten
from lt_trainer.engine import STEP_PARTS
from lt_trainer.errors import RunDirError
from lt_trainer.run_directory.jsonl import JsonlReader
from lt_trainer.run_directory.records import drop_superseded_records

NUMBERS = {
    "learning_rate": ("learning rate", "{:.3g}"),
    "grad_norm": ("grad norm", "{:.3g}"),
    "tokens_per_sec": ("tokens/s per device", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
    "memory_gib": ("memory per device", "{:.2f} GiB"),
    "energy_kwh": ("energy", "{:.3g} kWh"),
}
"""Title and format of the numbers of a record that are shown."""
SPEED_WINDOW = 20


class RunHistory:
    """Records, events and recipe of a run; `recipe` has the values of fields by dotted name.

    Args:
        path: run directory.
        name: name to show.

    Raises:
        RunDirError: not a run directory, or a damaged file.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        if not (path / ".lt-run").exists():
            raise RunDirError(f"{path} is not a run directory (it has no .lt-run); pass the folder in run.dir")
        self.path, self.name = path, name
        self._files = JsonlReader(path / "metrics.jsonl"), JsonlReader(path / "events.jsonl")
        self.records: list[Mapping[str, Any]] = []
        self.events: list[Mapping[str, Any]] = []
        self.train: list[Mapping[str, Any]] = []
        self.seconds = 0.0
        """Seconds of all starts, steps that were repeated included."""
        self.poll()

    def poll(self) -> None:
        """Read new records and events, and the recipe."""
        metrics, events = (file.read() if file.path.exists() else [] for file in self._files)
        self.recipe = flatten(self.read_json("recipe.json").get("recipe", {}))
        self.events += events
        self.seconds += math.fsum(map(seconds_of, metrics))
        self.records = drop_superseded_records([*self.records, *metrics])
        self.train = [record for record in self.records if "loss" in record]

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the run; {} if there is none."""
        path = self.path / name
        try:
            return json.loads(path.read_bytes()) if path.exists() else {}
        except (OSError, ValueError) as exc:
            raise RunDirError(f"{path} is damaged ({exc}); start the run again to rewrite it") from exc

    @property
    def losses(self) -> list[float]:
        """Losses of the training records; a step without labels has none."""
        return [record["loss"] for record in self.train if record["loss"] is not None]

    @property
    def step(self) -> int:
        """Last reported step; 0 without one."""
        return self.train[-1]["step"] if self.train else 0

    @property
    def max_steps(self) -> int:
        """Steps of the run; 0 if it has no recipe."""
        return self.recipe.get("schedule.max_steps", 0)

    @property
    def state(self) -> str:
        """State by the run's last event of that kind, such as "completed" or "stopped by SIGTERM"."""
        event = self.last_event("start", "stop", "completed")
        states = {"start": "running or killed", "stop": f"stopped by {event.get('signal')}", "completed": "completed"}
        return states.get(event.get("event", ""), "not started")

    @property
    def seconds_left(self) -> float:
        """Seconds to the last step at the speed of the newest records; nan if unknown or done."""
        recent, left = self.train[-SPEED_WINDOW:], self.max_steps - self.step
        n_steps = recent[-1]["step"] - recent[0]["step"] if recent else 0
        seconds = math.fsum(map(seconds_of, recent[1:]))
        return left * seconds / n_steps if n_steps and left > 0 else math.nan

    @property
    def validation(self) -> dict[str, list[Mapping[str, Any]]]:
        """Validation records by set, "" for the only one."""
        sets: dict[str, list[Mapping[str, Any]]] = {}
        for record in self.records:
            if "val_loss" in record:
                sets.setdefault(record.get("val_set", ""), []).append(record)
        return sets

    def last_event(self, *kinds: str) -> Mapping[str, Any]:
        """Return the newest event of one of the kinds; empty without one."""
        return next((event for event in reversed(self.events) if event["event"] in kinds), {})

    @property
    def memory_title(self) -> str:
        """Meaning of `memory_gib`: what a device's allocator held at most or, on CPUs, what a process did."""
        on_cpu = self.last_event("start").get("device_kind") == "cpu"
        return "peak resident memory of a process" if on_cpu else "peak memory per device"

    def numbers(self) -> dict[str, str]:
        """Return the numbers of the newest record, as text by title."""
        last, numbers = self.train[-1] if self.train else {}, dict[str, str]()
        for field, (title, template) in NUMBERS.items():
            if last.get(field) is not None:
                numbers[self.memory_title if field == "memory_gib" else title] = template.format(last[field])
        return numbers


def seconds_of(record: Mapping[str, Any]) -> float:
    """Return the seconds that a record counts by part, which is the time since the one before."""
    return math.fsum(record.get(f"{part}_s", 0.0) for part in STEP_PARTS)
