"""Evaluation results in a release: scores of its final weights.

    results/evaluation/             from the run directory: items of `[evaluation]`, results of `lt train evaluate`
    results/NAME                    given as --results
    run/metrics.jsonl               metrics of `[evaluation]` by step

A results.jsonl names its weights by their hash, so scores count only if they are of the weights in model/.
Cost: one read of the results.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lt_trainer.evaluation.weight_hashes import hash_weights
from lt_trainer.release.weight_files import MODEL_FOLDER, stated_hashes
from lt_trainer.run_directory.evaluation_results import find_results

RESULT_FOLDER, METRICS = "results", "run/metrics.jsonl"
PREFIX, ERROR_SUFFIX = "eval_", "_stderr"
LOSSES = ("loss", "perplexity", "bits_per_byte")


class Score(NamedTuple):
    """Scores of the final weights on a task, or their loss over a store.

    Attributes:
        name: The task, or the store.
        file: File of the release that has it.
        size: Items, or tokens of a store; None if the file does not say.
        metrics: Metric → value, without standard errors.
        text: Metrics with standard errors, as shown in cards.
    """

    name: str
    file: str
    size: int | None
    metrics: Mapping[str, float]
    text: str


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
    scores = [
        _score(
            name,
            METRICS,
            record["eval_items"],
            {key.removeprefix(PREFIX): value for key, value in record.items() if key.startswith(PREFIX)},
        )
        for name, record in last.items()
    ]
    weights = hash_weights(stated_hashes(bundle)[MODEL_FOLDER])
    for results in find_results(bundle / RESULT_FOLDER):
        if results.description.get("weights") != weights:
            continue
        assert results.folder is not None
        file = (results.folder / "results.jsonl").relative_to(bundle).as_posix()
        for unit in results.units:
            for result in unit.results:
                if unit.kind == "lm_eval":
                    scores.append(_score(str(result["task"]), file, None, _harness_metrics(result["metrics"])))
                elif unit.kind != "store":
                    scores.append(_score(unit.name, file, result["n_items"], result))
                elif result["group"] == "all":
                    losses = {name: result[name] for name in LOSSES}
                    scores.append(_score(unit.name.rstrip("/").rpartition("/")[2], file, result["tokens"], losses))
    return scores


def _harness_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics without the harness's filter "none": "acc,none" as acc, others as acc (other)."""
    named: dict[str, Any] = {}
    for name, value in metrics.items():
        metric, _, kind = name.partition(",")
        named[metric if kind in ("", "none") else f"{metric} ({kind})"] = value
    return named


def _score(name: str, file: str, size: int | None, values: Mapping[str, Any]) -> Score:
    numbers = {
        metric: float(value)
        for metric, value in values.items()
        if type(value) in (int, float) and math.isfinite(value) and metric not in ("n_items", "items")
    }
    metrics = {metric: value for metric, value in numbers.items() if ERROR_SUFFIX not in metric}
    errors = {metric.replace(ERROR_SUFFIX, ""): value for metric, value in numbers.items() if ERROR_SUFFIX in metric}
    texts = [f"{key} {metrics[key]:.4g}" + (f" ± {errors[key]:.2g}" if key in errors else "") for key in metrics]
    return Score(name, file, size, metrics, ", ".join(texts))
