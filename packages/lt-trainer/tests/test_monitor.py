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
from hypothesis import given
from hypothesis import strategies as st

from lt_trainer.engine import World
from lt_trainer.observability import monitor as module
from lt_trainer.observability.gpu_sampler import EnergyMeter, GpuSampler, GpusUnavailableError, load_nvml
from lt_trainer.observability.monitor import HostSampler, NodeMonitor, node_paths
from lt_trainer.run_directory.jsonl import JsonlWriter, RankLog, read_jsonl, read_last_object

GIB = 2**30


@pytest.mark.parametrize(
    ("readings", "joules"),
    [
        ([(0, 500, 300), (10, 800, 100), (20, 800, 100)], [0, 300, 300]),  # the counter counts, the power does not
        ([(0, None, 100), (10, None, 300), (12, None, 100)], [0, 2000, 2400]),  # without a counter
        ([(0, 9000, 200), (10, 5, 200), (20, 1005, 200)], [0, 2000, 3000]),  # a counter that starts anew
        ([(0, None, None), (5, 100, None), (6, None, None), (9, 160, None)], [None, 0, 0, 60]),  # gaps
    ],
)
def test_energy_of_readings(readings: list[tuple[float, float | None, float | None]], joules: list[Any]) -> None:
    meter = EnergyMeter()
    found = []
    for reading in readings:
        meter.update(*reading)
        found.append(meter.joules)
    assert found == joules


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=20))
def test_a_counter_is_never_lost_or_counted_twice(steps: list[float]) -> None:
    meter, total = EnergyMeter(), 1000.0
    for index, step in enumerate(steps):
        total += step if index else 0.0
        meter.update(float(index), total, 1e9)
    assert meter.joules == pytest.approx(total - 1000.0)


class FakeNvml:
    """NVIDIA's library as `pynvml` offers it, with two GPUs, of which the second has no energy counter."""

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
        if handle == 1:
            raise self.NVMLError_NotSupported("Not Supported")
        return self.millijoules

    def nvmlShutdown(self) -> None:
        self.open = False


def gpu(index: int) -> dict[str, float]:
    values = {"gpu": index, "utilization_percent": 90 + index, "memory_used_gib": 3.0, "memory_total_gib": 80.0}
    return values | {"power_w": (300.0, 400.0)[index], "temperature_c": 61 + index}


def test_gpus_are_read_in_our_units_and_a_lost_one_is_told_and_asked_again() -> None:
    nvml = FakeNvml()
    gpus = GpuSampler(nvml, count=2, environ={})
    assert gpus.sample(0.0) == [gpu(0), gpu(1)]
    nvml.millijoules += 7000
    gpus.sample(1.0)
    assert [meter.joules for meter in gpus.meters] == [7.0, 400.0]
    assert gpus.problem == "", "what a GPU does not support is no problem"
    nvml.lost = True
    assert "utilization_percent" not in gpus.sample(2.0)[0]
    assert gpus.problem == "GPU 1: GPU is lost"
    nvml.lost = False
    assert gpus.sample(3.0) == [gpu(0), gpu(1)]


@pytest.mark.parametrize(
    ("visible", "count", "found"),
    [(None, 2, [61, 62]), ("", 1, [61]), ("1, 0,5", 2, [62, 61]), ("GPU-bbbb-2", 1, [62])],
)
def test_the_gpus_of_the_run_are_the_first_visible_ones(visible: str | None, count: int, found: list[int]) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    samples = GpuSampler(FakeNvml(), count=count, environ=environ).sample(0.0)
    assert [sample["temperature_c"] for sample in samples] == found


def test_a_gpu_that_is_not_there_and_a_library_without_a_driver_are_reasons() -> None:
    with pytest.raises(GpusUnavailableError, match="NVML cannot open the GPUs: Not Found"):
        GpuSampler(FakeNvml(), count=1, environ={"CUDA_VISIBLE_DEVICES": "GPU-cccc"})
    with suppress(GpusUnavailableError):  # a machine that has a driver gives the library
        assert hasattr(load_nvml(), "nvmlDeviceGetCount")


def test_every_function_that_is_called_exists_in_the_real_library() -> None:
    import pynvml

    names = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert len(names) >= 10
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_a_process_is_seen_with_its_memory_and_cpu(tmp_path: Path) -> None:
    """A child that holds 200 MiB and burns CPU for a while."""
    script = (
        "import os, sys, time; held = bytearray(os.urandom(1)) * (200 << 20); print('ready', flush=True)\n"
        "sys.stdin.readline()\nwhile time.process_time() < 1.0: pass\nprint('done', flush=True); sys.stdin.readline()"
    )
    now = [0.0]
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        host = HostSampler(tmp_path, {0: os.getpid(), 3: child.pid}, clock=lambda: now[0])
        first = host.sample()
        assert set(first["ranks"]) == {"0", "3"}
        assert 0.19 < first["ranks"]["3"]["rss_gib"] < 0.5
        assert "disk_write_mib_s" not in first, "a rate needs two samples"
        assert first["memory_used_gib"] + first["memory_available_gib"] == pytest.approx(
            psutil.virtual_memory().total / GIB, abs=0.01
        )
        assert first["disk_free_gib"] == pytest.approx(psutil.disk_usage(str(tmp_path)).free / GIB, abs=0.5)
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        now[0] = 4.0
        second = host.sample()
        assert second["ranks"]["3"]["cpu_percent"] > 0
        assert 0 <= second["cpu_percent"] <= 100
        if psutil.disk_io_counters() is not None:
            assert second["disk_write_mib_s"] >= 0
        child.kill()
    assert set(host.sample()["ranks"]) == {"0"}


# ---- the thread ----


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


def test_a_run_has_a_sample_at_its_start_and_one_at_its_end(tmp_path: Path, log: RankLog) -> None:
    with monitor(tmp_path, log) as one:
        until(lambda: one.scalars())
        assert one.energy_joules() is None
    (path,) = node_paths(tmp_path)
    assert path == tmp_path / "monitor" / "node00000.jsonl"
    first, last = read_jsonl(path)
    assert set(first["ranks"]) == set(last["ranks"]) == {"0", "1"}
    assert last["node"] == 0
    assert last["monitor_cpu_s"] >= first["monitor_cpu_s"] > 0
    assert "gpus" not in last
    assert log.path.read_text() == ""
    assert "node0/rank0/rss_gib" in one.scalars()
    assert not [thread for thread in threading.enumerate() if thread.name == "monitor"]


def test_it_samples_every_interval(tmp_path: Path, log: RankLog) -> None:
    with monitor(tmp_path, log, interval_s=0.01):
        until(lambda: node_paths(tmp_path) and len(read_jsonl(node_paths(tmp_path)[0])) >= 5)


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
    assert one.energy_joules() == 71000.0 + 2500.0 + 10 * 400
    assert not nvml.open
    last = read_last_object(tmp_path / "monitor" / "node00000.jsonl")
    assert last["energy_j"] == 1000.0 + 2500.0 + 4000.0, "this node's"
    assert last["gpus"] == [gpu(0), gpu(1)]
    assert one.scalars()["node0/gpu1/power_w"] == 400.0


def test_a_start_without_a_gpu_library_keeps_the_energy_of_those_before(tmp_path: Path, log: RankLog) -> None:
    def missing() -> None:
        raise GpusUnavailableError("pip install 'lt-trainer[nvml]'")

    (tmp_path / "monitor").mkdir()
    (tmp_path / "monitor" / "node00000.jsonl").write_text('{"energy_j": 1000.0}\n')
    with monitor(tmp_path, log, nvml=missing) as one:
        pass
    assert "GPUs and their energy are not monitored: pip install 'lt-trainer[nvml]'" in log.path.read_text()
    assert one.energy_joules() is None
    assert read_last_object(tmp_path / "monitor" / "node00000.jsonl")["energy_j"] == 1000.0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_once_and_sampling_goes_on(tmp_path: Path, log: RankLog) -> None:
    with monitor(tmp_path, log, interval_s=0.01) as one:
        until(lambda: one._newest)
        assert one._file is not None
        kept, one._file = one._file, JsonlWriter("/dev/full")
        until(lambda: one._problems)
        seen = one._newest
        until(lambda: one._newest is not seen)
    kept.close()
    assert log.path.read_text().count("cannot write /dev/full: No space left on device") == 1


def test_a_file_that_cannot_be_opened_is_told(tmp_path: Path, log: RankLog) -> None:
    (tmp_path / "monitor" / "node00000.jsonl").mkdir(parents=True)
    with monitor(tmp_path, log) as one:
        until(lambda: one.scalars())
    assert "samples of this node are not saved: cannot open" in log.path.read_text()


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
