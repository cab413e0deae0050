"""Live view of a run in the terminal, from its files: progress, newest numbers, loss curve, validation, last events.

Each poll reads only what was appended; the first one reads all of metrics.jsonl. Whatever the files say is shown as
plain text, with control characters escaped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lt_data.display.terminal import escape_controls
from lt_trainer.engine import STEP_PARTS
from lt_trainer.errors import RunDirError
from lt_trainer.planning.plan import format_duration
from lt_trainer.run_directory.jsonl import JsonlReader
from lt_trainer.run_directory.records import drop_superseded_records, is_first_of_start

NUMBERS = {
    "learning_rate": ("learning rate", "{:.3g}"),
    "grad_norm": ("grad norm", "{:.3g}"),
    "tokens_per_sec": ("tokens/s per device", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
    "hfu": ("HFU", "{:.1%}"),
    "memory_gib": ("memory per device", "{:.2f} GiB"),
    "joules_per_token": ("energy per token", "{:.3g} J"),
    "energy_kwh": ("energy", "{:.3g} kWh"),
}
SPARK_CHARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 48
SPEED_WINDOW = 20
MAX_EVENTS = 6
IDLE_WARNING_S = 120.0


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
        self.path, self._clock = path, clock
        self._files = JsonlReader(path / "metrics.jsonl"), JsonlReader(path / "events.jsonl")
        self.records: list[Mapping[str, Any]] = []
        self.events: list[Mapping[str, Any]] = []

    def poll(self) -> None:
        """Read new records and events."""
        metrics, events = (file.read() if file.path.exists() else [] for file in self._files)
        self.records = drop_superseded_records([*self.records, *metrics])
        self.events += events

    @property
    def state(self) -> str:
        """State by the run's last event of that kind: "running", "completed" or "stopped by SIGTERM"."""
        names = {"start": "running", "stop": "stopped", "completed": "completed"}
        last = next((event for event in reversed(self.events) if event["event"] in names), {"event": ""})
        return names.get(last["event"], "not started") + (f" by {last['signal']}" if "signal" in last else "")

    @property
    def idle_s(self) -> float:
        """Seconds since the last write; 0 if there was none."""
        times = [file.path.stat().st_mtime for file in self._files if file.path.exists()]
        return max(self._clock() - max(times), 0.0) if times else 0.0

    @property
    def max_steps(self) -> int:
        """Steps of the run; 0 if it has no recipe."""
        path = self.path / "recipe.json"
        return json.loads(path.read_bytes())["recipe"]["schedule"]["max_steps"] if path.exists() else 0

    @property
    def train(self) -> list[Mapping[str, Any]]:
        """Training records."""
        return [record for record in self.records if "loss" in record]

    @property
    def remaining_s(self) -> float:
        """Seconds to the last step at the speed of the newest records of this start; nan if unknown."""
        recent = self.train[-SPEED_WINDOW:]
        for index in range(len(recent) - 1, 0, -1):
            if is_first_of_start(recent[index - 1], recent[index]):
                recent = recent[index:]
                break
        if len(recent) < 2:
            return math.nan
        seconds = recent[-1]["elapsed_s"] - recent[0]["elapsed_s"]
        return (self.max_steps - recent[-1]["step"]) * seconds / (recent[-1]["step"] - recent[0]["step"])


def watch_run(path: Path, *, interval_s: float, once: bool, console: Console | None = None) -> None:
    """Show a run until it completes or the user interrupts.

    Args:
        path: run directory.
        interval_s: time between polls.
        once: show the current view and return.
        console: output console.

    Raises:
        RunDirError: not a run directory, or a damaged file.
    """
    watcher = RunWatcher(path)
    watcher.poll()
    with Live(render(watcher), console=console, auto_refresh=False) as live:
        while not once and watcher.state != "completed":
            time.sleep(interval_s)
            watcher.poll()
            live.update(render(watcher), refresh=True)


def render(run: RunWatcher) -> RenderableType:
    """Return the view as a panel around one table of names and values."""
    table = Table.grid("", "", padding=(0, 2))
    for name, value in _rows(run):
        table.add_row(Text(_plain(name), style="dim"), Text(_plain(value)) if isinstance(value, str) else value)
    return Panel(table, title=Text(_plain(str(run.path))), expand=False)


def _rows(run: RunWatcher) -> Iterator[tuple[str, RenderableType]]:
    train, max_steps = run.train, run.max_steps
    device = next((event.get("device", "") for event in reversed(run.events) if event["event"] == "start"), "")
    yield run.state, Text(_plain(device), style="bold")
    if run.state == "running" and run.idle_s > IDLE_WARNING_S:
        yield "", Text(f"nothing written for {format_duration(run.idle_s)}", style="bold red")
    if train:
        last, step = train[-1], train[-1]["step"]
        left = "" if math.isnan(run.remaining_s) or step >= max_steps else f", {format_duration(run.remaining_s)} left"
        yield "step", f"{step:,}" + (f" of {max_steps:,}" if max_steps else "") + left
        yield "", ProgressBar(total=max(max_steps, 1), completed=step, width=CURVE_WIDTH)
        yield "loss", f"{last['loss']:.4f}"
        yield "", Text(_curve([record["loss"] for record in train]), style="cyan")
        for field, (title, template) in NUMBERS.items():
            if field in last:
                yield title, template.format(last[field])
        seconds = {part: last.get(f"{part}_s", 0.0) for part in STEP_PARTS}
        if total := sum(seconds.values()):
            yield "time", ", ".join(f"{part.replace('_', ' + ')} {one / total:.0%}" for part, one in seconds.items())
    for name, record in {record.get("val_set", ""): record for record in run.records if "val_loss" in record}.items():
        bits = f", {record['val_bits_per_byte']:.4f} bits per byte" if "val_bits_per_byte" in record else ""
        yield f"validation {name}", f"loss {record['val_loss']:.4f}{bits}, step {record['step']:,}"
    for event in run.events[-MAX_EVENTS:]:
        rest = " ".join(f"{name}={value}" for name, value in event.items() if name not in ("time", "event"))
        yield event["time"][11:19], f"{event['event']} {event.get('text', rest)}"


def _curve(losses: Sequence[float]) -> str:
    """Return the loss as a sparkline, each character the mean of a group; blank if not finite."""
    size = math.ceil(len(losses) / CURVE_WIDTH)
    groups = [losses[start : start + size] for start in range(0, len(losses), size)]
    means = [math.fsum(group) / len(group) for group in groups]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(SPARK_CHARS) - 1) / (high - low) if high > low else 0.0
    bars = [SPARK_CHARS[round((mean - low) * scale)] if math.isfinite(mean) else " " for mean in means]
    return f"{''.join(bars)} {high:.4g} to {low:.4g}"


def _plain(text: str) -> str:
    return escape_controls(text, keep="")
