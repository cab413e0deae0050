"""Evaluation results in a release: scores of its final weights, each checked against its items.

    results/evaluation/             from the run directory: items of `[evaluation]`, results of `lt train evaluate`
    results/NAME                    given as --results
    run/metrics.jsonl               metrics of `[evaluation]` by step

A results.jsonl names its weights by their hash, so scores count only if they are of the weights in model/. Metrics of
lt's own tasks are computed again from the items; of the harness's, the accuracies. Cost: one read of the results.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_ckpt import Checkpoint, open_source
from lt_trainer.errors import TrainerError
from lt_trainer.evaluation.tasks import task_metrics
from lt_trainer.evaluation.weight_hashes import hash_weights
from lt_trainer.release.weight_files import stated_hashes, tensor_hashes
from lt_trainer.run_directory.evaluation_results import EvaluationUnit, find_results
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.run_directory.records import drop_superseded_records

RESULT_FOLDER = "results"
RUN_RESULTS = f"{RESULT_FOLDER}/evaluation"
METRICS = "run/metrics.jsonl"
PREFIX, ERROR_SUFFIX = "eval_", "_stderr"
NOT_METRICS = ("eval_task", "eval_items")
LOSSES = ("loss", "perplexity", "bits_per_byte")
RECOMPUTED_OF_HARNESS = ("acc", "acc_norm")
RELATIVE_TOLERANCE = 1e-12


@dataclass(frozen=True, kw_only=True)
class Score:
    """Scores of the final weights on a task, or their loss over a group of a store's documents.

    Attributes:
        name: The task, or the store.
        kind: "task", "lm_eval" or "store".
        group: Of a store: "" for the whole, "source NAME" or "length LOW-HIGH"; else "".
        file: File of the bundle that has it.
        n_items: Items, or tokens of a store; None if the file does not say.
        metrics: Metric → value, without standard errors.
        errors: Metric → standard error.
    """

    name: str
    kind: str
    group: str
    file: str
    n_items: int | None
    metrics: Mapping[str, float]
    errors: Mapping[str, float]

    @property
    def text(self) -> str:
        """Metrics with standard errors, as shown in cards."""
        return ", ".join(
            f"{metric} {value:.4g}" + (f" ± {self.errors[metric]:.2g}" if metric in self.errors else "")
            for metric, value in self.metrics.items()
        )


def is_sample_file(name: str) -> bool:
    """Return True for a file of generated texts, such as samples.jsonl: by how its name begins."""
    return name.rpartition("/")[2].startswith("samples")


def read_scores(bundle: Path, records: Sequence[Mapping[str, Any]], step: int) -> list[Score]:
    """Read the scores of the final weights.

    Args:
        bundle: The release.
        records: Its log, without superseded records.
        step: Step of the final weights.

    Raises:
        ValueError: A results file is damaged.
    """
    last = {str(record["eval_task"]): record for record in records if "eval_task" in record and record["step"] == step}
    scores: list[Score] = []
    for name, record in last.items():
        if "eval_loss" in record:  # a validation set
            file = f"{RUN_RESULTS}/step-{step:08d}/{name}.jsonl"
            scores += [_group_score(name, file, losses) for losses in read_jsonl(bundle / file)]
        else:
            scores.append(_score(name, "task", METRICS, record["eval_items"], _run_metrics(record)))
    weights = hash_weights(stated_hashes(bundle))
    for results in find_results(bundle / RESULT_FOLDER):
        if results.description.get("weights") == weights:
            assert results.folder is not None
            file = (results.folder / "results.jsonl").relative_to(bundle).as_posix()
            scores += [score for unit in results.units for score in _scores_of(unit, file)]
    return scores


def _run_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix(PREFIX): value
        for name, value in record.items()
        if name.startswith(PREFIX) and name not in NOT_METRICS
    }


def _scores_of(unit: EvaluationUnit, file: str) -> Iterator[Score]:
    for result in unit.results:
        if unit.kind == "task":
            metrics = {name: value for name, value in result.items() if name != "n_items"}
            yield _score(unit.name, unit.kind, file, result["n_items"], metrics)
        elif unit.kind == "lm_eval":
            yield _score(str(result["task"]), unit.kind, file, None, _harness_metrics(result["metrics"]))
        else:
            yield _group_score(unit.name.rstrip("/").rpartition("/")[2], file, result)


def _group_score(name: str, file: str, losses: Mapping[str, Any]) -> Score:
    group = "" if losses["group"] == "all" else f"{losses['group']} {losses['name']}"
    return _score(name, "store", file, losses["tokens"], {metric: losses[metric] for metric in LOSSES}, group=group)


def _harness_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics without the harness's filter "none": "acc,none" as acc, others as acc (other)."""
    named: dict[str, Any] = {}
    for name, value in metrics.items():
        metric, _, kind = name.partition(",")
        named[metric if kind in ("", "none") else f"{metric} ({kind})"] = value
    return named


def _score(name: str, kind: str, file: str, n_items: int | None, metrics: Mapping[str, Any], group: str = "") -> Score:
    numbers = {
        metric: float(value)
        for metric, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    return Score(
        name=name,
        kind=kind,
        group=group,
        file=file,
        n_items=n_items,
        metrics={metric: value for metric, value in numbers.items() if ERROR_SUFFIX not in metric},
        errors={metric.replace(ERROR_SUFFIX, ""): value for metric, value in numbers.items() if ERROR_SUFFIX in metric},
    )


def find_foreign_results(given: Sequence[Path], checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Return a problem for each given result that is not of released weights, or cannot be read."""
    problems: list[str] = []
    named: dict[tuple[str, str], str] = {}  # file and hash of the weights → their path
    for path in given:
        try:
            for results in find_results(path):
                weights, model = results.description.get("weights"), results.description.get("model")
                named[str(results.folder), str(weights)] = str(model)
            files = [path] if path.is_file() else sorted(path.rglob("*.jsonl"))
            for file in (file for file in files if file.suffix == ".jsonl" and is_sample_file(str(file))):
                named |= {
                    (str(file), str(r["weights"])): str(r.get("model")) for r in read_jsonl(file) if "weights" in r
                }
        except TrainerError as exc:
            problems.append(f"--results: {exc}")
    sources = [open_source(checkpoint.path) for checkpoint in checkpoints] if named else []
    hashes = {hash_weights(tensor_hashes(source, list(source.weights.specs))) for source in sources}
    problems += [
        f"--results: {file} has results of other weights ({model}); evaluate a released checkpoint of this run"
        for (file, weights), model in named.items()
        if weights not in hashes
    ]
    return problems


def find_score_problems(bundle: Path) -> Iterator[str]:
    """Compute metrics again from their items; yield what differs. Results without items show nothing.

    Raises:
        OSError: A file cannot be read.
        ValueError: One is damaged.
    """
    records = drop_superseded_records(read_jsonl(bundle / METRICS))
    newest = {(int(r["step"]), str(r["eval_task"])): r for r in records if "eval_task" in r}
    for (step, task), record in newest.items():
        file = f"{RUN_RESULTS}/step-{step:08d}/{task}.jsonl"
        yield from _compare(bundle, file, _run_metrics(record), f"{METRICS}, step {step}", record.get("eval_items"))
    for results in find_results(bundle / RESULT_FOLDER):
        assert results.folder is not None
        folder = results.folder.relative_to(bundle).as_posix()
        for unit in results.units:
            for result in unit.results if unit.kind != "store" else ():
                name = result["task"] if unit.kind == "lm_eval" else unit.name
                file = f"{folder}/items/{name}.jsonl"
                yield from _compare(bundle, file, _stated(unit.kind, result), folder, result.get("n_items"))


def _stated(kind: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a result that its items determine."""
    if kind == "task":
        return {name: value for name, value in result.items() if name != "n_items"}
    metrics = _harness_metrics(result["metrics"])
    return {name: metrics[name] for name in RECOMPUTED_OF_HARNESS if name in metrics}


def _compare(bundle: Path, file: str, stated: Mapping[str, Any], where: str, n_items: int | None) -> Iterator[str]:
    """Yield the stated metrics, and number of items, that are not those of a file that is there."""
    if not (bundle / file).exists():
        return
    items = read_jsonl(bundle / file)
    if n_items is not None and len(items) != n_items and not (items and "group" in items[0]):
        yield f"{where}: {n_items} items, but {file} has {len(items)}"
    if not items:
        return
    if "log_probs" in items[0]:
        actual = task_metrics(items)
    elif "group" in items[0]:  # of a store, whose first line is the whole
        actual = {metric: items[0][metric] for metric in LOSSES}
    else:  # of the harness, whose order of adding up is not known
        shares = {name: [float(item[name]) for item in items if name in item] for name in stated}
        actual = {name: math.fsum(values) / len(values) for name, values in shares.items() if values}
    for name in sorted(stated.keys() | actual.keys()):
        if not _is_equal(stated.get(name), actual.get(name)):
            yield f"{where}: {name} = {stated.get(name)!r}, but {file} gives {actual.get(name)!r}"


def _is_equal(stated: Any, actual: Any) -> bool:
    if not isinstance(stated, int | float) or not isinstance(actual, int | float):
        return False
    return (math.isnan(stated) and math.isnan(actual)) or math.isclose(stated, actual, rel_tol=RELATIVE_TOLERANCE)
