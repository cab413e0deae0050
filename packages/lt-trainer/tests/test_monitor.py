"""The node's monitor: real processes and disks, a stand-in for NVIDIA's library, energy, and what may go wrong."""

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
from lt_trainer.observability.monitor.energy import EnergyMeter
from lt_trainer.observability.monitor.host import HostSampler, block_device
from lt_trainer.observability.monitor.node import NodeMonitor, node_paths
from lt_trainer.observability.monitor.nvml import GpuSample, GpuSampler, GpusUnavailableError, visible_gpus
from lt_trainer.resilience.heartbeat import Heartbeat
from lt_trainer.resilience.watchdog import heartbeat_path
from lt_trainer.run_directory.jsonl import JsonlWriter, read_jsonl, read_last_object
from lt_trainer.run_directory.rank_log import RankLog

GIB = 2**30


# ---- energy ----


def test_the_counter_counts_and_the_power_does_not() -> None:
    meter = EnergyMeter()
    assert meter.update(0.0, 500.0, 300.0) == 0.0
    assert meter.update(10.0, 800.0, 100.0) == 300.0
    assert meter.update(20.0, 800.0, 100.0) == 300.0


def test_without_a_counter_power_is_integrated() -> None:
    meter = EnergyMeter()
    assert meter.update(0.0, None, 100.0) == 0.0
    assert meter.update(10.0, None, 300.0) == 2000.0
    assert meter.update(12.0, None, 100.0) == 2400.0


def test_a_counter_that_starts_anew_is_bridged_by_power() -> None:
    meter = EnergyMeter()
    meter.update(0.0, 9000.0, 200.0)
    assert meter.update(10.0, 5.0, 200.0) == 2000.0
    assert meter.update(20.0, 1005.0, 200.0) == 3000.0


def test_without_both_nothing_is_known_and_a_gap_is_bridged() -> None:
    meter = EnergyMeter()
    assert meter.update(0.0, None, None) is None
    assert meter.update(5.0, 100.0, None) == 0.0
    assert meter.update(6.0, None, None) == 0.0
    assert meter.update(9.0, 160.0, None) == 60.0


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=20))
def test_a_counter_is_never_lost_or_counted_twice(steps: list[float]) -> None:
    meter, total = EnergyMeter(), 1000.0
    for index, step in enumerate(steps):
        total += step if index else 0.0
        joules = meter.update(float(index), total, 1e9)
    assert joules == pytest.approx(total - 1000.0)


# ---- GPUs ----


class FakeNvml:
    """NVIDIA's library as `pynvml` offers it, with two GPUs, of which the second has no energy counter."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.millijoules = 5_000_000
        self.milliwatts = [300_000, 400_000]
        self.lost = False
        self.open = True

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= 2:
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return ("GPU-aaaa-1", "GPU-bbbb-2")[handle]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.calls.append("utilization")
        if self.lost:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(gpu=90 + handle, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=3 * GIB, total=80 * GIB)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self.milliwatts[handle]

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61 + handle

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        self.calls.append(f"energy {handle}")
        if handle == 1:
            raise self.NVMLError_NotSupported("Not Supported")
        return self.millijoules

    def nvmlShutdown(self) -> None:
        self.open = False


def test_a_gpu_is_read_in_our_units() -> None:
    gpus = GpuSampler(FakeNvml(), count=2, environ={})
    assert gpus.sample(0) == GpuSample(
        utilization_percent=90,
        memory_used_gib=3.0,
        memory_total_gib=80.0,
        power_w=300.0,
        temperature_c=61,
        energy_counter_j=5000.0,
    )
    assert gpus.sample(1).energy_counter_j is None
    assert gpus.last_problem == ""


def test_what_is_not_supported_is_asked_once() -> None:
    nvml = FakeNvml()
    gpus = GpuSampler(nvml, count=2, environ={})
    for _ in range(3):
        gpus.sample(0), gpus.sample(1)
    assert nvml.calls.count("energy 1") == 1
    assert nvml.calls.count("energy 0") == 3


def test_a_gpu_that_is_lost_is_told_and_asked_again() -> None:
    nvml = FakeNvml()
    gpus = GpuSampler(nvml, count=1, environ={})
    nvml.lost = True
    assert gpus.sample(0).utilization_percent is None
    assert gpus.last_problem == "GPU 0, utilization: GPU is lost"
    nvml.lost = False
    assert gpus.sample(0).utilization_percent == 90


@pytest.mark.parametrize(
    ("value", "count", "names"),
    [
        (None, 2, ["0", "1"]),
        ("", 1, ["0"]),
        ("3, 1,0", 2, ["3", "1"]),
        ("GPU-bbbb", 1, ["GPU-bbbb"]),
    ],
)
def test_the_gpus_of_the_run_are_the_first_visible_ones(value: str | None, count: int, names: list[str]) -> None:
    assert visible_gpus({} if value is None else {"CUDA_VISIBLE_DEVICES": value}, count) == names


def test_names_of_gpus_may_be_shortened_as_cuda_takes_them() -> None:
    gpus = GpuSampler(FakeNvml(), count=1, environ={"CUDA_VISIBLE_DEVICES": "GPU-bbbb"})
    assert gpus.sample(0).temperature_c == 62
    with pytest.raises(GpusUnavailableError, match="NVML cannot open the GPUs: Not Found"):
        GpuSampler(FakeNvml(), count=1, environ={"CUDA_VISIBLE_DEVICES": "GPU-cccc"})


def test_every_function_that_is_called_exists_in_the_real_library() -> None:
    import pynvml

    names = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert len(names) >= 11
    assert [name for name in names if not hasattr(pynvml, name)] == []


# ---- the machine ----


def test_a_process_is_seen_with_its_memory_cpu_and_writes(tmp_path: Path) -> None:
    """A child that holds 200 MiB, burns CPU for a while and writes 64 MiB."""
    script = """
        import os, sys, time
        held = bytearray(os.urandom(1)) * (200 << 20)
        print("ready", flush=True)
        sys.stdin.readline()
        while time.process_time() < 1.0:
            pass
        with open(sys.argv[1], "wb") as file:
            for _ in range(64):
                file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        print("done", flush=True)
        sys.stdin.readline()
    """
    import textwrap

    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "file")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    now = [0.0]
    host = HostSampler(tmp_path, clock=lambda: now[0])
    try:
        assert child.stdout.readline() == "ready\n"
        before = psutil.Process(child.pid).cpu_times()
        first = host.sample({0: os.getpid(), 3: child.pid})
        assert set(first["ranks"]) == {"0", "3"}
        assert 0.19 < first["ranks"]["3"]["rss_gib"] < 0.5
        assert "cpu_percent" not in first["ranks"]["3"]  # a rate needs two looks
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        after = psutil.Process(child.pid).cpu_times()
        now[0] = 4.0
        second = host.sample({3: child.pid})
        burnt = (after.user + after.system) - (before.user + before.system)
        assert burnt > 0.5
        assert second["ranks"]["3"]["cpu_percent"] == pytest.approx(100 * burnt / 4.0, abs=3)
        if "write_mib_s" in first["ranks"]["0"] or hasattr(psutil.Process(), "io_counters"):
            assert second["ranks"]["3"]["write_mib_s"] == pytest.approx(16.0, abs=1)
        assert second["memory_used_gib"] + second["memory_available_gib"] == pytest.approx(
            psutil.virtual_memory().total / GIB, abs=0.01
        )
        assert second["disk_free_gib"] == pytest.approx(psutil.disk_usage(str(tmp_path)).free / GIB, abs=0.5)
        assert 0 <= second["cpu_percent"] <= 100
        now[0] = 6.0
        third = host.sample({3: child.pid})  # since the sample before, not since the first
        assert third["ranks"]["3"]["write_mib_s"] == 0
        assert third["ranks"]["3"]["cpu_percent"] < 100 * burnt / 4.0 / 2
    finally:
        child.kill()
        child.communicate()
    assert host.sample({3: child.pid})["ranks"] == {}  # gone


@pytest.mark.skipif(not Path("/sys/dev/block").exists(), reason="needs Linux's list of block devices")
def test_the_disk_of_the_run_directory_is_found_or_left_out(tmp_path: Path) -> None:
    disk = block_device(tmp_path)
    assert disk == "" or (Path("/sys/class/block") / disk).exists()
    assert block_device(Path("/proc")) == ""  # no block device


# ---- the thread ----


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def beat(run: Path, rank: int, *, pid: int, attempt: str = "now", machine: str = "m") -> None:
    path = heartbeat_path(run, rank)
    path.parent.mkdir(exist_ok=True)
    record = Heartbeat(
        attempt=attempt,
        rank=rank,
        pid=pid,
        process_start_time="1",
        host="h",
        machine_id=machine,
        beat=1,
        n_rollbacks=0,
        step=1,
        stage="step",
    )
    path.write_bytes(record.encode())


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RankLog]:
    with RankLog(tmp_path, 0) as log:
        yield log


def monitor(run: Path, log: RankLog, **changes: Any) -> NodeMonitor:
    options: dict[str, Any] = {
        "world": World(rank=0, size=2, local_rank=0, local_size=2),
        "attempt": "now",
        "interval_s": 3600.0,
        "gpus": False,
        "environ": {},
    }
    return NodeMonitor(run, log=log, **(options | changes))


def until(done: Callable[[], object]) -> None:
    for _ in range(2000):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def test_a_run_has_a_sample_at_its_start_and_one_at_its_end(tmp_path: Path, log: RankLog) -> None:
    beat(tmp_path, 0, pid=os.getpid())
    beat(tmp_path, 1, pid=os.getppid(), attempt="before")
    with monitor(tmp_path, log) as one:
        until(lambda: one.scalars())
        assert one.energy_joules() is None
    (path,) = node_paths(tmp_path)
    assert path == tmp_path / "monitor" / "node00000.jsonl"
    first, last = read_jsonl(path)
    assert set(first["ranks"]) == set(last["ranks"]) == {"0"}  # what rank 1 left is of another start
    assert last["node"] == 0
    assert last["monitor_cpu_s"] >= first["monitor_cpu_s"] > 0
    assert "gpus" not in last
    assert one.pop_problems() == []
    assert "node0/rank0/rss_gib" in one.scalars()
    assert not [thread for thread in threading.enumerate() if thread.name == "monitor"]


def test_only_processes_of_this_machine_are_looked_at(tmp_path: Path, log: RankLog) -> None:
    beat(tmp_path, 0, pid=os.getpid())
    beat(tmp_path, 1, pid=os.getpid(), machine="another")
    with monitor(tmp_path, log):
        pass
    assert set(read_jsonl(node_paths(tmp_path)[0])[-1]["ranks"]) == {"0"}


def test_it_samples_every_interval(tmp_path: Path, log: RankLog) -> None:
    with monitor(tmp_path, log, interval_s=0.01):
        until(lambda: node_paths(tmp_path) and len(read_jsonl(node_paths(tmp_path)[0])) >= 5)


def test_energy_of_all_gpus_nodes_and_starts_is_added_up(tmp_path: Path, log: RankLog) -> None:
    nvml, clock = FakeNvml(), Clock()
    (tmp_path / "monitor").mkdir()
    (tmp_path / "monitor" / "node00001.jsonl").write_text('{"energy_j": 7.0}\n{"energy_j": 70000.0}\n{"energy_')
    (tmp_path / "monitor" / "node00000.jsonl").write_text('{"energy_j": 1000.0}\n')
    with monitor(tmp_path, log, gpus=True, nvml=lambda: nvml, clock=clock) as one:
        until(lambda: one.energy_joules() is not None)
        assert one.energy_joules() == 71000.0
        clock.now += 2.0
        assert one.energy_joules() == 71000.0 + 2 * 700  # until the next sample, the power of this one
        clock.now += 8.0
        nvml.millijoules += 2_500_000
    assert one.energy_joules() == 71000.0 + 2500.0 + 10 * 400
    assert not nvml.open
    last = read_last_object(tmp_path / "monitor" / "node00000.jsonl")
    assert last["energy_j"] == 1000.0 + 2500.0 + 4000.0  # this node's
    assert last["gpus"][1] == {
        "gpu": 1,
        "utilization_percent": 91,
        "memory_used_gib": 3.0,
        "memory_total_gib": 80.0,
        "power_w": 400.0,
        "temperature_c": 62,
    }
    assert one.scalars()["node0/gpu1/power_w"] == 400.0


def test_a_start_without_a_gpu_library_keeps_the_energy_of_those_before(tmp_path: Path, log: RankLog) -> None:
    def missing() -> None:
        raise GpusUnavailableError("pip install 'lt-trainer[nvml]'")

    (tmp_path / "monitor").mkdir()
    (tmp_path / "monitor" / "node00000.jsonl").write_text('{"energy_j": 1000.0}\n')
    with monitor(tmp_path, log, gpus=True, nvml=missing) as one:
        pass
    assert one.pop_problems() == ["GPUs and their energy are not monitored: pip install 'lt-trainer[nvml]'"]
    assert one.pop_problems() == []
    assert "pip install 'lt-trainer[nvml]'" in log.path.read_text()
    assert one.energy_joules() is None
    assert read_last_object(tmp_path / "monitor" / "node00000.jsonl")["energy_j"] == 1000.0


def test_the_real_library_without_a_driver_is_a_reason_and_no_error() -> None:
    from lt_trainer.observability.monitor.nvml import load_nvml

    with suppress(GpusUnavailableError):  # a machine that has a driver gives the library
        assert hasattr(load_nvml(), "nvmlDeviceGetCount")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_once_and_sampling_goes_on(tmp_path: Path, log: RankLog) -> None:
    with monitor(tmp_path, log, interval_s=0.01) as one:
        until(lambda: one._newest)
        assert one._sink is not None
        kept, one._sink = one._sink, JsonlWriter("/dev/full")
        until(lambda: one._reported_kinds)
        seen = one._newest
        until(lambda: one._newest is not seen)
    kept.close()
    (problem,) = one.pop_problems()
    assert problem.startswith("samples of this node are not saved: cannot write /dev/full: No space left on device")
    assert log.path.read_text().count("samples of this node are not saved") == 1


def test_a_file_that_cannot_be_opened_is_told(tmp_path: Path, log: RankLog) -> None:
    (tmp_path / "monitor" / "node00000.jsonl").mkdir(parents=True)
    with monitor(tmp_path, log) as one:
        until(lambda: one.scalars())
    (problem,) = one.pop_problems()
    assert "samples of this node are not saved: cannot open" in problem


def test_a_driver_that_hangs_does_not_keep_the_run_from_ending(
    tmp_path: Path, log: RankLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lt_trainer.observability.monitor import node

    monkeypatch.setattr(node, "JOIN_TIMEOUT_S", 0.05)
    released = threading.Event()
    nvml = FakeNvml()
    monkeypatch.setattr(
        nvml, "nvmlDeviceGetUtilizationRates", lambda handle: released.wait() and SimpleNamespace(gpu=1)
    )
    with monitor(tmp_path, log, gpus=True, nvml=lambda: nvml) as one:
        assert one.energy_joules() is None
    released.set()
    one._thread.join()
