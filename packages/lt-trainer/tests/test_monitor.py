"""The node's monitor: a real process, a stand-in for NVIDIA's library, energy, and what may go wrong."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lt_trainer.engine import World
from lt_trainer.observability import monitor as module
from lt_trainer.observability.monitor import NodeMonitor, load_nvml
from lt_trainer.run_directory.jsonl import JsonlWriter, RankLog, read_jsonl

GIB = 2**30


class NvmlError(Exception):
    pass


class NotSupportedError(NvmlError):
    pass


def raising(error: Exception) -> Any:
    def call(handle: int) -> None:
        raise error

    return call


def fake_nvml() -> Any:
    """NVIDIA's library as `pynvml` offers it, with two GPUs that share a counter."""
    nvml = SimpleNamespace(NVMLError=NvmlError, NVMLError_NotSupported=NotSupportedError, NVML_TEMPERATURE_GPU=0)
    uuids = {"GPU-bbbb-2": lambda: 1}
    nvml.millijoules, nvml.is_open = 5_000_000, True
    nvml.nvmlDeviceGetHandleByIndex = int
    nvml.nvmlDeviceGetHandleByUUID = lambda name: uuids.get(name, partial(raising(NvmlError("Not Found")), 0))()
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=90 + handle, memory=40)
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=3 * GIB, total=80 * GIB)
    nvml.nvmlDeviceGetPowerUsage = (300_000, 400_000).__getitem__
    nvml.nvmlDeviceGetTemperature = lambda handle, sensor: 61 + handle
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: nvml.millijoules
    nvml.nvmlShutdown = lambda: setattr(nvml, "is_open", False)
    return nvml


def gpu(index: int) -> dict[str, float]:
    values = {"gpu": index, "utilization_percent": 90 + index, "memory_used_gib": 3.0, "memory_total_gib": 80.0}
    return values | {"power_w": (300.0, 400.0)[index], "temperature_c": 61 + index}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RankLog]:
    with RankLog(tmp_path, 0) as log:
        yield log


def monitor(run: Path, log: RankLog, **changes: Any) -> NodeMonitor:
    world = World(rank=0, size=2, local_rank=0, local_size=2)
    options: dict[str, Any] = {"world": world, "pids": {0: os.getpid(), 1: os.getppid()}, "interval_s": 3600.0}
    return NodeMonitor(run, log=log.write, **(options | changes))


def until(done: Callable[[], object]) -> None:
    for _ in range(2000):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def test_every_function_that_is_called_exists_in_the_real_library() -> None:
    import pynvml

    names = [name for name in vars(fake_nvml()) if name.startswith(("nvml", "NVML"))]
    assert len(names) >= 10
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_processes_are_seen_until_they_end(tmp_path: Path, log: RankLog) -> None:
    clock = Clock()
    with subprocess.Popen(["sleep", "60"]) as child:
        one = monitor(tmp_path, log, pids={0: os.getpid(), 3: child.pid}, clock=clock)
        first = one._sample_host()
        clock.now += 4.0
        second = one._sample_host()
        child.kill()
    assert set(first["ranks"]) == set(second["ranks"]) == {"0", "3"}
    assert set(one._sample_host()["ranks"]) == {"0"}
    assert first["ranks"]["0"]["rss_gib"] == pytest.approx(psutil.Process().memory_info().rss / GIB, rel=0.2)
    assert first["disk_free_gib"] == pytest.approx(psutil.disk_usage(str(tmp_path)).free / GIB, abs=0.5)
    assert "disk_write_mib_s" not in first, "a rate needs two samples"
    assert ("disk_write_mib_s" in second) == (psutil.disk_io_counters() is not None)


def samples(run: Path) -> list[dict[str, Any]]:
    return read_jsonl(run / "monitor" / "node00000.jsonl")


def test_a_run_has_a_sample_at_its_start_and_one_at_its_end(tmp_path: Path, log: RankLog) -> None:
    with monitor(tmp_path, log) as one:
        until(one.scalars)
        assert one.energy_joules() is None
    first, last = samples(tmp_path)
    assert set(first["ranks"]) == set(last["ranks"]) == {"0", "1"}
    assert last["node"] == 0
    assert last["monitor_cpu_s"] >= first["monitor_cpu_s"] > 0
    assert "gpus" not in last
    assert log.path.read_text() == ""
    assert "node0/rank0/rss_gib" in one.scalars()
    assert not [thread for thread in threading.enumerate() if thread.name == "monitor"]
    with monitor(tmp_path, log, interval_s=0.01):
        until(lambda: len(samples(tmp_path)) >= 7)


def test_energy_of_all_gpus_nodes_and_starts_is_added_up(tmp_path: Path, log: RankLog) -> None:
    nvml, clock = fake_nvml(), Clock()
    (tmp_path / "monitor").mkdir()
    (tmp_path / "monitor" / "node00001.jsonl").write_text('{"energy_j": 7.0}\n{"energy_j": 70000.0}\n{"energy_')
    (tmp_path / "monitor" / "node00000.jsonl").write_text('{"energy_j": 1000.0}\n')
    with monitor(tmp_path, log, nvml=lambda: nvml, clock=clock) as one:
        until(lambda: one.energy_joules() is not None)
        assert one.energy_joules() == 71000.0
        clock.now += 2.0
        assert one.energy_joules() == 71000.0 + 2 * 700  # until the next sample, the power of this one
        clock.now += 8.0
        nvml.millijoules += 2_500_000
    assert one.energy_joules() == 71000.0 + 2 * 2500.0
    assert not nvml.is_open
    last = samples(tmp_path)[-1]
    assert last["energy_j"] == 1000.0 + 2 * 2500.0, "this node's"
    assert last["gpus"] == [gpu(0), gpu(1)]
    assert one.scalars()["node0/gpu1/power_w"] == 400.0


def test_a_lost_gpu_is_told_and_the_energy_until_then_stays(tmp_path: Path, log: RankLog) -> None:
    nvml = fake_nvml()
    with monitor(tmp_path, log, nvml=lambda: nvml) as one:
        until(one.scalars)
        nvml.millijoules += 1_000_000
        one._sample()
        nvml.nvmlDeviceGetUtilizationRates = raising(NvmlError("GPU is lost"))
        nvml.nvmlDeviceGetTotalEnergyConsumption = raising(NotSupportedError("Not Supported"))
    last = samples(tmp_path)[-1]
    assert last["energy_j"] == 2000.0
    assert "utilization_percent" not in last["gpus"][0]
    told = log.path.read_text().splitlines()
    assert [line.partition("# monitor: ")[2] for line in told] == ["GPU 0: GPU is lost", "GPU 1: GPU is lost"]


@pytest.mark.parametrize(
    ("visible", "temperatures"),
    [(None, [61, 62]), ("", [61, 62]), ("1, 0,5", [62, 61]), ("GPU-bbbb-2,0", [62, 61]), ("GPU-cccc", None)],
)
def test_the_gpus_of_the_run_are_the_first_visible_ones(
    tmp_path: Path, log: RankLog, monkeypatch: pytest.MonkeyPatch, visible: str | None, temperatures: list[int] | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with monitor(tmp_path, log, nvml=fake_nvml):
        pass
    found = samples(tmp_path)[-1].get("gpus")
    assert (found and [one["temperature_c"] for one in found]) == temperatures
    assert ("NVML cannot open the GPUs: Not Found" in log.path.read_text()) == (temperatures is None)


def test_a_start_without_a_gpu_library_keeps_the_energy_of_those_before(tmp_path: Path, log: RankLog) -> None:
    (tmp_path / "monitor").mkdir()
    (tmp_path / "monitor" / "node00000.jsonl").write_text('{"energy_j": 1000.0}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", None)
        with monitor(tmp_path, log, nvml=load_nvml) as one:
            until(one.scalars)
    assert "GPUs and their energy are not monitored: pip install 'lt-trainer[nvml]'" in log.path.read_text()
    assert one.energy_joules() is None
    assert samples(tmp_path)[-1]["energy_j"] == 1000.0


def test_a_disk_that_cannot_be_written_is_told_once_and_sampling_goes_on(tmp_path: Path, log: RankLog) -> None:
    (tmp_path / "monitor" / "node00000.jsonl").mkdir(parents=True)
    with monitor(tmp_path, log, interval_s=0.01) as one:
        until(one.scalars)
        assert "samples of this node are not saved: cannot open" in log.path.read_text()
        if Path("/dev/full").exists():
            one._file = JsonlWriter("/dev/full")
            until(lambda: "cannot write /dev/full: No space left on device" in log.path.read_text())
        seen = one._newest
        until(lambda: one._newest is not seen)
    assert log.path.read_text().count("cannot write /dev/full") <= 1


def test_a_driver_that_hangs_does_not_keep_the_run_from_ending(
    tmp_path: Path, log: RankLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOIN_TIMEOUT_S", 0.05)
    released, nvml = threading.Event(), fake_nvml()
    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", lambda handle: released.wait() and 1000)
    with monitor(tmp_path, log, nvml=lambda: nvml) as one:
        assert one.energy_joules() is None
    released.set()
    one._thread.join()
