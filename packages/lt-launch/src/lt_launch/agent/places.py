"""Where the records of a stage stand, how they are read and written, and what a run directory says about training.

A spec.json stands in `<launch>/stages/<stage>/`; the records of an array's element in `<launch>/stages/<stage>.<i>/`.
JSON files are written beside their place and renamed, so that nobody reads half of one; lists are JSON lines.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

ATTEMPT = re.compile(r"attempt-(\d{3,6})")
LAUNCHED = "launched"
"""A file of this name in an attempt's folder: a person has started it, not the launcher after an ending."""
CHECKPOINT = re.compile(r"step-(\d{8,12})")

Table = dict[str, Any]


class Place:
    """The folder of one stage, or of one element of an array stage."""

    def __init__(self, spec_path: Path, index: int | None = None) -> None:
        self.stage = Path(spec_path).absolute().parent
        """The folder of the spec."""
        self.folder = self.stage if index is None else self.stage.with_name(f"{self.stage.name}.{index}")
        self.index = index

    def attempt(self, number: int) -> Path:
        """The folder of an attempt."""
        return self.folder / f"attempt-{number:03}"

    def attempts(self) -> list[int]:
        """The numbers of all attempts, in order."""
        if not self.folder.is_dir():
            return []
        matches = (ATTEMPT.fullmatch(name) for name in os.listdir(self.folder))
        return sorted(int(match[1]) for match in matches if match)

    def attempts_of_launch(self) -> list[int]:
        """The numbers of the attempts since a person launched last: only they count against its restarts."""
        numbers = self.attempts()
        launched = [at for at, number in enumerate(numbers) if (self.attempt(number) / LAUNCHED).exists()]
        return numbers[launched[-1] :] if launched else numbers

    def new_attempt(self, *, launched: bool = False) -> int:
        """Make the folder of the next attempt; its number.

        Args:
            launched: whether it is the first of a launch, which begins to count anew.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        number = max(self.attempts(), default=-1) + 1
        self.attempt(number).mkdir()
        if launched:
            (self.attempt(number) / LAUNCHED).touch()
        return number

    @property
    def stamp(self) -> Path:
        """The stamp of a stage that is done."""
        return self.folder / "done.json"


def record_file(attempt: Path, node: int, rank: int | None = None) -> Path:
    """What the agent of one node noted, or of one process where each has an agent of its own."""
    return attempt / (f"node-{node:05}.jsonl" if rank is None else f"task-{rank:05}.jsonl")


def records(attempt: Path) -> list[list[Table]]:
    """What each agent of an attempt noted, by node (or process)."""
    names = sorted(name for name in os.listdir(attempt) if re.fullmatch(r"(node|task)-\d+\.jsonl", name))
    return [read_lines(attempt / name) for name in names]


def log_file(attempt: Path, rank: int) -> Path:
    """What one process wrote."""
    return attempt / f"rank-{rank:05}.log"


def read_table(path: Path) -> Table | None:
    """A JSON object; None where there is none, or it cannot be read as one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write_table(path: Path, values: Table) -> None:
    """Write a JSON object in full or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_lines(path: Path) -> list[Table]:
    """The objects of a JSON-lines file; a torn line is left out."""
    try:
        rows = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return []
    found = []
    for row in rows:
        try:
            values = json.loads(row)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict):
            found.append(values)
    return found


def newest_step(run_dir: str) -> int:
    """The step of the newest committed checkpoint of a run directory; -1 where there is none."""
    root = Path(run_dir) / "checkpoints"
    try:
        names = os.listdir(root)
    except OSError:
        return -1
    steps = [
        int(match[1]) for name in names if (match := CHECKPOINT.fullmatch(name)) and (root / name / "COMMIT").exists()
    ]
    return max(steps, default=-1)


def events_size(run_dir: str) -> int:
    """Bytes of the run directory's events so far: what is completed later stands behind them."""
    try:
        return os.path.getsize(Path(run_dir) / "events.jsonl")
    except OSError:
        return 0


def completed(run_dir: str, since: int = 0) -> bool:
    """Whether rank 0 has noted that all steps are done, and nothing began after that.

    Args:
        run_dir: the run directory of lt-trainer.
        since: bytes of events.jsonl that an earlier attempt wrote; they prove nothing about this one.
    """
    try:
        with open(Path(run_dir) / "events.jsonl", "rb") as file:
            file.seek(since)
            rows = file.read().split(b"\n")
    except OSError:
        return False
    last = ""
    for row in rows:
        try:
            kind = json.loads(row).get("event")
        except (ValueError, AttributeError, RecursionError):
            continue
        if kind in ("start", "stop", "completed"):
            last = kind
    return last == "completed"
