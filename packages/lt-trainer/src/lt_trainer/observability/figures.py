"""Figures of runs by matplotlib: loss, rates, step times and parameters, as SVG for a page or PNG files.

Text, axes and grid of an SVG have the color of the page's text, so that a figure can be read on light and dark ground.
Equal runs give equal bytes. Cost: about 0.2 s per figure; matplotlib leaves out points that nobody could tell apart.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lt_trainer.engine import STEP_PARTS

if TYPE_CHECKING:
    from lt_trainer.observability.report import RunHistory

COLORS = ("#2f78cf", "#d98324", "#35a065", "#c4508c", "#7d63d1", "#1f9aa5", "#a8941f", "#c2564a")
INK = "#0b0c0d"
STYLE = str(files("lt_trainer.observability") / "figures.mplstyle")
CURVES = {
    "loss": ("Loss, nats per token", ("loss",)),
    "learning_rate": ("Learning rate", ("learning_rate",)),
    "grad_norm": ("Gradient norm before clipping", ("grad_norm",)),
    "tokens_per_sec": ("Tokens/s per device", ("tokens_per_sec",)),
    "mfu": ("MFU (dashed: HFU, with recomputation)", ("mfu", "hfu")),
    "memory": ("Peak memory per device, GiB", ("memory_gib",)),
    "joules_per_token": ("Energy, J per token", ("joules_per_token",)),
}
EVENT_COLORS = {"stop": "0.5", "resume": COLORS[2], "rollback": COLORS[7], "step_skipped": COLORS[1]}
MAX_RULES = 40


def draw_figures(runs: Sequence[RunHistory]) -> dict[str, Figure]:
    """Return the figures for which the runs have numbers, by name; the first is that of the loss."""
    figures: dict[str, Figure] = {}
    last_step = max((run.step for run in runs), default=0)
    with rc_context(fname=STYLE):
        for name, (title, fields) in CURVES.items():
            figure = Figure(figsize=(12, 3.6) if name == "loss" else (6, 2.6), layout="constrained")
            axes = figure.subplots()
            for number, run in enumerate(runs):
                for field in fields:
                    _draw_curve(axes, run, field, COLORS[number % len(COLORS)])
                for index, (set_name, records) in enumerate(run.validation.items(), start=1):
                    if name == "loss":
                        color = COLORS[(index if len(runs) == 1 else number) % len(COLORS)]
                        label = f" {run.name}, validation {set_name}".rstrip()
                        axes.plot(*_points(records, "val_loss"), "o", color=color, label=label, clip_on=False)
            if axes.lines:
                _draw_events(axes, runs)
                _set_axes(axes, title, last_step)
                if name == "loss":
                    axes.legend(loc="upper right", ncols=4)
                figures[name] = figure
        figures |= {f"time-{number}": _draw_times(run) for number, run in enumerate(runs, 1) if len(run.train) > 1}
    return figures


def draw_parameters(n_parameters: Mapping[str, int]) -> Figure:
    """Return bars of the number of parameters by kind."""
    names, numbers = list(n_parameters)[::-1], list(n_parameters.values())[::-1]
    with rc_context({"axes.grid": False}, fname=STYLE):
        figure = Figure(figsize=(12, 0.4 + 0.24 * len(names)), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(names, numbers, color=COLORS[0], height=0.6)
        axes.bar_label(bars, [f"{number:,} ({number / sum(numbers):.1%})" for number in numbers], padding=4)
        axes.margins(x=0.12)
        axes.xaxis.set_visible(False)
        axes.spines[:].set_visible(False)
    return figure


def to_svg(figure: Figure) -> str:
    """Return a figure as an SVG element whose text has the color of what is around it."""
    file = io.StringIO()
    with rc_context(fname=STYLE):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()[file.getvalue().index("<svg") :].replace(INK, "currentColor")


def to_png(figure: Figure) -> bytes:
    """Return a figure as a PNG file on white ground."""
    file = io.BytesIO()
    with rc_context(fname=STYLE):
        figure.savefig(file, format="png")
    return file.getvalue()


def _points(records: Sequence[Mapping[str, Any]], field: str) -> np.ndarray:
    """Return steps and finite values of a field, float64 [2, n]."""
    points = [(record["step"], record[field]) for record in records if math.isfinite(record.get(field, math.nan))]
    return np.array(points, dtype=float).reshape(-1, 2).T


def _draw_curve(axes: Axes, run: RunHistory, field: str, color: str) -> None:
    """Draw a field; of loss and gradient norm all values faintly, and their centered moving average."""
    steps, values = _points(run.train, field)
    if not len(steps) or (field == "hfu" and all(record.get("hfu") == record.get("mfu") for record in run.train)):
        return
    if field == "grad_norm" and values.min() > 0 and values.max() > 10 * values.min():
        axes.set_yscale("log")
    if field in ("loss", "grad_norm") and len(steps) >= 20:
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
        width = max(5, len(steps) // 40)
        values = np.convolve(values, np.full(width, 1 / width), "valid")
        steps = steps[width // 2 :][: len(values)]
    style = "--" if field == "hfu" else "-" if len(steps) > 1 else "o"
    axes.plot(steps, values, style, color=color, label=f" {run.name}")  # labels that begin with _ are hidden


def _draw_events(axes: Axes, runs: Sequence[RunHistory]) -> None:
    """Draw a dotted line at stops, resumes, rollbacks and skipped steps, and a triangle at checkpoints."""
    events = [event for run in runs for event in run.events if "step" in event]
    for kind, color in EVENT_COLORS.items():
        steps = sorted({event["step"] for event in events if event["event"] == kind})
        for number, step in enumerate(steps[:MAX_RULES]):
            label = "" if number else kind.replace("_", " ")
            axes.axvline(step, color=color, linewidth=1, linestyle=":", label=label)
    if steps := [event["step"] for event in events if event["event"] == "checkpoint"]:
        bottom = [0.02] * len(steps)
        look = {"color": INK, "alpha": 0.5, "clip_on": False, "transform": axes.get_xaxis_transform()}
        axes.plot(steps, bottom, "^", label="checkpoint", **look)


def _set_axes(axes: Axes, title: str, last_step: int) -> None:
    axes.set_title(title)
    axes.set_xlim(0, max(last_step, 1))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter((lambda x, _: f"{100 * x:.3g}%") if "MFU" in title else "{x:,g}")
    if axes.get_yscale() == "log":
        axes.yaxis.set_minor_formatter("")
    elif "Loss" not in title:
        axes.set_ylim(bottom=0)


def _draw_times(run: RunHistory) -> Figure:
    """Return the share of each part of a step, averaged over groups of records."""
    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.subplots()
    seconds = np.array([[record.get(f"{part}_s", 0.0) for part in STEP_PARTS] for record in run.train])
    starts = np.unique(np.linspace(0, len(seconds), 100, endpoint=False, dtype=int))
    edges = [0, *(run.train[start - 1]["step"] for start in starts[1:]), run.step]
    groups = np.add.reduceat(seconds, starts)
    tops = np.cumsum(groups / np.maximum(groups.sum(axis=1, keepdims=True), 1e-9), axis=1)
    for index, part in enumerate(STEP_PARTS):
        label = f"{part.replace('_', ' + ')} {seconds[:, index].sum() / max(seconds.sum(), 1e-9):.0%}"
        bottoms = tops[:, index - 1] if index else 0
        axes.stairs(tops[:, index], edges, baseline=bottoms, fill=True, color=COLORS[index], alpha=0.85, label=label)
    _set_axes(axes, f"Time of a step by part, {run.name}", run.step)
    axes.yaxis.set_major_formatter("{x:.0%}")
    figure.legend(loc="outside lower center", ncols=3)
    return figure
