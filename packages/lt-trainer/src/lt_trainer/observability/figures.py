"""Figures of runs by matplotlib: a field of the records over the steps, as SVG for a page or PNG files.

Text, axes and grid of an SVG have the color of the page's text, so that a figure can be read on light and dark ground.
Equal runs give equal bytes. Cost: about 0.2 s per figure; matplotlib leaves out points that nobody could tell apart.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lt_trainer.observability.run_history import RunHistory

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
    "expert_load": ("Busiest over mean expert (darker: later layers)", ("expert_load",)),
    "expert_idle": ("Experts without tokens (darker: later layers)", ("expert_idle",)),
    "expert_aux_loss": ("Load-balancing loss (darker: later layers)", ("expert_aux_loss",)),
}
EVENT_COLORS = {"stop": "0.5", "resume": COLORS[2], "rollback": COLORS[7], "step_skipped": COLORS[1]}
MAX_RULES = 40


def draw_figures(runs: Sequence[RunHistory]) -> dict[str, Figure]:
    """Return the figures for which the runs have numbers, by name; the first is that of the loss."""
    with rc_context(fname=STYLE):
        figures = {name: _draw(runs, name, title, fields) for name, (title, fields) in CURVES.items()}
    return {name: figure for name, figure in figures.items() if figure.axes[0].lines}


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


def _draw(runs: Sequence[RunHistory], name: str, title: str, fields: Sequence[str]) -> Figure:
    figure = Figure(figsize=(12, 3.6) if name == "loss" else (6, 2.6), layout="constrained")
    axes = figure.subplots()
    titles = {run.memory_title for run in runs}
    if name == "memory" and len(titles) == 1:
        title = f"{titles.pop().capitalize()}, GiB"
    axes.set_title(title)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter((lambda x, _: f"{100 * x:.3g}%") if name == "mfu" else "{x:,g}")
    for number, run in enumerate(runs):
        for field in fields:
            _draw_curve(axes, run, field, COLORS[number % len(COLORS)])
        for index, (set_name, records) in enumerate(run.validation.items() if name == "loss" else (), start=1):
            color = COLORS[(index if len(runs) == 1 else number) % len(COLORS)]
            label = f" {run.name}, validation {set_name}".rstrip()
            axes.plot(*_points(records, "val_loss"), "o", color=color, label=label, clip_on=False)
    if not axes.lines:
        return figure
    for event in [event for run in runs for event in run.events if event["event"] in EVENT_COLORS][:MAX_RULES]:
        kind, known = event["event"].replace("_", " "), axes.get_legend_handles_labels()[1]
        label = "" if kind in known else kind
        axes.axvline(event.get("step", 0), color=EVENT_COLORS[event["event"]], linewidth=1, linestyle=":", label=label)
    if name == "loss":
        # Out of the layout: names of runs may be paths, longer than the axes are wide.
        axes.legend(loc="upper right", ncols=4 if len(runs) == 1 else 1).set_in_layout(False)
    elif axes.get_yscale() != "log":
        axes.set_ylim(bottom=0)
    axes.set_xlim(0, max(1, *(run.step for run in runs)))
    return figure


def _points(records: Sequence[Mapping[str, Any]], field: str) -> np.ndarray:
    """Return steps and finite values of a field, float64 [2, n]; of a field by layer [1 + layers, n]."""
    points = [np.append(record["step"], record[field]) for record in records if record.get(field) is not None]
    table = np.stack(points).T.astype(float) if points else np.empty((2, 0))
    return table[:, np.isfinite(table).all(axis=0)]


def _draw_curve(axes: Axes, run: RunHistory, field: str, color: str) -> None:
    """Draw a field, or one by layer in darker and darker curves.

    Of loss and gradient norm all values are drawn faintly, and their centered moving average.
    """
    steps, *curves = _points(run.train, field)
    if not len(steps) or (field == "hfu" and all(record.get("hfu") == record.get("mfu") for record in run.train)):
        return
    values = curves[-1]
    if field == "grad_norm" and values.min() > 0 and values.max() > 10 * values.min():
        axes.set_yscale("log")
    if field in ("loss", "grad_norm") and len(steps) >= 20:
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
        width = max(5, len(steps) // 40)
        curves = [np.convolve(values, np.full(width, 1 / width), "valid")]
        steps = steps[width // 2 :][: len(curves[0])]
    style = "--" if field == "hfu" else "-" if len(steps) > 1 else "o"
    for layer, values in enumerate(curves, start=1):
        # Labels that begin with _ are hidden.
        axes.plot(steps, values, style, color=color, alpha=layer / len(curves), label=f" {run.name}")
