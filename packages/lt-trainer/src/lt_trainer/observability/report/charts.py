"""Charts of a report as values, shared by HTML and PNG rendering. Pure; cost: O(records)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lt_trainer.observability.report.curves import Point, downsample, smooth_points
from lt_trainer.observability.report.run_history import EVENT_TITLES, RunHistory
from lt_trainer.timing import STEP_PARTS

MAX_POINTS = 1200
"""Maximum points per line: more than a page has pixel columns."""
TIME_COLUMNS = 120
"""Columns of the time breakdown."""

LineStyle = Literal["line", "faint", "dashed", "dots"]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Line of a chart: name, finite points by increasing step, style.

    `color` is an index: of the run if there are several, else 0 for training and 1, 2, ... for the validation sets.
    """

    color: int
    name: str
    points: Sequence[Point]
    style: LineStyle = "line"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over steps with a common value axis.

    Attributes:
        key: short name for files and links.
        title: displayed title.
        unit: unit of the values.
        curves: lines in drawing order.
        log: logarithmic value axis; all values are positive.
        from_zero: value axis starts at 0.
        percent: values are fractions of 1.
        note: sentence below the chart; may be empty.
        has_smoothed: each smoothed line has a faint line of all values behind it.
    """

    key: str
    title: str
    unit: str
    curves: Sequence[Curve]
    log: bool = False
    from_zero: bool = False
    percent: bool = False
    note: str = ""
    has_smoothed: bool = False

    @property
    def values(self) -> list[float]:
        """Values that determine the axis range: all except smoothed ones, which lie within."""
        raw = [line for line in self.curves if not line.name.endswith(", smoothed")]
        return [y for line in raw for _, y in line.points]


@dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """Time of a run by part: steps (begin, end] and shares for each column, and total seconds."""

    run: int
    columns: Sequence[tuple[float, float, Mapping[str, float]]]
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class EventLane:
    """Events of one kind in all runs: (run index, step, text)."""

    kind: str
    title: str
    events: Sequence[tuple[int, int, str]]


def build_charts(runs: Sequence[RunHistory]) -> list[Chart]:
    """Return the charts for which the runs have numbers."""
    charts = [
        _chart(runs, "loss", "Loss", "nats per token", fields={"loss": "line"}, has_smoothed=True),
        _chart(runs, "learning_rate", "Learning rate", "", fields={"learning_rate": "line"}, from_zero=True),
        _chart(
            runs,
            "grad_norm",
            "Gradient norm",
            "before clipping",
            fields={"grad_norm": "line"},
            has_smoothed=True,
            log=True,
        ),
        _chart(
            runs, "tokens_per_sec", "Speed", "tokens/s per device", fields={"tokens_per_sec": "line"}, from_zero=True
        ),
        _chart(
            runs,
            "mfu",
            "MFU and HFU",
            "fraction of the peak",
            fields={"mfu": "line", "hfu": "dashed"},
            from_zero=True,
            percent=True,
            note="Dashed: HFU, which includes activation recomputation.",
        ),
        _chart(runs, "memory", "Memory", "GiB, peak per device", fields={"memory_gib": "line"}, from_zero=True),
        _chart(runs, "joules_per_token", "Energy", "J per token", fields={"joules_per_token": "line"}, from_zero=True),
        _validation(runs),
        _evaluation(runs),
    ]
    return [_with_validation(chart, runs) if chart.key == "loss" else chart for chart in charts if chart.curves]


def _chart(
    runs: Sequence[RunHistory], key: str, title: str, unit: str, *, fields: Mapping[str, LineStyle], **options: Any
) -> Chart:
    lines: list[Curve] = []
    for number, run in enumerate(runs):
        for field, style in fields.items():
            points = [(float(record["step"]), float(record[field])) for record in run.train if field in record]
            finite = [(x, y) for x, y in points if math.isfinite(y)]
            if not finite or (field == "hfu" and _is_hfu_redundant(run.train)):
                continue
            name = run.name if field != "hfu" else f"{run.name}, HFU"
            smooth = smooth_points(finite) if options.get("has_smoothed") else []
            points = downsample(finite, MAX_POINTS)
            lines.append(Curve(color=number, name=name, points=points, style="faint" if smooth else style))
            if smooth:
                points = downsample(smooth, MAX_POINTS)
                lines.append(Curve(color=number, name=f"{name}, smoothed", points=points, style=style))
    lines.sort(key=lambda line: line.style != "faint")  # faint lines are drawn first
    values = [y for line in lines for _, y in line.points]
    log = options.pop("log", False) and bool(values) and min(values) > 0 and max(values) > 10 * min(values)
    if not any(line.style == "dashed" for line in lines):
        options.pop("note", None)
        title = title.removesuffix(" and HFU")
    return Chart(key=key, title=title, unit=unit, curves=lines, log=log, **options)


def _is_hfu_redundant(records: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if nothing is recomputed, so that HFU equals MFU."""
    return all(record.get("hfu") == record.get("mfu") for record in records)


def _validation(runs: Sequence[RunHistory]) -> Chart:
    lines = _validation_lines(runs, "line")
    return Chart(key="validation", title="Validation loss", unit="nats per token", curves=lines)


def _validation_lines(runs: Sequence[RunHistory], style: LineStyle) -> list[Curve]:
    lines = []
    for number, run in enumerate(runs):
        for index, (name, records) in enumerate(run.validation.items(), start=1):
            points = [(float(record["step"]), float(record["val_loss"])) for record in records]
            finite = [(x, y) for x, y in points if math.isfinite(y)]
            if finite:
                is_dashed = len(runs) > 1 and index > 1 and style == "line"
                lines.append(
                    Curve(
                        color=index if len(runs) == 1 else number,
                        name=f"{run.name}, {name or 'validation'}",
                        points=downsample(finite, MAX_POINTS),
                        style="dashed" if is_dashed else style,
                    )
                )
    return lines


def _evaluation(runs: Sequence[RunHistory]) -> Chart:
    """Return the accuracy of each task by step."""
    lines = []
    for number, run in enumerate(runs):
        for index, (task, records) in enumerate(run.evaluation.items(), start=1):
            points = [(float(record["step"]), float(record["eval_acc"])) for record in records if "eval_acc" in record]
            points = [(x, y) for x, y in points if math.isfinite(y)]
            if points:
                lines.append(
                    Curve(
                        color=index if len(runs) == 1 else number,
                        name=f"{run.name}, {task}",
                        points=downsample(points, MAX_POINTS),
                        style="dashed" if len(runs) > 1 and index > 1 else "line",
                    )
                )
    return Chart(key="evaluation", title="Tasks", unit="accuracy", curves=lines, from_zero=True, percent=True)


def _with_validation(chart: Chart, runs: Sequence[RunHistory]) -> Chart:
    """Return the loss chart with validation losses as dots and a note about the line styles."""
    dots = _validation_lines(runs, "dots")
    notes = []
    if any(line.style == "faint" for line in chart.curves):
        notes.append("Faint: each record; bold: centered moving average.")
    if dots:
        notes.append("Dots: validation.")
    return Chart(
        key=chart.key,
        title=chart.title,
        unit=chart.unit,
        curves=[*chart.curves, *dots],
        has_smoothed=chart.has_smoothed,
        note=" ".join(notes),
    )


def time_breakdowns(runs: Sequence[RunHistory]) -> list[TimeBreakdown]:
    """Return the time breakdowns of the runs whose records have step times."""
    breakdowns = []
    for number, run in enumerate(runs):
        records = [record for record in run.train if any(f"{part}_s" in record for part in STEP_PARTS)]
        if not records:
            continue
        size = math.ceil(len(records) / TIME_COLUMNS)
        columns, begin = [], 0.0
        for start in range(0, len(records), size):
            group = records[start : start + size]
            seconds = _seconds_by_part(group)
            total = sum(seconds.values())
            end = float(group[-1]["step"])
            if total > 0:
                columns.append((begin, end, {part: value / total for part, value in seconds.items()}))
            begin = end
        if columns:
            breakdowns.append(TimeBreakdown(run=number, columns=columns, seconds=_seconds_by_part(records)))
    return breakdowns


def _seconds_by_part(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {part: math.fsum(record.get(f"{part}_s", 0.0) for record in records) for part in STEP_PARTS}


def event_lanes(runs: Sequence[RunHistory]) -> list[EventLane]:
    """Return the events of all runs by kind, without empty kinds."""
    lanes = []
    for kind, title in EVENT_TITLES.items():
        events = [
            (number, event.step, event.text)
            for number, run in enumerate(runs)
            for event in run.step_events
            if event.kind == kind
        ]
        if events:
            lanes.append(EventLane(kind=kind, title=title, events=events))
    return lanes


def last_step(runs: Sequence[RunHistory]) -> float:
    """Return the end of the step axis: the last step of all runs, at least 1."""
    return float(max((run.step for run in runs), default=1) or 1)
