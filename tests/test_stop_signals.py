"""Two ranks that are stopped: by any signal, to one or to all, once or again, early or in a save; on several meshes."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lt_test_helpers.rank_processes import TIMEOUT_S, start_training
from lt_test_helpers.run_files import latest_checkpoint, read_events, read_losses
from lt_trainer.resilience.stop_signals import STOP_SIGNALS

MESHES = ((), ("parallel.pp=2",), ("parallel.cp=2",))


@pytest.fixture(scope="module")
def uninterrupted_losses(
    prepared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[tuple[str, ...]], dict[int, float]]:
    """The losses of a run of two ranks on a mesh that nothing stops."""
    done: dict[tuple[str, ...], dict[int, float]] = {}

    def of(mesh: tuple[str, ...]) -> dict[int, float]:
        if mesh not in done:
            cwd = tmp_path_factory.mktemp("whole")
            with start_training(prepared / "run.toml", cwd, *mesh) as run:
                run.end([0, 0])
            done[mesh] = read_losses(cwd / "run")
        return done[mesh]

    return of


@pytest.mark.parametrize(
    ("number", "to", "mesh"),
    [
        pytest.param(number, (None, 1)[i % 2], MESHES[i % len(MESHES)], marks=pytest.mark.slow if i == 1 else ())
        for i, number in enumerate(STOP_SIGNALS)
    ],
)
def test_all_ranks_stop_at_the_same_step_and_go_on_bit_equal(
    prepared: Path,
    tmp_path: Path,
    uninterrupted_losses: Callable[[tuple[str, ...]], dict[int, float]],
    number: signal.Signals,
    to: int | None,
    mesh: tuple[str, ...],
) -> None:
    """Signals to all and to one in turn; and a second one to all of them a moment later."""
    with start_training(prepared / "run.toml", tmp_path, *mesh) as run:
        run.wait_for_step(tmp_path / "run", 3)
        run.send_signal(number, to)
        time.sleep(0.003)
        run.send_signal(signal.SIGTERM)
        run.end([75, 75])
    (stop,), found = read_events(tmp_path / "run", "stop"), latest_checkpoint(tmp_path / "run")
    assert stop["step"] == found.step == max(read_losses(tmp_path / "run"))
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))
    with start_training(prepared / "run.toml", tmp_path, *mesh) as run:
        run.end([0, 0])
    assert read_losses(tmp_path / "run") == uninterrupted_losses(mesh)


def test_a_stop_while_everything_is_loaded_takes_no_step(prepared: Path, tmp_path: Path) -> None:
    """The signal comes when the run directory is there, long before the first step can be."""
    with start_training(prepared / "run.toml", tmp_path) as run:
        deadline = time.monotonic() + TIMEOUT_S
        while not (tmp_path / "run" / ".lt-run.lock").exists():
            assert run.alive_ranks == [0, 1], run.output(0) + run.output(1)
            assert time.monotonic() < deadline
            time.sleep(0.001)
        run.send_signal(signal.SIGUSR1, 0)
        run.end([75, 75])
    (stop,) = read_events(tmp_path / "run", "stop")
    assert stop["step"] == len(read_losses(tmp_path / "run")) <= 1
    assert not list((tmp_path / "run" / "alive").glob("trouble-*")), "both have left in peace"


def test_ten_signals_to_each_rank_are_one_stop(prepared: Path, tmp_path: Path) -> None:
    with start_training(prepared / "run.toml", tmp_path) as run:
        run.wait_for_step(tmp_path / "run", 2)
        for number in (*STOP_SIGNALS, *STOP_SIGNALS):
            run.send_signal(number)
            time.sleep(0.001)
        run.end([75, 75])
    assert latest_checkpoint(tmp_path / "run").step == max(read_losses(tmp_path / "run"))
