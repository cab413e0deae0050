"""The GPU benchmark tries itself on the CPU: every stage but the tests, a size that does not fit, and its numbers."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lt_model import flops_per_token, n_parameters, preset

BENCH = Path(__file__).parent.parent / "tools" / "bench"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """tools/bench/gpu.py as a module, and with it gpu_worker.py."""
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location("gpu", BENCH / "gpu.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["gpu"] = module  # dataclasses look their module up there
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Of a tiny model whose first micro-batch needs a tensor of 0.9 GiB where there is 0.75 GiB."""
    out = tmp_path_factory.mktemp("bench") / "gpu.json"
    command = [sys.executable, str(BENCH / "gpu.py"), "--device", "cpu", "--quick", "--no-tests", "--out", str(out)]
    sizes = ["--memory-limit-gib", "0.75", "--micro-batches", "20000,2"] if sys.platform == "linux" else []
    done = subprocess.run(
        [*command, *sizes, "--commit", "abc"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(out.read_text())
    return found


def test_the_report_says_what_ran_where_and_how(report: dict) -> None:
    assert report["complete"]
    assert report["versions"]["commit"] == "abc"
    assert report["versions"].keys() >= {"python", "lt-model", "lt-trainer", "lt-trainer-gpu"}
    assert report["machine"].keys() >= {"platform", "cpu_cores", "driver", "torch", "cuda", "device"}
    assert report["tests"] == {"status": "skipped", "reason": "--no-tests"}
    assert all(report["how"].values())


def test_products_count_their_operations(report: dict) -> None:
    products = report["matmul"]["products"]
    assert (products[0]["m"], products[0]["k"], products[0]["n"]) == (256, 256, 256)
    for found in products:
        flops = 2 * found["m"] * found["k"] * found["n"]
        assert found["best_flops_per_s"] * found["best_s"] == pytest.approx(flops)
        assert found["median_flops_per_s"] * found["median_s"] == pytest.approx(flops)
        assert 0 < found["best_s"] <= found["median_s"]


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory needs /proc")
def test_a_size_that_does_not_fit_is_noted_and_the_next_one_runs(report: dict) -> None:
    (row,) = report["training"]
    (failed,) = row["attempts"]
    assert (failed["status"], failed["during"]) == ("out_of_memory", "the first step")
    assert (failed["micro_batch_size"], failed["seq_len"]) == (20000, 64)
    assert failed["memory"]["estimate"]["total"] > 20e9
    assert (row["status"], row["micro_batch_size"], row["seq_len"]) == ("ok", 2, 64)


def test_the_numbers_of_a_row_agree(report: dict) -> None:
    (row,) = report["training"]
    config = preset("tiny-2m")
    assert row["parameters"] == n_parameters(config)
    assert row["timed_steps"] == len(row["step_s"]["all"]) == report["options"]["steps"]
    steps = sorted(row["step_s"]["all"])
    assert (row["step_s"]["min"], row["step_s"]["median"], row["step_s"]["max"]) == tuple(steps)
    assert row["tokens_per_s"] * row["step_s"]["median"] == pytest.approx(2 * 64)
    assert row["wall_s_per_step"] >= row["step_s"]["min"]
    for convention in ("full", "causal"):
        per_token = flops_per_token(config, 64, convention)
        assert row["flops_per_token"][convention] == per_token
        assert row["flops_per_s"][convention] == pytest.approx(row["tokens_per_s"] * per_token)
        for name, peak in row["peaks"].items():
            assert row["mfu"][convention][name] * peak["flops_per_s"] == pytest.approx(row["flops_per_s"][convention])
    assert row["peaks"].keys() == row["mfu"]["full"].keys() == {"engine", "matmul"}
    assert row["peaks"]["matmul"]["flops_per_s"] == report["matmul"]["products"][0]["best_flops_per_s"]
    assert row["all_finite"]
    assert row["loss"]["first"] == pytest.approx(math.log(config.vocab_size), abs=0.2)
    memory = row["memory"]
    assert memory["state_bytes"] == 3 * 4 * n_parameters(config)  # weights and two moments in float32
    assert memory["estimate"]["params"] + memory["estimate"]["moments"] == memory["state_bytes"]
    assert memory["peak_resident_bytes"] > memory["state_bytes"]


def test_what_does_not_fit_into_the_budget_is_skipped_and_says_so(bench: ModuleType) -> None:
    row = bench.train_case(bench.CASES[0], {"device": "cuda", "sets": []}, bench.Budget(30.0))
    assert row["status"] == "skipped"
    assert "s of the budget are left, a try needs up to 60" in row["reason"]


def test_a_child_that_crashes_or_hangs_is_a_result(bench: ModuleType) -> None:
    assert bench.run_with_timeout([sys.executable, "-c", "print('so'); raise SystemExit(3)"], 60.0) == (3, "so\n")
    code, output = bench.run_with_timeout([sys.executable, "-c", "import time; time.sleep(600)"], 2.0)
    assert code is None
    assert not output or "KeyboardInterrupt" in output  # it was interrupted first, so that pytest would report


def test_counts_of_a_junit_file(bench: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(
        '<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"><testcase classname="a" name="x">'
        '<failure message="wrong"/></testcase><testcase classname="a" name="y"><error message="broken"/></testcase>'
        '<testcase classname="a" name="z"><skipped message="no"/></testcase></testsuite></testsuites>'
    )
    found = bench.parse_junit(tmp_path / "junit.xml")
    assert found == {
        "passed": 2,
        "failed": 1,
        "errors": 1,
        "skipped": 1,
        "failures": [{"test": "a.x", "message": "wrong"}, {"test": "a.y", "message": "broken"}],
    }


def test_what_nvidia_smi_says_is_summed_up(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are read until it is ended; one that is cut short, or names a field that the card lacks, is left out."""
    child = sys.modules["gpu_worker"]
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '650.5, 1980, 60\\n[N/A], 1980, 60\\n700.5, 1755, 64\\n69'\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with child.GpuMonitor("cuda") as log:
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
    with child.GpuMonitor("cpu") as log:
        pass
    assert log.stats is None
