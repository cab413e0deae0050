"""Terminal rendering of a run view with rich: metrics, loss curve, times, nodes and last events."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lt_data.display.terminal import escape_controls
from lt_trainer.observability.watch.follower import RunView, RunWatcher
from lt_trainer.timing import STEP_PARTS

SPARK_CHARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60
"""Width of the loss curve in characters."""
GAP = 2
"""Blanks after a column."""
MAX_EVENTS = 6
IDLE_WARNING_S = 120.0
"""A running run that has written nothing for this long gets a warning."""


def watch_run(path: Path, *, interval_s: float, once: bool, console: Console | None = None) -> None:
    """Show a run until it completes or the user interrupts.

    Args:
        path: run directory.
        interval_s: time between polls.
        once: show the current view and return.
        console: output console.

    Raises:
        RunDirError: not a run directory.
    """
    console = console or Console()
    watcher = RunWatcher(path)
    view = watcher.poll()
    if once or view.state == "completed":
        console.print(render(view))
        return
    with Live(render(view), console=console, auto_refresh=False) as live:
        while view.state != "completed":
            time.sleep(interval_s)
            view = watcher.poll()
            live.update(render(view), refresh=True)


def render(view: RunView) -> RenderableType:
    """Return the view as a rich panel."""
    parts: list[RenderableType] = [_head(view)]
    if view.train:
        parts += [_numbers(view), _curve([record["loss"] for record in view.train])]
        parts += _times(view.train[-1])
    if view.validation:
        parts.append(_validation(view.validation))
    if view.nodes:
        parts.append(_nodes(view.nodes))
    parts.append(_events(view.events))
    return Panel(Group(*parts), title=Text(escape_controls(str(view.path), keep="")), expand=False)


def _head(view: RunView) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    state = Text(view.state, style="bold green" if view.state in ("running", "completed") else "bold yellow")
    step = f"step {view.step}" + (f" of {view.max_steps}" if view.max_steps else "")
    left = "" if view.state != "running" or math.isnan(view.remaining_s) else f"{_duration(view.remaining_s)} left"
    bar = ProgressBar(total=max(view.max_steps, 1), completed=view.step, width=30)
    table.add_row(state, step, bar, left, Text(escape_controls(view.device, keep="")))
    if view.state == "running" and view.idle_s > IDLE_WARNING_S:
        return Group(table, Text(f"nothing written for {_duration(view.idle_s)}", style="bold red"))
    return table


def _numbers(view: RunView) -> RenderableType:
    last = view.train[-1]
    columns = {
        "loss": ("loss", "{:.4f}"),
        "learning rate": ("learning_rate", "{:.3g}"),
        "grad norm": ("grad_norm", "{:.3g}"),
        "tokens/s per device": ("tokens_per_sec", "{:,.0f}"),
        "MFU": ("mfu", "{:.1%}"),
        "HFU": ("hfu", "{:.1%}"),
        "memory GiB": ("memory_gib", "{:.2f}"),
        "J/token": ("joules_per_token", "{:.3g}"),
        "kWh": ("energy_kwh", "{:.3g}"),
    }
    cells = {title: template.format(last[name]) for title, (name, template) in columns.items() if name in last}
    return _table(list(cells), [list(cells.values())])


def _curve(losses: Sequence[float]) -> RenderableType:
    """Return the loss as a sparkline, each character the mean of a group; blank if not finite."""
    size = max(1, math.ceil(len(losses) / CURVE_WIDTH))
    groups = [[x for x in losses[start : start + size] if math.isfinite(x)] for start in range(0, len(losses), size)]
    means = [sum(group) / len(group) if group else math.nan for group in groups]
    finite = [mean for mean in means if not math.isnan(mean)]
    if not finite:
        return Text("loss: no finite value yet")
    low, high = min(finite), max(finite)
    scale = (len(SPARK_CHARS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(" " if math.isnan(mean) else SPARK_CHARS[round((mean - low) * scale)] for mean in means)
    return Text.assemble("loss ", (bars, "cyan"), f"  {high:.4g} to {low:.4g}")


def _times(record: Mapping[str, Any]) -> list[RenderableType]:
    seconds = {part: record[f"{part}_s"] for part in STEP_PARTS if f"{part}_s" in record}
    total = sum(seconds.values())
    if not total > 0:
        return []
    shares = ", ".join(f"{part.replace('_', ' + ')} {value / total:.0%}" for part, value in seconds.items())
    return [Text(f"time  {shares}  of {_duration(total)}")]


def _validation(sets: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    rows = []
    for name, record in sets.items():
        bits = record.get("val_bits_per_byte")
        rows.append(
            [
                name or "validation",
                str(record["step"]),
                f"{record['val_loss']:.4f}",
                f"{record.get('val_perplexity', math.nan):.4g}",
                "" if bits is None else f"{bits:.4f}",
            ]
        )
    return _table(["validation set", "step", "loss", "perplexity", "bits per byte"], rows)


def _nodes(nodes: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    rows = []
    for name, sample in nodes.items():
        gpus = sample.get("gpus", [])
        rss = sum(rank.get("rss_gib", 0.0) for rank in sample.get("ranks", {}).values())
        rows.append(
            [
                f"{name} {sample.get('host', '')}",
                _number(sample.get("cpu_percent"), "{:.0f} %"),
                f"{_number(sample.get('memory_available_gib'), '{:.1f}')} GiB free",
                f"{rss:.2f} GiB",
                f"{_number(sample.get('disk_write_mib_s'), '{:.1f}')} MiB/s, "
                f"{_number(sample.get('disk_free_gib'), '{:.0f}')} GiB free",
                " ".join(_number(gpu.get("utilization_percent"), "{:.0f}%") for gpu in gpus),
                _number(sum(gpu.get("power_w", 0.0) for gpu in gpus) if gpus else None, "{:.0f} W"),
                _number(max((gpu.get("temperature_c", 0) for gpu in gpus), default=None), "{:.0f} C"),
            ]
        )
    return _table(["node", "CPU", "memory", "ranks", "disk writes", "GPUs", "power", "hottest"], rows)


def _events(events: Sequence[Mapping[str, Any]]) -> RenderableType:
    lines = []
    for event in events[-MAX_EVENTS:]:
        details = " ".join(f"{name}={value}" for name, value in event.items() if name not in ("time", "event", "text"))
        text = event.get("text") or f"{event.get('event', '')} {details}"
        line = escape_controls(f"{str(event.get('time', ''))[11:19]}  {text}", keep="")
        lines.append(Text(line, no_wrap=True, overflow="ellipsis"))
    return Group(*lines)


@dataclass(frozen=True, kw_only=True)
class _WrappingTable:
    """Table whose columns go on below where the terminal ends.

    Several rows are named there by their first column again.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        n_names = 1 if len(self.rows) > 1 else 0
        widths = [GAP + max(map(len, column)) for column in zip(self.titles, *self.rows, strict=True)]
        names = list(range(n_names))
        groups, used = [names[:]], sum(widths[:n_names])
        for column in range(n_names, len(widths)):
            if len(groups[-1]) > n_names and used + widths[column] - GAP > options.max_width:
                groups.append(names[:])
                used = sum(widths[:n_names])
            groups[-1].append(column)
            used += widths[column]
        for group in groups:
            table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
            for column in group:
                table.add_column(self.titles[column], no_wrap=True)
            for row in self.rows:
                table.add_row(*(Text(row[column]) for column in group))
            yield table


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    return _WrappingTable(titles=titles, rows=[[escape_controls(cell, keep="") for cell in row] for row in rows])


def _number(value: float | None, template: str) -> str:
    return "-" if value is None else template.format(value)


def _duration(seconds: float) -> str:
    """Format with two units at most: 45 s, 12 min 5 s, 3 h 20 min, 5 d 3 h."""
    if math.isnan(seconds):
        return "?"
    whole = round(seconds)
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{whole} s"
