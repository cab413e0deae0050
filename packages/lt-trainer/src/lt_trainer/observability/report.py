"""Self-contained HTML report of one run or of several runs side by side, and its figures as PNG files.

Only JSON files of the run directory and the newest checkpoint's manifest are read, and no other folder: a store is
named, not opened. Everything is escaped; the page has no script, and its content security policy forbids loading
anything. Equal files give equal bytes. Cost: reads all of metrics.jsonl and events.jsonl; 0.2 s per figure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from lt_ckpt import CheckpointError
from lt_ckpt.checkpoint import read_manifest
from lt_ckpt.discovery import list_steps
from lt_model import ModelConfig, ModelError, n_parameters
from lt_trainer.config.section import flatten
from lt_trainer.errors import TrainerError
from lt_trainer.files import write_atomic
from lt_trainer.observability.run_history import RunHistory
from lt_trainer.toml import format_value

MAX_ROWS = 200
MODEL_NAMES = ("model.preset", "model.config", "model.init_from")
"""Fields that name a run's model, the first that is set."""
IN_OTHER_TABLES = ("time", "event", "data", "batch")
"""Fields of a data event that the tables of events and recipe have."""


class ReportError(TrainerError):
    """Report cannot be written."""


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
        RunHistory(Path(run), name if names.count(name) == 1 else str(run))
        for run, name in zip(runs, names, strict=True)
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
    title = _title(runs[0]) if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    recipes = [{name: json.dumps(value) for name, value in run.recipe.items()} for run in runs]
    body = _columns(runs, [_facts(run) for run in runs])
    body += f"<h2>Curves</h2><div class=figures>{''.join(figures)}</div>" if figures else "<p>No records yet.</p>"
    body += f"<h2>Data, model, machine</h2>{_columns(runs, [_details(run) for run in runs])}"
    if len(runs) == 1:
        body += f"<h2>Recipe</h2>{_columns(runs, recipes)}"
    else:
        differing = _columns(runs, recipes, only_differing=True)
        body += f"<h2>Recipe differences</h2>{differing or '<p>The recipes are equal.</p>'}"
    for run in runs:
        body += f"<h2>Events of {escape(run.name)}</h2>{_events(run)}"
    style = (resources.files("lt_trainer.observability") / "report.css").read_text(encoding="utf-8")
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8>"
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name=viewport content="width=device-width, initial-scale=1"><link rel=icon href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style><h1>{escape(title)}</h1>{body}</html>\n"
    )


def _title(run: RunHistory) -> str:
    """Return model and run: the run's folder with the one above it, since many are called "run"."""
    path = run.path.resolve()
    model = next((run.recipe[name] for name in MODEL_NAMES if run.recipe.get(name)), "")
    return f"{Path(model).name or 'model'} in {path.parent.name}/{path.name}"


def _text(value: object) -> object:
    """Return a value as TOML writes it; text without quotes."""
    return value if isinstance(value, str | Path) else format_value(value)


def _named_texts(kind: str, values: Mapping[str, object]) -> dict[str, object]:
    """Return the values that are set, as text by "kind: dotted name"."""
    given = {name: value for name, value in flatten(values).items() if value not in (None, {}, [])}
    return {f"{kind}: {name}": _text(value) for name, value in given.items()}


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as HTML, with every cell escaped; "" without rows."""
    lines = [f"<tr>{''.join(f'<th>{escape(title)}</th>' for title in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows]
    return f"<div class=scroll><table>{''.join(lines)}</table></div>" if rows else ""


def _columns(
    runs: Sequence[RunHistory], values: Sequence[Mapping[str, object]], *, only_differing: bool = False
) -> str:
    """Return a table with a row per name and a column per run."""
    names = dict.fromkeys(name for one in values for name in one)
    rows = [(name, *(one.get(name, "") for one in values)) for name in names]
    rows = [row for row in rows if not only_differing or len(set(row[1:])) > 1]
    return table(("", *(run.name for run in runs)), rows)


def _facts(run: RunHistory) -> dict[str, object]:
    """Return state and key numbers by name."""
    start = run.last_event("start")
    losses = [loss for loss in run.losses if math.isfinite(loss)]
    tail = losses[-max(len(losses) // 40, 1) :]
    facts: dict[str, object] = {
        "state": run.state,
        "step": f"{run.step:,} of {run.max_steps:,}",
        "training time": f"{run.seconds / 3600:.2f} h",
        "devices": f"{start['world']} x {start['device']}" if start else "-",
        "loss": f"{math.fsum(tail) / len(tail):.4f}, mean of {len(tail)} records" if tail else "-",
        "records without a finite loss": len(run.losses) - len(losses),
    }
    for name, records in run.validation.items():
        bits = records[-1].get("val_bits_per_byte")
        more = "" if bits is None else f", {bits:.4f} bits per byte"
        facts[f"validation loss {name}".rstrip()] = f"{records[-1]['val_loss']:.4f}{more}"
    return facts | run.numbers()


def _details(run: RunHistory) -> dict[str, object]:
    """Return position in the data, newest checkpoint's model, machine and packages by name."""
    environment = run.read_json("environment.json")
    position = {name: value for name, value in run.last_event("data").items() if name not in IN_OTHER_TABLES}
    details = _named_texts("data", position)
    for step, path in list_steps(run.path / "checkpoints")[:1]:
        try:
            config = ModelConfig.from_dict(read_manifest(path).model or {})
            details |= {"model: parameters": f"{n_parameters(config):,}"}
            details |= _named_texts("model", config.to_dict())
        except (CheckpointError, ModelError) as exc:
            details["model"] = f"step {step} cannot be read: {exc}"
    details |= {name: environment.get(name, "") for name in ("hostname", "cpu", "platform", "python")}
    packages = ", ".join(f"{name} {version}" for name, version in environment.get("packages", {}).items())
    return details | {"packages": packages, "run directory": run.path}


def _events(run: RunHistory) -> str:
    """Return the newest events but data positions."""
    rows = []
    for event in [event for event in run.events if event["event"] != "data"][-MAX_ROWS:]:
        values = flatten({name: value for name, value in event.items() if name not in ("time", "event", "step")})
        rest = [f"{name} {_text(value)}" for name, value in values.items()]
        time = event["time"][:19].replace("T", " ")
        rows.append((time, event["event"], event.get("step", ""), event.get("text") or ", ".join(rest)))
    return table(("time, UTC", "event", "step", ""), rows)
