"""Clocks and sensors of the GPU benchmarks: CUDA events, the device's power and clock by nvidia-smi.

On a CPU the same code runs with another clock and without sensors. Torch is imported inside, because the parents of
these processes must not use a device.
"""

from __future__ import annotations

import csv
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

GPU_QUERY_FIELDS = ("power.draw", "clocks.sm", "temperature.gpu")


def gpu_query(fields: str) -> str | None:
    """Return the first line of nvidia-smi's output, or None without it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


class GpuMonitor:
    """Sampler of power, clock and temperature every 200 ms, if nvidia-smi is installed; does not disturb the host."""

    def __init__(self, kind: str) -> None:
        self._wanted = kind == "cuda" and shutil.which("nvidia-smi") is not None

    def __enter__(self) -> GpuMonitor:
        self._file = tempfile.TemporaryFile("w+")
        query = ["-i", "0", f"--query-gpu={','.join(GPU_QUERY_FIELDS)}", "--format=csv,noheader,nounits", "-lms", "200"]
        self._process = (
            subprocess.Popen(["nvidia-smi", *query], stdout=self._file, stderr=subprocess.DEVNULL)
            if self._wanted
            else None
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.stats: dict[str, Any] | None = None
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
            self._file.seek(0)
            self.stats = summarize_samples(list(csv.reader(self._file)))
        self._file.close()


def summarize_samples(rows: list[list[str]]) -> dict[str, Any] | None:
    """Return median and maximum of each column of `GPU_QUERY_FIELDS`; invalid lines are skipped."""
    samples = []
    for row in rows:
        try:
            values = [float(text) for text in row]
        except ValueError:
            continue
        if len(values) == len(GPU_QUERY_FIELDS):
            samples.append(values)
    if not samples:
        return None
    columns = dict(zip(("power_w", "sm_clock_mhz", "temperature_c"), zip(*samples, strict=True), strict=True))
    found = {name: {"median": statistics.median(values), "max": max(values)} for name, values in columns.items()}
    return {"samples": len(samples), **found}


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepTimer:
    """Timer of steps: CUDA events, which the host does not wait for, or perf_counter on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ticks: list[Any] = []

    def record(self) -> None:
        """Record a point in time."""
        import torch

        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._ticks.append(event)
        else:
            self._ticks.append(time.perf_counter())

    def elapsed_seconds(self) -> list[float]:
        """Return the seconds between consecutive points, after waiting for the last."""
        synchronize(self._device)
        pairs = zip(self._ticks, self._ticks[1:], strict=False)
        if self._device.type == "cuda":
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]


def time_call(device: torch.device, call: Callable[[], T]) -> tuple[float, T]:
    """Time `call` with the device idle before and after; return the seconds and the result."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - start, result
