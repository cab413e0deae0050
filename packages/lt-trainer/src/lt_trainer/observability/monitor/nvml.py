"""GPU sampler based on NVML: the only module that imports `pynvml` (package nvidia-ml-py).

`GpuSampler` takes the library as an argument, so tests can pass a fake. A query that a device does not support is tried
once and then skipped. Nothing raises after the devices are open.

Cost: about six driver calls per GPU and sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lt_trainer.constants import GIB


class GpusUnavailableError(Exception):
    """GPUs cannot be monitored."""


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """Sample of one GPU; None for unavailable values."""

    utilization_percent: float | None
    """Fraction of the last second or less in which a kernel was running, however efficient."""
    memory_used_gib: float | None
    memory_total_gib: float | None
    power_w: float | None
    temperature_c: float | None
    energy_counter_j: float | None
    """Energy since the driver was loaded."""


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


class GpuSampler:
    """Sampler of this run's GPUs on this node.

    Args:
        nvml: the initialized library.
        count: number of visible GPUs that the run uses, from the first.
        environ: environment with CUDA_VISIBLE_DEVICES.

    Raises:
        GpusUnavailableError: a GPU cannot be opened.
    """

    def __init__(self, nvml: Any, *, count: int, environ: Mapping[str, str]) -> None:
        self._nvml = nvml
        try:
            self._handles = [self._open(name) for name in visible_gpus(environ, count)]
        except nvml.NVMLError as exc:
            raise GpusUnavailableError(f"NVML cannot open the GPUs: {exc}") from None
        self._unsupported: set[tuple[int, str]] = set()
        self.last_problem = ""
        """Last error of the library."""

    def _open(self, name: str) -> Any:
        if name.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        for index in range(self._nvml.nvmlDeviceGetCount()):  # CUDA accepts UUID prefixes
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            if self._nvml.nvmlDeviceGetUUID(handle).startswith(name):
                return handle
        return self._nvml.nvmlDeviceGetHandleByUUID(name)  # a MIG instance

    def __len__(self) -> int:
        return len(self._handles)

    def close(self) -> None:
        """Shut down the library."""
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def sample(self, index: int) -> GpuSample:
        """Return a sample of GPU `index` of this run."""
        nvml, handle = self._nvml, self._handles[index]

        def query(name: str, call: Callable[[], Any]) -> Any:
            if (index, name) in self._unsupported:
                return None
            try:
                return call()
            except nvml.NVMLError as exc:
                if isinstance(exc, nvml.NVMLError_NotSupported):
                    self._unsupported.add((index, name))
                else:
                    self.last_problem = f"GPU {index}, {name}: {exc}"
                return None

        rates = query("utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        memory = query("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        milliwatts = query("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        millijoules = query("energy", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        sensor = nvml.NVML_TEMPERATURE_GPU
        return GpuSample(
            utilization_percent=None if rates is None else rates.gpu,
            memory_used_gib=None if memory is None else round(memory.used / GIB, 3),
            memory_total_gib=None if memory is None else round(memory.total / GIB, 3),
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=query("temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, sensor)),
            energy_counter_j=None if millijoules is None else millijoules / 1000,
        )


def visible_gpus(environ: Mapping[str, str], count: int) -> list[str]:
    """Return the GPUs of local ranks 0 to `count` - 1, as indices or UUIDs.

    Without CUDA_VISIBLE_DEVICES these are the first in NVML's order, which is CUDA's order if all GPUs are the same
    model.
    """
    names = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[:count] or [str(index) for index in range(count)]
