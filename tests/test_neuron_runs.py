"""Runs of the Trainium engine on its cpu backend, through the command: stopped, killed, resumed, on other ranks.

A run that a signal stops, or a SIGKILL ends, goes on from its newest valid checkpoint and ends with the same bits as a
run that nothing interrupts: the losses of every step, each time it was run, and the last state. With another number of
data-parallel ranks, or by another engine, a run goes on too; then sums are made in another order.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lt_ckpt import find_latest_valid, list_steps
from lt_test_helpers.rank_processes import TIMEOUT_S, RankProcesses, start_training
from lt_test_helpers.run_files import (
    assert_bit_equal,
    latest_checkpoint,
    read_events,
    read_losses,
    read_step_metrics,
)

STEPS, INTERVAL = 12, 3
KILLS = int(os.environ.get("LT_KILLS", "30"))
"""Of the full count, which only `pytest -m slow` runs."""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp2": ("parallel.tp=2", "parallel.sequence_parallel=true"),
    "pp2-bf16": ("parallel.pp=2", "engine.neuron.cpu_dtype=bfloat16"),
    "dp2": (),
}
"""Of two ranks."""


@pytest.fixture(scope="module")
def recipe(prepared: Path) -> Path:
    """The recipe of these tests' runs, without the section of the other engine."""
    text = (prepared / "run.toml").read_text().partition("[engine.gpu]")[0]
    path = prepared / "neuron.toml"
    path.write_text(text + '[engine.neuron]\nbackend = "cpu"\n')
    return path


def start_ranks(recipe: Path, cwd: Path, layout: str, ranks: int = 2) -> RankProcesses:
    fixed = (
        "run.engine=neuron",
        f"engine.neuron.num_neuroncores={ranks}",
        f"checkpoint.interval={INTERVAL}",
        "checkpoint.keep_last=9",
        f"schedule.max_steps={STEPS}",
        "fault_tolerance.hang_timeout_s=30",
    )
    preload = ("lt_trainer_neuron.engine", "lt_trainer_neuron.nxd.backend")
    return start_training(recipe, cwd, *fixed, *LAYOUTS[layout], ranks=ranks, preload=preload)


def run_to_end(recipe: Path, cwd: Path, layout: str, ranks: int = 2) -> None:
    with start_ranks(recipe, cwd, layout, ranks=ranks) as run:
        run.end([0] * ranks)


@pytest.fixture(scope="module")
def uninterrupted_run(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run directory of a run that nothing interrupts."""
    done: dict[str, Path] = {}

    def of(layout: str) -> Path:
        if layout not in done:
            cwd = tmp_path_factory.mktemp(f"whole-{layout}")
            run_to_end(recipe, cwd, layout)
            done[layout] = cwd / "run"
            assert sorted(read_step_metrics(cwd / "run")) == list(range(1, STEPS + 1))
            assert latest_checkpoint(cwd / "run").step == STEPS
        return done[layout]

    return of


@pytest.mark.parametrize("layout", ["tp2", "pp2-bf16"])
def test_a_stopped_run_goes_on_bit_equal(
    recipe: Path, tmp_path: Path, uninterrupted_run: Callable[[str], Path], layout: str
) -> None:
    """The signal reaches one rank of two; both save at the same step."""
    reference, run = uninterrupted_run(layout), tmp_path / "run"
    with start_ranks(recipe, tmp_path, layout) as ranks:
        ranks.wait_for_step(run, 4)
        ranks.send_signal(signal.SIGTERM, 1)
        ranks.end([75, 75])
    (stop,) = read_events(run, "stop")
    assert stop["step"] == latest_checkpoint(run).step == max(read_step_metrics(run)) < STEPS
    run_to_end(recipe, tmp_path, layout)
    assert [event["step"] for event in read_events(run, "resume")] == [stop["step"]]
    assert_bit_equal(run, reference)


def count_steps(run: Path) -> int:
    return sum(map(len, read_step_metrics(run).values()))


def kill_and_resume(recipe: Path, cwd: Path, layout: str, rng: random.Random, kills: int) -> int:
    """Kill a run at random steps until it has ended or `kills` are reached, then let it end; returns the kills."""
    run, struck = cwd / "run", 0
    while struck < kills:
        floor = max((step for step, _ in list_steps(run / "checkpoints")), default=0)
        with start_ranks(recipe, cwd, layout) as ranks:
            wanted = min(STEPS, floor + rng.randint(1, 2 * INTERVAL))
            deadline = time.monotonic() + TIMEOUT_S
            # Steps of before the kill are run again: it is how often steps were run that counts.
            before = count_steps(run)
            while len(ranks.alive_ranks) == len(ranks.pids) and count_steps(run) < before + wanted - floor:
                assert time.monotonic() < deadline, ranks.output()
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.02))
            one = rng.choice([None, 0, 1])
            ranks.kill(one)
            codes = ranks.wait(TIMEOUT_S)
        if codes == [0, 0]:
            break
        assert all(code in (-signal.SIGKILL, 75, 0) for code in codes), codes
        if one is not None and codes[one] == -signal.SIGKILL:
            assert codes[1 - one] in (75, 0), "the other rank ends by itself, to be started again"
        struck += 1
        found, rejected = find_latest_valid(run / "checkpoints")
        assert (found.step if found else 0) >= floor
        assert not rejected
    run_to_end(recipe, cwd, layout)
    return struck


@pytest.mark.parametrize(
    ("layout", "kills", "seed"),
    [("tp2", 2, 3), *(pytest.param(layout, KILLS, 7, marks=pytest.mark.slow) for layout in LAYOUTS)],
)
def test_a_killed_run_ends_with_the_same_bits(
    recipe: Path, tmp_path: Path, uninterrupted_run: Callable[[str], Path], layout: str, kills: int, seed: int
) -> None:
    """With SIGKILL to one rank or to both, at random steps; where a run ends first, a new one is begun."""
    reference, rng, struck, runs = uninterrupted_run(layout), random.Random(seed), 0, 0
    while struck < kills:
        runs += 1
        assert runs <= 4 * kills, "the kills come too late"
        cwd = tmp_path / str(runs)
        cwd.mkdir()
        struck += kill_and_resume(recipe, cwd, layout, rng, kills - struck)
        assert_bit_equal(cwd / "run", reference)


def test_a_run_goes_on_with_another_number_of_data_parallel_ranks(
    recipe: Path, tmp_path: Path, uninterrupted_run: Callable[[str], Path]
) -> None:
    """Stopped on two data-parallel ranks, which share the optimizer's state, and ended by one."""
    reference, run = uninterrupted_run("dp2"), tmp_path / "run"
    with start_ranks(recipe, tmp_path, "dp2") as ranks:
        ranks.wait_for_step(run, 4)
        ranks.send_signal(signal.SIGTERM)
        ranks.end([75, 75])
    stopped = latest_checkpoint(run).step
    run_to_end(recipe, tmp_path, "dp2", ranks=1)
    assert [event["step"] for event in read_events(run, "resume")] == [stopped]
    ours, theirs = read_step_metrics(run), read_step_metrics(reference)
    assert ours.keys() == theirs.keys()
    for step in ours:
        ((loss, norm, tokens),), ((loss_2, norm_2, tokens_2),) = ours[step], theirs[step]
        assert (loss, norm) == pytest.approx((loss_2, norm_2), rel=1e-4)
        assert tokens == tokens_2
    assert read_losses(run, "val_loss") == pytest.approx(read_losses(reference, "val_loss"), rel=1e-4)
