"""Evaluation section of the report: tasks, and losses of stores by source file and document length.

From metrics.jsonl the newest record of each task of `[evaluation]`; from evaluation/ in the run directory what
`lt train evaluate` wrote. Cost: a read of the results files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lt_trainer.errors import TrainerError
from lt_trainer.observability.report.run_history import RunHistory
from lt_trainer.run_directory.evaluation_results import EvaluationResults, find_results
from lt_trainer.run_directory.jsonl import read_jsonl

MAX_SOURCES = 30
"""Source files shown of a store; results.jsonl has all."""
GROUPS = {"all": "whole", "source": "source file", "length": "document length, tokens"}
TASK_HEAD = ("task", "step", "dtype", "items", "result")
STORE_HEAD = ("group", "", "documents", "tokens", "nats per token", "perplexity", "bits per byte")


def evaluation_section(run: RunHistory) -> str:
    """Return the section as HTML."""
    try:
        found = find_results(run.path / "evaluation")
    except TrainerError as exc:
        return f"<p>The results cannot be read: {escape(str(exc))}</p>"
    rows = [_run_row(task, records[-1]) for task, records in run.evaluation.items() if "eval_loss" not in records[-1]]
    stores = ""
    for name, records in run.evaluation.items():
        path = run.path / "evaluation" / f"step-{records[-1]['step']:08d}" / f"{name}.jsonl"
        if "eval_loss" in records[-1] and path.exists():
            stores += f"<h3>{escape(name)} <small>step {records[-1]['step']:,}, of the run</small></h3>"
            stores += _store_table(read_jsonl(path))
    for results in found:
        rows += [row for unit in results.units for row in _task_rows(results, unit.kind, unit.name, unit.results)]
        for unit in results.units:
            if unit.kind == "store":
                title = f"<h3>{escape(unit.name)} <small>{escape(_describe(results))}</small></h3>"
                stores += title + _store_table(unit.results)
    if not rows and not stores:
        return (
            "<p>None. Tasks are evaluated during a run by <code>[evaluation]</code>, and afterwards by "
            "<code>lt train evaluate</code>.</p>"
        )
    return (_table(TASK_HEAD, rows) if rows else "") + stores


def _run_row(task: str, record: Mapping[str, Any]) -> Sequence[str]:
    metrics = {name.removeprefix("eval_"): value for name, value in record.items() if name.startswith("eval_")}
    metrics = {name: value for name, value in metrics.items() if name not in ("task", "items")}
    return task, f"{record['step']:,}", "of the run", f"{record['eval_items']:,}", format_metrics(metrics)


def _task_rows(
    results: EvaluationResults, kind: str, name: str, summaries: Sequence[Mapping[str, Any]]
) -> list[Sequence[str]]:
    step, dtype = results.description.get("step"), str(results.description.get("dtype", ""))
    shown_step = "" if step is None else f"{step:,}"
    if kind == "task":
        metrics = {metric: value for metric, value in summaries[0].items() if metric != "n_items"}
        return [(name, shown_step, dtype, f"{summaries[0]['n_items']:,}", format_metrics(metrics))]
    if kind == "lm_eval":
        return [
            (str(one["task"]), shown_step, dtype, "", format_metrics(_harness_metrics(one["metrics"])))
            for one in summaries
        ]
    return []


def _harness_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removesuffix(",none").replace("_stderr,none", "_stderr"): value for name, value in metrics.items()}


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Return metrics as text, each with its standard error if there is one."""
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return ", ".join(
        f"{name} {value:.4g}" + (f" ± {numbers[f'{name}_stderr']:.2g}" if f"{name}_stderr" in numbers else "")
        for name, value in numbers.items()
        if not name.endswith("_stderr")
    )


def _describe(results: EvaluationResults) -> str:
    values = results.description
    step = "" if values.get("step") is None else f"step {values['step']:,}, "
    return f"{step}{values.get('dtype')}, rows of {values.get('seq_len'):,}"


def _store_table(losses: Sequence[Mapping[str, Any]]) -> str:
    rows: list[Sequence[str]] = []
    n_sources = sum(loss["group"] == "source" for loss in losses)
    left = MAX_SOURCES
    for loss in losses:
        left -= loss["group"] == "source"
        if loss["group"] == "source" and left < 0:
            continue
        numbers = (f"{loss['documents']:,}", f"{loss['tokens']:,}", f"{loss['loss']:.4f}")
        rows.append(
            (
                GROUPS[loss["group"]],
                loss["name"],
                *numbers,
                f"{loss['perplexity']:.4g}",
                f"{loss['bits_per_byte']:.4f}",
            )
        )
    more = f"<p>{n_sources - MAX_SOURCES:,} more source files are in results.jsonl.</p>"
    return _table(STORE_HEAD, rows) + (more if n_sources > MAX_SOURCES else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=scroll tabindex=0><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
