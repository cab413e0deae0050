"""Tasks that many processes take: what dies costs its own task, and whoever fails is named."""

import os
from pathlib import Path

import pytest

from lt_data import DataError
from lt_data.preparation.processes import run_in_processes
from lt_data.preparation.tasks import CLAIM, Tasks, build_task

N_TASKS = 6


def write_pid(task: int, work: Path) -> Path:
    """Result of a task: the process that did it."""
    path = work / "result"
    path.mkdir()
    (path / "pid").write_text(str(os.getpid()), encoding="utf-8")
    return path


@pytest.fixture
def tasks(tmp_path) -> Tasks:
    return Tasks(folder=tmp_path, names=tuple(f"task-{i}" for i in range(N_TASKS)), build=write_pid, what="tasks")


@pytest.mark.parametrize("workers", [1, 2])
def test_what_dead_processes_had_claimed_is_done(tasks, workers):
    for name in tasks.names[2:]:
        (tasks.folder / f"{name}{CLAIM}").touch()
    seen: list[tuple[int, int, str]] = []
    run_in_processes(tasks, lambda *at: seen.append(at), workers=workers)
    done_by = {(tasks.published(task) / "pid").read_text(encoding="utf-8") for task in range(N_TASKS)}
    assert (str(os.getpid()) in done_by) == (workers == 1)
    assert seen == sorted(seen)
    assert seen[-1] == (N_TASKS, N_TASKS, "tasks")
    assert not list(tasks.folder.glob("work-*"))


def test_the_first_result_stays(tasks):
    """Another process publishes the task, and ends the job, while this one is at it."""

    def overtaken(task: int, work: Path) -> Path:
        write_pid(task, tasks.published(task).parent).rename(tasks.published(task))
        (tasks.published(task) / "pid").write_text("another", encoding="utf-8")
        if task:
            raise DataError("what was built here was removed")
        return write_pid(task, work)

    slow = Tasks(folder=tasks.folder, names=tasks.names, build=overtaken, what="tasks")
    for task in (0, 1):
        build_task(slow, task)
        assert (tasks.published(task) / "pid").read_text(encoding="utf-8") == "another"
    assert not list(tasks.folder.glob("work-*"))
