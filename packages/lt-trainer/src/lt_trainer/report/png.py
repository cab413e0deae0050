"""The charts as pictures: the one module that knows matplotlib (extra `plot`).

No window and no global state: figures are drawn by the Agg renderer, on white. Each chart is a file of its own, and
`overview` has all of them above each other on one axis of steps.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lt_trainer.errors import TrainerError
from lt_trainer.report.charts import Chart, Lane, TimeSplit
from lt_trainer.report.curves import log_ticks, short, value_range
from lt_trainer.timing import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#2f6fbf", "#c2701c", "#3a8f5c", "#b0417a", "#7357c2", "#1f8f98", "#a08a12", "#b34a3c")
TIME_COLOURS = ("#c2701c", "#2f6fbf", "#3a8f5c", "#7357c2", "#1f8f98", "#aab2bf")
INK, SOFT, GRID = "#1c2330", "#5b6575", "#dfe3ea"
WIDTH, HEIGHT, DPI = 8.0, 3.2, 150


def check_matplotlib() -> None:
    """Raise where it is not there, before anything is written.

    Raises:
        TrainerError: matplotlib is missing.
    """
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise TrainerError('--png: matplotlib is not installed: pip install "lt-trainer[plot]"')


def names(made: Sequence[Chart], splits: Sequence[TimeSplit]) -> list[str]:
    """The names of the pictures that `draw` makes."""
    return ["overview", *(one.key for one in made), *(_time_name(split, splits) for split in splits)]


def draw(
    made: Sequence[Chart], splits: Sequence[TimeSplit], lanes: Sequence[Lane], runs: Sequence[str], last_step: float
) -> dict[str, bytes]:
    """The pictures: name → PNG.

    Args:
        made: the charts.
        splits: where the time went, by run.
        lanes: events.
        runs: the names of the runs.
        last_step: where the axis of steps ends.
    """
    found = {"overview": _png(_overview(made, lanes, runs, last_step))}
    for one in made:
        figure = _figure(HEIGHT)
        axes = figure.subplots()
        _chart(axes, one, runs, last_step)
        axes.set_xlabel("step", fontsize=8, color=SOFT)
        found[one.key] = _png(figure)
    for split in splits:
        found[_time_name(split, splits)] = _png(_time(split, runs, last_step))
    return found


def _time_name(split: TimeSplit, splits: Sequence[TimeSplit]) -> str:
    return "time" if len(splits) == 1 else f"time-{split.run + 1}"


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")


def _overview(made: Sequence[Chart], lanes: Sequence[Lane], runs: Sequence[str], last_step: float) -> Figure:
    heights = [2.2 if one.key == "loss" else 1.3 for one in made] + ([0.3 + 0.2 * len(lanes)] if lanes else [])
    figure = _figure(sum(heights) + 0.5) if heights else _figure(1.0)
    if not heights:
        return figure
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, one in zip(rows, made, strict=False):
        _chart(axes, one, runs, last_step)
    if lanes:
        axes = rows[-1]
        for number, lane in enumerate(lanes):
            for run, step, _ in lane.marks:
                axes.plot([step], [number], "o", color=COLOURS[run % len(COLOURS)], markersize=4)
        axes.set_yticks(range(len(lanes)), [lane.title for lane in lanes], fontsize=8)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        _clean(axes, "Events", last_step)
    rows[-1].set_xlabel("step", fontsize=8, color=SOFT)
    return figure


def _chart(axes: Any, one: Chart, runs: Sequence[str], last_step: float) -> None:
    looks = {
        "line": {"linewidth": 1.4},
        "faint": {"linewidth": 0.7, "alpha": 0.35},
        "dashed": {"linewidth": 1.2, "linestyle": "--"},
        "dots": {"linestyle": "", "marker": "o", "markersize": 4},
    }
    for line in one.lines:
        xs, ys = zip(*line.points, strict=True)
        name = line.name.removesuffix(", smoothed") if line.look != "faint" else "_"
        look: dict[str, Any] = looks["dots" if len(xs) == 1 else line.look]
        axes.plot(xs, ys, color=COLOURS[line.colour % len(COLOURS)], label=name, **look)
    values = one.values
    if one.log:
        axes.set_yscale("log")
        axes.minorticks_off()
        marks = log_ticks(*value_range(values, log=True))
        axes.set_yticks(marks, [short(value) for value in marks])
    else:
        axes.set_ylim(*value_range(values, from_zero=one.from_zero))
    if one.percent:
        from matplotlib.ticker import PercentFormatter

        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if len(one.lines) > 1 and any(line.look != "faint" for line in one.lines[1:]):
        axes.legend(fontsize=7, frameon=False, loc="best")
    _clean(axes, f"{one.title}, {one.unit}" if one.unit else one.title, last_step)


def _clean(axes: Any, title: str, last_step: float) -> None:
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.set_xlim(0, last_step)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, color=GRID, labelcolor=SOFT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)


def _time(split: TimeSplit, runs: Sequence[str], last_step: float) -> Figure:
    figure = _figure(HEIGHT)
    axes = figure.subplots()
    begins = [begin for begin, _, _ in split.columns]
    widths = [end - begin for begin, end, _ in split.columns]
    bottoms = [0.0] * len(begins)
    for part, colour in zip(PARTS, TIME_COLOURS, strict=True):
        shares = [found[part] for _, _, found in split.columns]
        if any(shares):
            axes.bar(begins, shares, widths, bottoms, align="edge", color=colour, label=part.replace("_", " + "))
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    axes.set_ylim(0, 1)
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(loc="outside lower left", ncols=len(PARTS), fontsize=7, frameon=False)
    title = f"Where the time goes, {runs[split.run]}" if len(runs) > 1 else "Where the time goes"
    _clean(axes, title, last_step)
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
