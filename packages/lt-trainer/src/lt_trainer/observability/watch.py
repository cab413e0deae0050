"""Live view of a run in the terminal, from its files: progress, newest numbers, loss curve, validation, last events.

Whatever the files say is shown as plain text, with control characters escaped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lt_data.display.terminal import escape_controls
from lt_trainer.observability.run_history import RunHistory

SPARK_CHARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 48
MAX_EVENTS = 6


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
    run, console = RunHistory(path), console or Console()
    with Live(render(run), console=console, auto_refresh=False) as live:
        while not once and run.state != "completed":
            time.sleep(interval_s)
            run.poll()
            live.update(render(run), refresh=True)
    if not console.is_terminal:
        console.line()  # of a file or a pipe Live leaves the last line open


def render(run: RunHistory) -> Panel:
    """Return the view as a panel around one table of names and values."""
    table = Table.grid("", "", padding=(0, 2))
    for row in _rows(run):
        table.add_row(*(Text(escape_controls(text, keep="")) for text in row))
    return Panel(table, title=Text(escape_controls(str(run.path), keep="")), expand=False)


def _rows(run: RunHistory) -> Iterator[tuple[str, str]]:
    yield run.state, str(run.last_event("start").get("device", ""))
    if run.train:
        left = "" if math.isnan(run.seconds_left) else f", {timedelta(seconds=round(run.seconds_left))} left"
        newest = time.time() - (run.path / "metrics.jsonl").stat().st_mtime
        yield "step", f"{run.step:,} of {run.max_steps:,}{left}; written {timedelta(seconds=round(newest))} ago"
    if run.losses:
        yield "loss", f"{run.losses[-1]:.4f}"
        yield "", _curve(run.losses)
    yield from run.numbers().items()
    for name, records in run.validation.items():
        last = records[-1]
        bits = f", {last['val_bits_per_byte']:.4f} bits per byte" if "val_bits_per_byte" in last else ""
        yield f"validation {name}", f"loss {last['val_loss']:.4f}{bits}, step {last['step']:,}"
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
