"""SIGKILL at any moment of a run: nothing that was saved is lost, and what is trained in the end is the same bits.

A run is killed and started again until it has done all its steps. Most kills are aimed at saves: at the moment when a
file of one appears, or up to 5 ms later. Some come between steps, some while a run starts; some hit all ranks, some hit
one, and then the others must end by themselves. After every sixth the newest checkpoint is damaged besides, so that
the run has to fall back on the one before. After each kill the newest valid checkpoint is at least as new as the newest
that had appeared before it, and the next start goes on from exactly there.
"""

import fnmatch
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_ckpt import find_latest_valid, list_steps
from lt_data import RowReader, Stream, TokenStore, open_pack
from lt_test_helpers.meshes import LATENTS
from lt_test_helpers.rank_processes import RankProcesses, start_training
from lt_test_helpers.run_files import assert_bit_equal, latest_checkpoint, read_events, read_step_metrics
from lt_trainer.data.training_data import parse_stream_state
from lt_trainer.run_directory.jsonl import read_jsonl

STEPS, BATCH, INTERVAL = 24, 8, 2
KILLS = int(os.environ.get("LT_KILLS", "100"))
"""Of the full count, which only `pytest -m slow` runs."""
SAVE_FILE_PATTERNS = (
    ".tmp-*",
    "weights-*",
    "exp_avg_sq-*",
    "part-*",
    "tokenizer",
    "manifest.json*",
    "COMMIT*",
    "step-*",
    ".trash-*",
)
"""What appears in the checkpoint folder, or in that of a save under way, in the course of a save."""
PIPELINE, CONTEXT = ("parallel.pp=2",), ("parallel.cp=2",)
EXPERTS = (*LATENTS, "parallel.ep=2", "engine.gpu.dtype=bfloat16", "optimizer.name=muon", "moe.bias_update_rate=0.05")
MESHES = ((2, ()), (1, ()), (2, PIPELINE), (4, ()), (2, CONTEXT), (4, PIPELINE + CONTEXT), (2, EXPERTS))
"""Ranks and options of the full count's runs."""
EXIT_LOST_PEER = 75
DEADLINE_S = 180.0


def start_ranks(prepared: Path, cwd: Path, ranks: int, sets: tuple[str, ...] = (), **more: Any) -> RankProcesses:
    fixed = (
        "engine.gpu.dtype=float64",
        f"checkpoint.interval={INTERVAL}",
        f"schedule.max_steps={STEPS}",
        "data.validation=",
        "fault_tolerance.hang_timeout_s=30",  # also sets how long a rank looks for the cause when it has lost another
    )
    return start_training(prepared / "run.toml", cwd, *fixed, *sets, ranks=ranks, **more)


def list_names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):  # not yet there, renamed since it was listed, or a file
        return []


@pytest.fixture(scope="module")
def reference(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run directory of a run with so many ranks on this mesh that nothing interrupts."""
    done: dict[tuple[int, tuple[str, ...]], Path] = {}

    def of(ranks: int, sets: tuple[str, ...] = ()) -> Path:
        if (ranks, sets) not in done:
            cwd = tmp_path_factory.mktemp(f"reference-{ranks}")
            with start_ranks(prepared, cwd, ranks, sets) as run:
                run.end([0] * ranks)
            assert sorted(read_step_metrics(cwd / "run")) == list(range(1, STEPS + 1))
            assert latest_checkpoint(cwd / "run").step == STEPS
            done[ranks, sets] = cwd / "run"
        return done[ranks, sets]

    return of


@dataclass
class KillTrials:
    """Runs that are killed, and what came of it."""

    prepared: Path
    root: Path
    rng: random.Random
    log: Callable[[str], None] = lambda text: None
    kills: int = 0
    single_rank_kills: int = 0
    kills_during_save: int = 0
    cleaned_up: int = 0
    fallbacks: int = 0
    runs: int = 0
    pending_patterns: list[str] = field(default_factory=list)
    torn_saves: set[str] = field(default_factory=set)
    damaged_steps: set[int] = field(default_factory=set)

    def run_with_kills(self, ranks: int, kills: int, sets: tuple[str, ...] = ()) -> Path:
        """A new run, killed until it has ended or `kills` are reached, and then left alone; returns its directory."""
        self.runs += 1
        cwd = self.root / f"{self.runs}"
        cwd.mkdir()
        run = cwd / "run"
        self.torn_saves, self.damaged_steps, expected, finished = set(), set(), 0, False
        while not finished:
            resumes = len(read_events(run, "resume"))
            with start_ranks(self.prepared, cwd, ranks, sets) as processes:
                struck = self._kill(processes, run) if self.kills < kills else []
                there = [step for step in self._checkpoint_steps(run) if step not in self.damaged_steps]
                codes = processes.wait(DEADLINE_S)
                output = "".join(f"\n--- rank {rank}:\n{processes.output(rank)}" for rank in range(ranks))
            finished = codes == [0] * ranks
            self._check_codes(codes, struck, run, output)
            resumed = [event["step"] for event in read_events(run, "resume")[resumes:]]
            assert resumed in ([], [expected] if expected else []), f"went on from {resumed}, not from {expected}"
            if not finished:
                self.kills += 1
                self.single_rank_kills += len(struck) < ranks
                expected = self._check_after_kill(run, max([expected, *there]))
                self.log(f"{self.kills}: run {self.runs}, rank {struck} of {ranks} killed, newest step {expected}")
        left = {
            name: list_names(run / "checkpoints" / name)
            for name in list_names(run / "checkpoints")
            if name.startswith(".")
        }
        # A kill between making a folder and marking it leaves one that nobody can claim, with nothing of value in it.
        marks = re.compile(r"save\.json\.[0-9a-f]{16}\.tmp")
        assert all(marks.fullmatch(name) for inside in left.values() for name in inside), f"not swept: {left}"
        self.cleaned_up += len(self.torn_saves - left.keys())
        return run

    def _kill(self, processes: RankProcesses, run: Path) -> list[int]:
        """Wait for a random moment, and kill a rank or all; returns which, or none when the run ended before."""
        arrived = self._kill_condition(run)
        while not arrived():
            if not processes.alive_ranks:
                return []
            time.sleep(0.0005)
        time.sleep(self.rng.choice([0.0, self.rng.uniform(0, 0.005)]))
        alive = processes.alive_ranks
        if len(alive) < len(processes.pids):
            return []
        one = self.rng.choice([None, *alive])
        processes.kill(one)
        return alive if one is None else [one]

    def _kill_condition(self, run: Path) -> Callable[[], bool]:
        root = run / "checkpoints"
        kind = self.rng.choices(("save", "step", "start"), (6, 2, 2))[0]
        if kind == "start":
            starts, delay = len(read_events(run, "start")), self.rng.uniform(0, 0.1)

            def begun() -> bool:
                if len(read_events(run, "start")) == starts:
                    return False
                time.sleep(delay)
                return True

            return begun
        if kind == "step":
            lines = len(read_jsonl(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0
            wanted = lines + self.rng.randint(1, 7)
            return lambda: sum(map(len, read_step_metrics(run).values())) >= wanted
        if not self.pending_patterns:
            self.pending_patterns = self.rng.sample(SAVE_FILE_PATTERNS, len(SAVE_FILE_PATTERNS))
        old, stage, count = set(list_names(root)), self.pending_patterns.pop(), self.rng.randint(1, 3)
        seen: set[str] = set()

        def saving() -> bool:
            for name in list_names(root):
                if name in old or name.startswith(".tmp-step-00000000"):  # the rehearsal of a start
                    continue
                inside = list_names(root / name) if name.startswith(".tmp-") else []
                if any(fnmatch.fnmatch(found, stage) for found in (name, *inside)):
                    seen.add(name)
            return len(seen) >= count

        return saving

    def _checkpoint_steps(self, run: Path) -> list[int]:
        return [step for step, path in list_steps(run / "checkpoints") if ".aside-" not in path.name]

    def _check_codes(self, codes: list[int], struck: list[int], run: Path, output: str) -> None:
        """Those that were not killed have lost a peer and say so, unless all was done before they could notice."""
        done = self._checkpoint_steps(run)[:1] == [STEPS]
        for rank, code in enumerate(codes):
            allowed = {EXIT_LOST_PEER} if struck else set()
            if rank in struck:
                allowed.add(-signal.SIGKILL)
            if done:
                allowed.add(0)
            assert code in allowed, f"rank {rank} ended with {code}, killed was {struck}{output}"

    def _check_after_kill(self, run: Path, floor: int) -> int:
        """Check what a kill has left, damage it now and then, and return the step from which the run must go on."""
        root = run / "checkpoints"
        found, rejected = find_latest_valid(root)
        step = found.step if found else 0
        assert step >= floor, f"step {floor} was there before the kill, now the newest valid one is {step}: {rejected}"
        strange = [bad for bad in rejected if int(bad.path.name.split("-")[1].split(".")[0]) not in self.damaged_steps]
        assert not strange, f"a kill must not leave a broken folder with a checkpoint's name: {strange}"
        self.damaged_steps -= {step}
        torn = {name for name in list_names(root) if name.startswith((".tmp-", ".trash-"))}
        self.kills_during_save += any(not name.startswith(".tmp-step-00000000") for name in torn - self.torn_saves)
        self.torn_saves |= torn
        older = [other for other in self._checkpoint_steps(run) if other < step and other not in self.damaged_steps]
        if found and older and self.kills % 6 == 5:
            victim = self.rng.choice(sorted(path for path in found.path.iterdir() if path.suffix == ".safetensors"))
            with open(victim, "r+b") as file:
                file.seek(self.rng.randrange(victim.stat().st_size))
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1 << self.rng.randrange(8)]))
            self.damaged_steps.add(step)
            self.fallbacks += 1
            fallback, _ = find_latest_valid(root)
            assert fallback is not None
            assert fallback.step == older[0]
            return fallback.step
        return step

    def summary(self) -> str:
        return (
            f"{self.kills} kills in {self.runs} runs, {self.single_rank_kills} of them of one rank among several: "
            f"{self.kills_during_save} inside a save, {self.cleaned_up} torn folders swept, {self.fallbacks} fallbacks "
            "past a damaged checkpoint; every run ended with the same bits"
        )


@pytest.fixture
def trials(prepared: Path, tmp_path: Path) -> Callable[..., KillTrials]:
    return lambda seed, **more: KillTrials(prepared, tmp_path, random.Random(seed), **more)


@pytest.mark.parametrize(
    ("ranks", "sets", "kills", "seed"),
    [
        pytest.param(1, (), 6, 1, id="one"),
        pytest.param(2, EXPERTS, 1, 5, id="ep"),
        pytest.param(4, (*PIPELINE, *CONTEXT), 1, 3, id="pp-cp"),
        pytest.param(2, (), 1, 2, id="fsdp", marks=pytest.mark.slow),
    ],
)
def test_killed_runs_end_with_the_same_bits(trials, reference, ranks: int, sets, kills: int, seed: int) -> None:
    sample: KillTrials = trials(seed)
    while sample.kills < kills or not sample.kills_during_save:
        assert sample.kills < 10 * kills, "the kills must hit saves"
        run = sample.run_with_kills(ranks, max(kills, sample.kills + 2), sets)
        assert_bit_equal(run, reference(ranks, sets))


@pytest.mark.slow
def test_a_hundred_kills(trials, reference, capfd: pytest.CaptureFixture[str]) -> None:
    def say(text: str) -> None:
        with capfd.disabled():
            print(text, flush=True)  # noqa: T201

    many: KillTrials = trials(int(os.environ.get("LT_SEED", "0")), log=say)
    start_s = time.monotonic()
    while many.kills < KILLS:
        ranks, sets = MESHES[many.runs % len(MESHES)]
        assert_bit_equal(many.run_with_kills(ranks, KILLS, sets), reference(ranks, sets))
    say(f"{many.summary()}; {time.monotonic() - start_s:.0f} s")
    assert many.kills_during_save >= KILLS // 10, "the kills must hit saves"


def wait_after_step_9(rank: int) -> None:
    """Before the command, in each rank: no rows after step 9, so that a run is killed where it was meant to be."""
    original = Stream.take

    def waiting(self: Stream) -> Any:
        while self.state.step == 9:
            time.sleep(1)
        return original(self)

    Stream.take = waiting  # pyright: ignore[reportAttributeAccessIssue]


def record_rows(rank: int) -> None:
    """Before the command, in each rank: note which rows its stream gives."""
    rows, original = open(f"rows-{rank}", "w", buffering=1, encoding="ascii"), Stream.take  # noqa: SIM115

    def noting(self: Stream) -> Any:
        batch = original(self)
        rows.write(json.dumps([batch.step, batch.row_ids.tolist()]) + "\n")
        return batch

    Stream.take = noting  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_goes_on_with_other_ranks(prepared: Path, reference, tmp_path: Path, before: int, after: int) -> None:
    """The same rows in the same order, and nearly the same numbers: only the order of additions differs."""
    run = tmp_path / "run"
    with start_ranks(prepared, tmp_path, before, prepare=f"{__file__}:wait_after_step_9") as processes:
        while 9 not in read_step_metrics(run):
            assert processes.alive_ranks, processes.output()
            time.sleep(0.01)
        processes.kill()
        processes.wait(DEADLINE_S)
    saved = latest_checkpoint(run)
    assert (saved.step, saved.manifest.layout["world"]) == (8, before)
    with start_ranks(prepared, tmp_path, after, prepare=f"{__file__}:record_rows") as processes:
        processes.end([0] * after)

    store = TokenStore(prepared / "train")
    reader = RowReader(store, open_pack(store, seq_len=64))
    fresh = Stream(reader, global_batch_size=BATCH)
    order = fresh.global_rows(fresh.state, STEPS * BATCH)
    read = [
        dict(json.loads(line) for line in (tmp_path / f"rows-{rank}").read_text().splitlines()) for rank in range(after)
    ]
    for step in range(saved.step, STEPS):  # each rank has two rows of each micro-step
        whole = np.stack([np.reshape(rank[step], (-1, 2)) for rank in read], axis=1).flatten()
        assert whole.tolist() == order[step * BATCH : (step + 1) * BATCH].tolist(), f"rows of step {step + 1}"
    for rank in read:  # beyond the last step rows are only made ahead
        assert sorted(step for step in rank if step < STEPS) == list(range(saved.step, STEPS))
    state = parse_stream_state(latest_checkpoint(run).manifest.data or {})
    assert (state.step, state.row, state.skipped) == (STEPS, STEPS * BATCH, ())

    last = read_events(run, "data")[-1]
    assert (last["step"], last["row"], last["dp_size"]) == (saved.step, saved.step * BATCH, after)
    expected, found = read_step_metrics(reference(before)), read_step_metrics(run)
    for step in range(saved.step + 1, STEPS + 1):
        loss, norm, tokens = found[step][-1]
        assert tokens == expected[step][0][2]
        near = 1e-6 if step <= saved.step + 3 else 1e-4
        assert (loss, norm) == pytest.approx(expected[step][0][:2], rel=near), f"step {step}"
