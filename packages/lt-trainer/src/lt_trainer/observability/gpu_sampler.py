"""GPU samples and energy by NVML: the only module that imports `pynvml` (package nvidia-ml-py).

`GpuSampler` takes the library as an argument, so that tests can pass a fake. Once the devices are open nothing raises:
a value that a device does not have is left out. Cost: about six driver calls per GPU and sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lt_trainer.constants import GIB


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


class EnergyMeter:
    """Energy of a GPU since the first reading: by its counter, else by its power.

    The counter is exact up to the driver's update interval (some milliseconds). Without one, or if it was reset (driver
    reload), the mean of two power readings times the interval is added.
    """

    def __init__(self) -> None:
        self.joules: float | None = None
        """None before the first reading."""
        self._previous = (0.0, None, None)

    def update(self, now_s: float, counter_j: float | None, power_w: float | None) -> None:
        """Add a reading: monotonic time, and what the GPU has of energy counter and power."""
        if counter_j is None and power_w is None:
            return
        before_s, before_j, before_w = self._previous
        if self.joules is None:
            self.joules = 0.0
        elif counter_j is not None and before_j is not None and counter_j >= before_j:
            self.joules += counter_j - before_j
        else:
            powers = [power for power in (before_w, power_w) if power is not None]
            self.joules += (now_s - before_s) * sum(powers) / max(len(powers), 1)
        self._previous = (now_s, counter_j, power_w)


class GpuSampler:
    """Sampler of this run's GPUs on this node: those of local ranks 0 to `count` - 1.

    Without CUDA_VISIBLE_DEVICES these are the first in NVML's order, which is CUDA's order if all GPUs are the same
    model. CUDA_VISIBLE_DEVICES may have indices or whole UUIDs.

    Args:
        nvml: the initialized library.
        count: number of GPUs that the run uses, the first visible ones.
        environ: environment with CUDA_VISIBLE_DEVICES.

    Raises:
        GpusUnavailableError: a GPU cannot be opened.
    """

    def __init__(self, nvml: Any, *, count: int, environ: Mapping[str, str]) -> None:
        self._nvml = nvml
        visible = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        names = visible[:count] or [str(index) for index in range(count)]
        try:
            self._handles = [
                nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
                for name in names
            ]
        except nvml.NVMLError as exc:
            raise GpusUnavailableError(f"NVML cannot open the GPUs: {exc}") from None
        self.meters = [EnergyMeter() for _ in names]
        self.problem = ""
        """Last error of the library."""

    def sample(self, now_s: float) -> list[dict[str, float]]:
        """Return the values of each GPU at a monotonic time, and add to their `meters`."""
        return [self._sample(index, now_s) for index in range(len(self._handles))]

    def _sample(self, index: int, now_s: float) -> dict[str, float]:
        nvml, handle = self._nvml, self._handles[index]

        def query(call: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return call(handle, *arguments)
            except nvml.NVMLError_NotSupported:
                return None
            except nvml.NVMLError as exc:
                self.problem = f"GPU {index}: {exc}"
                return None

        rates, memory = query(nvml.nvmlDeviceGetUtilizationRates), query(nvml.nvmlDeviceGetMemoryInfo)
        milliwatts, millijoules = query(nvml.nvmlDeviceGetPowerUsage), query(nvml.nvmlDeviceGetTotalEnergyConsumption)
        watts = None if milliwatts is None else milliwatts / 1000
        self.meters[index].update(now_s, None if millijoules is None else millijoules / 1000, watts)
        values = {
            "gpu": index,
            "utilization_percent": rates and rates.gpu,
            "memory_used_gib": memory and round(memory.used / GIB, 3),
            "memory_total_gib": memory and round(memory.total / GIB, 3),
            "power_w": watts,
            "temperature_c": query(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        }
        return {name: value for name, value in values.items() if value is not None}

    def close(self) -> None:
        """Shut down the library."""
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()
