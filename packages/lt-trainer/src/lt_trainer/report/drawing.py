"""Charts as HTML: lines are SVG that is stretched to the width there is, words are HTML, so they keep their size.

A line's width is kept by `vector-effect`, a dot is a stroke without length and with round ends. Every chart has the
same axis of steps, and `page.js` moves one ruler over all of them; the numbers that it shows are in `values_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from lt_trainer.report.charts import Chart, Lane, Line, TimeSplit
from lt_trainer.report.curves import log_ticks, short, ticks, value_range
from lt_trainer.timing import PARTS

COLOURS = 8
"""Runs have colours of their own up to this number; then they begin again."""


class Axis:
    """Where a value stands on an axis, as a share of its length from the low end."""

    def __init__(self, low: float, high: float, *, log: bool = False) -> None:
        from math import log10

        self._of = log10 if log else float
        self._low, self._length = self._of(low), self._of(high) - self._of(low)

    def __call__(self, value: float) -> float:
        """The share; below 0 or above 1 where the value is not on the axis."""
        return (self._of(value) - self._low) / self._length


def chart(made: Chart, runs: Sequence[str], last_step: float, ruled: Sequence[int]) -> str:
    """A chart with title, legend, axes and note.

    Args:
        made: what to draw.
        runs: the names of all runs.
        last_step: where the axis of steps ends.
        ruled: steps at which a fine line stands in every chart.
    """
    values = made.values
    low, high = value_range(values, log=made.log, from_zero=made.from_zero)
    across, up = Axis(0.0, last_step), Axis(low, high, log=made.log)
    marks = log_ticks(low, high) if made.log else ticks(low, high)
    above = sum(value > high for value in values)
    rules = "".join(f"<path class=grid d='M0 {_down(up(y))}H1000'/>" for y in marks)
    events = "".join(f"<path class=event d='M{1000 * across(step):.1f} 0V300'/>" for step in ruled)
    drawn = "".join(_line(line, across, up) for line in made.lines)
    note = [made.note] if made.note else []
    if made.log:
        note.append("Logarithmic axis.")
    if above:
        note.append(f"{above} value{' stands' if above == 1 else 's stand'} above the axis.")
    unit = f" <small>{escape(made.unit)}</small>" if made.unit else ""
    label = escape(f"{made.title}: {_spoken(made, runs)}", quote=True)
    return (
        f"<figure class=graph id=chart-{made.key}><figcaption><h3>{escape(made.title)}{unit}</h3>"
        f"{_legend(made, runs)}</figcaption>"
        f"<div class=plot><div class=y>{''.join(_mark_y(up(y), _number(made, y)) for y in marks)}</div>"
        f'<svg viewBox="0 0 1000 300" preserveAspectRatio=none role=img aria-label="{label}">{rules}{events}{drawn}'
        f"</svg>{_steps(last_step)}</div>"
        + (f"<p class=note>{escape(' '.join(note))}</p>" if note else "")
        + "</figure>"
    )


def _line(line: Line, across: Axis, up: Axis) -> str:
    places = [(1000 * across(x), 300 * (1 - min(up(y), 1.0))) for x, y in line.points]
    colour = f"r{line.colour % COLOURS}"
    if line.look == "dots" or len(places) == 1:
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
        return f"<path class='dots {colour}' d='{dots}'/>"
    return f"<path class='{line.look} {colour}' d='M{'L'.join(f'{x:.1f} {y:.1f}' for x, y in places)}'/>"


def _down(share: float) -> str:
    return f"{300 * (1 - share):.1f}"


def _mark_y(share: float, text: str) -> str:
    return f"<span style=bottom:{100 * share:.2f}%>{escape(text)}</span>"


def _steps(last_step: float) -> str:
    across = Axis(0.0, last_step)
    found = [step for step in ticks(0.0, last_step) if step == round(step)]
    return f"<div class=x>{''.join(f'<span style=left:{100 * across(s):.2f}%>{short(s)}</span>' for s in found)}</div>"


def _number(made: Chart, value: float) -> str:
    return f"{100 * value:.3g}%" if made.percent else short(value)


def _legend(made: Chart, runs: Sequence[str]) -> str:
    """Each run with its colour and the last value of its line; the ruler puts other values there."""
    shown = []
    for number, line in enumerate(made.lines):
        if line.look == "faint":
            continue
        name = line.name.removesuffix(", smoothed") if made.smooth else line.name
        if len(runs) == 1:
            name = name.removeprefix(runs[0]).removeprefix(", ") or ("training" if made.key == "loss" else "last")
        last = line.points[-1][1]
        shown.append(
            f"<span class=key><i class='r{line.colour % COLOURS} {line.look}'></i>{escape(name)} "
            f"<output data-chart={made.key} data-line={number}>{_number(made, last)}</output></span>"
        )
    return f"<div class=legend>{''.join(shown)}</div>"


def _spoken(made: Chart, runs: Sequence[str]) -> str:
    told = []
    for line in made.lines:
        if line.look != "faint":
            (first, one), (last, other) = line.points[0], line.points[-1]
            told.append(f"{line.name} {_number(made, one)} at step {first:g}, {_number(made, other)} at step {last:g}")
    return "; ".join(told)


def values_of(made: Sequence[Chart]) -> dict[str, Any]:
    """What `page.js` needs to tell values: for each chart and line its steps and values, and how to write them."""
    return {
        one.key: {
            "percent": one.percent,
            "lines": [
                None
                if line.look == "faint"
                else [[round(x) for x, _ in line.points], [float(f"{y:.5g}") for _, y in line.points]]
                for line in one.lines
            ],
        }
        for one in made
    }


def lanes_figure(lanes: Sequence[Lane], last_step: float) -> str:
    """Events on the axis of steps: a lane for each kind, a dot for each event, in the colour of its run."""
    across = Axis(0.0, last_step)
    rows = []
    for lane in lanes:
        dots = "".join(
            f"<path class='dots r{run % COLOURS}' d='M{1000 * across(step):.1f} 10h0'><title>"
            f"{escape(lane.title)}, step {step}{escape(f': {text}' if text else '')}</title></path>"
            for run, step, text in lane.marks
        )
        label = escape(f"{lane.title} at steps {_listed([step for _, step, _ in lane.marks])}", quote=True)
        rows.append(
            f"<div class=lane><span>{escape(lane.title)} <small>{len(lane.marks)}</small></span>"
            f'<svg viewBox="0 0 1000 20" preserveAspectRatio=none role=img aria-label="{label}">'
            f"<path class=grid d='M0 10H1000'/>{dots}</svg></div>"
        )
    return (
        "<figure class='graph lanes' id=chart-events><figcaption><h3>Events <small>by step</small></h3></figcaption>"
        f"<div class=plot>{''.join(rows)}{_steps(last_step)}</div></figure>"
    )


def _listed(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:20]))
    return shown + (f" and {len(steps) - 20} more" if len(steps) > 20 else "")


def time_figure(split: TimeSplit, runs: Sequence[str], last_step: float) -> str:
    """Where a run's time went, as shares stacked over the steps, with the sums beside."""
    across = Axis(0.0, last_step)
    bars = []
    for begin, end, shares in split.columns:
        bottom = 0.0
        left, width = 1000 * across(begin), 1000 * (across(end) - across(begin))
        for part in PARTS:
            share = shares[part]
            if share > 0.0005:
                y, height = 300 * (1 - bottom - share), 300 * share
                bars.append(
                    f"<path class=t-{part} d='M{left:.1f} {y:.1f}h{width + 0.3:.1f}v{height:.1f}h-{width + 0.3:.1f}z'/>"
                )
            bottom += share
    total = sum(split.seconds.values())
    keys = "".join(
        f"<span class=key><i class='t-{part}'></i>{escape(part.replace('_', ' + '))} <output>{seconds / total:.1%}"
        f"</output></span>"
        for part, seconds in split.seconds.items()
        if seconds > 0
    )
    name = f" <small>{escape(runs[split.run])}</small>" if len(runs) > 1 else " <small>share of each stretch</small>"
    spoken = ", ".join(f"{part.replace('_', ' ')} {s / total:.0%}" for part, s in split.seconds.items())
    return (
        f"<figure class='graph time' id=chart-time-{split.run}><figcaption><h3>Where the time goes{name}</h3>"
        f"<div class=legend>{keys}</div></figcaption><div class=plot>"
        f"<div class=y>{''.join(_mark_y(share, f'{share:.0%}') for share in (0.0, 0.5, 1.0))}</div>"
        f'<svg viewBox="0 0 1000 300" preserveAspectRatio=none role=img aria-label="{escape(spoken, quote=True)}">'
        f"{''.join(bars)}</svg>{_steps(last_step)}</div></figure>"
    )


def bars(rows: Sequence[tuple[str, float, str]], kind: str = "a") -> str:
    """A table of bars: label, length as a share of the longest, and what it says."""
    most = max((share for _, share, _ in rows), default=0.0) or 1.0
    cells = "".join(
        f"<tr><th scope=row>{escape(label)}</th><td><svg viewBox='0 0 100 10' preserveAspectRatio=none "
        "aria-hidden=true><rect width=100 height=10 rx=1 class=track />"
        f"<rect width='{max(100 * share / most, 0.4):.2f}' height=10 rx=1 class={kind} /></svg>"
        f"<span>{escape(text)}</span></td></tr>"
        for label, share, text in rows
    )
    return f"<table class='chart one'><tbody>{cells}</tbody></table>"


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """A table of names and values."""
    cells = "".join(f"<tr><th scope=row>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table class=facts><tbody>{cells}</tbody></table>"


def tiles(rows: Sequence[tuple[str, str]]) -> str:
    """A few numbers, large."""
    cells = "".join(f"<div><dd>{escape(value)}</dd><dt>{escape(name)}</dt></div>" for name, value in rows)
    return f"<dl class=tiles>{cells}</dl>"
