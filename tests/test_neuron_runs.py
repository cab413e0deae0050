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
from typing import Any

import pytest

from lt_ckpt import Checkpoint, find_latest_valid
from lt_test_helpers.rank_processes import RankProcesses, start_run
from lt_trainer.run_directory.jsonl import read_jsonl

STEPS, INTERVAL, TIMEOUT_S = 12, 3, 240
KILLS = int(os.environ.get("LT_KILLS", "30"))
"""Of the full count, which only `pytest -m slow` runs."""
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp2": (2, ("parallel.tp=2", "parallel.sequence_parallel=true")),
    "pp2-bf16": (2, ("parallel.pp=2", "engine.neuron.cpu_dtype=bfloat16")),
    "dp2": (2, ()),
}


@pytest.fixture(scope="module")
def recipe(prepared: Path) -> Path:
    """The recipe of these tests' runs, without the section of the other engine."""
    text = (prepared / "run.toml").read_text().partition("[engine.gpu]")[0]
    path = prepared / "neuron.toml"
    path.write_text(text + '[engine.neuron]\nbackend = "cpu"\n')
    return path


def start_ranks(recipe: Path, cwd: Path, layout: str, *more: str, ranks: int = 0) -> RankProcesses:
    n, sets = LAYOUTS[layout]
    fixed = (
        "run.engine=neuron",
        f"engine.neuron.num_neuroncores={ranks or n}",
        f"checkpoint.interval={INTERVAL}",
        "checkpoint.keep_last=9",
        f"schedule.max_steps={STEPS}",
        "fault_tolerance.hang_timeout_s=30",
    )
    arguments = [text for value in (*fixed, *sets, *more) for text in ("--set", value)]
    preload = ("lt_trainer_neuron.engine", "lt_trainer_neuron.nxd.backend")
    return start_run(["run", recipe, *arguments], ranks=ranks or n, cwd=cwd, preload=preload)


def run_to_end(recipe: Path, cwd: Path, layout: str, *more: str, ranks: int = 0) -> None:
    with start_ranks(recipe, cwd, layout, *more, ranks=ranks) as run:
        assert set(run.wait(TIMEOUT_S)) == {0}, run.output()


def read_step_metrics(run: Path) -> dict[int, set[tuple[float, float, int]]]:
    """What metrics.jsonl says of each step, all times that it was run."""
    found: dict[int, set[tuple[float, float, int]]] = {}
    for record in read_jsonl(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else ():
        if "grad_norm" in record:
            told = (record["loss"], record["grad_norm"], record["valid_tokens"])
            found.setdefault(record["step"], set()).add(told)
    return found


def read_validation_losses(run: Path) -> list[float]:
    return [record["val_loss"] for record in read_jsonl(run / "metrics.jsonl") if "val_loss" in record]


def read_events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    return [event for event in read_jsonl(path) if event["event"] == kind] if path.exists() else []


def latest_checkpoint(run: Path) -> Checkpoint:
    found, rejected = find_latest_valid(run / "checkpoints")
    assert found is not None
    assert not rejected
    return found


def checkpoint_hashes(checkpoint: Checkpoint) -> dict[str, list[str]]:
    return {
        f"{group}/{name}": [piece.xxh3_128 for piece in record.slices]
        for group, tensors in checkpoint.manifest.tensors.items()
        for name, record in tensors.items()
    }


def wait_for_step(run: RankProcesses, folder: Path, step: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while max(read_step_metrics(folder), default=0) < step:
        assert len(run.alive_ranks) == len(run.pids), run.output()
        assert time.monotonic() < deadline
        time.sleep(0.002)


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


def assert_bit_equal(run: Path, reference: Path) -> None:
    assert read_step_metrics(run) == read_step_metrics(reference)
    assert all(len(told) == 1 for told in read_step_metrics(run).values())
    assert checkpoint_hashes(latest_checkpoint(run)) == checkpoint_hashes(latest_checkpoint(reference))


@pytest.mark.parametrize("layout", ["tp2", "pp2-bf16"])
def test_a_stopped_run_goes_on_bit_equal(
    recipe: Path, tmp_path: Path, uninterrupted_run: Callable[[str], Path], layout: str
) -> None:
    """The signal reaches one rank of two; both save at the same step."""
    reference, run = uninterrupted_run(layout), tmp_path / "run"
    with start_ranks(recipe, tmp_path, layout) as ranks:
        wait_for_step(ranks, run, 4)
        ranks.send_signal(signal.SIGTERM, 1)
        assert ranks.wait(TIMEOUT_S) == [75, 75], ranks.output()
    (stop,) = read_events(run, "stop")
    assert stop["step"] == latest_checkpoint(run).step == max(read_step_metrics(run)) < STEPS
    run_to_end(recipe, tmp_path, layout)
    assert [event["step"] for event in read_events(run, "resume")] == [stop["step"]]
    assert_bit_equal(run, reference)


def kill_and_resume(recipe: Path, cwd: Path, layout: str, rng: random.Random, kills: int) -> int:
    """Kill a run at random steps until it has ended or `kills` are reached, then let it end; returns the kills."""
    run, struck = cwd / "run", 0
    while struck < kills:
        floor = max((step for step, _ in _checkpoints(run)), default=0)
        with start_ranks(recipe, cwd, layout) as ranks:
            wanted = min(STEPS, floor + rng.randint(1, 2 * INTERVAL))
            deadline = time.monotonic() + TIMEOUT_S
            # Lines of metrics of before the kill are there already: it is the lines that are counted.
            before = sum(1 for _ in read_jsonl(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0
            while len(ranks.alive_ranks) == len(ranks.pids):
                lines = len(read_jsonl(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0
                if lines >= before + wanted - floor:
                    break
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


def _checkpoints(run: Path) -> list[tuple[int, Path]]:
    from lt_ckpt import list_steps

    return list(list_steps(run / "checkpoints")) if (run / "checkpoints").exists() else []


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
        wait_for_step(ranks, run, 4)
        ranks.send_signal(signal.SIGTERM)
        assert ranks.wait(TIMEOUT_S) == [75, 75], ranks.output()
    stopped = latest_checkpoint(run).step
    run_to_end(recipe, tmp_path, "dp2", ranks=1)
    assert [event["step"] for event in read_events(run, "resume")] == [stopped]
    ours, theirs = read_step_metrics(run), read_step_metrics(reference)
    assert ours.keys() == theirs.keys()
    for step in ours:
        ((loss, norm, tokens),), ((loss_2, norm_2, tokens_2),) = ours[step], theirs[step]
        assert (loss, norm) == pytest.approx((loss_2, norm_2), rel=1e-4)
        assert tokens == tokens_2
    assert read_validation_losses(run) == pytest.approx(read_validation_losses(reference), rel=1e-4)
