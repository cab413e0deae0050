"""Evaluation results in a release: scores of its final weights.

    run/metrics.jsonl               metrics of `[evaluation]` by step
    run/evaluation/                 items of `[evaluation]`, results of `lt train evaluate`

A results.jsonl names its weights by their hash, so scores count only if they are of the weights in model/.
Cost: one read of the results.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lt_trainer.evaluation.weight_hashes import hash_weights
from lt_trainer.release.weight_files import MODEL_FOLDER, stated_hashes
from lt_trainer.run_directory.evaluation_results import RESULTS_FILE, find_results

METRICS, EVALUATION = "run/metrics.jsonl", "run/evaluation"


class Score(NamedTuple):
    """Scores of the final weights on a task, or their loss over a store.

    Attributes:
        name: The task, or the store.
        file: File of the release that has it.
        size: Items, or tokens of a store.
        metrics: Metric → value; NAME_stderr is its standard error.
    """

    name: str
    file: str
    size: int
    metrics: Mapping[str, float]


def read_scores(bundle: Path, records: Sequence[Mapping[str, Any]], step: int) -> list[Score]:
    """Read the scores of the final weights.

    Args:
        bundle: The release.
        records: Its log, without superseded records.
        step: Step of the final weights.

    Raises:
        ValueError: A results file is damaged.
    """
    last = [record for record in records if "eval_task" in record and record["step"] == step]
    scores = [Score(str(one["eval_task"]), METRICS, one["eval_items"], _metrics(one, "eval_")) for one in last]
    weights = hash_weights(stated_hashes(bundle)[MODEL_FOLDER])
    for results in find_results(bundle / EVALUATION):
        assert results.folder is not None
        file = (results.folder / RESULTS_FILE).relative_to(bundle).as_posix()
        for unit in results.units if results.description.get("weights") == weights else ():
            for one in unit.results[:1] if unit.kind == "store" else unit.results:  # the first is of the whole store
                name = str(one.get("task") or Path(unit.name).name)
                scores.append(Score(name, file, one.get("n_items", one.get("tokens")), _metrics(one)))
    return scores


def _metrics(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    numbers = {name: value for name, value in record.items() if isinstance(value, float) and name.startswith(prefix)}
    return {name.removeprefix(prefix): value for name, value in numbers.items() if name != "loss_sum"}
