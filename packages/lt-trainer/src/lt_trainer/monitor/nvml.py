"""GPUs through NVIDIA's management library: the one module that knows `pynvml` (package nvidia-ml-py).

`Gpus` takes the library as an argument, so that a stand-in that speaks the same functions can take its place. What a
device does not support is asked once and then left out. Nothing here raises once the devices are open.

Cost: some six calls per GPU and sample, each a read from the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

GIB = 2**30


class NoGpus(Exception):
    """Why GPUs cannot be looked at."""


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One GPU at one time; None for what it does not tell."""

    utilization_percent: float | None
    """Share of the last second or less in which a kernel was running; says nothing about how well."""
    memory_used_gib: float | None
    memory_total_gib: float | None
    power_w: float | None
    temperature_c: float | None
    counter_j: float | None
    """Energy since the driver was loaded."""


def load_nvml() -> Any:
    """The library, loaded and initialised.

    Raises:
        NoGpus: it is not installed, or finds no driver.
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        raise NoGpus("pip install 'lt-trainer[nvml]'") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        raise NoGpus(f"NVML does not start: {exc}") from None
    return pynvml


class Gpus:
    """The GPUs of this run on this node.

    Args:
        nvml: the library.
        count: how many of the visible GPUs the run uses: the first ones.
        environ: where CUDA_VISIBLE_DEVICES stands.

    Raises:
        NoGpus: one cannot be opened.
    """

    def __init__(self, nvml: Any, *, count: int, environ: Mapping[str, str]) -> None:
        self._nvml = nvml
        try:
            self._handles = [self._open(name) for name in visible(environ, count)]
        except nvml.NVMLError as exc:
            raise NoGpus(f"NVML does not open the GPUs: {exc}") from None
        self._unsupported: set[tuple[int, str]] = set()
        self.problem = ""
        """What the library answered last instead of a number."""

    def _open(self, name: str) -> Any:
        if name.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        for index in range(self._nvml.nvmlDeviceGetCount()):  # CUDA takes the beginning of a name as well
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            if self._nvml.nvmlDeviceGetUUID(handle).startswith(name):
                return handle
        return self._nvml.nvmlDeviceGetHandleByUUID(name)  # a part of a GPU

    def __len__(self) -> int:
        return len(self._handles)

    def close(self) -> None:
        """Let go of the library."""
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def sample(self, index: int) -> GpuSample:
        """What GPU number `index` of this run does now."""
        nvml, handle = self._nvml, self._handles[index]

        def ask(name: str, call: Callable[[], Any]) -> Any:
            if (index, name) in self._unsupported:
                return None
            try:
                return call()
            except nvml.NVMLError as exc:
                if isinstance(exc, nvml.NVMLError_NotSupported):
                    self._unsupported.add((index, name))
                else:
                    self.problem = f"GPU {index}, {name}: {exc}"
                return None

        rates = ask("utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        memory = ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        milliwatts = ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        millijoules = ask("energy", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        return GpuSample(
            utilization_percent=None if rates is None else rates.gpu,
            memory_used_gib=None if memory is None else round(memory.used / GIB, 3),
            memory_total_gib=None if memory is None else round(memory.total / GIB, 3),
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=ask("temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            counter_j=None if millijoules is None else millijoules / 1000,
        )


def visible(environ: Mapping[str, str], count: int) -> list[str]:
    """The GPUs that local ranks 0 to `count` - 1 use, as indices or names.

    Without CUDA_VISIBLE_DEVICES these are the first ones as NVML counts; CUDA counts alike where all GPUs are of a
    kind.
    """
    names = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[:count] or [str(index) for index in range(count)]
