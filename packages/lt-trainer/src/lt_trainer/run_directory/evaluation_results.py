"""Results of an evaluation: results.jsonl with a line per task or store, and items/TASK.jsonl.

The first line describes what all numbers depend on: the weights by their hash (`lt_trainer.evaluation.hash_weights`),
their step if they are a checkpoint's, dtype, device and row length. Each further line is a task or a store that is
done, with the hash of its content and the options that its numbers depend on. A repeated command computes only what is
not there: after a changed task file, store or option the old line does not count, and the last line of a name does. A
folder with results of other weights or another dtype is an error, so numbers of two models never mix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lt_trainer.errors import RunDirError
from lt_trainer.run_directory.jsonl import JsonlWriter, read_jsonl

RESULTS_FILE, ITEMS_FOLDER = "results.jsonl", "items"
INFORMATIVE = ("model", "step")
"""Fields of a description that may differ for the same numbers: the weights may have moved."""


@dataclass(frozen=True, kw_only=True)
class EvaluationUnit:
    """Results of a task or a store."""

    kind: str
    """"task", "store" or "lm_eval"."""
    name: str
    options: Mapping[str, Any]
    """What the numbers depend on besides the description: hash of the content, number of items, ..."""
    results: Sequence[Mapping[str, Any]]


@dataclass(kw_only=True)
class EvaluationResults:
    """Results file of one evaluation, open for adding to it; without a folder it keeps nothing."""

    folder: Path | None
    description: Mapping[str, Any]
    units: list[EvaluationUnit] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path | None, description: Mapping[str, Any]) -> EvaluationResults:
        """Open the results in a folder, which is made if it is missing.

        Raises:
            RunDirError: the folder has results of another evaluation, or another file of that name, or it cannot be
                written.
        """
        if folder is None:
            return cls(folder=None, description=description)
        path = folder / RESULTS_FILE
        if not path.exists():
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as exc:
                raise RunDirError(f"cannot make {folder}: {exc.strerror}; pass another folder as --out") from exc
            with JsonlWriter(path) as writer:
                writer.write(description)
            return cls(folder=folder, description=description)
        kept = read_results(folder)
        if not kept.description:  # the process that made the file was ended before its first line
            with JsonlWriter(path) as writer:
                writer.write(description)
        elif changed := [
            name for name in description if name not in INFORMATIVE and kept.description.get(name) != description[name]
        ]:
            name = changed[0]
            raise RunDirError(
                f"{path} has results with {name} = {kept.description.get(name)!r}, not {description[name]!r}; pass "
                "another --out, or move it away"
            )
        return cls(folder=folder, description=description, units=kept.units)

    def find(self, kind: str, name: str, options: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
        """Return the newest results of a task or store with these options, or None."""
        for unit in reversed(self.units):
            if (unit.kind, unit.name) == (kind, name):
                return unit.results if unit.options == options else None
        return None

    def add(self, kind: str, name: str, options: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
        """Append the results of a task or store."""
        self.units.append(EvaluationUnit(kind=kind, name=name, options=options, results=results))
        if self.folder is not None:
            with JsonlWriter(self.folder / RESULTS_FILE) as writer:
                writer.write({"kind": kind, "name": name, "options": dict(options), "results": list(results)})

    def write_items(self, task: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the items of a task to items/TASK.jsonl, in the place of earlier ones."""
        if self.folder is None:
            return
        folder = self.folder / ITEMS_FOLDER
        folder.mkdir(exist_ok=True)
        path = folder / f"{task}.jsonl"
        path.unlink(missing_ok=True)
        with JsonlWriter(path) as writer:
            for record in records:
                writer.write(record)


def read_results(folder: Path) -> EvaluationResults:
    """Read the results in a folder, the newest of each task and store.

    Raises:
        RunDirError: its results.jsonl cannot be read, or is not one of `lt train evaluate`.
    """
    path = folder / RESULTS_FILE
    first, *others = read_jsonl(path) or [{}]
    units: dict[tuple[str, str], EvaluationUnit] = {}
    try:
        if first:
            first["weights"]
        for record in others:
            unit = EvaluationUnit(
                kind=record["kind"], name=record["name"], options=record["options"], results=record["results"]
            )
            units.pop((unit.kind, unit.name), None)
            units[unit.kind, unit.name] = unit
    except KeyError as exc:
        raise RunDirError(
            f"{path}: has no {exc.args[0]!r}: not results of lt train evaluate; pass another folder"
        ) from exc
    return EvaluationResults(folder=folder, description=first, units=list(units.values()))


def find_results(folder: Path) -> list[EvaluationResults]:
    """Read all results below a folder, by path."""
    return [read_results(path.parent) for path in sorted(folder.rglob(RESULTS_FILE))]


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Return the numbers of a result as text, each with its standard error if there is one.

    Example:
        >>> format_metrics({"acc,none": 0.25, "acc_stderr,none": 0.0125})
        'acc 0.25 ± 0.013'
    """
    numbers = {name.removesuffix(",none"): value for name, value in metrics.items() if isinstance(value, int | float)}
    return ", ".join(
        (f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}")
        + (f" ± {numbers[f'{name}_stderr']:.2g}" if f"{name}_stderr" in numbers else "")
        for name, value in numbers.items()
        if not name.endswith("_stderr")
    )
