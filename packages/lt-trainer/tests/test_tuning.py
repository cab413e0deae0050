"""Tuning: its search on generated and recorded grids, its probes as real processes, its journal and its ends."""

import math
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from lt_trainer.config.recipe import load
from lt_trainer.errors import RecipeError
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.tuning.probe import ProbeCommand, ProbeResult, parse_probe
from lt_trainer.tuning.search import MODES, SettingGrid, TunedSetting, find_fastest
from lt_trainer.tuning.tune import TuneError, TuneOptions, describe, probe_arguments, tune_recipe

NEAR = 1.03
"""What is found may be this much slower than the fastest of the grid."""


def setting(size: int, mode: str = "none", compiled: str | bool = False) -> TunedSetting:
    return TunedSetting(micro_batch_size=size, activation_checkpointing=mode, compile=compiled)


def random_grid(draw: random.Random) -> tuple[SettingGrid, dict[TunedSetting, float | None]]:
    """A grid as devices have them: launches, saturation, bumps of kernels, recomputation, and a memory that ends."""
    sizes = [2**n for n in range(draw.randint(2, 8))]
    if draw.random() < 0.3:
        rows = draw.choice([12, 24, 48, 60, 96])
        sizes = [n for n in range(1, rows + 1) if rows % n == 0]
    launch, row_s = draw.uniform(0.0, 3.0), 1.0
    saturation = draw.uniform(0.0, 2.0)
    recompute = {"none": 1.0, "selective": draw.uniform(1.02, 1.2), "full": draw.uniform(1.2, 1.36)}
    compiled = {False: 1.0, True: draw.uniform(0.6, 1.05)}
    row_memory = {"none": 1.0, "selective": draw.uniform(0.3, 0.7), "full": draw.uniform(0.05, 0.25)}
    fixed = draw.uniform(0.5, 8.0)
    capacity = fixed + draw.uniform(0.3, 2.5 * sizes[-1])
    pressure = draw.uniform(1.0, 1.4)
    grid: dict[TunedSetting, float | None] = {}
    for is_compiled, mode in product((True, False), MODES):
        memory_factor = 0.85 if is_compiled else 1.0
        for size in sizes:
            memory = fixed + size * row_memory[mode] * memory_factor
            bump = draw.uniform(0.985, 1.015)
            per_row = row_s * (1 + saturation / size) * recompute[mode] * compiled[is_compiled] * bump
            step = sizes[-1] * (per_row + launch * (0.4 if is_compiled else 1.0) / size)
            step *= pressure if memory > 0.95 * capacity else 1.0
            grid[setting(size, mode, is_compiled)] = None if memory > capacity else step
    start = setting(draw.choice(sizes), draw.choice(MODES), draw.random() < 0.5)
    compile_order = (start.compile, not start.compile)
    return SettingGrid(micro_batch_sizes=sizes, compile=compile_order, start=start), grid


def searched(grid: SettingGrid, table: Mapping[TunedSetting, float | None]) -> tuple[TunedSetting | None, int]:
    """What the search finds, and how many it measured; it must not measure anything twice."""
    measured: list[TunedSetting] = []

    def measure(one: TunedSetting) -> float | None:
        assert one not in measured
        measured.append(one)
        return table[one]

    return find_fastest(grid, measure), len(measured)


def loss_of(found: TunedSetting | None, table: Mapping[TunedSetting, float | None]) -> float:
    """How much slower than the fastest; 1 for none found where none works."""
    times = [value for value in table.values() if value is not None]
    if found is None:
        return 1.0 if not times else math.inf
    value = table[found]
    return math.inf if value is None else value / min(times)


def test_the_search_finds_a_setting_within_three_percent_of_the_best() -> None:
    losses, shares = [], []
    for seed in range(2000):
        grid, table = random_grid(random.Random(seed))
        found, n_measured = searched(grid, table)
        losses.append(loss_of(found, table))
        shares.append(n_measured / len(table))
    late = [(seed, loss) for seed, loss in enumerate(losses) if loss > NEAR]
    assert late == [], f"{len(late)}: {late[:10]}"
    assert sum(shares) / len(shares) < 0.7


def test_a_limit_of_probes_and_settings_that_all_fail_end_the_search() -> None:
    grid = SettingGrid(micro_batch_sizes=[1, 2, 4], compile=(False,), start=setting(2, "full"))
    tried: list[TunedSetting] = []
    assert find_fastest(grid, lambda one: tried.append(one)) is None
    assert tried[:2] == [setting(2, "full"), setting(1, "full")]


def test_chunks_of_the_loss_are_tried_with_the_best_setting() -> None:
    """On a line whose fastest micro-batch has 2048 tokens: two sizes besides the recipe's."""
    grid = SettingGrid(micro_batch_sizes=[1, 2, 4], compile=(False,), start=setting(1), tokens_per_row=1024)
    tried: list[TunedSetting] = []

    def measure(one: TunedSetting) -> float:
        tried.append(one)
        recomputed = 1.1 if one.activation_checkpointing != "none" else 1.0
        chunked = 0.9 if one.loss_chunk_tokens == 1024 else 1.0
        return {1: 3.0, 2: 2.0, 4: 4.0}[one.micro_batch_size] * recomputed * chunked

    found = find_fastest(grid, measure)
    assert tried[-2:] == [replace(setting(2), loss_chunk_tokens=n) for n in (256, 1024)]
    assert found == tried[-1]
    assert "engine.gpu.loss_chunk_tokens=1024" in found.to_set_options()


@pytest.mark.parametrize(
    ("code", "err", "outcome", "message"),
    [
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried", "out_of_memory", "torch.OutOfMemoryError"),
        (
            70,
            "Traceback\nRuntimeError: [enforce] DefaultCPUAllocator: can't allocate memory",
            "out_of_memory",
            "Runtime",
        ),
        (-9, "", "killed", "killed"),
        (1, "failed (exitcode: -9) ... Signal 9 (SIGKILL) received", "killed", "killed"),
        (
            64,
            "error: engine.gpu.compile = True: no compiler; set it to false\n",
            "refused",
            "error: engine.gpu.compile",
        ),
        (70, "Traceback\nKeyError: 'x'\n", "failed", "KeyError: 'x'"),
        (139, "", "failed", "exit code 139"),
    ],
)
def test_every_end_of_a_probe_is_a_result(code: int, err: str, outcome: str, message: str) -> None:
    result = parse_probe(setting(2), code, "", err)
    assert (result.outcome, result.step_s) == (outcome, None)
    assert result.message.startswith(message)


def recipe_file(folder: Path, **batch: int) -> Path:
    values = {"global_batch_size": 4, "micro_batch_size": 2, **batch}
    lines = "\n".join(f"{name} = {value}" for name, value in values.items())
    path = folder / "run.toml"
    path.write_text(
        "[data]\nsynthetic = true\nseq_len = 16\n"
        "[model]\nvocab_size = 64\nhidden_size = 32\nintermediate_size = 32\n"
        "n_heads = 2\nn_kv_heads = 2\nn_layers = 1\n"
        f"[batch]\n{lines}\n[engine.gpu]\ndevice = 'cpu'\n",
        encoding="utf-8",
    )
    return path


def timed(one: TunedSetting, seconds: float | None) -> ProbeResult:
    if seconds is None:
        return ProbeResult(setting=one, outcome="out_of_memory", message="too much")
    return ProbeResult(setting=one, outcome="ok", step_s=seconds, tokens_per_s=64 / seconds, peak_bytes=2**30)


def test_a_probe_is_of_the_recipe_that_the_command_was_given() -> None:
    words = probe_arguments("run.toml", ["a.b=1"], Path("h.json"), TuneOptions(steps=3, warmup=1))
    assert words == ["run.toml", "--steps", "3", "--warmup", "1", "--set", "a.b=1", "--hyperparameters", "h.json"]


def test_a_probe_is_told_with_its_memory_where_it_is_known() -> None:
    told = describe(timed(setting(4), 0.5))
    assert told.endswith("0.5 s a step, 128 tokens/s, peak 1.00 GiB")
    assert describe(replace(timed(setting(4), 0.5), peak_bytes=None)).endswith("0.5 s a step, 128 tokens/s")
    assert describe(timed(setting(4), None)).endswith("out of memory: too much")


def test_an_interrupted_tuning_goes_on_and_writes_what_a_run_can_read(tmp_path: Path) -> None:
    path, journal, out, lines = recipe_file(tmp_path), tmp_path / "t.jsonl", tmp_path / "fast.toml", []
    probed: list[TunedSetting] = []

    def probe(one: TunedSetting) -> ProbeResult:
        if len(probed) == 2:
            raise KeyboardInterrupt
        probed.append(one)
        return timed(one, None if one == setting(4, "none", "auto") else 4.0 / one.micro_batch_size)

    options = {"options": TuneOptions(), "journal": journal, "out": out, "log": lines.append}
    with pytest.raises(KeyboardInterrupt):
        tune_recipe(load(path), probe, **options)
    assert probed == [setting(2, "none", "auto"), setting(4, "none", "auto")]
    assert [record["outcome"] for record in read_jsonl(journal)] == ["ok", "out_of_memory"]
    assert "--set batch.micro_batch_size=2" in lines
    assert tomllib.loads(out.read_text(encoding="utf-8"))["batch"] == {"micro_batch_size": 2}
    with open(journal, "a", encoding="utf-8") as file:
        file.write('{"key": "torn')

    again: list[TunedSetting] = []
    lines.clear()
    found = tune_recipe(load(path), lambda one: again.append(one) or timed(one, 1.0), **options)
    assert found in again
    assert not set(again) & set(probed)
    assert lines[0].startswith("2 probe(s) of ")
    written = tomllib.loads(out.read_text(encoding="utf-8"))
    loaded = load(path, overrides=found.to_set_options()).recipe
    assert written["batch"]["micro_batch_size"] == loaded.batch.micro_batch_size == found.micro_batch_size
    assert written["engine"]["gpu"]["activation_checkpointing"] == found.activation_checkpointing
    assert loaded.batch.global_batch_size == 4

    once_more: list[TunedSetting] = []
    assert tune_recipe(load(path), lambda one: once_more.append(one) or timed(one, 1.0), **options) == found
    assert once_more == []
    other = load(path, overrides=["data.seq_len=32"])
    tune_recipe(other, lambda one: once_more.append(one) or timed(one, 1.0), **options)
    assert once_more, "another recipe is measured anew"


def test_a_device_decides_where_to_begin(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, global_batch_size=64)
    probed: list[TunedSetting] = []
    options = {"journal": tmp_path / "t.jsonl", "log": lambda text: None}
    tune_recipe(
        load(path), lambda one: probed.append(one) or timed(one, 1.0), options=TuneOptions(device="h100"), **options
    )
    assert probed[0] == setting(64, "none", "auto"), "all of it fits"
    with pytest.raises(RecipeError, match="unknown device"):
        tune_recipe(load(path), lambda one: timed(one, 1.0), options=TuneOptions(device="abacus"), **options)
    with pytest.raises(RecipeError, match="tuning tries none, selective and full"):
        tune_recipe(
            load(path, overrides=["engine.gpu.activation_checkpointing=memory_budget"]),
            lambda one: timed(one, 1.0),
            options=TuneOptions(),
            **options,
        )
    with pytest.raises(TuneError, match=r"no setting works here.*too much"):
        tune_recipe(
            load(path, overrides=["data.seq_len=8"]), lambda one: timed(one, None), options=TuneOptions(), **options
        )


@pytest.mark.slow
def test_real_probes_on_a_cpu(tmp_path: Path) -> None:
    """One that works, one that is refused, one that the system kills, one that hangs; then the command, interrupted."""
    path = recipe_file(tmp_path)
    probe = ProbeCommand(arguments=[str(path), "--steps", "2", "--warmup", "1"])
    good = probe.run(setting(4, "full", "auto"))
    assert good.outcome == "ok", good
    assert good.step_s is not None
    assert good.tokens_per_s == pytest.approx(64 / good.step_s)
    assert probe.run(setting(3, "none", "auto")).outcome == "refused"
    late = ProbeCommand(arguments=probe.arguments, timeout_s=0.5).run(setting(1, "none", "auto"))
    assert (late.outcome, late.message) == ("timed_out", "not finished after 0.5 s")

    command = [sys.executable, "-m", "lt_trainer", "tune", str(path), "--steps", "1", "--warmup", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    journal = tmp_path / "run.tune.jsonl"
    while not (journal.exists() and read_jsonl(journal)):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "interrupted; the same command goes on from" in out
    assert "--set batch.micro_batch_size=" in out


@pytest.mark.slow
def test_a_probe_of_several_ranks_that_is_too_slow_leaves_none_behind(tmp_path: Path) -> None:
    """torchrun starts each rank in a session of its own, so killing its process group does not reach them."""
    psutil = pytest.importorskip("psutil")
    path = recipe_file(tmp_path)
    command = ProbeCommand(arguments=[str(path), "--steps", "1000000"], ranks=2, timeout_s=25)
    assert command.run(setting(2, "none", False)).outcome == "timed_out"
    left = [one for one in psutil.process_iter(["cmdline"]) if str(path) in (one.info["cmdline"] or [])]
    assert left == []


def test_one_real_probe(tmp_path: Path) -> None:
    pytest.importorskip("lt_trainer_gpu")
    path = recipe_file(tmp_path)
    result = ProbeCommand(arguments=[str(path), "--steps", "1", "--warmup", "1"]).run(setting(4, "selective", "auto"))
    assert result.outcome == "ok", result
    assert result.step_s is not None
    assert result.step_s > 0
