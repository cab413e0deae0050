"""Sampling thread of a node, in its local rank 0; its errors never stop the run.

Each sample is a line of `<run>/monitor/node00000.jsonl`:

    time, node, host, cpu_percent, memory_used_gib, memory_available_gib,
    disk_free_gib, disk, disk_read_mib_s, disk_write_mib_s,
    ranks: {"0": {rss_gib, cpu_percent, read_mib_s, write_mib_s}, ...}
    gpus: [{gpu, utilization_percent, memory_used_gib, memory_total_gib, power_w, temperature_c}, ...]
    energy_j: joules of this node's GPUs since the run's first start
    monitor_cpu_s: CPU time of this thread

Rank 0's thread also reads the last lines of the other nodes, for the energy of the whole run. Problems are reported
once per kind and written to the rank's log; sampling continues without the missing values.

The main thread only reads the thread's fields: it never waits for a driver or a disk.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_trainer.engine import World
from lt_trainer.errors import RunDirError
from lt_trainer.files import read_bytes
from lt_trainer.observability.monitor.energy import EnergyMeter
from lt_trainer.observability.monitor.host import HostSampler
from lt_trainer.observability.monitor.nvml import GpuSampler, GpusUnavailableError, load_nvml
from lt_trainer.resilience.heartbeat import decode_heartbeat
from lt_trainer.resilience.watchdog import heartbeat_path
from lt_trainer.run_directory.jsonl import JsonlWriter, read_last_object
from lt_trainer.run_directory.typed_records import is_number

if TYPE_CHECKING:
    from lt_trainer.run_directory.rank_log import RankLog

FOLDER = "monitor"
JOIN_TIMEOUT_S = 5.0
"""Maximum wait for the thread at the end of a run: a hanging driver must not block the exit."""


def node_path(run: Path, node: int) -> Path:
    """Return the samples file of a node."""
    return run / FOLDER / f"node{node:05}.jsonl"


def node_paths(run: Path) -> list[Path]:
    """Return the sample files of all nodes that ever took part in a run."""
    return sorted((run / FOLDER).glob("node*.jsonl"))


def _joules(path: Path) -> float:
    """Return the joules of the newest sample of a file; 0 without one."""
    joules = read_last_object(path).get("energy_j", 0.0)
    return float(joules) if is_number(joules) else 0.0


class NodeMonitor:
    """Context manager that samples this node in a thread.

    Args:
        run: run directory.
        world: ranks of this process; it is local rank 0 of its node.
        attempt: name of this start of the run, as in heartbeats.
        interval_s: time between samples.
        log: log for problems.
        gpus: the local ranks compute on GPUs.
        nvml: loads NVML; raises GpusUnavailableError.
        environ: environment with CUDA_VISIBLE_DEVICES.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        run: Path,
        *,
        world: World,
        attempt: str,
        interval_s: float,
        log: RankLog,
        gpus: bool,
        nvml: Callable[[], Any] = load_nvml,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._world, self._attempt, self._interval_s = run, world, attempt, interval_s
        self._log, self._clock = log, clock
        self._node = world.rank // world.local_size
        self._path = node_path(run, self._node)
        self._nvml = nvml if gpus else None
        self._environ = environ
        self._gpus: GpuSampler | None = None
        self._meters: list[EnergyMeter] = []
        self._host = HostSampler(run, clock=clock)
        self._sink: JsonlWriter | None = None
        self._previous_starts_j = self._node_j = 0.0
        """Joules of this node in earlier starts of the run, and in all starts."""
        self._energy: tuple[float, float, float] | None = None
        """Time, joules of the whole run until then, and watts of this node's GPUs."""
        self._newest: dict[str, Any] = {}
        self._reported_kinds: set[str] = set()
        self._new_problems: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_loop, name="monitor", daemon=True)

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
        sample, scalars = self._newest, {}
        groups = {"": sample} | {f"rank{rank}/": values for rank, values in sample.get("ranks", {}).items()}
        groups |= {f"gpu{values['gpu']}/": values for values in sample.get("gpus", [])}
        for prefix, values in groups.items():
            for name, value in values.items():
                if isinstance(value, int | float) and name not in ("node", "gpu", "monitor_cpu_s"):
                    scalars[f"node{self._node}/{prefix}{name}"] = float(value)
        return scalars

    def pop_problems(self) -> list[str]:
        """Return and clear the new problems, each kind once per run; for the main thread."""
        problems, self._new_problems = self._new_problems, []
        return problems

    def __enter__(self) -> NodeMonitor:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(JOIN_TIMEOUT_S)

    def _sample_loop(self) -> None:
        """Sample until the monitor stops, and once more then."""
        self._open()
        self._sample()
        while not self._stop.wait(self._interval_s):
            self._sample()
        self._sample()
        if self._gpus is not None:
            self._gpus.close()
        if self._sink is not None:
            with suppress(RunDirError):
                self._sink.close()

    def _open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._previous_starts_j = self._node_j = _joules(self._path)
            self._sink = JsonlWriter(self._path)
        except (OSError, RunDirError) as exc:
            self._report_problem("file", f"samples of this node are not saved: {exc}")
        if self._nvml is None:
            return
        try:
            self._gpus = GpuSampler(self._nvml(), count=self._world.local_size, environ=self._environ)
        except GpusUnavailableError as exc:
            self._report_problem("gpus", f"GPUs and their energy are not monitored: {exc}")
            return
        self._meters = [EnergyMeter() for _ in range(len(self._gpus))]

    def _sample(self) -> None:
        sample: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "node": self._node,
            "host": socket.gethostname(),
        }
        try:
            sample |= self._host.sample(self._pids())
        except OSError as exc:  # psutil reads system files; a network file system may be temporarily unavailable
            self._report_problem("host", f"sampling this node failed: {exc}")
        if self._gpus is not None:
            sample |= self._gpu_sample(self._gpus)
        if self._node_j:
            sample["energy_j"] = round(self._node_j, 3)
        sample["monitor_cpu_s"] = round(time.thread_time(), 4)
        self._newest = sample
        if self._sink is not None:
            try:
                self._sink.write(sample)
            except RunDirError as exc:
                self._report_problem("file", f"samples of this node are not saved: {exc}")

    def _gpu_sample(self, gpus: GpuSampler) -> dict[str, Any]:
        samples, watts = [], 0.0
        for index, meter in enumerate(self._meters):
            now = gpus.sample(index)
            meter.update(self._clock(), now.energy_counter_j, now.power_w)
            watts += now.power_w or 0.0
            values = {name: value for name, value in asdict(now).items() if value is not None}
            values.pop("energy_counter_j", None)
            samples.append({"gpu": index, **values})
        if gpus.last_problem:
            self._report_problem("gpu", f"{gpus.last_problem}")
        joules = [meter.joules for meter in self._meters if meter.joules is not None]
        if joules:
            self._node_j = self._previous_starts_j + sum(joules)
            self._energy = (self._clock(), self._node_j + self._other_nodes_j(), watts)
        return {"gpus": samples}

    def _other_nodes_j(self) -> float:
        """Return the reported joules of the run's other nodes; 0 off rank 0."""
        if self._world.rank != 0:
            return 0.0
        others = [path for path in node_paths(self._run) if path != self._path]
        return sum(map(_joules, others))

    def _pids(self) -> dict[int, int]:
        """Return the PIDs of this node's ranks from their heartbeats, without invisible processes."""
        first = self._world.rank
        records = {}
        for rank in range(first, first + self._world.local_size):
            with suppress(OSError):
                record = decode_heartbeat(read_bytes(heartbeat_path(self._run, rank)))
                if record is not None and record.attempt == self._attempt:
                    records[rank] = record
        machine_id = records[first].machine_id if first in records else ""
        return {rank: record.pid for rank, record in records.items() if record.machine_id == machine_id}

    def _report_problem(self, kind: str, text: str) -> None:
        if kind in self._reported_kinds:
            return
        self._reported_kinds.add(kind)
        self._new_problems.append(text)
        with suppress(RunDirError):
            self._log.write(f"# monitor: {text}")
