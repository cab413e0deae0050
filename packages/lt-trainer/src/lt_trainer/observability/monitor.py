"""Node monitor: a thread of local rank 0 that samples its node by psutil and NVML; its errors never stop the run.

Each sample is a line of `<run>/monitor/node00000.jsonl`:

    time, node, host, cpu_percent, memory_used_gib, memory_available_gib,
    disk_free_gib, disk_read_mib_s, disk_write_mib_s,
    ranks: {"0": {rss_gib, cpu_percent}, ...}
    gpus: [{gpu, utilization_percent, memory_used_gib, memory_total_gib, power_w, temperature_c}, ...]
    energy_j: joules of this node's GPUs since the run's first start
    monitor_cpu_s: CPU time of this thread

Rates are averages since the previous sample, so the first one has none. What is not available is left out. In a
container, CPU and memory are the machine's. Rank 0's thread also reads the last lines of the other nodes, for the
energy of the whole run. Problems are written once to the rank's log.

The main thread only reads the thread's fields: it never waits for a driver or a disk. Cost of a sample: 0.2 ms of CPU,
0.1 ms per process, and six driver calls per GPU.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from lt_trainer.constants import GIB, MIB
from lt_trainer.engine import World
from lt_trainer.errors import RunDirError
from lt_trainer.run_directory.jsonl import JsonlWriter, read_last_object

JOIN_TIMEOUT_S = 5.0
"""Maximum wait for the thread at the end of a run: a hanging driver must not block the exit."""


class GpusUnavailableError(Exception):
    """GPUs cannot be monitored."""


def load_nvml() -> Any:
    """Import and initialize pynvml.

    Raises:
        GpusUnavailableError: not installed, or no driver.
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        raise GpusUnavailableError("pip install 'lt-trainer[nvml]'") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        raise GpusUnavailableError(f"cannot initialize NVML: {exc}") from None
    return pynvml


class NodeMonitor:
    """Context manager that samples this node in a thread.

    GPUs are those of local ranks 0 to the last: the first ones of CUDA_VISIBLE_DEVICES (indices or whole UUIDs), else
    of NVML's order, which is CUDA's order if all GPUs are the same model.

    Args:
        run: run directory.
        world: ranks of this process; it is local rank 0 of its node.
        pids: processes of this node's ranks by rank.
        interval_s: time between samples.
        log: writes a line to the rank's log, for problems.
        nvml: loads NVML (`load_nvml`); None if the ranks do not compute on NVIDIA's GPUs.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        run: Path,
        *,
        world: World,
        pids: Mapping[int, int],
        interval_s: float,
        log: Callable[[str], None],
        nvml: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world, self._interval_s, self._log, self._clock = world, interval_s, log, clock
        self.has_gpus = nvml is not None
        """Whether `energy_joules` may tell something."""
        self._node, self._load_nvml = world.rank // world.local_size, nvml
        self._nvml: Any = None
        self._path = run / "monitor" / f"node{self._node:05}.jsonl"
        self._processes = {rank: psutil.Process(pid) for rank, pid in pids.items() if psutil.pid_exists(pid)}
        for source in (psutil, *self._processes.values()):
            source.cpu_percent()  # the first call returns 0
        self._disk: tuple[float, float, float] | None = None
        """Time of the previous sample, and MiB that all disks had read and written."""
        self._gpus: list[Any] = []
        """Handles by local rank."""
        self._first_counter_j: float | None = None
        self._file: JsonlWriter | None = None
        self._node_j = self._previous_starts_j = 0.0
        """Joules of this node since the run's first start, and those of earlier starts."""
        self._energy: tuple[float, float, float] | None = None
        """Time, joules of the whole run until then, and watts of this node's GPUs."""
        self._newest: dict[str, Any] = {}
        self._problems: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="monitor", daemon=True)

    def energy_joules(self) -> float | None:
        """Return joules of all GPUs of the run since its first start; None if not measured.

        Extrapolates from the newest sample with its power, since only the thread calls the driver.
        """
        if self._energy is None:
            return None
        sampled_s, joules, watts = self._energy
        return joules + watts * max(self._clock() - sampled_s, 0.0)

    def scalars(self) -> dict[str, float]:
        """Return the newest sample by tag: "node0/cpu_percent", "node0/rank0/rss_gib", "node0/gpu0/power_w"."""
        sample = self._newest
        groups = {"": sample} | {f"rank{rank}/": values for rank, values in sample.get("ranks", {}).items()}
        groups |= {f"gpu{values['gpu']}/": values for values in sample.get("gpus", [])}
        return {
            f"node{self._node}/{prefix}{name}": float(value)
            for prefix, values in groups.items()
            for name, value in values.items()
            if isinstance(value, int | float) and name not in ("node", "gpu", "monitor_cpu_s")
        }

    def __enter__(self) -> NodeMonitor:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(JOIN_TIMEOUT_S)

    def _sample_until_stopped(self) -> None:
        """Sample at each interval until the monitor stops, and once more then."""
        try:
            self._node_j = self._previous_starts_j = read_last_object(self._path).get("energy_j", 0.0)
            self._file = JsonlWriter(self._path)
            if self._load_nvml is not None:
                self._open_gpus(self._load_nvml())
        except RunDirError as exc:
            self._report(f"samples of this node are not saved: {exc}")
        except GpusUnavailableError as exc:
            self._report(f"GPUs and their energy are not monitored: {exc}")
        self._sample()
        while not self._stop.wait(self._interval_s):
            self._sample()
        self._sample()
        if self._nvml is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        if self._file is not None:
            self._file.close()

    def _open_gpus(self, nvml: Any) -> None:
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        count = self._world.local_size
        try:
            of_index, of_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
            names = visible[:count] or [str(index) for index in range(count)]
            self._gpus = [of_index(int(name)) if name.isdecimal() else of_uuid(name) for name in names]
        except nvml.NVMLError as exc:
            raise GpusUnavailableError(f"NVML cannot open the GPUs: {exc}") from None
        self._nvml = nvml

    def _sample(self) -> None:
        try:
            sample = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "node": self._node}
            sample |= {"host": socket.gethostname()} | self._sample_host()
            if self._gpus:
                sample["gpus"] = [self._sample_gpu(index, handle) for index, handle in enumerate(self._gpus)]
                counters = [gpu.pop("counter_j") for gpu in sample["gpus"] if "counter_j" in gpu]
                if len(counters) == len(self._gpus):
                    self._first_counter_j = self._first_counter_j or sum(counters)
                    self._node_j = self._previous_starts_j + sum(counters) - self._first_counter_j
                    watts = sum(gpu.get("power_w", 0.0) for gpu in sample["gpus"])
                    self._energy = (self._clock(), self._node_j + self._other_nodes_j(), watts)
            if self._node_j:
                sample["energy_j"] = round(self._node_j, 3)
            self._newest = sample | {"monitor_cpu_s": round(time.thread_time(), 4)}
            if self._file is not None:
                self._file.write(self._newest)
        except (OSError, RunDirError) as exc:  # system files that psutil reads, the disk
            self._report(f"sampling this node failed: {exc}")

    def _sample_host(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        sample: dict[str, Any] = {
            "cpu_percent": psutil.cpu_percent(),
            "memory_used_gib": round((memory.total - memory.available) / GIB, 3),
            "memory_available_gib": round(memory.available / GIB, 3),
            "disk_free_gib": round(shutil.disk_usage(self._path.parent.parent).free / GIB, 3),
            "ranks": {},
        }
        if disk := psutil.disk_io_counters():
            now = (self._clock(), disk.read_bytes / MIB, disk.write_bytes / MIB)
            if self._disk is not None and now[0] > self._disk[0]:
                seconds, read, written = (new - old for new, old in zip(now, self._disk, strict=True))
                sample |= {"disk_read_mib_s": round(read / seconds, 3), "disk_write_mib_s": round(written / seconds, 3)}
            self._disk = now
        for rank, process in self._processes.items():
            with suppress(psutil.Error):  # it has exited
                rss_gib = round(process.memory_info().rss / GIB, 3)
                sample["ranks"][str(rank)] = {"rss_gib": rss_gib, "cpu_percent": process.cpu_percent()}
        return sample

    def _sample_gpu(self, index: int, handle: Any) -> dict[str, float]:
        """Return what a GPU has of the values; also counter_j, its energy counter."""
        nvml = self._nvml

        def query(call: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return call(handle, *arguments)
            except nvml.NVMLError_NotSupported:
                return None
            except nvml.NVMLError as exc:
                self._report(f"GPU {index}: {exc}")
                return None

        rates, memory = query(nvml.nvmlDeviceGetUtilizationRates), query(nvml.nvmlDeviceGetMemoryInfo)
        milliwatts, millijoules = query(nvml.nvmlDeviceGetPowerUsage), query(nvml.nvmlDeviceGetTotalEnergyConsumption)
        values = {
            "gpu": index,
            "utilization_percent": rates and rates.gpu,
            "memory_used_gib": memory and round(memory.used / GIB, 3),
            "memory_total_gib": memory and round(memory.total / GIB, 3),
            "power_w": milliwatts and milliwatts / 1000,
            "counter_j": millijoules and millijoules / 1000,
            "temperature_c": query(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        }
        return {name: value for name, value in values.items() if value is not None}

    def _other_nodes_j(self) -> float:
        """Return the reported joules of the run's other nodes; 0 off rank 0."""
        paths = self._path.parent.glob("node*.jsonl") if self._world.rank == 0 else ()
        return sum(read_last_object(path).get("energy_j", 0.0) for path in paths if path != self._path)

    def _report(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.add(problem)
            with suppress(RunDirError):
                self._log(f"# monitor: {problem}")
