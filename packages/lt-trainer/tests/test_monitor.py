"""The node's monitor: a real process, a stand-in for NVIDIA's library, energy, and what may go wrong."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lt_trainer.engine import World
from lt_trainer.observability import monitor as module
from lt_trainer.observability.monitor import GpusUnavailableError, NodeMonitor, load_nvml
from lt_trainer.run_directory.jsonl import JsonlWriter, RankLog, read_jsonl, read_last_object

GIB = 2**30


class FakeNvml:
    """NVIDIA's library as `pynvml` offers it, with two GPUs, that share a counter."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    def __init__(self) -> None:
        self.millijoules = 5_000_000
        self.lost = False
        self.open = True

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        if name != "GPU-bbbb-2":
            raise self.NVMLError("Not Found")
        return 1

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if self.lost:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(gpu=90 + handle, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=3 * GIB, total=80 * GIB)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return (300_000, 400_000)[handle]

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61 + handle

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if self.lost:
            raise self.NVMLError_NotSupported("Not Supported")
        return self.millijoules

    def nvmlShutdown(self) -> None:
        self.open = False


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

    names = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert len(names) >= 10
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_a_process_is_seen_with_its_memory_and_cpu(tmp_path: Path, log: RankLog) -> None:
    """A child that holds 200 MiB and burns CPU for a while."""
    script = (
        "import os, sys, time; held = bytearray(os.urandom(1)) * (200 << 20); print('ready', flush=True)\n"
        "sys.stdin.readline()\nwhile time.process_time() < 1.0: pass\nprint('done', flush=True); sys.stdin.readline()"
    )
    clock = Clock()
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        one = monitor(tmp_path, log, pids={0: os.getpid(), 3: child.pid}, clock=clock)
        first = one._sample_host()
        assert set(first["ranks"]) == {"0", "3"}
        assert 0.19 < first["ranks"]["3"]["rss_gib"] < 0.5
        assert "disk_write_mib_s" not in first, "a rate needs two samples"
        total = first["memory_used_gib"] + first["memory_available_gib"]
        assert total == pytest.approx(psutil.virtual_memory().total / GIB, abs=0.01)
        assert first["disk_free_gib"] == pytest.approx(psutil.disk_usage(str(tmp_path)).free / GIB, abs=0.5)
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        clock.now += 4.0
        second = one._sample_host()
        assert second["ranks"]["3"]["cpu_percent"] > 0
        assert 0 <= second["cpu_percent"] <= 100
        assert ("disk_write_mib_s" in second) == (psutil.disk_io_counters() is not None)
        child.kill()
    assert set(one._sample_host()["ranks"]) == {"0"}


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
    nvml, clock = FakeNvml(), Clock()
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
    assert not nvml.open
    last = samples(tmp_path)[-1]
    assert last["energy_j"] == 1000.0 + 2 * 2500.0, "this node's"
    assert last["gpus"] == [gpu(0), gpu(1)]
    assert one.scalars()["node0/gpu1/power_w"] == 400.0


def test_a_lost_gpu_is_told_and_the_energy_until_then_stays(tmp_path: Path, log: RankLog) -> None:
    nvml = FakeNvml()
    with monitor(tmp_path, log, nvml=lambda: nvml) as one:
        until(one.scalars)
        nvml.millijoules += 1_000_000
        one._sample()
        nvml.lost = True
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
    with monitor(tmp_path, log, nvml=FakeNvml):
        pass
    found = samples(tmp_path)[-1].get("gpus")
    assert (found and [one["temperature_c"] for one in found]) == temperatures
    assert ("NVML cannot open the GPUs: Not Found" in log.path.read_text()) == (temperatures is None)


def test_a_start_without_a_gpu_library_keeps_the_energy_of_those_before(tmp_path: Path, log: RankLog) -> None:
    def missing() -> None:
        raise GpusUnavailableError("pip install 'lt-trainer[nvml]'")

    with suppress(GpusUnavailableError):  # a machine that has a driver gives the library
        assert hasattr(load_nvml(), "nvmlDeviceGetCount")
    (tmp_path / "monitor").mkdir()
    (tmp_path / "monitor" / "node00000.jsonl").write_text('{"energy_j": 1000.0}\n')
    with monitor(tmp_path, log, nvml=missing) as one:
        pass
    assert "GPUs and their energy are not monitored: pip install 'lt-trainer[nvml]'" in log.path.read_text()
    assert one.energy_joules() is None
    assert read_last_object(tmp_path / "monitor" / "node00000.jsonl")["energy_j"] == 1000.0


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
    released, nvml = threading.Event(), FakeNvml()
    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", lambda handle: released.wait() and 1000)
    with monitor(tmp_path, log, nvml=lambda: nvml) as one:
        assert one.energy_joules() is None
    released.set()
    one._thread.join()
