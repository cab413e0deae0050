"""Tasks of `[evaluation]` in a release: their files, as far as their licenses allow.

    data/tasks/NAME.jsonl          the file of a task that may be redistributed
    data/tasks.jsonl               a line per task: `TaskEntry`

A license is given as for a source: the first pattern in `licences.toml` that matches the file's path counts. Generated
tasks are lt's own code, which is in the wheels. The released recipe names the tasks whose files are there, so it runs;
that changes no loss. Cost: a copy of the files.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lt_trainer.config.sections.evaluation import EvaluationOptions
from lt_trainer.evaluation.scorer import EvaluationError
from lt_trainer.evaluation.tasks import find_tasks
from lt_trainer.files import parse_json, read_text
from lt_trainer.release.data_files import hash_file
from lt_trainer.release.filtering import TextFilter
from lt_trainer.release.license_file import LicenseFile
from lt_trainer.release.mof import is_open_license
from lt_trainer.release.typed import from_json, is_inside

TASK_FOLDER, TASK_LIST = "data/tasks", "data/tasks.jsonl"


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """Task of `[evaluation]` in a release.

    Attributes:
        name: Its name.
        items: Items in it.
        is_generated: True for a task of lt's own, which has no file.
        path: Path of its file in the run's recipe, filtered; "" if it is generated.
        sha256: SHA-256 of the file; "" if it is generated.
        license: SPDX expression; "" if none was given.
        redistribute: Whether it may be redistributed, as was given.
        url: Where it can be obtained; may be "".
        file: Path in the bundle; "" if it is not in it.
    """

    name: str
    items: int
    is_generated: bool
    path: str
    sha256: str
    license: str
    redistribute: bool
    url: str
    file: str

    @property
    def problem(self) -> str:
        """Reason why the task does not count as released openly; "" if it does."""
        if self.is_generated:
            return ""
        if not self.license:
            return f"task {self.path} has no license"
        if not is_open_license(self.license):
            return f"task {self.path}: {self.license} is not a license that counts as open"
        return "" if self.file else f"task {self.path} may not be redistributed"


@dataclass(frozen=True, kw_only=True)
class ReleasedTask:
    """Task and its file on this machine; None for a generated one."""

    entry: TaskEntry
    source: Path | None


def describe_tasks(
    options: EvaluationOptions, licenses: LicenseFile, text_filter: TextFilter, problems: list[str]
) -> list[ReleasedTask]:
    """Return the tasks of a recipe; a file that is no longer there becomes a problem."""
    found: list[ReleasedTask] = []
    for name in options.tasks:
        path = Path(options.tasks_dir) / f"{name}.jsonl" if options.tasks_dir else None
        source = path if path is not None and path.exists() else None
        try:
            (task,) = find_tasks([name], options.tasks_dir)
        except EvaluationError as exc:
            problems.append(f"evaluation.tasks: {exc}; relative paths are taken from the current folder")
            continue
        given = licenses.source(str(source or ""))
        entry = TaskEntry(
            name=name,
            items=len(task.items),
            is_generated=source is None,
            path="" if source is None else text_filter.apply(str(source)),
            sha256="" if source is None else hash_file(source),
            license="" if source is None else given.license,
            redistribute=source is not None and given.redistribute,
            url="" if source is None else given.url,
            file=f"{TASK_FOLDER}/{name}.jsonl" if source is not None and given.license and given.redistribute else "",
        )
        found.append(ReleasedTask(entry=entry, source=source))
    return found


def release_tasks(bundle: Path, tasks: Sequence[ReleasedTask]) -> None:
    """Write the list of tasks and the files that may be redistributed."""
    if not tasks:
        return
    (bundle / TASK_FOLDER).parent.mkdir(exist_ok=True)
    lines = [json.dumps(asdict(task.entry)) for task in tasks]
    (bundle / TASK_LIST).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for task in tasks:
        if task.entry.file and task.source is not None:
            (bundle / TASK_FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(task.source, bundle / task.entry.file)


def recipe_fields(options: EvaluationOptions, tasks: Sequence[TaskEntry]) -> Mapping[str, Any]:
    """Return the fields of `[evaluation]` for the released recipe: the tasks whose items are there."""
    kept = [task.name for task in tasks if task.is_generated or task.file]
    if not kept:
        interval = options.interval if options.stores else 0
        return {
            "evaluation.tasks": [],
            "evaluation.tasks_dir": "",
            "evaluation.interval": interval,
            "evaluation.limit": 0,
        }
    has_files = any(task.file for task in tasks)
    return {"evaluation.tasks": kept, "evaluation.tasks_dir": TASK_FOLDER if has_files else ""}


def read_tasks(bundle: Path) -> list[TaskEntry]:
    """Read data/tasks.jsonl; empty without one.

    Raises:
        ValueError: A line has other fields, values of other types, or a path out of the release.
    """
    if not (bundle / TASK_LIST).exists():
        return []
    entries = []
    for number, line in enumerate(read_text(bundle / TASK_LIST).split("\n")[:-1], start=1):
        entry = from_json(TaskEntry, parse_json(line), f"{TASK_LIST}:{number}")
        if entry.file and not is_inside(entry.file):
            raise ValueError(f"{TASK_LIST}:{number}: file = {entry.file!r} is not a path in the release")
        entries.append(entry)
    return entries
