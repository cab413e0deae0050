"""Which charts a report has, as values: the same for the page and for the pictures. Pure; cost: O(records)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lt_trainer.report.curves import Point, smoothed, thinned
from lt_trainer.report.reading import KINDS, History
from lt_trainer.timing import PARTS

MOST_POINTS = 1200
"""Points of a line: more than a page has columns."""
COLUMNS = 120
"""Columns of the chart of where the time goes."""

Look = Literal["line", "faint", "dashed", "dots"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart: what it is called, its finite points by rising step, and how it is drawn.

    `colour` is a number: that of the run where there are several, else one for what is trained on (0) and for each
    validation set.
    """

    colour: int
    name: str
    points: Sequence[Point]
    look: Look = "line"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over steps that share a value axis.

    Attributes:
        key: short name, for files and links.
        title: for people.
        unit: of the values.
        lines: those that are drawn, in this order.
        log: whether values are shown by their logarithm; all are above 0 then.
        from_zero: whether the axis begins at 0.
        percent: whether values are shares of 1.
        note: a sentence, or nothing.
        smooth: whether lines are a smoothed one before a faint one of all values.
    """

    key: str
    title: str
    unit: str
    lines: Sequence[Line]
    log: bool = False
    from_zero: bool = False
    percent: bool = False
    note: str = ""
    smooth: bool = False

    @property
    def values(self) -> list[float]:
        """All values, by which the axis is made; without means, which lie among them."""
        raw = [line for line in self.lines if not line.name.endswith(", smoothed")]
        return [y for line in raw for _, y in line.points]


@dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """Where a run's time went: for each column its steps (from, to] and the share of each part, and the sums."""

    run: int
    columns: Sequence[tuple[float, float, Mapping[str, float]]]
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Events of one kind of all runs: (run, step, what to say)."""

    kind: str
    title: str
    marks: Sequence[tuple[int, int, str]]


def charts(runs: Sequence[History]) -> list[Chart]:
    """All charts that the records of these runs have numbers for."""
    found = [
        _chart(runs, "loss", "Loss", "nats per token", fields={"loss": "line"}, smooth=True),
        _chart(runs, "learning_rate", "Learning rate", "", fields={"learning_rate": "line"}, from_zero=True),
        _chart(
            runs, "grad_norm", "Gradient norm", "before clipping", fields={"grad_norm": "line"}, smooth=True, log=True
        ),
        _chart(
            runs, "tokens_per_sec", "Speed", "tokens/s per device", fields={"tokens_per_sec": "line"}, from_zero=True
        ),
        _chart(
            runs,
            "mfu",
            "MFU and HFU",
            "share of the peak",
            fields={"mfu": "line", "hfu": "dashed"},
            from_zero=True,
            percent=True,
            note="HFU, dashed, counts what activation checkpointing computes again.",
        ),
        _chart(runs, "memory", "Memory", "GiB, peak per device", fields={"memory_gib": "line"}, from_zero=True),
        _chart(runs, "joules_per_token", "Energy", "J per token", fields={"joules_per_token": "line"}, from_zero=True),
        _validation(runs),
    ]
    return [_with_validation(chart, runs) if chart.key == "loss" else chart for chart in found if chart.lines]


def _chart(
    runs: Sequence[History], key: str, title: str, unit: str, *, fields: Mapping[str, Look], **options: Any
) -> Chart:
    lines: list[Line] = []
    for number, run in enumerate(runs):
        for field, look in fields.items():
            points = [(float(record["step"]), float(record[field])) for record in run.train if field in record]
            finite = [(x, y) for x, y in points if math.isfinite(y)]
            if not finite or (field == "hfu" and _same(run.train)):
                continue
            name = run.name if field != "hfu" else f"{run.name}, HFU"
            smooth = smoothed(finite) if options.get("smooth") else []
            lines.append(
                Line(colour=number, name=name, points=thinned(finite, MOST_POINTS), look="faint" if smooth else look)
            )
            if smooth:
                lines.append(
                    Line(colour=number, name=f"{name}, smoothed", points=thinned(smooth, MOST_POINTS), look=look)
                )
    lines.sort(key=lambda line: line.look != "faint")  # what is faint lies behind
    values = [y for line in lines for _, y in line.points]
    log = options.pop("log", False) and bool(values) and min(values) > 0 and max(values) > 10 * min(values)
    if not any(line.look == "dashed" for line in lines):
        options.pop("note", None)
        title = title.removesuffix(" and HFU")
    return Chart(key=key, title=title, unit=unit, lines=lines, log=log, **options)


def _same(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing is computed again, so that HFU would lie on MFU."""
    return all(record.get("hfu") == record.get("mfu") for record in records)


def _validation(runs: Sequence[History]) -> Chart:
    lines = _validation_lines(runs, "line")
    return Chart(key="validation", title="Validation loss", unit="nats per token", lines=lines)


def _validation_lines(runs: Sequence[History], look: Look) -> list[Line]:
    lines = []
    for number, run in enumerate(runs):
        for place, (name, records) in enumerate(run.validation.items(), start=1):
            points = [(float(record["step"]), float(record["val_loss"])) for record in records]
            finite = [(x, y) for x, y in points if math.isfinite(y)]
            title = f"{run.name}, {name or 'validation'}"
            if finite:
                colour = place if len(runs) == 1 else number
                other = len(runs) > 1 and place > 1 and look == "line"
                lines.append(
                    Line(
                        colour=colour, name=title, points=thinned(finite, MOST_POINTS), look="dashed" if other else look
                    )
                )
    return lines


def _with_validation(chart: Chart, runs: Sequence[History]) -> Chart:
    """The loss with the validation losses as dots, and what the note then says."""
    dots = _validation_lines(runs, "dots")
    drawn = [line.look for line in chart.lines]
    notes = []
    if "faint" in drawn:
        notes.append("Pale: each record; bold: the mean of those around it.")
    if dots:
        notes.append("Dots: validation.")
    return Chart(
        key=chart.key,
        title=chart.title,
        unit=chart.unit,
        lines=[*chart.lines, *dots],
        smooth=chart.smooth,
        note=" ".join(notes),
    )


def time_splits(runs: Sequence[History]) -> list[TimeSplit]:
    """Where the time of each run went, of those whose records tell."""
    found = []
    for number, run in enumerate(runs):
        records = [record for record in run.train if any(f"{part}_s" in record for part in PARTS)]
        if not records:
            continue
        size = math.ceil(len(records) / COLUMNS)
        columns, before = [], 0.0
        for at in range(0, len(records), size):
            group = records[at : at + size]
            seconds = _sum(group)
            total = sum(seconds.values())
            after = float(group[-1]["step"])
            if total > 0:
                columns.append((before, after, {part: value / total for part, value in seconds.items()}))
            before = after
        sums = _sum(records)
        if columns:
            found.append(TimeSplit(run=number, columns=columns, seconds=sums))
    return found


def _sum(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {part: math.fsum(record.get(f"{part}_s", 0.0) for record in records) for part in PARTS}


def lanes(runs: Sequence[History]) -> list[Lane]:
    """The events of all runs by kind; of kinds that happened."""
    found = []
    for kind, title in KINDS.items():
        marks = [
            (number, mark.step, mark.text) for number, run in enumerate(runs) for mark in run.marks if mark.kind == kind
        ]
        if marks:
            found.append(Lane(kind=kind, title=title, marks=marks))
    return found


def last_step(runs: Sequence[History]) -> float:
    """Where the axis of steps ends: the last step of all runs, 1 at least."""
    return float(max((run.step for run in runs), default=1) or 1)
