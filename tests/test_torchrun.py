"""Two ranks under a real torchrun: stopped by every signal, killed, with a mistake in the recipe; and checked only."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lt_test_helpers.run_files import latest_checkpoint, read_events, read_losses

LONG_RUN_ARGS = ("--set", "schedule.max_steps=100000", "--set", "checkpoint.interval=1000")


@contextmanager
def start_torchrun(recipe: Path, cwd: Path, *arguments: str, ranks: int = 2) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "lt_trainer", "torchrun", str(recipe), "--nproc-per-node", str(ranks), *arguments]
    with (
        open(cwd / "out.txt", "w", encoding="utf-8") as out,
        subprocess.Popen(
            command, cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=out, stderr=subprocess.STDOUT
        ) as process,
    ):
        yield process
        if process.poll() is None:
            process.kill()


def wait_until_training(process: subprocess.Popen, cwd: Path) -> None:
    deadline = time.monotonic() + 240
    while len(read_losses(cwd / "run")) < 2:
        assert process.poll() is None, (cwd / "out.txt").read_text(encoding="utf-8")
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rank_pids(cwd: Path) -> dict[int, int]:
    """Process numbers by rank, from the heartbeats."""
    import json

    return {
        (record := json.loads(path.read_bytes()))["rank"]: record["pid"]
        for path in (cwd / "run" / "alive").glob("*.json")
    }


def parent_of(pid: int) -> int:
    """The parent of a process; 0 where there is no such process any more."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state in "ZX" else int(parent)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGUSR1, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_to_the_launcher_is_a_saved_stop_with_exit_code_75(prepared: Path, tmp_path: Path, number) -> None:
    with start_torchrun(prepared / "run.toml", tmp_path, *LONG_RUN_ARGS) as process:
        wait_until_training(process, tmp_path)
        process.send_signal(number)
        process.send_signal(signal.SIGTERM)  # a second one changes nothing
        assert process.wait(timeout=180) == 75, (tmp_path / "out.txt").read_text(encoding="utf-8")
    assert "Traceback" not in (tmp_path / "out.txt").read_text(encoding="utf-8")
    (stop,), found = read_events(tmp_path / "run", "stop"), latest_checkpoint(tmp_path / "run")
    assert (stop["step"], stop["signal"]) == (found.step, number.name)


def test_a_rank_that_cannot_stop_is_killed_after_the_grace_time_of_the_recipe(prepared: Path, tmp_path: Path) -> None:
    """torchrun's own patience is 30 s; a stopped process does not even see SIGTERM."""
    arguments = (
        *LONG_RUN_ARGS,
        "--set",
        "fault_tolerance.grace_period_s=3",
        "--set",
        "fault_tolerance.hang_timeout_s=500",
    )
    with start_torchrun(prepared / "run.toml", tmp_path, *arguments) as process:
        wait_until_training(process, tmp_path)
        os.kill(rank_pids(tmp_path)[1], signal.SIGSTOP)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=180) != 0
        assert 2.5 < time.monotonic() - start < 25


def test_a_killed_rank_ends_the_run_with_start_me_again(prepared: Path, tmp_path: Path) -> None:
    with start_torchrun(prepared / "run.toml", tmp_path, *LONG_RUN_ARGS) as process:
        wait_until_training(process, tmp_path)
        os.kill(rank_pids(tmp_path)[1], signal.SIGKILL)
        assert process.wait(timeout=180) == 75, (tmp_path / "out.txt").read_text(encoding="utf-8")
    log = (tmp_path / "run" / "logs" / "rank00000.log").read_text(encoding="utf-8")
    assert "rank 1" in log
    assert "rerun to resume" in log


def test_a_killed_rank_that_has_no_others_ends_with_the_signal(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code is noted for the launcher, as it could not note it itself."""
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv("LT_EXIT_CODES", str(notes))
    with start_torchrun(prepared / "run.toml", tmp_path, *LONG_RUN_ARGS, ranks=1) as process:
        wait_until_training(process, tmp_path)
        os.kill(rank_pids(tmp_path)[0], signal.SIGKILL)
        assert process.wait(timeout=180) == 128 + signal.SIGKILL, (tmp_path / "out.txt").read_text(encoding="utf-8")
    assert (notes / "0").read_text(encoding="utf-8") == f"137 {os.uname().nodename}\n"


def test_machines_that_do_not_meet_are_a_reason_to_try_again(prepared: Path, tmp_path: Path) -> None:
    """The other machine's torchrun has the port, and is none."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={taken.getsockname()[1]}"]
        with start_torchrun(prepared / "run.toml", tmp_path, "--", "--rdzv-backend=static", *options) as process:
            assert process.wait(timeout=120) == 75, (tmp_path / "out.txt").read_text(encoding="utf-8")
    assert "did not meet" in (tmp_path / "out.txt").read_text(encoding="utf-8")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("killed", ["torchrun", "command"])
def test_ranks_whose_launcher_is_killed_save_and_end(prepared: Path, tmp_path: Path, killed: str) -> None:
    """torchrun itself, or the command above it: nobody watches the ranks any more."""
    with start_torchrun(prepared / "run.toml", tmp_path, *LONG_RUN_ARGS) as process:
        wait_until_training(process, tmp_path)
        ranks = list(rank_pids(tmp_path).values())
        agent = parent_of(ranks[0])
        assert parent_of(agent) == process.pid
        os.kill(agent if killed == "torchrun" else process.pid, signal.SIGKILL)
        assert process.wait(timeout=60) in (137, -9)
        deadline = time.monotonic() + 60
        while any(parent_of(pid) for pid in (*ranks, agent)):
            assert time.monotonic() < deadline, (tmp_path / "out.txt").read_text(encoding="utf-8")
            time.sleep(0.1)
    assert latest_checkpoint(tmp_path / "run").step == max(read_losses(tmp_path / "run"))


@pytest.mark.slow
def test_a_context_parallel_run_killed_and_stopped_goes_on_as_one_that_never_was(lt, prepared: Path, tmp_path) -> None:
    """Two ranks share each row: killed, started again, stopped, started again; then the losses of one process."""
    sets = ["schedule.kind=wsd", "schedule.decay_steps=1", "checkpoint.interval=8", "engine.gpu.dtype=float64"]
    on_two = (*sets, "parallel.cp=2", "schedule.max_steps=100000")
    arguments = [word for value in on_two for word in ("--set", value)]
    for number in (signal.SIGKILL, signal.SIGTERM):
        done = read_losses(tmp_path / "run")
        with start_torchrun(prepared / "run.toml", tmp_path, *arguments) as process:
            wait_until_training(process, tmp_path)
            deadline = time.monotonic() + 240
            while max(read_losses(tmp_path / "run"), default=0) < max(done, default=0) + 10:
                assert process.poll() is None, (tmp_path / "out.txt").read_text(encoding="utf-8")
                assert time.monotonic() < deadline
                time.sleep(0.05)
            if number == signal.SIGKILL:
                os.kill(rank_pids(tmp_path)[1], number)
            else:
                process.send_signal(number)
            assert process.wait(timeout=180) == 75, (tmp_path / "out.txt").read_text(encoding="utf-8")
    steps = max(read_losses(tmp_path / "run")) + 2
    last = [word for value in (*on_two, f"schedule.max_steps={steps}") for word in ("--set", value)]
    with start_torchrun(prepared / "run.toml", tmp_path, *last) as process:
        assert process.wait(timeout=240) == 0, (tmp_path / "out.txt").read_text(encoding="utf-8")
    alone = [word for value in (*sets, f"schedule.max_steps={steps}", "run.dir=alone") for word in ("--set", value)]
    lt("train", "run", prepared / "run.toml", *alone, cwd=tmp_path)
    for field in ("loss", "valid_tokens", "val_loss"):
        found, wanted = (read_losses(tmp_path / name, field) for name in ("run", "alone"))
        assert wanted
        assert found == {step: pytest.approx(value, rel=1e-7) for step, value in wanted.items()}
    assert len(read_events(tmp_path / "run", "resume")) == 2


def test_a_mistake_in_the_recipe_is_told_once(prepared: Path, tmp_path: Path) -> None:
    with start_torchrun(prepared / "run.toml", tmp_path, "--set", "optimizer.beta1=7") as process:
        assert process.wait(timeout=120) == 64
    assert (tmp_path / "out.txt").read_text(encoding="utf-8").count("optimizer.beta1 = 7") == 1
    with start_torchrun(prepared / "run.toml", tmp_path, "--set", "parallel.tp=4") as process:
        assert process.wait(timeout=120) == 64  # only the ranks know how many they are


def test_check_on_all_ranks(prepared: Path, tmp_path: Path) -> None:
    with start_torchrun(prepared / "run.toml", tmp_path, "--check") as process:
        assert process.wait(timeout=180) == 0
    text = (tmp_path / "out.txt").read_text(encoding="utf-8")
    assert text.count("engine on 2 x ") == text.count("check: step 1 in ") == 1
    found = re.search(r"check: restored; the next step has loss (\S+), without it (\S+)", text)
    assert found is not None
    assert found[1] == found[2]
    assert text.count("check: nothing was left behind") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt"]
