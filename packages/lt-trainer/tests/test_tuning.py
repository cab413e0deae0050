"""Tuning: its search on generated and recorded grids, its probes as real processes, its journal and its ends."""

import math
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from lt_trainer.config.recipe import load
from lt_trainer.errors import RecipeError
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.tuning.probe import ProbeResult, parse_probe, run_probe
from lt_trainer.tuning.search import MODES, SettingGrid, TunedSetting, find_fastest
from lt_trainer.tuning.tune import TuneError, tune_recipe

NEAR = 1.04
"""What is found may be this much slower than the fastest of the grid."""


def setting(size: int, mode: str = "none", compiled: str | bool = False) -> TunedSetting:
    return TunedSetting(size, mode, compiled)


def random_grid(draw: random.Random) -> tuple[SettingGrid, dict[TunedSetting, float | None]]:
    """A grid as devices have them: launches, saturation, bumps of kernels, recomputation, and a memory that ends."""
    rows = draw.choice([4, 12, 24, 48, 60, 96, 128, 256])
    sizes = [n for n in range(1, rows + 1) if rows % n == 0]
    launch, saturation, fixed = draw.uniform(0.0, 3.0), draw.uniform(0.0, 2.0), draw.uniform(0.5, 8.0)
    recompute = {"none": 1.0, "selective": draw.uniform(1.02, 1.2), "full": draw.uniform(1.2, 1.36)}
    row_memory = {"none": 1.0, "selective": draw.uniform(0.3, 0.7), "full": draw.uniform(0.05, 0.25)}
    compiled, capacity = draw.uniform(0.6, 1.05), fixed + draw.uniform(0.3, 2.5 * rows)
    grid: dict[TunedSetting, float | None] = {}
    for is_compiled, mode, size in product((True, False), MODES, sizes):
        memory = fixed + size * row_memory[mode] * (0.85 if is_compiled else 1.0)
        bump, share = draw.uniform(0.985, 1.015), 0.4 if is_compiled else 1.0
        per_row = (1 + saturation / size) * recompute[mode] * (compiled if is_compiled else 1.0) * bump
        step = rows * (per_row + launch * share / size)
        grid[setting(size, mode, is_compiled)] = None if memory > capacity else step
    start = setting(draw.choice(sizes), draw.choice(MODES), draw.random() < 0.5)
    return SettingGrid(sizes, (start.compile, not start.compile), start), grid


def test_the_search_finds_a_setting_within_four_percent_of_the_best() -> None:
    shares = []
    for seed in range(2000):
        grid, table = random_grid(random.Random(seed))
        measured: list[TunedSetting] = []
        found = find_fastest(grid, lambda one, to=measured, of=table: to.append(one) or of[one])
        assert len(measured) == len({*measured}), "nothing is measured twice"
        shares.append(len(measured) / len(table))
        fastest = min((value for value in table.values() if value is not None), default=None)
        time_s = None if found is None else table[found]
        assert time_s == fastest or (time_s or math.inf) <= NEAR * (fastest or 0), seed
    assert sum(shares) / len(shares) < 0.7


def test_settings_that_all_fail_end_the_search() -> None:
    grid = SettingGrid([1, 2, 4], (False,), setting(2, "full"))
    tried: list[TunedSetting] = []
    assert find_fastest(grid, lambda one: tried.append(one)) is None
    assert tried[:2] == [setting(2, "full"), setting(1, "full")]


@pytest.mark.parametrize(
    ("code", "err", "message"),
    [
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried", "out of memory: torch.OutOfMemoryError"),
        (70, "Traceback\nRuntimeError: [enforce] can't allocate memory", "out of memory: RuntimeError"),
        (-9, "", "killed"),
        (64, "error: engine.gpu.compile = true: no compiler; set it to false\n", "error: engine.gpu.compile"),
        (70, "Traceback\nKeyError: 'x'\n", "KeyError: 'x'"),
        (139, "", "exit code 139"),
    ],
)
def test_every_end_of_a_probe_is_a_result(code: int, err: str, message: str) -> None:
    result = parse_probe(code, "", err)
    assert result.step_s is None
    assert result.message.startswith(message)


RECIPE = """\
data = { synthetic = true, seq_len = 16 }
model = { vocab_size = 64, hidden_size = 32, intermediate_size = 32, n_heads = 2, n_kv_heads = 2, n_layers = 1 }
batch = { global_batch_size = 4, micro_batch_size = 2 }
engine.gpu.device = "cpu"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RECIPE, encoding="utf-8")
    return file


def timed(seconds: float | None) -> ProbeResult:
    if seconds is None:
        return ProbeResult(message="too much")
    return ProbeResult(step_s=seconds, tokens_per_s=64 / seconds, peak_bytes=2**30)


def test_an_interrupted_tuning_goes_on_and_writes_what_a_run_can_read(tmp_path: Path, path: Path) -> None:
    pytest.importorskip("lt_trainer_gpu")
    journal, out, lines = tmp_path / "t.jsonl", tmp_path / "fast.toml", []
    probed: list[Sequence[str]] = []

    def probe(sets: Sequence[str]) -> ProbeResult:
        if len(probed) == 2:
            raise KeyboardInterrupt
        probed.append(sets)
        return timed(None if len(probed) == 2 else 2.0)

    tune = partial(tune_recipe, ranks=1, options=[], journal=journal, out=out, log=lines.append)
    with pytest.raises(KeyboardInterrupt):
        tune(load(path), probe)
    assert probed == [setting(n, "none", "auto").to_set_options() for n in (2, 4)]
    assert [record["step_s"] for record in read_jsonl(journal)] == [2.0, None]
    assert "--set batch.micro_batch_size=2" in lines
    assert tomllib.loads(out.read_text(encoding="utf-8"))["batch"] == {"micro_batch_size": 2}
    with open(journal, "a", encoding="utf-8") as file:
        file.write('{"key": "torn')

    again: list[Sequence[str]] = []
    lines.clear()
    found = tune(load(path), lambda sets: again.append(sets) or timed(1.0))
    assert found.to_set_options() in again
    assert not [sets for sets in again if sets in probed]
    assert lines[0].startswith("2 probe(s) of ")
    assert lines[1].endswith("1 s a step, 64 tokens/s, peak 1.00 GiB")
    loaded = load(path, overrides=found.to_set_options()).recipe
    chosen = load(out, base={"data": {"store": "x"}}).recipe
    assert chosen.batch.micro_batch_size == loaded.batch.micro_batch_size == found.micro_batch_size
    assert chosen.engine == load(path, overrides=["engine.gpu.device=auto", *found.to_set_options()]).recipe.engine

    once_more: list[Sequence[str]] = []
    assert tune(load(path), lambda sets: once_more.append(sets) or timed(1.0)) == found
    assert once_more == []
    tune(load(path, overrides=["data.seq_len=32"]), lambda sets: once_more.append(sets) or timed(1.0))
    assert once_more, "another recipe is measured anew"


def test_what_cannot_be_tuned(tmp_path: Path, path: Path) -> None:
    mode = "engine.gpu.activation_checkpointing=memory_budget"
    tune = partial(tune_recipe, probe=lambda sets: timed(None), ranks=1, options=[], journal=tmp_path / "t.jsonl")
    with pytest.raises(RecipeError, match="tuning tries none, selective and full"):
        tune(load(path, overrides=[mode]))
    with pytest.raises(TuneError, match=r"no setting works here.*too much"):
        tune(load(path))


@pytest.mark.slow
def test_probes_that_do_not_end_by_themselves(path: Path) -> None:
    """torchrun starts each rank in a session of its own, so killing its process group does not reach them.

    Then the command, interrupted.
    """
    psutil = pytest.importorskip("psutil")
    result = run_probe([str(path), "--steps", "1000000"], [], ranks=2, timeout_s=25)
    assert result.message == "not finished after 25 s"
    assert [one for one in psutil.process_iter(["cmdline"]) if str(path) in (one.info["cmdline"] or [])] == []

    command = [sys.executable, "-m", "lt_trainer", "tune", str(path), "--steps", "1", "--warmup", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    journal = path.parent / "run.tune.jsonl"
    while not (journal.exists() and read_jsonl(journal)):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "interrupted; the same command goes on from" in out
    assert "--set batch.micro_batch_size=" in out


def test_real_probes(path: Path) -> None:
    pytest.importorskip("lt_trainer_gpu")
    arguments = [str(path), "--steps", "1", "--warmup", "1"]
    good = run_probe(arguments, setting(4, "selective", "auto").to_set_options())
    assert good.step_s is not None, good
    assert good.tokens_per_s == pytest.approx(64 / good.step_s)
    assert run_probe(arguments, setting(3, "none", "auto").to_set_options()).message.startswith("error: batch.")
