"""The GPU benchmarks try themselves on a CPU: their numbers, sizes that do not fit, runs that go on, layouts."""

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lt_model import flops_per_token, n_parameters, preset
from lt_test_helpers.pool import RankPool
from lt_trainer.config.recipe import load
from lt_trainer.engine import World
from lt_trainer.training.benchmark import resolve_bench_recipe
from lt_trainer_gpu.spec import SPEC as ENGINE

BENCH = Path(__file__).parent.parent / "tools" / "bench"
SPEC = {
    "kind": "steps",
    "device": "cpu",
    "preset": "tiny-2m",
    "n_layers": 0,
    "micro_batch_size": 2,
    "seq_len": 64,
    "document_tokens": 0,
    "plain": "",
    "sets": [],
    "warmup": 1,
    "steps": 3,
    "curve_steps": 12,
    "memory_limit_gib": 0.0,
    "limit_s": 60.0,
}


@pytest.fixture(scope="module", autouse=True)
def modules() -> Iterator[None]:
    """tools/bench on the path, as its scripts have it."""
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def ranks() -> RankPool:
    return RankPool(4, preload=("lt_trainer_gpu.engine", "lt_trainer_gpu.parallelize"))


def call(module: str, function: str, *args: Any) -> Any:
    """A function of the benchmark, in a process of its own."""
    sys.path.insert(0, str(BENCH))
    import torch

    torch.set_num_threads(1)
    return getattr(importlib.import_module(module), function)(*args)


def script(name: str, out: Path, *arguments: str) -> dict[str, Any]:
    """A script's report; it is the file's too."""
    command = [sys.executable, BENCH / name, "--device", "cpu", "--quick", "--out", out, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(out.read_text())
    return found


def test_the_numbers_of_a_row_agree(tmp_path: Path) -> None:
    found = script("gpu.py", tmp_path / "gpu.json", "--stage", "tiny", "--commit", "abc")
    assert not found["complete"], "other stages remain"
    assert found["versions"]["commit"] == "abc"
    (row,) = found["rows"]
    config = preset("tiny-2m")
    assert (row["stage"], row["case"], row["status"], row["attempts"]) == ("tiny", "tiny", "ok", [])
    assert (row["parameters"], row["n_layers"]) == (n_parameters(config), config.n_layers)
    steps = sorted(row["step_s"]["all"])
    assert (row["step_s"]["min"], row["step_s"]["median"], row["step_s"]["max"]) == tuple(steps)
    assert row["tokens_per_s"] * row["step_s"]["median"] == pytest.approx(2 * 64)
    for convention in ("full", "causal"):
        flops = row["tokens_per_s"] * flops_per_token(config, 64, convention)
        assert row["flops_per_s"][convention] == pytest.approx(flops)
        peak = row["peaks"]["engine"]["flops_per_s"]
        assert row["mfu"]["engine"][convention] * peak == pytest.approx(flops)
    assert row["resolved"]["engine.gpu.compile"] is False
    assert row["loss"]["first"] == pytest.approx(math.log(config.vocab_size), abs=0.2)
    assert row["state_bytes"] == 3 * 4 * n_parameters(config)  # weights and two moments in float32
    assert row["memory"]["peak_resident_bytes"] > row["state_bytes"]


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory needs /proc")
def test_a_size_that_does_not_fit_is_noted_and_the_next_one_runs(ranks: RankPool, monkeypatch) -> None:
    """A first micro-batch that needs a tensor of 0.9 GiB where there is 0.75 GiB."""
    gpu, cases = importlib.import_module("gpu"), importlib.import_module("gpu_cases")

    def run_child(kind: str, spec: dict[str, Any], limit_s: float) -> dict[str, Any]:
        return ranks.run(call, "gpu_worker", "measure_steps", spec | {"limit_s": limit_s}, ranks=1)[0]

    monkeypatch.setattr(gpu, "run_child", run_child)
    case = replace(cases.QUICK_STAGES["tiny"][0], sizes=((20000, 64), (2, 64)), sets=("run.seed=3",))
    row = gpu.run_case(case, SPEC | {"memory_limit_gib": 0.75}, None, 120.0)
    (failed,) = row["attempts"]
    assert (failed["status"], failed["during"], failed["micro_batch_size"]) == (
        "out_of_memory",
        "the first step",
        20000,
    )
    assert (row["status"], row["micro_batch_size"], row["seq_len"]) == ("ok", 2, 64)


def test_a_loss_curve_falls_from_the_logarithm_of_the_vocabulary(ranks: RankPool) -> None:
    (found,) = ranks.run(call, "gpu_worker", "measure_losses", SPEC | {"curve_seed": 1}, ranks=1)
    assert found["resolved"]["engine.gpu.fp8"] == "off"
    assert found["losses"][0] == pytest.approx(math.log(2048), abs=0.2)
    assert found["losses"][-1] < found["losses"][0] - 0.1
    assert found["tail"] == found["losses"][-1]  # a tenth of 12 is one


def compare_plain(spec: dict[str, Any]) -> tuple[float, float, dict[str, Any]]:
    """Losses of the plain model and of lt's with the same weights, and the plain model's own steps."""
    sys.path.insert(0, str(BENCH))
    import torch
    from gpu_plain import PlainLlama, cross_entropy
    from gpu_worker import measure_steps

    from lt_model import Decoder
    from lt_model.init import init_model

    torch.set_num_threads(1)
    config = replace(preset("tiny-2m"), n_layers=2)
    wanted = Decoder(config)
    init_model(wanted, 0)
    plain = PlainLlama(config)
    names = {name for name, _ in plain.named_parameters()}
    plain.load_state_dict({name: p for name, p in wanted.named_parameters() if name in names}, strict=False)
    assert names == {name for name, _ in wanted.named_parameters()}
    ids = torch.randint(0, config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        losses = [cross_entropy(model(ids[:, :-1]), ids[:, 1:]).item() for model in (plain, wanted)]
    return *losses, measure_steps(spec)


def test_the_plain_step_trains_the_same_model(ranks: RankPool) -> None:
    ((loss, reference, row),) = ranks.run(compare_plain, SPEC | {"plain": "eager"}, ranks=1)
    assert loss == pytest.approx(reference, rel=1e-5)
    assert row["status"] == "ok"
    assert row["loss"]["first"] == pytest.approx(math.log(2048), abs=0.2)
    assert row["loss"]["last"] != row["loss"]["first"]


def test_layers_are_taken_off_and_sizes_left_out_until_the_plan_fits() -> None:
    cases, gpus = importlib.import_module("gpu_cases"), importlib.import_module("gpus")
    (case,) = cases.STAGES["8b"]
    layers = [size.n_layers for size in cases.list_tries(case, 80 * 2**30)]
    assert layers == sorted(layers, reverse=True)
    assert 3 < layers[-1] < layers[0] < 32
    fp8 = {case.name: cases.list_tries(case, 80 * 2**30) for case in cases.STAGES["fp8"]}
    assert fp8["8b-bf16"] == fp8["8b-tensorwise"] == fp8["8b-rowwise"]
    (last,) = gpus.speed_tries("8b", gpus.speed_layouts(8)["fsdp-1"], "cuda", 80 * 2**30)
    assert "engine.gpu.activation_checkpointing=full" in last


def test_marks_are_met_or_not() -> None:
    cases = importlib.import_module("gpu_cases")
    size = {"status": "ok", "n_layers": 4, "micro_batch_size": 2, "seq_len": 8}
    rows = [
        size | {"case": "1b", "tokens_per_s": 45_000.0},
        size | {"case": "8b", "tokens_per_s": 1.0, "flops_per_s": {"full": 0.49 * 989e12}},
        size | {"case": "8b-bf16", "tokens_per_s": 10.0},
        size | {"case": "8b-tensorwise", "tokens_per_s": 12.5},
        size | {"case": "8b-rowwise", "tokens_per_s": 12.5, "n_layers": 3},
        *(size | {"case": f"bf16-{seed}", "tail": 2.0 + seed} for seed in range(3)),
        size | {"case": "tensorwise-0", "tail": 4.5},
    ]
    found = {mark["name"]: (mark["value"], mark["met"]) for mark in cases.compare_with_marks(rows)}
    assert found == {
        "1b tokens/s": (45_000.0, True),
        "8b MFU": (pytest.approx(0.49), False),
        "fp8 tensorwise / bf16": (1.25, True),  # rowwise ran at another size
        "tensorwise-0 loss after training": (4.5, False),
    }


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    runs = importlib.import_module("gpu_runs")
    ran: list[float] = []

    def run(status: str, limit_s: float, torch: str = "2.11.0", **given: bool) -> tuple[list[str], list[str]]:
        def one(limit_s: float) -> dict[str, Any]:
            ran.append(limit_s)
            return {"status": status}

        tasks = [runs.Task(stage="s", name=str(limit), limit_s=limit, run=one) for limit in (10, 1000, 20)]
        report = runs.Report(tmp_path / "report.json", {"benchmark": "b"}, {"torch": torch})
        return report.run(tasks, limit_s, **given), [row["status"] for row in report.rows]

    assert run("crashed", 100) == (["s: 1000"], ["crashed"] * 2)
    assert run("ok", 2000) == ([], ["crashed", "crashed", "ok"])
    assert run("ok", 2000, retry=True) == ([], ["ok"] * 3)
    assert ran == [10, 20, 1000, 10, 20]
    with pytest.raises(SystemExit, match=r"measured elsewhere.*2\.15\.0"):
        run("ok", 2000, torch="2.15.0")


def test_a_child_that_crashes_or_hangs_is_a_result(tmp_path: Path) -> None:
    runs = importlib.import_module("gpu_runs")
    assert runs.run_with_timeout([sys.executable, "-c", "print('so'); raise SystemExit(3)"], 60.0) == (3, "so\n")
    code, output = runs.run_with_timeout([sys.executable, "-c", "import time; time.sleep(600)"], 2.0)
    assert code is None
    assert not output or "KeyboardInterrupt" in output  # it was interrupted first, so that pytest would report
    assert runs.run_for_result("gpu_worker.py", {"kind": "nothing"}, tmp_path, 60.0)["status"] == "crashed"


def test_what_nvidia_smi_says_is_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are read until it is ended; one that is cut short, or names a field that the card lacks, is left out."""
    worker = importlib.import_module("gpu_worker")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '650.5, 1980, 60\\n[N/A], 1980, 60\\n700.5, 1755, 64\\n69'\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with worker.GpuMonitor("cuda") as log:
        while os.fstat(log._file.fileno()).st_size < 50:
            assert log._process.poll() is None
    assert log.stats == {
        "power_w": {"median": 675.5, "max": 700.5},
        "sm_clock_mhz": {"median": 1867.5, "max": 1980.0},
        "temperature_c": {"median": 62.0, "max": 64.0},
    }


def run_rank(folder: str) -> None:
    call("gpus_worker", "run_rank", Path(folder))


@pytest.fixture(scope="module")
def compare(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory):
    """Trains a layout and one device in forked ranks, as torchrun does; returns how far they are apart."""
    gpus, done = importlib.import_module("gpus"), {}

    def train(layout: Any, dtype: str) -> tuple[dict[str, Any], Path]:
        if (layout, dtype) not in done:
            folder = tmp_path_factory.mktemp("layout")
            (folder / "spec.json").write_text(json.dumps(gpus.layout_spec(layout, dtype, "cpu", quick=True)))
            ranks.run(run_rank, str(folder), ranks=layout[0])
            done[layout, dtype] = json.loads((folder / "result.json").read_text()), folder
        return done[layout, dtype]

    def compared(layout: Any, dtype: str) -> dict[str, Any]:
        return gpus.compare_layout(*train(layout, dtype), layout[0], *train(gpus.reference_of(layout), dtype), dtype)

    return compared


def test_a_layout_equals_one_device_and_a_run_that_trains_otherwise_is_noticed(compare) -> None:
    """`reference_of` keeps what names the optimizer, so the others differ from their reference by something else."""
    gpus = importlib.import_module("gpus")
    found = compare(gpus.LAYOUTS["fsdp"], "float32")
    assert found["equal"], found
    angles = compare((1, ("model.rope_theta=5000.0",)), "float32")
    assert not angles["equal"]
    assert not angles["different_at_start"]
    assert angles["errors"]["gradient"] > gpus.TOLERANCES["float32"]["gradient"]
    seed = compare((1, ("run.seed=1",)), "float32")
    assert "weights/model.embed_tokens.weight" in seed["different_at_start"]
    rows = [{"status": "ok", "equal": True}, {"status": "out_of_memory"}, {"status": "ok", **seed}, {"status": "x"}]
    assert [gpus.is_failure(row) for row in rows] == [False, False, True, True]


@pytest.mark.slow
def test_speed_is_measured_under_torchrun(tmp_path: Path) -> None:
    found = script("gpus.py", tmp_path / "gpus.json", "--gpus", "2", "--stage", "speed-tiny", "--layout", "fsdp-2")
    (row,) = found["rows"]
    assert (row["stage"], row["case"], row["status"], row["ranks"]) == ("speed-tiny", "fsdp-2", "ok", 2)
    assert row["tokens_per_s_per_device"] == row["tokens_per_s"] / 2
    assert row["memory"]["peak_bytes"] > row["memory"]["state_bytes"]


def test_no_recipe_of_a_stage_is_refused() -> None:
    gpus = importlib.import_module("gpus")

    def check(resolved: Any, layout: Any) -> None:
        ENGINE.check(resolved.recipe, World(size=layout[0], local_size=layout[0]))

    for layout in gpus.LAYOUTS.values():
        spec = gpus.layout_spec(layout, "float32", "cuda", quick=False)
        check(load(base=spec["base"], overrides=spec["sets"]), layout)
    for case in ("1b", "8b"):
        for devices in (2, 4, 8):
            for layout in gpus.speed_layouts(devices).values():
                for sets in gpus.speed_tries(case, layout, "cuda", None):
                    preset = gpus.SPEED_CASES[case][0]
                    check(resolve_bench_recipe(None, preset, overrides=sets, hyperparameters=None), layout)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_every_layout_of_four_ranks_equals_one_device(compare, dtype: str) -> None:
    gpus = importlib.import_module("gpus")
    found = {name: compare(layout, dtype) for name, layout in gpus.LAYOUTS.items() if layout[0] <= 4}
    assert not {name: result for name, result in found.items() if not result["equal"]}


@pytest.mark.slow
def test_every_stage_runs_on_a_cpu_and_is_continued(tmp_path: Path) -> None:
    found = script("gpu.py", tmp_path / "gpu.json")
    assert found["complete"]
    assert {row["status"] for row in found["rows"]} == {"ok"}
    assert script("gpu.py", tmp_path / "gpu.json")["rows"] == found["rows"]
