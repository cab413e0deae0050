"""Self-contained HTML report of one run or of several runs side by side, and its figures as PNG files.

Only JSON files of the run directory and the newest checkpoint's manifest are read, and no other folder: a store is
named, not opened. Everything is escaped; the page has no script, and its content security policy forbids loading
anything. Steps repeated after a kill or rollback count once, with their last record. Equal files give equal bytes.
Cost: reads all of metrics.jsonl and events.jsonl; 0.2 s per figure.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from lt_ckpt import CheckpointError
from lt_ckpt.checkpoint import read_manifest
from lt_ckpt.discovery import list_steps
from lt_model import LlamaConfig, ModelError
from lt_model.costs import flops_per_token
from lt_model.params import param_specs
from lt_trainer.errors import RunDirError, TrainerError
from lt_trainer.files import write_atomic
from lt_trainer.run_directory.evaluation_results import find_results, format_metrics
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.run_directory.records import drop_superseded_records, is_first_of_start

MAX_ROWS = 200
TILES = {
    "tokens_per_sec": ("tokens/s per device", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
    "memory_gib": ("memory per device", "{:.2f} GiB"),
    "energy_kwh": ("energy", "{:.3g} kWh"),
}


class ReportError(TrainerError):
    """Report cannot be written."""


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """Records, events and recipe of a run; `recipe` has the values of fields by dotted name."""

    path: Path
    name: str
    records: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]

    @cached_property
    def train(self) -> list[Mapping[str, Any]]:
        """Training records without superseded ones."""
        return [record for record in drop_superseded_records(self.records) if "loss" in record]

    @property
    def step(self) -> int:
        """Last reported step; 0 without one."""
        return self.train[-1]["step"] if self.train else 0

    @cached_property
    def validation(self) -> dict[str, list[Mapping[str, Any]]]:
        """Validation records by set, "" for the only one; likewise."""
        return self._group("val_loss", "val_set")

    @cached_property
    def evaluation(self) -> dict[str, list[Mapping[str, Any]]]:
        """Evaluation records by task; likewise."""
        return self._group("eval_task", "eval_task")

    def _group(self, field: str, name: str) -> dict[str, list[Mapping[str, Any]]]:
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for record in drop_superseded_records(self.records):
            if field in record:
                groups.setdefault(record.get(name, ""), []).append(record)
        return groups

    def last_event(self, *kinds: str) -> Mapping[str, Any]:
        """Return the newest event of one of the kinds; empty without one."""
        return next((event for event in reversed(self.events) if event["event"] in kinds), {})


def read_run(path: Path, name: str) -> RunHistory:
    """Read a run directory.

    Raises:
        RunDirError: not a run directory, or a damaged file.
    """
    if not (path / ".lt-run").exists():
        raise RunDirError(f"{path} is not a run directory (it has no .lt-run); pass the folder in run.dir")
    logs = [path / "metrics.jsonl", path / "events.jsonl"]
    records, events = (read_jsonl(log) if log.exists() else [] for log in logs)
    recipe, environment = (_read_json(path / name) for name in ("recipe.json", "environment.json"))
    fields = dict(_leaves(recipe.get("recipe", {})))
    return RunHistory(path=path, name=name, records=records, events=events, recipe=fields, environment=environment)


def write_report(
    runs: Sequence[str | Path], out: str | Path, *, png: str | Path | None = None, overwrite: bool = False
) -> tuple[Path, ...]:
    """Write the HTML report of one or more runs, and its figures as PNG files; nothing if one cannot be made.

    Args:
        runs: run directories (only read); several are compared.
        out: HTML file.
        png: folder for PNG files.
        overwrite: overwrite existing files.

    Returns:
        The files written.

    Raises:
        ReportError: matplotlib is not installed; a file exists, or cannot be written.
        RunDirError: not a run directory, or a damaged file.
    """
    try:
        from lt_trainer.observability import figures
    except ModuleNotFoundError as exc:
        raise ReportError(f"a report needs {exc.name} for its figures: pip install 'lt-trainer[plot]'") from exc
    names = [Path(run).resolve().name for run in runs]
    histories = [
        read_run(Path(run), name if names.count(name) == 1 else str(run)) for run, name in zip(runs, names, strict=True)
    ]
    drawn = figures.draw_figures(histories)
    page = _page(histories, [figures.to_svg(figure) for figure in drawn.values()])
    contents = {Path(out): page.encode("utf-8", "backslashreplace")}
    if png is not None:
        contents |= {Path(png) / f"{name}.png": figures.to_png(figure) for name, figure in drawn.items()}
    for path in contents:
        if path.exists() and not overwrite:
            raise ReportError(f"{path} exists; choose another name or pass --overwrite")
    for path, content in contents.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
        except OSError as exc:
            raise ReportError(f"cannot write {path}: {exc.strerror}; choose a writable folder") from exc
    return tuple(contents)


def _page(runs: Sequence[RunHistory], figures: Sequence[str]) -> str:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    body = _head(runs[0]) if len(runs) == 1 else _comparison(runs)
    body += f"<h2>Curves</h2><div class=figures>{''.join(figures)}</div>" if figures else "<p>No records yet.</p>"
    for run in runs:
        for heading, section in SECTIONS.items():
            if text := section(run):
                body += f"<h2>{heading}{f', {escape(run.name)}' if len(runs) > 1 else ''}</h2>{text}"
    style = (resources.files("lt_trainer.observability") / "report.css").read_text(encoding="utf-8")
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8>"
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name=viewport content="width=device-width, initial-scale=1"><link rel=icon href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style><h1>{escape(title)}</h1>{body}</html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as HTML, with every cell escaped; "" without rows."""
    lines = [f"<tr>{''.join(f'<th>{escape(title)}</th>' for title in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows]
    return f"<div class=scroll><table>{''.join(lines)}</table></div>" if rows else ""


def _tiles(values: Mapping[str, str]) -> str:
    tiles = "".join(f"<div><dd>{escape(value)}</dd><dt>{escape(name)}</dt></div>" for name, value in values.items())
    return f"<dl class=tiles>{tiles}</dl>"


def _head(run: RunHistory) -> str:
    """Return state, progress and key numbers."""
    facts = _facts(run)
    words = f"{facts.pop('state')}, step {facts.pop('step')}, {facts.pop('training time')} of training"
    if start := run.last_event("start"):
        words += f", {start['world']} x {start['device']}"
    bar = f"<progress max={run.recipe.get('schedule.max_steps', 0) or 1} value={run.step}></progress>"
    lost = [record["step"] for record in run.train if not math.isfinite(record["loss"])]
    note = f"<p>{len(lost):,} records, the first of step {lost[0]:,}, have no finite loss.</p>" if lost else ""
    return f"<p>{escape(words)}</p>{bar}{_tiles(facts)}{note}"


def _facts(run: RunHistory) -> dict[str, str]:
    """Return state and key numbers by name."""
    event, max_steps = run.last_event("start", "stop", "completed"), run.recipe.get("schedule.max_steps", 0)
    states = {"start": "running or killed", "stop": f"stopped by {event.get('signal')}", "completed": "completed"}
    all_train = [record for record in run.records if "loss" in record]
    ends = [one["elapsed_s"] for one, two in pairwise(all_train) if is_first_of_start(one, two)]
    minutes = math.fsum(ends + [record["elapsed_s"] for record in all_train[-1:]]) / 60
    facts = {
        "state": states.get(event.get("event", ""), "not started"),
        "step": f"{run.step:,}" + (f" of {max_steps:,}" if max_steps else ""),
        "training time": f"{minutes / 60:.1f} h" if minutes >= 120 else f"{minutes:.1f} min",
    }
    if losses := [record["loss"] for record in run.train if math.isfinite(record["loss"])]:
        tail = losses[-max(len(losses) // 40, 1) :]
        facts[f"loss, mean of {len(tail)} records"] = f"{math.fsum(tail) / len(tail):.4f}"
    for name, records in run.validation.items():
        facts[f"validation loss {name}"] = f"{records[-1]['val_loss']:.4f}"
        if "val_bits_per_byte" in records[-1]:
            facts[f"bits per byte {name}"] = f"{records[-1]['val_bits_per_byte']:.4f}"
    last = run.train[-1] if run.train else {}
    numbers = {title: template.format(last[field]) for field, (title, template) in TILES.items() if field in last}
    return facts | numbers


def _comparison(runs: Sequence[RunHistory]) -> str:
    """Return a table of the runs' key numbers, and one of the recipe fields that differ."""
    facts = [_facts(run) for run in runs]
    names = dict.fromkeys(name for values in facts for name in values)
    rows = [(run.name, *(values.get(name, "-") for name in names)) for run, values in zip(runs, facts, strict=True)]
    fields = dict.fromkeys(name for run in runs for name in run.recipe)
    values = [(field, *(json.dumps(run.recipe.get(field)) for run in runs)) for field in fields]
    differing = table(("field", *(run.name for run in runs)), [row for row in values if len(set(row[1:])) > 1])
    return f"{table(('run', *names), rows)}<h2>Recipe differences</h2>{differing or '<p>The recipes are equal.</p>'}"


def _evaluation(run: RunHistory) -> str:
    """Return the results of tasks and stores, of the run and of `lt train evaluate`."""
    tasks: list[Sequence[object]] = []
    stores: list[Sequence[object]] = []
    for task, records in run.evaluation.items():
        metrics = {name.removeprefix("eval_"): value for name, value in records[-1].items() if name.startswith("eval_")}
        tasks.append((task, records[-1]["step"], "", format_metrics(metrics)))
    for results in find_results(run.path / "evaluation"):
        step, dtype = (results.description.get(name, "") for name in ("step", "dtype"))
        for unit in results.units:
            if unit.kind == "store":
                losses = unit.results[:MAX_ROWS]
                stores += [(unit.name, step, one["group"], one["name"], format_metrics(one)) for one in losses]
            else:
                found = [(one.get("task", unit.name), one.get("metrics", one)) for one in unit.results]
                tasks += [(name, step, dtype, format_metrics(metrics)) for name, metrics in found]
    groups = table(("store", "step", "by", "", "result"), stores)
    return table(("task", "step", "dtype", "result"), tasks) + groups


def _data(run: RunHistory) -> str:
    """Return the stores, the order of rows and the run's position in them."""
    names = ("seq_len", "packing", "validation", "loader", "synthetic")
    fields = [(name.removeprefix("data."), value) for name, value in run.recipe.items() if name.startswith("data.")]
    rows: list[Sequence[object]] = [
        (name, value) for name, value in fields if value and (name in names or name.split(".")[-1] == "store")
    ]
    if event := run.last_event("data"):
        batch = event["global_batch_size"]
        rows.append(("step", f"{batch:,} rows over {event['dp_size']} data-parallel rank(s)"))
        if not event.get("ramp") and run.step >= event["step"]:
            n_rows = event["row"] + (run.step - event["step"]) * batch
            positions = n_rows * run.recipe.get("data.seq_len", 0)
            rows.append(("read so far", f"{n_rows:,} rows, {positions:,} positions"))
        rows += [("skipped", f"rows {begin:,} to {end - 1:,}") for begin, end in event.get("skipped", [])]
        rows += [(name, event[name]) for name in ("seed", "fingerprint") if name in event]
    return table(("", ""), rows)


def _model(run: RunHistory) -> str:
    """Return shape, parameters and FLOPs of the newest checkpoint's model."""
    from lt_trainer.observability.figures import draw_parameters, to_svg

    steps = list_steps(run.path / "checkpoints")
    if not steps:
        return ""
    try:
        config = LlamaConfig.from_dict(read_manifest(steps[0][1]).model or {})
    except (CheckpointError, ModelError) as exc:
        return f"<p>The model of {escape(steps[0][1].name)} cannot be read: {escape(str(exc))}</p>"
    counts: Counter[str] = Counter()
    for parameter in param_specs(config):
        counts[parameter.kind] += parameter.numel
    seq_len = run.recipe.get("data.seq_len", 0) or config.max_position_embeddings
    tiles = {
        "parameters": f"{counts.total():,}",
        "layers": f"{config.n_layers}",
        "hidden size": f"{config.hidden_size:,}",
        "query and key/value heads": f"{config.n_heads}, {config.n_kv_heads}",
        "vocabulary": f"{config.vocab_size:,}",
        f"FLOPs per token, rows of {seq_len:,}": f"{flops_per_token(config, seq_len):.3g}",
    }
    return _tiles(tiles) + to_svg(draw_parameters(counts))


def _events(run: RunHistory) -> str:
    """Return the newest events but data positions."""
    rows = []
    for event in [event for event in run.events if event["event"] != "data"][-MAX_ROWS:]:
        rest = [f"{name} {value}" for name, value in event.items() if name not in ("time", "event", "step")]
        time = event["time"][:19].replace("T", " ")
        rows.append((time, event["event"], event.get("step", ""), event.get("text") or ", ".join(rest)))
    return table(("time, UTC", "event", "step", ""), rows)


def _recipe(run: RunHistory) -> str:
    """Return machine, packages and recipe."""
    names = ("hostname", "cpu", "platform", "python")
    rows = [(name, run.environment[name]) for name in names if name in run.environment]
    packages = ", ".join(f"{name} {version}" for name, version in run.environment.get("packages", {}).items())
    fields = table(("field", "value"), [(name, json.dumps(value)) for name, value in run.recipe.items()])
    about = table(("", ""), [("run directory", run.path), *rows, ("packages", packages)])
    return f"{about}<details><summary>All fields of the recipe</summary>{fields}</details>"


SECTIONS = {"Evaluation": _evaluation, "Data": _data, "Model": _model, "Events": _events, "Machine, recipe": _recipe}


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as exc:
        raise RunDirError(f"{path} is damaged ({exc}); start the run again to rewrite it") from exc
