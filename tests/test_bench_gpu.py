"""The GPU benchmarks try themselves on the CPU: their numbers, sizes that do not fit, resuming, marks, and layouts."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lt_model import flops_per_token, n_parameters, preset
from lt_test_helpers.pool import RankPool

BENCH = Path(__file__).parent.parent / "tools" / "bench"
ENV = os.environ | {"OMP_NUM_THREADS": "1"}
SPEC = {
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
    return RankPool(2, preload=("lt_trainer_gpu.engine", "lt_trainer_gpu.parallelize"))


def call(module: str, function: str, *args: Any) -> Any:
    """A function of the benchmark, in a process of its own."""
    sys.path.insert(0, str(BENCH))
    import torch

    torch.set_num_threads(1)
    return getattr(importlib.import_module(module), function)(*args)


def script(name: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    """A script's report; it must be the file's and end with this exit code."""
    done = subprocess.run(
        [sys.executable, str(BENCH / name), "--device", "cpu", "--quick", *arguments],
        env=ENV,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench") / "gpu.json"
    found = script("gpu.py", "--out", str(out), "--stage", "tiny", "--commit", "abc")
    assert found == json.loads(out.read_text())
    return found


def test_the_report_says_what_ran_where_and_how(report: dict[str, Any]) -> None:
    assert not report["complete"], "other stages remain"
    assert report["versions"]["commit"] == "abc"
    assert report["versions"].keys() >= {"python", "lt-model", "lt-trainer", "lt-trainer-gpu"}
    assert report["machine"].keys() >= {"platform", "cpu_cores", "driver", "torch", "cuda", "device"}
    assert all(report["how"].values())


def test_the_numbers_of_a_row_agree(report: dict[str, Any]) -> None:
    (row,) = report["rows"]
    config = preset("tiny-2m")
    assert (row["stage"], row["case"], row["status"], row["attempts"]) == ("tiny", "tiny", "ok", [])
    assert row["parameters"] == n_parameters(config)
    assert row["n_layers"] == config.n_layers
    assert row["timed_steps"] == len(row["step_s"]["all"]) == report["options"]["steps"]
    steps = sorted(row["step_s"]["all"])
    assert (row["step_s"]["min"], row["step_s"]["median"], row["step_s"]["max"]) == tuple(steps)
    assert row["tokens_per_s"] * row["step_s"]["median"] == pytest.approx(2 * 64)
    assert row["wall_s_per_step"] >= row["step_s"]["min"]
    for convention in ("full", "causal"):
        per_token = flops_per_token(config, 64, convention)
        assert row["flops_per_token"][convention] == per_token
        assert row["flops_per_s"][convention] == pytest.approx(row["tokens_per_s"] * per_token)
        peak = row["peaks"]["engine"]["flops_per_s"]
        assert row["mfu"][convention]["engine"] * peak == pytest.approx(row["flops_per_s"][convention])
        assert row["mfu"][convention]["matmul"] is None, "not measured in this run"
    assert row["resolved"]["engine.gpu.compile"] is False
    assert row["all_finite"]
    assert row["loss"]["first"] == pytest.approx(math.log(config.vocab_size), abs=0.2)
    memory = row["memory"]
    assert memory["state_bytes"] == 3 * 4 * n_parameters(config)  # weights and two moments in float32
    assert memory["estimate"]["params"] + memory["estimate"]["moments"] == memory["state_bytes"]
    assert memory["peak_resident_bytes"] > memory["state_bytes"]


def test_products_count_their_operations_and_are_a_peak_of_mfu(ranks: RankPool) -> None:
    (found,) = ranks.run(call, "gpu_worker", "matmul", {"device": "cpu", "shapes": [[64, 32, 16]]}, ranks=1)
    (product,) = found["products"]
    assert product["best_flops_per_s"] * product["best_s"] == pytest.approx(2 * 64 * 32 * 16)
    assert product["median_flops_per_s"] * product["median_s"] == pytest.approx(2 * 64 * 32 * 16)
    assert 0 < product["best_s"] <= product["median_s"]
    gpu, gpu_report = importlib.import_module("gpu"), importlib.import_module("gpu_report")
    report = gpu_report.Report(None, {"benchmark": "gpu"}, {})
    assert gpu.measured_peak_flops(report) is None
    report.add(gpu_report.Task(stage="device", name="matmul", limit_s=1, run=lambda limit_s: {}), found)
    peak = gpu.measured_peak_flops(report)
    row = {"peaks": {"engine": {"flops_per_s": 4.0}}, "flops_per_s": {"full": 3.0, "causal": 1.0}}
    mfu = gpu.add_mfu(row, peak)["mfu"]
    assert mfu["full"] == {"engine": 0.75, "matmul": 3.0 / product["best_flops_per_s"]}


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory needs /proc")
def test_a_size_that_does_not_fit_is_noted_and_the_next_one_runs(ranks: RankPool, monkeypatch) -> None:
    """A first micro-batch that needs a tensor of 0.9 GiB where there is 0.75 GiB."""
    gpu, cases = importlib.import_module("gpu"), importlib.import_module("gpu_cases")

    def run_child(kind: str, spec: dict[str, Any], limit_s: float) -> dict[str, Any]:
        assert kind == "train"
        return ranks.run(call, "gpu_worker", "train", spec | {"limit_s": limit_s}, ranks=1)[0]

    monkeypatch.setattr(gpu, "run_child", run_child)
    case = replace(cases.QUICK_STAGES["tiny"][0], sizes=((20000, 64), (2, 64)), sets=("run.seed=3",))
    row = gpu.run_case(case, SPEC | {"memory_limit_gib": 0.75}, None, 120.0)
    (failed,) = row["attempts"]
    assert (failed["status"], failed["during"]) == ("out_of_memory", "the first step")
    assert (failed["micro_batch_size"], failed["seq_len"]) == (20000, 64)
    assert failed["memory"]["estimate"]["total"] > 20e9
    assert (row["status"], row["micro_batch_size"], row["seq_len"]) == ("ok", 2, 64)


@pytest.mark.parametrize("fp8", ["off", "tensorwise"])
def test_a_loss_curve_falls_from_the_logarithm_of_the_vocabulary(ranks: RankPool, fp8: str) -> None:
    spec = SPEC | {"curve_seed": 1, "sets": [f"engine.gpu.fp8={fp8}"]}
    (found,) = ranks.run(call, "gpu_losses", "measure_losses", spec, ranks=1)
    assert found["resolved"]["engine.gpu.fp8"] == fp8
    assert found["losses"][0] == pytest.approx(math.log(2048), abs=0.2)
    assert found["losses"][-1] < found["losses"][0] - 0.1
    assert found["tail"] == found["losses"][-1]  # a tenth of 12 is one


def compare_plain(spec: dict[str, Any]) -> tuple[float, float, dict[str, Any]]:
    """Losses of the plain model and of lt's with the same weights, and the plain model's own steps."""
    sys.path.insert(0, str(BENCH))
    import torch
    from gpu_plain import PlainLlama, cross_entropy
    from gpu_worker import train_plain

    from lt_model import Llama
    from lt_model.init import init_model

    torch.set_num_threads(1)
    config = replace(preset("tiny-2m"), n_layers=2)
    wanted = Llama(config)
    init_model(wanted, 0)
    plain = PlainLlama(config)
    names = {name for name, _ in plain.named_parameters()}
    plain.load_state_dict({name: p for name, p in wanted.named_parameters() if name in names}, strict=False)
    assert names == {name for name, _ in wanted.named_parameters()}
    ids = torch.randint(0, config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = cross_entropy(plain(ids[:, :-1]), ids[:, 1:]).item()
        logits = wanted(ids[:, :-1])
        reference = cross_entropy(logits, ids[:, 1:]).item()
    return loss, reference, train_plain(spec)


def test_the_plain_step_trains_the_same_model(ranks: RankPool) -> None:
    ((loss, reference, row),) = ranks.run(compare_plain, SPEC | {"plain": "eager", "curve_seed": None}, ranks=1)
    assert loss == pytest.approx(reference, rel=1e-5)
    assert (row["status"], row["timed_steps"]) == ("ok", 3)
    assert row["parameters"] == n_parameters(preset("tiny-2m"))
    assert row["loss"]["first"] == pytest.approx(math.log(2048), abs=0.2)
    assert row["loss"]["last"] != row["loss"]["first"]


def test_layers_are_taken_off_until_the_plan_fits() -> None:
    cases = importlib.import_module("gpu_cases")
    (case,) = cases.STAGES["8b"]
    layers = [size.n_layers for size in cases.list_tries(case, 80 * 2**30)]
    assert layers == sorted(layers, reverse=True)
    assert 3 < layers[-1] < layers[0] < 32
    assert {size.n_layers for size in cases.list_tries(case, 1000 * 2**30)} == {32}
    fp8 = {case.name: cases.list_tries(case, 80 * 2**30) for case in cases.STAGES["fp8"]}
    assert fp8["8b-bf16"] == fp8["8b-tensorwise"] == fp8["8b-rowwise"]


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
    processes, module = importlib.import_module("gpu_processes"), importlib.import_module("gpu_report")
    out, ran = tmp_path / "report.json", []

    def tasks(status: str) -> list[Any]:
        def run(limit_s: float) -> dict[str, Any]:
            ran.append(limit_s)
            return {"status": status}

        return [module.Task(stage="s", name=str(limit), limit_s=limit, run=run) for limit in (10, 1000, 20)]

    def open_report(torch: str = "2.11.0") -> Any:
        return module.Report(out, {"benchmark": "b"}, {"torch": torch})

    assert module.run_tasks(open_report(), tasks("crashed"), processes.Budget(100)) == ["s: 1000"]
    assert ran == [10, 20]
    assert module.run_tasks(open_report(), tasks("ok"), processes.Budget(2000)) == []
    assert ran == [10, 20, 1000]
    report = open_report()
    report.forget_failures()
    assert module.run_tasks(report, tasks("ok"), processes.Budget(2000)) == []
    assert ran == [10, 20, 1000, 10, 20]
    assert [row["status"] for row in open_report().rows] == ["ok"] * 3
    with pytest.raises(SystemExit, match=r"measured elsewhere.*2\.15\.0"):
        open_report("2.15.0")


def test_a_child_that_crashes_or_hangs_is_a_result(tmp_path: Path) -> None:
    processes = importlib.import_module("gpu_processes")
    assert processes.run_with_timeout([sys.executable, "-c", "print('so'); raise SystemExit(3)"], 60.0) == (3, "so\n")
    code, output = processes.run_with_timeout([sys.executable, "-c", "import time; time.sleep(600)"], 2.0)
    assert code is None
    assert not output or "KeyboardInterrupt" in output  # it was interrupted first, so that pytest would report
    oom = [sys.executable, "-c", "raise MemoryError('no')"]
    assert processes.run_for_result(oom, {}, tmp_path, 60.0)["status"] == "out_of_memory"


@pytest.mark.slow
def test_a_torchrun_that_hangs_is_ended_with_its_ranks(tmp_path: Path) -> None:
    processes = importlib.import_module("gpu_processes")
    program = tmp_path / "hang.py"
    program.write_text(
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[1] + '/pid' + os.environ['RANK'], 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    command = processes.torchrun_command(2, [str(program)])
    found = processes.run_for_result(command, {}, tmp_path, 20.0, processes.torchrun_environment(), is_torchrun=True)
    assert found["status"] == "timed_out"
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_counts_of_a_junit_file(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(
        '<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"><testcase classname="a" name="x">'
        '<failure message="wrong"/></testcase><testcase classname="a" name="y"><error message="broken"/></testcase>'
        '<testcase classname="a" name="z"><skipped message="no"/></testcase></testsuite></testsuites>'
    )
    found = importlib.import_module("gpu").parse_junit(tmp_path / "junit.xml")
    assert found == {
        "passed": 2,
        "failed": 1,
        "errors": 1,
        "skipped": 1,
        "failures": [{"test": "a.x", "message": "wrong"}, {"test": "a.y", "message": "broken"}],
    }


def test_what_nvidia_smi_says_is_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are read until it is ended; one that is cut short, or names a field that the card lacks, is left out."""
    sensors = importlib.import_module("gpu_sensors")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '650.5, 1980, 60\\n[N/A], 1980, 60\\n700.5, 1755, 64\\n69'\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with sensors.GpuMonitor("cuda") as log:
        deadline = 600
        while log._file.tell() == 0 and (deadline := deadline - 1):
            log._file.seek(0, os.SEEK_END)
            subprocess.run(["sleep", "0.1"], check=True)
    assert log.stats == {
        "samples": 2,
        "power_w": {"median": 675.5, "max": 700.5},
        "sm_clock_mhz": {"median": 1867.5, "max": 1980.0},
        "temperature_c": {"median": 62.0, "max": 64.0},
    }
    with sensors.GpuMonitor("cpu") as log:
        pass
    assert log.stats is None


@pytest.mark.slow
def test_every_stage_runs_on_a_cpu_and_is_continued(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "gpu.json"))
    assert script("gpu.py", *out, "--stage", "tiny", "--limit-s", "30", code=3)["rows"] == []  # a try may take 60 s
    found = script("gpu.py", *out)
    assert found["complete"]
    assert {row["status"] for row in found["rows"]} == {"ok"}
    assert script("gpu.py", *out)["rows"] == found["rows"]
    stopped = subprocess.Popen(
        [sys.executable, str(BENCH / "gpu.py"), "--device", "cpu", "--quick"], env=ENV, stderr=subprocess.PIPE
    )
    time.sleep(3)
    stopped.send_signal(signal.SIGTERM)
    stopped.communicate(timeout=60)
    assert stopped.returncode == 128 + signal.SIGTERM
