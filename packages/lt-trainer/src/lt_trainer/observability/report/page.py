"""Self-contained HTML page of one run or of several runs side by side.

Style and script are inline, and a content security policy forbids all network access and any other style or script, so
a page opened from a mail or an archive loads nothing. All text from a run is escaped. Equal files give equal bytes.

The policy allows no style attributes: what has a place of its own has a class such as `x2500`, and `_place_rules` adds
the rule of each class to the style.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from lt_data.display.report import STYLE, content_security_policy
from lt_trainer.config.fields import flatten
from lt_trainer.observability.report.charts import Chart, build_charts, event_lanes, last_step, time_breakdowns
from lt_trainer.observability.report.curves import SMOOTHING_FRACTION, format_short
from lt_trainer.observability.report.data_section import data_section
from lt_trainer.observability.report.evaluation_section import evaluation_section
from lt_trainer.observability.report.html_charts import (
    N_COLORS,
    chart_html,
    chart_values,
    event_lanes_html,
    key_value_table,
    place_class,
    stat_tiles,
    time_breakdown_html,
)
from lt_trainer.observability.report.model_section import model_section
from lt_trainer.observability.report.run_history import EVENT_TITLES, RunHistory

MAX_EVENTS = 200
RULED_EVENTS = ("stop", "resume", "rollback", "step_skipped")
"""Event kinds with a vertical line in every chart, if there are at most `MAX_RULED`."""
MAX_RULED = 40
SECTIONS = {
    "curves": "Curves",
    "events": "Events",
    "tasks": "Evaluation",
    "data": "Data",
    "model": "Model",
    "recipe": "Recipe",
}


def report_html(runs: Sequence[RunHistory]) -> str:
    """Return the report as HTML.

    Args:
        runs: one or more runs with unique names.
    """
    charts = build_charts(runs)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    kind = "Training run" if len(runs) == 1 else "Training runs"
    parts = {"compare": "Comparison", **SECTIONS} if len(runs) > 1 else SECTIONS
    links = "".join(f"<a href='#{key}'>{name}</a>" for key, name in parts.items())
    body = "\n".join(
        [
            f"<header id=top><p class=kind>{kind}</p><h1>{escape(title)}</h1></header>",
            *([_head(runs[0])] if len(runs) == 1 else [_comparison(runs)]),
            _curves(runs, charts),
            _events(runs),
            _section_per_run(runs, "tasks", evaluation_section),
            _section_per_run(runs, "data", data_section),
            _section_per_run(runs, "model", model_section),
            _section_per_run(runs, "recipe", _recipe),
        ]
    )
    values = json.dumps({"last": last_step(runs), "charts": chart_values(charts)}, separators=(",", ":"))
    style, script = f"{STYLE}{_file('page.css')}{_place_rules(body)}", _file("page.js")
    policy = content_security_policy(style=style, scripts=[script])
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        f'<meta http-equiv=Content-Security-Policy content="{policy}">\n'
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        '<meta name=color-scheme content="light dark">\n<link rel=icon href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<nav><div>{links}</div></nav>\n<main>\n{body}\n</main>\n"
        f"<script type=application/json id=values>{values.replace('<', chr(92) + 'u003c')}</script>\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _place_rules(body: str) -> str:
    """Return the style rules of the places that `place_class` has named; text of a run has no `<`."""
    places = sorted(set(re.findall(r"<(?:span|i) class=([xyw])(-?\d+)>", body)))
    kinds = {"x": "left", "y": "bottom", "w": "width"}
    return "".join(f".{kind}{place}{{{kinds[kind]}:{int(place) / 100:.2f}%}}" for kind, place in places)


def _file(name: str) -> str:
    return (files("lt_trainer.observability.report") / name).read_text(encoding="utf-8")


def _head(run: RunHistory) -> str:
    """Return state, progress and key numbers."""
    of = f" of {run.max_steps:,}" if run.max_steps else ""
    share = min(run.step / run.max_steps, 1.0) if run.max_steps else 0.0
    status = ", ".join(
        text
        for text in (
            run.state,
            f"step {run.step:,}{of}",
            run.devices,
            f"{_duration(run.training_seconds)} of training",
        )
        if text
    )
    notes = "".join(f"<p class=again>{text}</p>" for text in _left_out_notes(run))
    bar = f"<div class=bar><i class={place_class('w', share)}></i></div>"
    return f"<p>{escape(status)}</p>{bar}{stat_tiles(list(_numbers(run)))}{notes}"


def _left_out_notes(run: RunHistory) -> Iterator[str]:
    """Yield a sentence per reason for omitting records from the curves."""
    if run.n_superseded:
        yield f"{run.n_superseded:,} records of repeated steps are omitted."
    if steps := [record["step"] for record in run.train if not math.isfinite(record["loss"])]:
        yield (
            f"{len(steps):,} of {len(run.train):,} records have a non-finite loss, the first at step "
            f"{steps[0]:,}, the last at step {steps[-1]:,}; they are omitted from the loss and its curve."
        )


def _numbers(run: RunHistory) -> Iterator[tuple[str, str]]:
    loss, records = last_loss(run)
    if records:
        yield "last loss" if records == 1 else f"loss, mean of the last {records} records", f"{loss:.4f}"
    for name, validations in run.validation.items():
        of = f", {name}" if name else ""
        best, newest = min(validations, key=lambda record: record["val_loss"]), validations[-1]
        yield f"validation loss{of}", f"{newest['val_loss']:.4f}"
        if best["step"] != newest["step"]:
            yield f"best{of}, at step {best['step']:,}", f"{best['val_loss']:.4f}"
        if "val_bits_per_byte" in newest:
            yield f"bits per byte{of}", f"{newest['val_bits_per_byte']:.4f}"
    for task, evaluations in run.evaluation.items():
        if "eval_acc" in evaluations[-1]:
            yield f"accuracy, {task}", f"{evaluations[-1]['eval_acc']:.1%}"
    last: Mapping[str, Any] = run.train[-1] if run.train else {}
    if "tokens_per_sec" in last:
        yield "tokens/s per device", format_short(last["tokens_per_sec"])
    if not math.isnan(last.get("mfu", math.nan)):
        yield "MFU", f"{last['mfu']:.1%}"
    if last:
        yield "memory", f"{max(record.get('memory_gib', 0.0) for record in run.train):.2f} GiB"
    if "energy_kwh" in last:
        yield "energy", f"{last['energy_kwh']:.3g} kWh"


def last_loss(run: RunHistory) -> tuple[float, int]:
    """Return the mean training loss of the last fortieth of the records, and how many records that is.

    Ignores non-finite losses; (nan, 0) if there are no others.
    """
    losses = [float(record["loss"]) for record in run.train if math.isfinite(record["loss"])]
    tail = losses[-max(len(losses) // SMOOTHING_FRACTION, 1) :]
    return (math.fsum(tail) / len(tail), len(tail)) if tail else (math.nan, 0)


def _comparison(runs: Sequence[RunHistory]) -> str:
    """Return a table of runs and of the recipe fields that differ."""
    headings = ("run", "state", "step", "last loss", "best validation", "tokens/s", "MFU", "GiB", "training time")
    rows = []
    for number, run in enumerate(runs):
        last: Mapping[str, Any] = run.train[-1] if run.train else {}
        best = [record["val_loss"] for records in run.validation.values() for record in records]
        cells = [
            run.state,
            f"{run.step:,}",
            _or_dash(last_loss(run)[0], "{:.4f}"),
            _or_dash(min(best, default=math.nan), "{:.4f}"),
            format_short(last["tokens_per_sec"]) if "tokens_per_sec" in last else "-",
            _or_dash(last.get("mfu", math.nan), "{:.1%}"),
            _or_dash(max((record.get("memory_gib", 0.0) for record in run.train), default=math.nan), "{:.2f}"),
            _duration(run.training_seconds),
        ]
        key = f"<span class=key><i class=r{number % N_COLORS}></i></span>"
        columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr><th scope=row>{key}{escape(run.name)}</th>{columns}</tr>")
    table = _table(headings, rows)
    recipes = [flatten(run.recipe_table) for run in runs]
    names = list(dict.fromkeys(name for recipe in recipes for name in recipe))
    differing = [name for name in names if len({json.dumps(recipe.get(name)) for recipe in recipes}) > 1]
    if differing:
        lines = [
            f"<tr><th scope=row>{escape(name)}</th>"
            + "".join(f"<td>{escape(_value(recipe.get(name, '-')))}</td>" for recipe in recipes)
            + "</tr>"
            for name in differing
        ]
        differences = _table(("field", *(run.name for run in runs)), lines)
    else:
        differences = "<p>The recipes are equal.</p>"
    for run in runs:
        table += "".join(f"<p class=again>{escape(run.name)}: {text}</p>" for text in _left_out_notes(run))
    return f"<section id=compare><h2>Comparison</h2>{table}<h3>Recipe differences</h3>{differences}</section>"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def _or_dash(value: float, template: str) -> str:
    return "-" if math.isnan(value) else template.format(value)


def _table(headings: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th scope=col>{escape(text)}</th>" for text in headings)
    body = "".join(rows)
    return f"<div class=scroll tabindex=0><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _curves(runs: Sequence[RunHistory], charts: Sequence[Chart]) -> str:
    names, last = [run.name for run in runs], last_step(runs)
    ruled = sorted({event.step for run in runs for event in run.step_events if event.kind in RULED_EVENTS})
    ruled = ruled if len(ruled) <= MAX_RULED else []
    figures = []
    for chart in charts:
        figure = chart_html(chart, names, last, ruled)
        figures.append(f"<div class=wide>{figure}</div>" if chart.key == "loss" else figure)
        if chart.key == "loss" and (lanes := event_lanes(runs)):
            figures.append(f"<div class=wide>{event_lanes_html(lanes, last)}</div>")
    figures += [time_breakdown_html(breakdown, names, last) for breakdown in time_breakdowns(runs)]
    if not charts:
        figures = ["<p>No records yet.</p>"]
    note = "<p class=note>Dotted lines: stops, resumes, rollbacks and skipped steps.</p>" if ruled and charts else ""
    return f"<section id=curves><h2>Curves</h2>{note}<div class=charts>{''.join(figures)}</div></section>"


def _events(runs: Sequence[RunHistory]) -> str:
    """Return the events, newest last, without data positions."""
    rows = []
    for number, run in enumerate(runs):
        shown = [event for event in run.events if event.get("event") != "data"]
        for event in shown[-MAX_EVENTS:]:
            kind = str(event.get("event", ""))
            details = {k: v for k, v in event.items() if k not in ("time", "event", "step", "text")}
            text = event.get("text") or ", ".join(f"{name} {_value(value)}" for name, value in details.items())
            time, title = str(event.get("time", "")), EVENT_TITLES.get(kind, kind)
            rows.append(
                (
                    time,
                    f"<tr><td class=when>{escape(time[:19].replace('T', ' '))}</td>"
                    f"<td><span class=key><i class=r{number % N_COLORS}></i></span>{escape(title)}</td>"
                    f"<td>{escape(str(event.get('step', '')))}</td><td>{escape(str(text))}</td></tr>",
                )
            )
    rows.sort(key=lambda row: row[0])
    is_cut = any(len(run.events) > MAX_EVENTS for run in runs)
    note = f"<p>The newest {MAX_EVENTS} of each run.</p>" if is_cut else ""
    table = _table(("time, UTC", "event", "step", ""), [row for _, row in rows])
    folded = f"<details><summary>{len(rows)} {'event' if len(rows) == 1 else 'events'}</summary>{table}</details>"
    return f"<section id=events><h2>Events</h2>{note}{folded}</section>"


def _section_per_run(runs: Sequence[RunHistory], key: str, render: Callable[[RunHistory], str]) -> str:
    if len(runs) == 1:
        return f"<section id={key}><h2>{SECTIONS[key]}</h2>{render(runs[0])}</section>"
    folded = "".join(
        f"<details><summary><span class=key><i class=r{i % N_COLORS}></i>{escape(run.name)}</span></summary>"
        f"{render(run)}</details>"
        for i, run in enumerate(runs)
    )
    return f"<section id={key}><h2>{SECTIONS[key]}</h2>{folded}</section>"


def _recipe(run: RunHistory) -> str:
    """Return the environment, and the recipe with the origin of each value."""
    machine, packages, start = run.environment, run.environment.get("packages", {}), run.start_event
    rows = [
        ("run directory", str(run.path)),
        ("devices", run.devices),
        (
            "peak per device",
            f"{start['peak_flops']:.4g} FLOP/s, {start.get('peak_source', '')}" if "peak_flops" in start else "",
        ),
        ("machine", ", ".join(str(machine[name]) for name in ("hostname", "cpu", "platform") if machine.get(name))),
        ("Python", str(machine.get("python", ""))),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
    ]
    toml = (
        f"<details><summary>recipe.toml</summary><pre tabindex=0>{escape(run.recipe_toml)}</pre></details>"
        if run.recipe_toml
        else ""
    )
    return key_value_table([(name, value) for name, value in rows if value]) + toml


def _duration(seconds: float) -> str:
    """Format with two units at most: 45 s, 12 min 5 s, 3 h 20 min, 5 d 3 h."""
    whole = round(seconds)
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{whole} s"
