"""The page of one run, or of several beside each other: one HTML text that loads nothing.

Style and script stand in it, and a content security policy forbids everything else, so that a page opened from a mail
or an archive tells nobody. Every text from a run is escaped. The same files give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from lt_data.showing.report import STYLE
from lt_trainer.fields import flatten
from lt_trainer.report.charts import Chart, charts, lanes, last_step, time_splits
from lt_trainer.report.curves import SMOOTHED_SHARE, short
from lt_trainer.report.data_part import data_part
from lt_trainer.report.drawing import COLOURS, chart, facts, lanes_figure, tiles, time_figure, values_of
from lt_trainer.report.model_part import model_part
from lt_trainer.report.reading import KINDS, History

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
SHOWN_EVENTS = 200
RULED = ("stop", "resume", "rewind", "skipped")
"""Kinds of events that have a fine line in every chart, as far as they are few."""
MOST_RULED = 40
PARTS = {"curves": "Curves", "events": "Events", "data": "Data", "model": "Model", "recipe": "Recipe"}


def page(runs: Sequence[History]) -> str:
    """The HTML of the report.

    Args:
        runs: one or more, with names that differ.
    """
    made = charts(runs)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    kind = "Training run" if len(runs) == 1 else "Training runs"
    parts = {"compare": "Comparison", **PARTS} if len(runs) > 1 else PARTS
    links = "".join(f"<a href='#{key}'>{name}</a>" for key, name in parts.items())
    body = "\n".join(
        [
            f"<header id=top><p class=kind>{kind}</p><h1>{escape(title)}</h1></header>",
            *([_head(runs[0])] if len(runs) == 1 else [_comparison(runs)]),
            _curves(runs, made),
            _events(runs),
            _for_each(runs, "data", data_part),
            _for_each(runs, "model", model_part),
            _for_each(runs, "recipe", _recipe),
        ]
    )
    values = json.dumps({"last": last_step(runs), "charts": values_of(made)}, separators=(",", ":"))
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        f'<meta http-equiv=Content-Security-Policy content="{POLICY}">\n'
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        '<meta name=color-scheme content="light dark">\n<link rel=icon href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{_file('page.css')}</style>\n</head>\n<body>\n"
        f"<nav><div>{links}</div></nav>\n<main>\n{body}\n</main>\n"
        f"<script type=application/json id=values>{values.replace('<', chr(92) + 'u003c')}</script>\n"
        f"<script>{_file('page.js')}</script>\n</body>\n</html>\n"
    )


def _file(name: str) -> str:
    return (files("lt_trainer.report") / name).read_text(encoding="utf-8")


def _head(run: History) -> str:
    """State, progress and the numbers that matter most."""
    of = f" of {run.max_steps:,}" if run.max_steps else ""
    share = min(run.step / run.max_steps, 1.0) if run.max_steps else 0.0
    about = ", ".join(
        text
        for text in (
            run.state,
            f"step {run.step:,}{of}",
            f"{run.start['world']} x {run.start['device']}" if run.start else "",
            f"{_duration(run.seconds)} of training",
        )
        if text
    )
    again = "".join(f"<p class=again>{text}</p>" for text in _left_out(run))
    bar = f"<div class=bar><i style='width:{100 * share:.2f}%'></i></div>"
    return f"<p>{escape(about)}</p>{bar}{tiles(list(_numbers(run)))}{again}"


def _left_out(run: History) -> Iterator[str]:
    """A sentence for each reason why records are not in the curves."""
    if run.left:
        yield f"{run.left:,} records of steps that were done again are left out."
    if wrong := [record["step"] for record in run.train if not math.isfinite(record["loss"])]:
        yield (
            f"{len(wrong):,} of {len(run.train):,} records have a loss that is not finite, the first at step "
            f"{wrong[0]:,}, the last at step {wrong[-1]:,}; they are left out of the loss and of its curve."
        )


def _numbers(run: History) -> Iterator[tuple[str, str]]:
    loss, records = last_loss(run)
    if records:
        yield "last loss" if records == 1 else f"loss, mean of the last {records} records", f"{loss:.4f}"
    for name, found in run.validation.items():
        of = f", {name}" if name else ""
        best, newest = min(found, key=lambda record: record["val_loss"]), found[-1]
        yield f"validation loss{of}", f"{newest['val_loss']:.4f}"
        if best["step"] != newest["step"]:
            yield f"best{of}, at step {best['step']:,}", f"{best['val_loss']:.4f}"
        if "val_bits_per_byte" in newest:
            yield f"bits per byte{of}", f"{newest['val_bits_per_byte']:.4f}"
    last: Mapping[str, Any] = run.train[-1] if run.train else {}
    if "tokens_per_sec" in last:
        yield "tokens/s per device", short(last["tokens_per_sec"])
    if not math.isnan(last.get("mfu", math.nan)):
        yield "MFU", f"{last['mfu']:.1%}"
    if last:
        yield "memory", f"{max(record.get('memory_gib', 0.0) for record in run.train):.2f} GiB"
    if "energy_kwh" in last:
        yield "energy", f"{last['energy_kwh']:.3g} kWh"


def last_loss(run: History) -> tuple[float, int]:
    """The training loss that the run has come to, and how many records that is the mean of: the last fortieth of them.

    What is not finite is left out; (nan, 0) where nothing is left.
    """
    losses = [float(record["loss"]) for record in run.train if math.isfinite(record["loss"])]
    tail = losses[-max(len(losses) // SMOOTHED_SHARE, 1) :]
    return (math.fsum(tail) / len(tail), len(tail)) if tail else (math.nan, 0)


def _comparison(runs: Sequence[History]) -> str:
    """A row for each run, and the fields of the recipes that differ."""
    heads = ("run", "state", "step", "loss, last", "best validation", "tokens/s", "MFU", "GiB", "training")
    rows = []
    for number, run in enumerate(runs):
        last: Mapping[str, Any] = run.train[-1] if run.train else {}
        best = [record["val_loss"] for records in run.validation.values() for record in records]
        cells = [
            run.state,
            f"{run.step:,}",
            _or_dash(last_loss(run)[0], "{:.4f}"),
            _or_dash(min(best, default=math.nan), "{:.4f}"),
            short(last["tokens_per_sec"]) if "tokens_per_sec" in last else "-",
            _or_dash(last.get("mfu", math.nan), "{:.1%}"),
            _or_dash(max((record.get("memory_gib", 0.0) for record in run.train), default=math.nan), "{:.2f}"),
            _duration(run.seconds),
        ]
        key = f"<span class=key><i class=r{number % COLOURS}></i></span>"
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr><th scope=row>{key}{escape(run.name)}</th>{shown}</tr>")
    table = _table(heads, rows)
    flat = [flatten(run.tables) for run in runs]
    names = list(dict.fromkeys(name for one in flat for name in one))
    differing = [name for name in names if len({json.dumps(one.get(name)) for one in flat}) > 1]
    if differing:
        lines = [
            f"<tr><th scope=row>{escape(name)}</th>"
            + "".join(f"<td>{escape(_value(one.get(name, '-')))}</td>" for one in flat)
            + "</tr>"
            for name in differing
        ]
        recipes = _table(("field", *(run.name for run in runs)), lines)
    else:
        recipes = "<p>All fields of their recipes are equal.</p>"
    for run in runs:
        table += "".join(f"<p class=again>{escape(run.name)}: {text}</p>" for text in _left_out(run))
    return f"<section id=compare><h2>Comparison</h2>{table}<h3>Where the recipes differ</h3>{recipes}</section>"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def _or_dash(value: float, form: str) -> str:
    return "-" if math.isnan(value) else form.format(value)


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th scope=col>{escape(text)}</th>" for text in heads)
    body = "".join(rows)
    return f"<div class=scroll tabindex=0><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _curves(runs: Sequence[History], made: Sequence[Chart]) -> str:
    names, last = [run.name for run in runs], last_step(runs)
    ruled = sorted({mark.step for run in runs for mark in run.marks if mark.kind in RULED})
    ruled = ruled if len(ruled) <= MOST_RULED else []
    drawn = []
    for one in made:
        figure = chart(one, names, last, ruled)
        drawn.append(f"<div class=wide>{figure}</div>" if one.key == "loss" else figure)
        if one.key == "loss" and (found := lanes(runs)):
            drawn.append(f"<div class=wide>{lanes_figure(found, last)}</div>")
    drawn += [time_figure(split, names, last) for split in time_splits(runs)]
    if not made:
        drawn = ["<p>No record has been written yet.</p>"]
    dotted = "<p class=note>Dotted lines: stops, resumes, ways back and skipped steps.</p>" if ruled and made else ""
    return f"<section id=curves><h2>Curves</h2>{dotted}<div class=charts>{''.join(drawn)}</div></section>"


def _events(runs: Sequence[History]) -> str:
    """What happened, newest last: everything but the data positions and what is told in `note`s besides."""
    rows = []
    for number, run in enumerate(runs):
        shown = [event for event in run.events if event.get("event") != "data"]
        for event in shown[-SHOWN_EVENTS:]:
            kind = str(event.get("event", ""))
            rest = {k: v for k, v in event.items() if k not in ("time", "event", "step", "text")}
            text = event.get("text") or ", ".join(f"{name} {_value(value)}" for name, value in rest.items())
            rows.append(
                (
                    str(event.get("time", "")),
                    f"<tr><td class=when>{escape(str(event.get('time', ''))[:19].replace('T', ' '))}</td>"
                    f"<td><span class=key><i class=r{number % COLOURS}></i></span>{escape(KINDS.get(kind, kind))}</td>"
                    f"<td>{escape(str(event.get('step', '')))}</td><td>{escape(str(text))}</td></tr>",
                )
            )
    rows.sort(key=lambda row: row[0])
    more = sum(max(len(run.events) - SHOWN_EVENTS, 0) for run in runs)
    note = f"<p>The newest {SHOWN_EVENTS} of each run.</p>" if more else ""
    table = _table(("time, UTC", "event", "step", ""), [row for _, row in rows])
    folded = f"<details><summary>{len(rows)} {'event' if len(rows) == 1 else 'events'}</summary>{table}</details>"
    return f"<section id=events><h2>Events</h2>{note}{folded}</section>"


def _for_each(runs: Sequence[History], key: str, part: Any) -> str:
    if len(runs) == 1:
        return f"<section id={key}><h2>{PARTS[key]}</h2>{part(runs[0])}</section>"
    folded = "".join(
        f"<details><summary><span class=key><i class=r{i % COLOURS}></i>{escape(run.name)}</span></summary>{part(run)}"
        "</details>"
        for i, run in enumerate(runs)
    )
    return f"<section id={key}><h2>{PARTS[key]}</h2>{folded}</section>"


def _recipe(run: History) -> str:
    """Where it ran, and the recipe with the origin of each value."""
    machine, packages = run.environment, run.environment.get("packages", {})
    rows = [
        ("run directory", str(run.path)),
        ("devices", f"{run.start['world']} x {run.start['device']}" if run.start else ""),
        ("peak of a device", f"{run.start['peak_flops']:.4g} FLOP/s, {run.start['peak_source']}" if run.start else ""),
        ("machine", ", ".join(str(machine[name]) for name in ("hostname", "cpu", "platform") if machine.get(name))),
        ("Python", str(machine.get("python", ""))),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
    ]
    toml = (
        f"<details><summary>recipe.toml</summary><pre tabindex=0>{escape(run.toml)}</pre></details>" if run.toml else ""
    )
    return facts([(name, value) for name, value in rows if value]) + toml


def _duration(seconds: float) -> str:
    """Two units at most: 45 s, 12 min 5 s, 3 h 20 min, 5 d 3 h."""
    whole = round(seconds)
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{whole} s"
