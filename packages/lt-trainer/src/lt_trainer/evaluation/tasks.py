"""Multiple-choice and cloze tasks, from files of JSON lines or generated (`generated_tasks`).

A task is a file NAME.jsonl. Each line is one item, and all items of a task are of the same kind:

    {"context": "The capital of France is", "choices": [" Paris", " Rome"], "label": 0}      multiple choice
    {"context": "He took the key and opened the", "target": " door"}                         cloze

The texts are scored as they stand: a continuation begins with its own space. Other fields are ignored. Multiple choice
(as of HellaSwag, ARC, PIQA): `acc` is the share of items whose label has the largest log-probability, `acc_norm` the
same per character of the choice. Cloze (as of LAMBADA): `acc` is the share of targets that greedy decoding gives, and
`perplexity` exp(-mean log-probability of a target). Of equal choices the first is taken. Standard errors are those of
the mean of independent items.

Cost: a forward pass over the texts of all choices.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_trainer.evaluation.encoding import PairEncoder
from lt_trainer.evaluation.generated_tasks import GENERATED_TASKS
from lt_trainer.evaluation.requests import Score, ScoreRequest, check_requests, score_requests
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError, Scorer
from lt_trainer.files import parse_json, read_text

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
MAX_LOG_FOR_EXP = 700.0
REMEDY = 'write {"context": ..., "choices": [...], "label": 0} or {"context": ..., "target": ...}'


@dataclass(frozen=True, kw_only=True)
class TaskItem:
    """Item of a task; `label` is None in a cloze, whose only choice is its target."""

    context: str
    choices: tuple[str, ...]
    label: int | None


@dataclass(frozen=True, kw_only=True)
class Task:
    """Task: items of one kind."""

    name: str
    items: tuple[TaskItem, ...]

    @property
    def is_cloze(self) -> bool:
        """True if each item has a target, False if it has choices."""
        return self.items[0].label is None

    @property
    def sha256(self) -> str:
        """Hash of all items: of a changed task, results do not count."""
        values = [[item.context, list(item.choices), item.label] for item in self.items]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Metrics of a task, and the records of its items."""

    task: str
    n_items: int
    metrics: dict[str, float]
    """By name: acc, acc_stderr and acc_norm, acc_norm_stderr (multiple choice) or perplexity (cloze)."""
    items: tuple[dict[str, Any], ...]
    """index, log_probs and is_greedy of each choice, label, and the item's share in each accuracy."""


def find_tasks(names: Sequence[str], folder: str | Path, *, limit: int = 0) -> list[Task]:
    """Read tasks: NAME.jsonl of a folder, or the generated task of that name.

    Args:
        names: names of tasks.
        folder: folder of the files; "" for none.
        limit: number of items of each, the first ones; 0 for all.

    Raises:
        EvaluationError: no such task, or a file that is not a task.
    """
    tasks = []
    for name in names:
        if not NAME_PATTERN.fullmatch(name):
            raise EvaluationError(
                f"task {name!r}: must have letters, digits, '_', '-' and '.' and start with a letter or digit, as its "
                "results are in files of that name; rename its file"
            )
        path = Path(folder) / f"{name}.jsonl" if folder else None
        if path is not None and path.exists():
            task = read_task(path)
        elif name in GENERATED_TASKS:
            task = Task(name=name, items=tuple(_item(record, f"generated task {name}") for record in generate(name)))
        else:
            files = sorted(file.stem for file in Path(folder).glob("*.jsonl")) if folder else []
            available = ", ".join([*files, *GENERATED_TASKS])
            raise EvaluationError(f"task {name!r}: no such task{f' in {folder}' if folder else ''}; have {available}")
        tasks.append(Task(name=name, items=task.items[: limit or None]))
    return tasks


def generate(name: str) -> list[dict[str, Any]]:
    """Return the items of a generated task, as records of a file."""
    return GENERATED_TASKS[name]()


def read_task(path: Path) -> Task:
    """Read a task from a file.

    Raises:
        EvaluationError: it cannot be read, a line is not an item, or its items are of two kinds; names the line.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise EvaluationError(f"cannot read {path}: {exc}; give a file of JSON lines in UTF-8") from exc
    items: list[TaskItem] = []
    for number, line in enumerate(lines, start=1):
        at = f"{path}:{number}"
        try:
            record = parse_json(line)
        except ValueError as exc:
            raise EvaluationError(f"{at}: not JSON ({exc}); {REMEDY}") from exc
        items.append(_item(record, at))
        if (items[-1].label is None) != (items[0].label is None):
            raise EvaluationError(f"{at}: a cloze among items with choices, or the reverse; put them in two files")
    if not items:
        raise EvaluationError(f"{path} has no items; {REMEDY}")
    return Task(name=path.stem, items=tuple(items))


def _item(record: Any, at: str) -> TaskItem:
    if not isinstance(record, dict) or not isinstance(record.get("context"), str):
        raise EvaluationError(f"{at}: no text in the field context; {REMEDY}")
    if "target" in record:
        choices, label = [record["target"]], None
    else:
        choices, label = record.get("choices"), record.get("label")
        if not isinstance(choices, list) or len(choices) < 2:
            raise EvaluationError(f"{at}: choices = {choices!r} is not a list of at least two texts; {REMEDY}")
        if type(label) is not int or not 0 <= label < len(choices):
            raise EvaluationError(f"{at}: label = {label!r} is not an index in {len(choices)} choices; {REMEDY}")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise EvaluationError(f"{at}: a choice or target is not a text, or is empty; {REMEDY}")
    return TaskItem(context=record["context"], choices=tuple(choices), label=label)


@dataclass(frozen=True, kw_only=True)
class EncodedTask:
    """Task with the request of each choice, in order."""

    task: Task
    requests: tuple[ScoreRequest, ...]

    @staticmethod
    def encode(task: Task, encoder: PairEncoder, shape: BatchShape) -> EncodedTask:
        """Encode a task.

        Raises:
            EvaluationError: a choice has more tokens than a row.
        """
        requests = tuple(encoder.request(item.context, choice) for item in task.items for choice in item.choices)
        check_requests(requests, shape, f"task {task.name}")
        return EncodedTask(task=task, requests=requests)


def evaluate_task(
    scorer: Scorer,
    encoded: EncodedTask,
    shape: BatchShape,
    *,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> TaskResult:
    """Score a task; return its result, equal on all ranks. Collective.

    Args:
        scorer: the model.
        encoded: the task.
        shape: rows of a batch.
        on_batch: told of this rank's batches, done and in all.
    """
    scores = score_requests(scorer, encoded.requests, shape, on_batch=on_batch)
    items, first = [], 0
    for index, item in enumerate(encoded.task.items):
        items.append(_item_record(index, item, scores[first : first + len(item.choices)]))
        first += len(item.choices)
    return TaskResult(task=encoded.task.name, n_items=len(items), metrics=task_metrics(items), items=tuple(items))


def task_metrics(items: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of a task from the records of its items."""
    metrics: dict[str, float] = {}
    for name in ("acc", "acc_norm"):
        shares = [record[name] for record in items if name in record]
        if shares:
            metrics |= {name: statistics.fmean(shares), f"{name}_stderr": _standard_error(shares)}
    if "label" not in items[0]:  # a cloze
        mean = -statistics.fmean(record["log_probs"][0] for record in items)
        metrics["perplexity"] = math.exp(mean) if mean < MAX_LOG_FOR_EXP else math.inf
    return metrics


def _item_record(index: int, item: TaskItem, scores: Sequence[Score]) -> dict[str, Any]:
    log_probs = [score.log_prob for score in scores]
    record = {"index": index, "log_probs": log_probs, "is_greedy": [score.is_greedy for score in scores]}
    if item.label is None:
        return {**record, "acc": int(scores[0].is_greedy)}
    per_character = [score / len(choice) for score, choice in zip(log_probs, item.choices, strict=True)]
    is_best, is_best_norm = (_index_of_largest(values) == item.label for values in (log_probs, per_character))
    return {**record, "label": item.label, "acc": int(is_best), "acc_norm": int(is_best_norm)}


def _index_of_largest(values: Sequence[float]) -> int:
    """Return the first index of the largest value; -1 if one is nan, as of weights that have diverged."""
    return -1 if any(map(math.isnan, values)) else max(range(len(values)), key=values.__getitem__)


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
