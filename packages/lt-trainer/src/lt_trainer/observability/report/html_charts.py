"""HTML rendering of charts: lines are SVG stretched to the page width, text is HTML of fixed size.

`vector-effect` keeps the line width; a dot is a zero-length stroke with round caps. All charts have the same step axis,
and `page.js` moves one ruler over all of them; its numbers come from `chart_values`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Literal

from lt_trainer.observability.report.charts import Chart, Curve, EventLane, TimeBreakdown
from lt_trainer.observability.report.curves import format_short, log_ticks, ticks, value_range
from lt_trainer.timing import STEP_PARTS

N_COLORS = 8
"""Number of distinct line colors; further runs reuse them."""


class Axis:
    """Linear or logarithmic axis: maps a value to a fraction of the axis length."""

    def __init__(self, low: float, high: float, *, log: bool = False) -> None:
        from math import log10

        self._scale = log10 if log else float
        self._low, self._length = self._scale(low), self._scale(high) - self._scale(low)

    def __call__(self, value: float) -> float:
        """Return the fraction from the low end; below 0 or above 1 if off the axis."""
        return (self._scale(value) - self._low) / self._length


def chart_html(chart: Chart, runs: Sequence[str], last_step: float, ruled_steps: Sequence[int]) -> str:
    """Return a chart with title, legend, axes and note.

    Args:
        chart: chart to render.
        runs: names of all runs.
        last_step: end of the step axis.
        ruled_steps: steps with a vertical line.
    """
    values = chart.values
    low, high = value_range(values, log=chart.log, from_zero=chart.from_zero)
    across, up = Axis(0.0, last_step), Axis(low, high, log=chart.log)
    marks = log_ticks(low, high) if chart.log else ticks(low, high)
    above = sum(value > high for value in values)
    rules = "".join(f"<path class=grid d='M0 {_y_pixels(up(y))}H1000'/>" for y in marks)
    events = "".join(f"<path class=event d='M{1000 * across(step):.1f} 0V300'/>" for step in ruled_steps)
    lines = "".join(_curve_path(line, across, up) for line in chart.curves)
    note = [chart.note] if chart.note else []
    if chart.log:
        note.append("Logarithmic axis.")
    if above:
        note.append(f"{above} value{'s' * (above > 1)} above the axis.")
    unit = f" <small>{escape(chart.unit)}</small>" if chart.unit else ""
    label = escape(f"{chart.title}: {_aria_text(chart, runs)}", quote=True)
    return (
        f"<figure class=graph id=chart-{chart.key}><figcaption><h3>{escape(chart.title)}{unit}</h3>"
        f"{_legend(chart, runs)}</figcaption>"
        f"<div class=plot><div class=y>{''.join(_y_tick(up(y), _format_value(chart, y)) for y in marks)}</div>"
        f'<svg viewBox="0 0 1000 300" preserveAspectRatio=none role=img aria-label="{label}">{rules}{events}{lines}'
        f"</svg>{_step_axis(last_step)}</div>"
        + (f"<p class=note>{escape(' '.join(note))}</p>" if note else "")
        + "</figure>"
    )


def _curve_path(line: Curve, across: Axis, up: Axis) -> str:
    points = [(1000 * across(x), 300 * (1 - min(up(y), 1.0))) for x, y in line.points]
    color = f"r{line.color % N_COLORS}"
    if line.style == "dots" or len(points) == 1:
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)
        return f"<path class='dots {color}' d='{dots}'/>"
    return f"<path class='{line.style} {color}' d='M{'L'.join(f'{x:.1f} {y:.1f}' for x, y in points)}'/>"


def _y_pixels(share: float) -> str:
    return f"{300 * (1 - share):.1f}"


def _y_tick(share: float, text: str) -> str:
    return f"<span class={place_class('y', share)}>{escape(text)}</span>"


def place_class(kind: Literal["x", "y", "w"], share: float) -> str:
    """Return the class of an element at a share of its parent's width (x), height (y), or so wide (w)."""
    return f"{kind}{round(10_000 * share)}"


def _step_axis(last_step: float) -> str:
    across = Axis(0.0, last_step)
    steps = [step for step in ticks(0.0, last_step) if step == round(step)]
    labels = "".join(f"<span class={place_class('x', across(step))}>{format_short(step)}</span>" for step in steps)
    return f"<div class=x>{labels}</div>"


def _format_value(chart: Chart, value: float) -> str:
    return f"{100 * value:.3g}%" if chart.percent else format_short(value)


def _legend(chart: Chart, runs: Sequence[str]) -> str:
    """Return each line's color, name and last value; the ruler replaces the values."""
    entries = []
    for number, line in enumerate(chart.curves):
        if line.style == "faint":
            continue
        name = line.name.removesuffix(", smoothed") if chart.has_smoothed else line.name
        if len(runs) == 1:
            name = name.removeprefix(runs[0]).removeprefix(", ") or ("training" if chart.key == "loss" else "last")
        last = line.points[-1][1]
        entries.append(
            f"<span class=key><i class='r{line.color % N_COLORS} {line.style}'></i>{escape(name)} "
            f"<output data-chart={chart.key} data-line={number}>{_format_value(chart, last)}</output></span>"
        )
    return f"<div class=legend>{''.join(entries)}</div>"


def _aria_text(chart: Chart, runs: Sequence[str]) -> str:
    texts = []
    for line in chart.curves:
        if line.style != "faint":
            ends = (f"{_format_value(chart, y)} at step {x:g}" for x, y in (line.points[0], line.points[-1]))
            texts.append(f"{line.name} {', '.join(ends)}")
    return "; ".join(texts)


def chart_values(charts: Sequence[Chart]) -> dict[str, Any]:
    """Return the data of `page.js`: steps and values of each line, by chart."""
    return {
        chart.key: {
            "percent": chart.percent,
            "lines": [
                None
                if line.style == "faint"
                else [[round(x) for x, _ in line.points], [float(f"{y:.5g}") for _, y in line.points]]
                for line in chart.curves
            ],
        }
        for chart in charts
    }


def event_lanes_html(lanes: Sequence[EventLane], last_step: float) -> str:
    """Return events on the step axis: a lane per kind, a dot per event in the color of its run."""
    across = Axis(0.0, last_step)
    rows = []
    for lane in lanes:
        dots = "".join(
            f"<path class='dots r{run % N_COLORS}' d='M{1000 * across(step):.1f} 10h0'><title>"
            f"{escape(lane.title)}, step {step}{escape(f': {text}' if text else '')}</title></path>"
            for run, step, text in lane.events
        )
        label = escape(f"{lane.title} at steps {_format_steps([step for _, step, _ in lane.events])}", quote=True)
        rows.append(
            f"<div class=lane><span>{escape(lane.title)} <small>{len(lane.events)}</small></span>"
            f'<svg viewBox="0 0 1000 20" preserveAspectRatio=none role=img aria-label="{label}">'
            f"<path class=grid d='M0 10H1000'/>{dots}</svg></div>"
        )
    return (
        "<figure class='graph lanes' id=chart-events><figcaption><h3>Events <small>by step</small></h3></figcaption>"
        f"<div class=plot>{''.join(rows)}{_step_axis(last_step)}</div></figure>"
    )


def _format_steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:20]))
    return shown + (f" and {len(steps) - 20} more" if len(steps) > 20 else "")


def time_breakdown_html(breakdown: TimeBreakdown, runs: Sequence[str], last_step: float) -> str:
    """Return the time of a run as shares stacked over the steps, with totals in the legend."""
    across = Axis(0.0, last_step)
    bars = []
    for begin, end, shares in breakdown.columns:
        bottom = 0.0
        left, width = 1000 * across(begin), 1000 * (across(end) - across(begin))
        for part in STEP_PARTS:
            share = shares[part]
            if share > 0.0005:
                y, height = 300 * (1 - bottom - share), 300 * share
                bars.append(
                    f"<path class=t-{part} d='M{left:.1f} {y:.1f}h{width + 0.3:.1f}v{height:.1f}h-{width + 0.3:.1f}z'/>"
                )
            bottom += share
    total = sum(breakdown.seconds.values())
    keys = "".join(
        f"<span class=key><i class='t-{part}'></i>{escape(part.replace('_', ' + '))} <output>{seconds / total:.1%}"
        f"</output></span>"
        for part, seconds in breakdown.seconds.items()
        if seconds > 0
    )
    name = f" <small>{escape(runs[breakdown.run])}</small>" if len(runs) > 1 else " <small>share of time</small>"
    label = ", ".join(f"{part.replace('_', ' ')} {s / total:.0%}" for part, s in breakdown.seconds.items())
    return (
        f"<figure class='graph time' id=chart-time-{breakdown.run}><figcaption><h3>Time breakdown{name}</h3>"
        f"<div class=legend>{keys}</div></figcaption><div class=plot>"
        f"<div class=y>{''.join(_y_tick(share, f'{share:.0%}') for share in (0.0, 0.5, 1.0))}</div>"
        f'<svg viewBox="0 0 1000 300" preserveAspectRatio=none role=img aria-label="{escape(label, quote=True)}">'
        f"{''.join(bars)}</svg>{_step_axis(last_step)}</div></figure>"
    )


def bar_table(rows: Sequence[tuple[str, float, str]], kind: str = "a") -> str:
    """Return a bar table; rows are (label, value, text), bars are relative to the largest value."""
    largest = max((value for _, value, _ in rows), default=0.0) or 1.0
    cells = "".join(
        f"<tr><th scope=row>{escape(label)}</th><td><svg viewBox='0 0 100 10' preserveAspectRatio=none "
        "aria-hidden=true><rect width=100 height=10 rx=1 class=track />"
        f"<rect width='{max(100 * value / largest, 0.4):.2f}' height=10 rx=1 class={kind} /></svg>"
        f"<span>{escape(text)}</span></td></tr>"
        for label, value, text in rows
    )
    return f"<table class='chart one'><tbody>{cells}</tbody></table>"


def key_value_table(rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of names and values."""
    cells = "".join(f"<tr><th scope=row>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table class=facts><tbody>{cells}</tbody></table>"


def stat_tiles(rows: Sequence[tuple[str, str]]) -> str:
    """Return large tiles of (name, value)."""
    cells = "".join(f"<div><dd>{escape(value)}</dd><dt>{escape(name)}</dt></div>" for name, value in rows)
    return f"<dl class=tiles>{cells}</dl>"
