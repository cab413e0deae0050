"""Faults planted in real runs: each ends in a run that goes on, or in one clear message and the right exit code."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lt_test_helpers.rank_processes import TIMEOUT_S, RankProcesses, start_training
from lt_test_helpers.run_files import latest_checkpoint, read_events, read_losses

FAULTS_FILE = Path(__file__).with_name("faults.py")


def start_ranks(prepared: Path, cwd: Path, *sets: str, ranks: int = 2, fault: str = "") -> RankProcesses:
    prepare = f"{FAULTS_FILE}:{fault}" if fault else ""
    return start_training(prepared / "run.toml", cwd, *sets, ranks=ranks, prepare=prepare)


def run_to_end(prepared: Path, cwd: Path, *sets: str, codes: list[int], fault: str = "") -> list[str]:
    """Run to the end; returns what each rank said, after checking the exit codes."""
    with start_ranks(prepared, cwd, *sets, ranks=len(codes), fault=fault) as run:
        return run.end(codes)


@pytest.fixture(scope="module")
def uninterrupted_losses(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process that nothing disturbs."""
    cwd = tmp_path_factory.mktemp("whole")
    run_to_end(prepared, cwd, codes=[0])
    return read_losses(cwd / "run")


def test_an_infinite_loss_on_one_rank_is_skipped_by_all_and_then_left_behind(prepared: Path, tmp_path: Path) -> None:
    """Two ranks, of which one is hit, do what one process does: skip three steps, go back to step 8, end the same."""
    sets = ("fault_tolerance.max_skipped_steps=2", "engine.gpu.dtype=float64")
    for name, ranks in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        said = run_to_end(prepared, tmp_path / name, *sets, codes=[0] * ranks, fault="infinite_loss_on_rank_1")
        assert "step 10 was skipped: loss" in said[0]
    one, two = tmp_path / "one" / "run", tmp_path / "two" / "run"
    for run in (one, two):
        assert [e["step"] for e in read_events(run, "step_skipped")] == [10, 11, 12]
        assert [(e["step"], e["rows"]) for e in read_events(run, "rollback")] == [(8, [64, 96])]
    wanted = read_losses(one)
    assert sorted(wanted) == list(range(1, 21))
    assert read_losses(two) == pytest.approx(wanted, rel=1e-9)


def test_a_rank_that_hangs_is_named_with_its_stack_and_the_others_end(prepared: Path, tmp_path: Path) -> None:
    said = run_to_end(
        prepared, tmp_path, "fault_tolerance.hang_timeout_s=4", codes=[75, 75], fault="data_loader_hangs_on_rank_1"
    )
    logs = [(tmp_path / "run" / "logs" / f"rank{rank:05}.log").read_text(encoding="utf-8") for rank in (0, 1)]
    assert "stuck_reader" in logs[1]
    assert "rank 1" in said[0]
    assert "rank 1" in logs[0]
    (folder,) = (tmp_path / "run" / "flight").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0", "rank_1"]
    entries = [pickle.loads((folder / f"rank_{rank}").read_bytes())["entries"] for rank in (0, 1)]
    waiting, absent = (max(e["collective_seq_id"] for e in es if e["pg_id"] == 0) for es in entries)
    assert waiting == absent + 1, "rank 0 has begun what rank 1 has not"


def test_a_rank_that_hangs_with_pythons_lock_ends_and_is_named_by_the_others(prepared: Path, tmp_path: Path) -> None:
    sets, fault = "fault_tolerance.hang_timeout_s=4", "data_loader_keeps_pythons_lock_on_rank_1"
    said = run_to_end(prepared, tmp_path, sets, codes=[75, -signal.SIGALRM], fault=fault)
    assert "rank 1" in said[0]
    assert "stuck_reader" in (tmp_path / "run" / "logs" / "rank00001.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("mesh", ["parallel.pp=2", "parallel.cp=2"])
def test_a_rank_that_hangs_is_named_on_other_meshes(prepared: Path, tmp_path: Path, mesh: str) -> None:
    sets = ("fault_tolerance.hang_timeout_s=4", mesh)
    said = run_to_end(prepared, tmp_path, *sets, codes=[75, 75], fault="data_loader_hangs_on_rank_1")
    assert "rank 1" in said[0]
    assert "stuck_reader" in (tmp_path / "run" / "logs" / "rank00001.log").read_text(encoding="utf-8")


def test_a_rank_that_is_frozen_is_named_and_the_others_end(prepared: Path, tmp_path: Path) -> None:
    sets = ("fault_tolerance.hang_timeout_s=4", "schedule.max_steps=100000", "checkpoint.interval=8")
    with start_ranks(prepared, tmp_path, *sets) as run:
        run.wait_for_step(tmp_path / "run", 10)
        os.kill(run.pids[1], signal.SIGSTOP)
        deadline = time.monotonic() + TIMEOUT_S
        while 0 in run.alive_ranks:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        said = run.output(0)
        run.kill(1)
        assert run.wait(TIMEOUT_S) == [75, -signal.SIGKILL], said
    assert "rank 1" in said
    reached = latest_checkpoint(tmp_path / "run").step
    assert reached >= 8
    with start_ranks(prepared, tmp_path, *sets) as run:  # and the run goes on
        run.wait_for_step(tmp_path / "run", reached + 2)


def test_an_error_on_one_rank_is_told_by_all(prepared: Path, tmp_path: Path) -> None:
    said = run_to_end(prepared, tmp_path, codes=[75, 64], fault="disk_error_on_rank_1")
    assert "error: shards/00000.bin: Input/output error; check the disk" in said[1]
    assert "rank 1" in said[0]
    assert "Input/output error" in said[0]
    run_to_end(prepared, tmp_path, codes=[0, 0])


def test_a_changed_store_is_refused_with_what_changed(prepared: Path, lt, tmp_path: Path) -> None:
    shutil.copytree(prepared / "text" / "train", tmp_path / "text")
    lt("data", "prepare", "text", "--tokenizer", prepared / "tokenizer", "--out", "store", cwd=tmp_path)
    lt("data", "pack", "store", "--seq-len", "64", cwd=tmp_path)
    store = f"data.store={tmp_path}/store"
    run_to_end(prepared, tmp_path, store, "schedule.max_steps=12", codes=[0])
    (tmp_path / "text" / "007.txt").write_text("another text altogether", encoding="utf-8")
    shutil.rmtree(tmp_path / "store")
    lt("data", "prepare", "text", "--tokenizer", prepared / "tokenizer", "--out", "store", cwd=tmp_path)
    (said,) = run_to_end(prepared, tmp_path, store, codes=[64])
    assert "pack" in said  # the old pack does not fit the new store, or there is none
    lt("data", "pack", "store", "--seq-len", "64", cwd=tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}
    (said,) = run_to_end(prepared, tmp_path, store, codes=[64])
    assert "store:" in said
    assert "before" in said
    assert {path: path.read_bytes() for path in before} == before


def test_a_clock_that_jumps_by_years_changes_nothing(prepared: Path, tmp_path: Path, uninterrupted_losses) -> None:
    sets = ("checkpoint.interval=3", "checkpoint.keep_last=2")
    with start_ranks(prepared, tmp_path, *sets, ranks=1, fault="wall_clock_jumps") as run:
        run.wait_for_step(tmp_path / "run", 8)
        run.send_signal(signal.SIGTERM)
        run.end([75])
    stopped = latest_checkpoint(tmp_path / "run").step
    for number, path in enumerate((tmp_path / "run" / "checkpoints").iterdir()):
        os.utime(path, (4e9 * (number % 2), 4e9 * (number % 2)))
    run_to_end(prepared, tmp_path, *sets, codes=[0], fault="wall_clock_jumps")
    assert [e["step"] for e in read_events(tmp_path / "run", "resume")] == [stopped]
    assert read_losses(tmp_path / "run") == uninterrupted_losses


def in_locale(prepared: Path, home: Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TZ": "Pacific/Chatham", **env}
    command = [sys.executable, "-m", "lt_trainer", "run", str(prepared / "run.toml"), "--set", f"run.dir={home}/run"]
    return subprocess.run(command, cwd=home.parent, env=environ, capture_output=True, check=False)


def test_names_that_the_terminal_cannot_show(prepared: Path, tmp_path: Path, uninterrupted_losses) -> None:
    """A folder with an umlaut and a dotless i in the C locale, with output that can only be ASCII."""
    home = tmp_path / "läufe-\u0131"
    home.mkdir()
    done = in_locale(prepared, home, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_losses(home / "run") == uninterrupted_losses
    assert b"l\\xe4ufe-\\u0131" in done.stdout


def test_names_that_the_locale_cannot_say_are_refused(prepared: Path, tmp_path: Path) -> None:
    """With Python's own remedies for the C locale switched off, an argument arrives as bytes without a meaning."""
    home = tmp_path / "läufe"
    home.mkdir()
    done = in_locale(prepared, home, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 64, done.stdout + done.stderr
    assert b"not valid Unicode" in done.stderr
    assert list(home.iterdir()) == []


def test_a_run_outlives_its_terminal(prepared: Path, tmp_path: Path, uninterrupted_losses) -> None:
    """Whoever read standard output is gone after the first line; the log and the metrics go on."""
    command = [sys.executable, "-m", "lt_trainer", "run", str(prepared / "run.toml")]
    with subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(TIMEOUT_S) == 0, said
    assert said == b""
    assert read_losses(tmp_path / "run") == uninterrupted_losses
    log = (tmp_path / "run" / "logs" / "rank00000.log").read_text(encoding="utf-8")
    assert "standard output is closed (Broken pipe)" in log
    assert "training completed at step 20" in log


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB, mounted in the test's folder."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_too_small_is_found_before_the_first_step(prepared: Path, small_disk: Path) -> None:
    larger = ("model.hidden_size=256", "model.intermediate_size=512", "run.dir=disk/run")
    said = run_to_end(prepared, small_disk.parent, *larger, codes=[64, 64])
    assert "a checkpoint needs" in said[0]
    assert "are free" in said[1]
    assert read_losses(small_disk / "run") == {}
    assert list((small_disk / "run" / "checkpoints").iterdir()) == []


def test_a_disk_that_fills_up_ends_the_run_and_loses_nothing(
    prepared: Path, small_disk: Path, uninterrupted_losses
) -> None:
    cwd = small_disk.parent
    said = run_to_end(prepared, cwd, "run.dir=disk/run", codes=[64], fault="disk_fills_up_after_step_10")
    assert "No space left on device" in said[0]
    assert "free" in said[0]
    assert latest_checkpoint(small_disk / "run").step == 8
    (small_disk / "of-somebody-else").unlink()
    run_to_end(prepared, cwd, "run.dir=disk/run", codes=[0])
    found = read_losses(small_disk / "run")
    assert {step: found[step] for step in range(9, 21)} == {step: uninterrupted_losses[step] for step in range(9, 21)}


def test_checkpoints_that_turn_read_only_end_the_run_and_nothing_is_lost(
    prepared: Path, small_disk: Path, uninterrupted_losses
) -> None:
    cwd, checkpoints = small_disk.parent, small_disk / "run" / "checkpoints"
    fault = "checkpoints_become_read_only_after_step_10"
    said = run_to_end(prepared, cwd, "run.dir=disk/run", codes=[64], fault=fault)
    assert "Read-only file system" in said[0]
    assert latest_checkpoint(small_disk / "run").step == 8
    said = run_to_end(prepared, cwd, "run.dir=disk/run", codes=[64])  # and is found at once when it is started again
    assert "Read-only file system" in said[0]
    subprocess.run(["umount", str(checkpoints)], check=True)
    run_to_end(prepared, cwd, "run.dir=disk/run", codes=[0])
    found = read_losses(small_disk / "run")
    assert {step: found[step] for step in range(9, 21)} == {step: uninterrupted_losses[step] for step in range(9, 21)}
