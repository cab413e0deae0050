"""Device table for plans, with the source of each number.

Peaks are dense bfloat16 tensor-core FLOP/s (no sparsity) and power is the board's limit, both from NVIDIA's product
datasheets (https://www.nvidia.com/en-us/data-center/, one PDF each). Memory is the total that `nvidia-smi` shows:
slightly less than the rounded number in the datasheet.

A rank of Trainium 2 under TorchNeuron is a logical core: a quarter of a chip's 96 GiB and 667 dense bfloat16 TFLOP/s
(AWS's page of Trn2 instances, 64 ranks on a trn2.48xlarge). Its power is an assumption: AWS publishes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lt_trainer.config.fields import suggest
from lt_trainer.errors import RecipeError

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class PlannedDevice:
    """Device model.

    Attributes:
        name: value of `--device`.
        title: product name in the datasheet.
        memory_bytes: total memory, as shown by nvidia-smi.
        peak_flops: dense bfloat16 FLOP/s.
        power_w: board power limit.
    """

    name: str
    title: str
    memory_bytes: int
    peak_flops: float
    power_w: float


def _device(name: str, title: str, memory_mib: int, peak_tflops: float, power_w: float) -> PlannedDevice:
    return PlannedDevice(
        name=name, title=title, memory_bytes=memory_mib * _MIB, peak_flops=peak_tflops * 1e12, power_w=power_w
    )


_TABLE = (
    _device("a10g", "NVIDIA A10G", 23028, 70, 300),
    _device("l4", "NVIDIA L4", 23034, 121, 72),
    _device("l40s", "NVIDIA L40S", 46068, 362, 350),
    _device("a100-40gb", "NVIDIA A100 SXM 40 GB", 40960, 312, 400),
    _device("a100", "NVIDIA A100 SXM 80 GB", 81920, 312, 400),
    _device("h100", "NVIDIA H100 SXM", 81559, 989, 700),
    _device("h100-pcie", "NVIDIA H100 PCIe", 81559, 756, 350),
    _device("h100-nvl", "NVIDIA H100 NVL", 95830, 835, 400),
    _device("h200", "NVIDIA H200 SXM", 143771, 989, 700),
    _device("b200", "NVIDIA B200", 183359, 2250, 1000),
    _device("trn2", "AWS Trainium2 rank (a quarter of a chip)", 24576, 166.75, 125),
)
DEVICES: Mapping[str, PlannedDevice] = MappingProxyType({device.name: device for device in _TABLE})


def find_device(name: str) -> PlannedDevice:
    """Return the device called `name` (case-insensitive).

    Raises:
        RecipeError: unknown device.
    """
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    suggestion = suggest(name, DEVICES)
    hint = f"did you mean {suggestion}? " if suggestion else ""
    raise RecipeError("unknown device", values={"--device": name}, remedy=f"{hint}choose one of {', '.join(DEVICES)}")
