"""Stop signals at the very start of a command: recorded before torch is loaded, and the command ends with 75."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lt_ckpt import list_steps
from lt_trainer.resilience.stop_signals import STOP_SIGNALS

TIMEOUT_S = 240
START_S = 6.0
"""About as long as a command takes to its first step here."""
RUN = [sys.executable, "-m", "lt_trainer", "run"]
LT_RUN = [str(Path(sys.executable).parent / "lt"), "train", "run"]
TORCHRUN = [sys.executable, "-m", "lt_trainer", "torchrun", "--nproc-per-node", "2"]

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


def block_stop_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@contextmanager
def started(command: list[str], recipe: Path, cwd: Path, *, blocked: bool) -> Iterator[subprocess.Popen]:
    """A command in a session of its own; with `blocked`, its signals wait until it takes them."""
    with (
        open(cwd / "out.txt", "w", encoding="utf-8") as out,
        subprocess.Popen(
            [*command, str(recipe)],
            cwd=cwd,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=block_stop_signals if blocked else None,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def is_caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines())
    return bool(int(lines["SigCgt"], 16) >> (number - 1) & 1)


def end_of(process: subprocess.Popen, cwd: Path) -> int:
    """Its exit code, after what a stop before the first step must leave: at most the checkpoint of this stop."""
    code = process.wait(TIMEOUT_S)
    text = (cwd / "out.txt").read_text(encoding="utf-8")
    assert "torchrun" in process.args or "Traceback" not in text, text  # torch shows where torchrun was stopped
    folder = cwd / "run" / "checkpoints"
    assert code != 75 or not folder.exists() or len(list_steps(folder)) <= 1, text
    return code


@pytest.mark.parametrize("command", [RUN, LT_RUN], ids=["rank", "lt"])
def test_handlers_are_set_before_anything_heavy_is_loaded(prepared: Path, tmp_path: Path, command: list[str]) -> None:
    with started(command, prepared / "run.toml", tmp_path, blocked=False) as process:
        while not is_caught(process.pid, signal.SIGTERM):
            assert process.poll() is None
        loaded = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
        process.terminate()
        assert end_of(process, tmp_path) == 75
    assert "libtorch" not in loaded
    assert "numpy" not in loaded


def test_the_launcher_ends_with_75_when_torchrun_is_stopped_while_it_loads(prepared: Path, tmp_path: Path) -> None:
    """torchrun itself dies of a signal before its handlers are set; no rank has left a code then."""
    with started(TORCHRUN, prepared / "run.toml", tmp_path, blocked=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text(encoding="ascii").strip():
            assert process.poll() is None
            time.sleep(0.001)
        process.terminate()
        assert end_of(process, tmp_path) == 75


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("command", [RUN, LT_RUN, TORCHRUN], ids=["rank", "lt", "torchrun"])
def test_signals_at_any_time_until_the_process_is_gone(
    prepared: Path, tmp_path: Path, command: list[str], seed: int
) -> None:
    """The first one may come before the interpreter runs, the last ones while it unloads its modules."""
    draw = random.Random(seed)
    with started(
        [*command, "--set", "schedule.max_steps=100000"], prepared / "run.toml", tmp_path, blocked=True
    ) as run:
        time.sleep(START_S * draw.random() ** 2)
        while run.poll() is None:
            run.send_signal(draw.choice(STOP_SIGNALS))
            time.sleep(0.01)
        assert end_of(run, tmp_path) == 75
