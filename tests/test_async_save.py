"""Two ranks that train on while a checkpoint is written: the same bits, every failure told, and nothing lost.

The functions at the top are planted in each rank before it starts: they make the disk slow or faulty for what is
written in the background, and only for that.
"""

import errno
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lt_ckpt import Checkpoint, find_latest_valid, list_steps
from lt_test_helpers.rank_processes import TIMEOUT_S, RankProcesses, start_training
from lt_test_helpers.run_files import read_events, read_losses

BASE_OVERRIDES = ("checkpoint.async_save=true", "checkpoint.interval=4", "checkpoint.keep_last=9", "data.validation=")


def _on_fsync_in_the_background(action) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if threading.current_thread().name.startswith("lt-ckpt"):
            action()
        real(descriptor)

    os.fsync = fsync


def slow_disk(rank: int) -> None:
    """A save takes as long as several steps."""
    _on_fsync_in_the_background(lambda: time.sleep(0.01))


def rank_1_has_no_space_after_step_8(rank: int) -> None:
    """The disk of rank 1 fills up: its second part fails, and it cannot even say so."""
    fsyncs, real = [0], os.open

    def full() -> None:
        fsyncs[0] += 1
        if rank == 1 and fsyncs[0] > 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path: Any, *args: Any, **more: Any) -> int:
        if rank == 1 and os.path.basename(path).startswith("failed-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *args, **more)

    os.open = opened
    _on_fsync_in_the_background(full)


def rank_1_fails_while_a_save_is_in_flight(rank: int) -> None:
    """Rank 1 cannot read the sixth batch; its part of the save of step 4 is being written."""
    from lt_data import DataError, Stream

    slow_disk(rank)
    following, calls = Stream.take, [0]

    def failing(self: Stream) -> Any:
        calls[0] += 1
        if rank == 1 and calls[0] == 6:
            raise DataError("shards/00000.bin: Input/output error; check the disk")
        return following(self)

    Stream.take = failing


def start_ranks(prepared: Path, cwd: Path, *sets: str, fault: str = "", ranks: int = 2) -> RankProcesses:
    prepare = f"{__file__}:{fault}" if fault else ""
    return start_training(prepared / "run.toml", cwd, *BASE_OVERRIDES, *sets, ranks=ranks, prepare=prepare)


def run_to_end(prepared: Path, cwd: Path, *sets: str, codes: list[int], fault: str = "") -> list[str]:
    """Run to the end; returns what each rank said, after checking the exit codes."""
    with start_ranks(prepared, cwd, *sets, fault=fault, ranks=len(codes)) as run:
        return run.end(codes)


def event_steps(run: Path, kind: str) -> list[int]:
    return [event["step"] for event in read_events(run, kind)]


def checkpoint_steps(run: Path) -> list[int]:
    return sorted(step for step, _ in list_steps(run / "checkpoints"))


def unfinished_saves(run: Path) -> list[str]:
    return [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module")
def uninterrupted_run(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with all its checkpoints saved in the foreground."""
    cwd = tmp_path_factory.mktemp("whole")
    run_to_end(prepared, cwd, "checkpoint.async_save=false", codes=[0, 0])
    assert checkpoint_steps(cwd / "run") == [4, 8, 12, 16, 20]
    return cwd / "run"


def check_checkpoint(path: Path, reference: Path) -> None:
    """Slice by slice the same bytes, and the same of all that is no tensor."""
    ours, theirs = (
        Checkpoint.open(folder / "checkpoints" / path.name).manifest for folder in (path.parents[1], reference)
    )
    assert ours.tensors == theirs.tensors
    assert (ours.scalars, ours.data, ours.layout, ours.model) == (
        theirs.scalars,
        theirs.data,
        theirs.layout,
        theirs.model,
    )


@pytest.mark.parametrize(
    ("fault", "sets"),
    [("", ()), ("slow_disk", ("engine.gpu.optimizer_offload=true",))],
    ids=["", "slow-disk-optimizer-offload"],
)
def test_the_same_losses_and_the_same_checkpoints(
    prepared: Path, tmp_path: Path, uninterrupted_run: Path, fault: str, sets: tuple[str, ...]
) -> None:
    """With optimizer offload too: its moments in host memory change while their copy is written."""
    run_to_end(prepared, tmp_path, *sets, codes=[0, 0], fault=fault)
    run = tmp_path / "run"
    assert read_losses(run) == read_losses(uninterrupted_run)
    assert checkpoint_steps(run) == event_steps(run, "checkpoint") == checkpoint_steps(uninterrupted_run)
    assert unfinished_saves(run) == []
    for _, path in list_steps(run / "checkpoints"):
        check_checkpoint(path, uninterrupted_run)


def test_a_part_that_fails_ends_both_ranks_with_its_cause(
    prepared: Path, tmp_path: Path, uninterrupted_run: Path
) -> None:
    said = run_to_end(prepared, tmp_path, codes=[64, 64], fault="rank_1_has_no_space_after_step_8")
    run = tmp_path / "run"
    assert "No space left on device" in said[1]
    assert "on another rank: " in said[0]
    reached = checkpoint_steps(run)
    assert 20 not in reached
    assert unfinished_saves(run) == []
    run_to_end(prepared, tmp_path, codes=[0, 0])
    assert event_steps(run, "resume") == reached[-1:]
    assert read_losses(run) == read_losses(uninterrupted_run)


def test_a_stop_waits_for_the_save_in_flight(prepared: Path, tmp_path: Path, uninterrupted_run: Path) -> None:
    with start_ranks(prepared, tmp_path, fault="slow_disk") as run:
        wait_for_a_save(run, tmp_path / "run", set())
        run.send_signal(signal.SIGTERM, 1)
        run.end([75, 75])
    stopped = event_steps(tmp_path / "run", "stop")
    assert checkpoint_steps(tmp_path / "run")[-1:] == stopped
    assert 4 in checkpoint_steps(tmp_path / "run")
    assert unfinished_saves(tmp_path / "run") == []
    run_to_end(prepared, tmp_path, codes=[0, 0])
    assert read_losses(tmp_path / "run") == read_losses(uninterrupted_run)


def test_an_error_on_one_rank_does_not_lose_the_save_in_flight(
    prepared: Path, tmp_path: Path, uninterrupted_run: Path
) -> None:
    """Rank 1 ends its part before it leaves; rank 0 hears that rank 1 is gone, and commits all the same."""
    fault = "rank_1_fails_while_a_save_is_in_flight"
    said = run_to_end(prepared, tmp_path, "fault_tolerance.hang_timeout_s=30", codes=[75, 64], fault=fault)
    assert "check the disk" in said[1]
    assert checkpoint_steps(tmp_path / "run") == event_steps(tmp_path / "run", "checkpoint") == [4]
    run_to_end(prepared, tmp_path, codes=[0, 0])
    assert event_steps(tmp_path / "run", "resume") == [4]
    assert read_losses(tmp_path / "run") == read_losses(uninterrupted_run)


def list_saves(folder: Path) -> set[str]:
    """Names of the saves that are in flight or were left, those of rehearsals apart."""
    root = folder / "checkpoints"
    names = os.listdir(root) if root.exists() else []
    return {name for name in names if name.startswith(".tmp-") and not name.startswith(".tmp-step-00000000")}


def wait_for_a_save(run: RankProcesses, folder: Path, old: set[str]) -> None:
    """Until a save is in flight that was not there before."""
    deadline = time.monotonic() + TIMEOUT_S
    while list_saves(folder) <= old:
        if len(run.alive_ranks) < len(run.pids):
            return
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_9_while_a_save_is_in_flight(prepared: Path, tmp_path: Path, uninterrupted_run: Path, seed: int) -> None:
    """Of one rank or of both, twice in one run; each time the old checkpoint is there, or the new one."""
    rng, run = random.Random(seed), tmp_path / "run"
    for _ in range(2):
        old = list_saves(run)
        with start_ranks(prepared, tmp_path, "fault_tolerance.hang_timeout_s=30", fault="slow_disk") as processes:
            wait_for_a_save(processes, run, old)
            time.sleep(rng.uniform(0, 0.3))
            before = checkpoint_steps(run)
            processes.kill(rng.choice([None, 0, 1]))
            processes.wait(TIMEOUT_S)
        found, rejected = find_latest_valid(run / "checkpoints")
        assert rejected == []
        if found is None:
            assert before == []
            continue
        assert found.step >= max(before, default=0)
        check_checkpoint(found.path, uninterrupted_run)
    resumes = len(event_steps(run, "resume"))
    newest, _ = find_latest_valid(run / "checkpoints")
    run_to_end(prepared, tmp_path, codes=[0, 0])
    assert event_steps(run, "resume")[resumes:] == ([newest.step] if newest else [])
    assert read_losses(run) == read_losses(uninterrupted_run)
    check_checkpoint(run / "checkpoints" / "step-00000020", uninterrupted_run)
