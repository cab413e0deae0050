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
    """Results of a task or a store.

    Attributes:
        kind: "task", "store" or "lm_eval".
        options: What the numbers depend on besides the description: hash of the content, number of items, ...
    """

    kind: str
    name: str
    options: Mapping[str, Any]
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
            RunDirError: the folder has results of another evaluation, or it cannot be written.
        """
        found = cls(folder=folder, description={})
        if folder is not None and (folder / RESULTS_FILE).exists():
            found = read_results(folder)
        for name, value in description.items() if found.description else ():
            if name not in INFORMATIVE and found.description.get(name) != value:
                raise RunDirError(
                    f"{found.folder}/{RESULTS_FILE} has results with {name} = {found.description.get(name)!r}, not "
                    f"{value!r}; pass another --out, or move it away"
                )
        results = cls(folder=folder, description=description, units=found.units)
        if not found.description:
            results._append(RESULTS_FILE, [description])
        return results

    def find(self, kind: str, name: str, options: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
        """Return the newest results of a task or store with these options, or None."""
        newest = [unit for unit in self.units if (unit.kind, unit.name) == (kind, name)][-1:]
        return next((unit.results for unit in newest if unit.options == options), None)

    def add(self, kind: str, name: str, options: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
        """Append the results of a task or store."""
        self.units.append(EvaluationUnit(kind=kind, name=name, options=options, results=results))
        self._append(RESULTS_FILE, [{"kind": kind, "name": name, "options": dict(options), "results": list(results)}])

    def write_items(self, task: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the items of a task to items/TASK.jsonl, in the place of earlier ones."""
        if self.folder is not None:
            (self.folder / ITEMS_FOLDER / f"{task}.jsonl").unlink(missing_ok=True)
            self._append(f"{ITEMS_FOLDER}/{task}.jsonl", records)

    def _append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        if self.folder is None:
            return
        with JsonlWriter(self.folder / name) as writer:
            for record in records:
                writer.write(record)


def read_results(folder: Path) -> EvaluationResults:
    """Read the results in a folder, the newest of each task and store.

    Raises:
        RunDirError: its results.jsonl cannot be read, or is not one of `lt train evaluate`.
    """
    first, *others = read_jsonl(folder / RESULTS_FILE) or [{}]
    try:
        units = {(record["kind"], record["name"]): EvaluationUnit(**record) for record in others}
        if first:
            first["weights"]
    except (KeyError, TypeError) as exc:
        raise RunDirError(
            f"{folder / RESULTS_FILE}: not results of lt train evaluate ({exc}); pass another folder"
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
