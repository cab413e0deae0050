"""Tasks that many processes take: what dies costs its own task, and whoever fails is named."""

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from lt_data import DataError
from lt_data.preparation import processes
from lt_data.preparation.processes import MAX_LOST, build_with_processes
from lt_data.preparation.tasks import CLAIM, Tasks, build_unclaimed, run_tasks
from lt_data.progress import no_progress

N_TASKS = 6


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("task_functions")


def make_tasks(folder: Path, build: Callable[[int, Path], Path]) -> Tasks:
    folder.mkdir()
    return Tasks(folder=folder, names=tuple(f"task-{i}" for i in range(N_TASKS)), build=build, what="tasks")


def test_what_dead_processes_had_claimed_is_done_by_all_workers(functions: ModuleType, tmp_path: Path) -> None:
    tasks = make_tasks(tmp_path / "tasks", functions.write_pid)
    for name in tasks.names:
        (tasks.folder / f"{name}{CLAIM}").touch()
    run_tasks(tasks, partial(build_with_processes, workers=3), no_progress)
    done_by = {tasks.published(task).read_text(encoding="utf-8") for task in range(N_TASKS)}
    assert len(done_by) > 2
    assert str(os.getpid()) not in done_by


def test_a_task_that_ends_its_process_again_and_again_is_named(functions: ModuleType, tmp_path: Path) -> None:
    tasks = make_tasks(tmp_path / "tasks", functions.die)
    expected = rf"1 of 6 tasks failed, the others are finished; task-3: its process ended {MAX_LOST} times .*SIGKILL"
    with pytest.raises(DataError, match=expected):
        run_tasks(tasks, partial(build_with_processes, workers=2), no_progress)
    assert tasks.list_missing() == [3]
    assert (tasks.folder / "attempts").stat().st_size <= MAX_LOST + 1  # and the one that claimed it


def test_a_task_that_another_machine_has_finished_is_not_waited_for(
    functions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_LOOK_S", 0.05)
    tasks = make_tasks(tmp_path / "tasks", functions.wait_for_others)
    (tasks.folder / f"{tasks.names[2]}{CLAIM}").touch()
    is_published = Tasks.is_published

    def publish(self: Tasks, task: int) -> bool:
        if task == 2 and (tasks.folder / "waits").exists():
            tasks.published(2).write_text("another machine", encoding="utf-8")
        return is_published(self, task)

    monkeypatch.setattr(Tasks, "is_published", publish)
    run_tasks(tasks, partial(build_with_processes, workers=2), no_progress)
    assert tasks.published(2).read_text(encoding="utf-8") == "another machine"
    assert not (tasks.folder / "has-waited").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_every_failure_is_named_with_its_reason(workers: int, functions: ModuleType, tmp_path: Path) -> None:
    tasks = make_tasks(tmp_path / "tasks", functions.fail)
    expected = "3 of 6 tasks failed, the others are finished; task-1: reason 1; task-3: reason 3; task-5: reason 5$"
    with pytest.raises(DataError, match=expected):
        run_tasks(tasks, partial(build_with_processes, workers=workers), no_progress)
    assert tasks.list_missing() == [1, 3, 5]
    assert not list(tasks.folder.glob("work-*"))


def test_results_that_another_process_used_and_removed(
    functions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process ends the job, and removes the results, when this one has just seen that nothing is missing."""
    tasks = make_tasks(tmp_path / "tasks", functions.write_pid)
    list_missing = Tasks.list_missing

    def list_and_remove(self: Tasks) -> list[int]:
        missing = list_missing(self)
        for name in () if missing else tasks.names:
            (tasks.folder / name).unlink()
        return missing

    monkeypatch.setattr(Tasks, "list_missing", list_and_remove)
    with pytest.raises(DataError, match=r"6 of 6 tasks failed.*task-0: was removed by another process.*; and 3 more$"):
        run_tasks(tasks, lambda tasks, _: build_unclaimed(tasks), no_progress)


def test_progress_counts_the_finished_tasks(functions: ModuleType, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    tasks = make_tasks(tmp_path / "tasks", functions.write_pid)
    run_tasks(tasks, partial(build_with_processes, workers=2), lambda *at: seen.append(at))
    assert seen == sorted(seen)
    assert seen[-1] == (N_TASKS, N_TASKS, "tasks")
