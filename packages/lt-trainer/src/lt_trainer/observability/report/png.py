"""PNG rendering of charts: the only module that imports matplotlib (extra `plot`).

No window and no global state: figures use the Agg renderer on white. Each chart is a separate file, and `overview` has
all of them stacked on one step axis.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lt_trainer.errors import TrainerError
from lt_trainer.observability.report.charts import Chart, EventLane, TimeBreakdown
from lt_trainer.observability.report.curves import format_short, log_ticks, value_range
from lt_trainer.timing import STEP_PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#2f6fbf", "#c2701c", "#3a8f5c", "#b0417a", "#7357c2", "#1f8f98", "#a08a12", "#b34a3c")
TIME_COLORS = ("#c2701c", "#2f6fbf", "#3a8f5c", "#7357c2", "#1f8f98", "#aab2bf")
INK, MUTED, GRID = "#1c2330", "#5b6575", "#dfe3ea"
WIDTH, HEIGHT, DPI = 8.0, 3.2, 150


def require_matplotlib() -> None:
    """Check that matplotlib is installed, before anything is written.

    Raises:
        TrainerError: matplotlib is not installed.
    """
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise TrainerError('--png: matplotlib is not installed: pip install "lt-trainer[plot]"')


def picture_names(charts: Sequence[Chart], breakdowns: Sequence[TimeBreakdown]) -> list[str]:
    """Return the names of the pictures of `draw_pictures`."""
    names = (_time_name(breakdown, breakdowns) for breakdown in breakdowns)
    return ["overview", *(chart.key for chart in charts), *names]


def draw_pictures(
    charts: Sequence[Chart],
    breakdowns: Sequence[TimeBreakdown],
    lanes: Sequence[EventLane],
    runs: Sequence[str],
    last_step: float,
) -> dict[str, bytes]:
    """Return the PNG files by name.

    Args:
        charts: charts to draw.
        breakdowns: time breakdown per run.
        lanes: events.
        runs: names of the runs.
        last_step: end of the step axis.
    """
    pictures = {"overview": _png(_overview(charts, lanes, runs, last_step))}
    for chart in charts:
        figure = _figure(HEIGHT)
        axes = figure.subplots()
        _draw_chart(axes, chart, runs, last_step)
        axes.set_xlabel("step", fontsize=8, color=MUTED)
        pictures[chart.key] = _png(figure)
    for breakdown in breakdowns:
        pictures[_time_name(breakdown, breakdowns)] = _png(_time_figure(breakdown, runs, last_step))
    return pictures


def _time_name(breakdown: TimeBreakdown, breakdowns: Sequence[TimeBreakdown]) -> str:
    return "time" if len(breakdowns) == 1 else f"time-{breakdown.run + 1}"


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")


def _overview(charts: Sequence[Chart], lanes: Sequence[EventLane], runs: Sequence[str], last_step: float) -> Figure:
    heights = [2.2 if chart.key == "loss" else 1.3 for chart in charts] + ([0.3 + 0.2 * len(lanes)] if lanes else [])
    figure = _figure(sum(heights) + 0.5) if heights else _figure(1.0)
    if not heights:
        return figure
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, chart in zip(rows, charts, strict=False):
        _draw_chart(axes, chart, runs, last_step)
    if lanes:
        axes = rows[-1]
        for number, lane in enumerate(lanes):
            for run, step, _ in lane.events:
                axes.plot([step], [number], "o", color=COLORS[run % len(COLORS)], markersize=4)
        axes.set_yticks(range(len(lanes)), [lane.title for lane in lanes], fontsize=8)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        _style_axes(axes, "Events", last_step)
    rows[-1].set_xlabel("step", fontsize=8, color=MUTED)
    return figure


def _draw_chart(axes: Any, chart: Chart, runs: Sequence[str], last_step: float) -> None:
    styles = {
        "line": {"linewidth": 1.4},
        "faint": {"linewidth": 0.7, "alpha": 0.35},
        "dashed": {"linewidth": 1.2, "linestyle": "--"},
        "dots": {"linestyle": "", "marker": "o", "markersize": 4},
    }
    for line in chart.curves:
        xs, ys = zip(*line.points, strict=True)
        name = line.name.removesuffix(", smoothed") if line.style != "faint" else "_"
        style: dict[str, Any] = styles["dots" if len(xs) == 1 else line.style]
        axes.plot(xs, ys, color=COLORS[line.color % len(COLORS)], label=name, **style)
    values = chart.values
    if chart.log:
        axes.set_yscale("log")
        axes.minorticks_off()
        marks = log_ticks(*value_range(values, log=True))
        axes.set_yticks(marks, [format_short(value) for value in marks])
    else:
        axes.set_ylim(*value_range(values, from_zero=chart.from_zero))
    if chart.percent:
        from matplotlib.ticker import PercentFormatter

        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if len(chart.curves) > 1 and any(line.style != "faint" for line in chart.curves[1:]):
        axes.legend(fontsize=7, frameon=False, loc="best")
    _style_axes(axes, f"{chart.title}, {chart.unit}" if chart.unit else chart.title, last_step)


def _style_axes(axes: Any, title: str, last_step: float) -> None:
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.set_xlim(0, last_step)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, color=GRID, labelcolor=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)


def _time_figure(breakdown: TimeBreakdown, runs: Sequence[str], last_step: float) -> Figure:
    figure = _figure(HEIGHT)
    axes = figure.subplots()
    begins = [begin for begin, _, _ in breakdown.columns]
    widths = [end - begin for begin, end, _ in breakdown.columns]
    bottoms = [0.0] * len(begins)
    for part, color in zip(STEP_PARTS, TIME_COLORS, strict=True):
        shares = [column_shares[part] for _, _, column_shares in breakdown.columns]
        if any(shares):
            axes.bar(begins, shares, widths, bottoms, align="edge", color=color, label=part.replace("_", " + "))
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    axes.set_ylim(0, 1)
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(loc="outside lower left", ncols=len(STEP_PARTS), fontsize=7, frameon=False)
    title = f"Time breakdown, {runs[breakdown.run]}" if len(runs) > 1 else "Time breakdown"
    _style_axes(axes, title, last_step)
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
