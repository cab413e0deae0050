"""Devices by model name: dense bfloat16 peak, and for plans also memory and power.

Peaks are dense bfloat16 FLOP/s without sparsity. Sources: NVIDIA's product datasheets (A10, A30, A40, A100, H100, H200,
L4, L40, L40S, RTX A6000), architecture papers (Ampere GA102, Ada, Blackwell: GeForce and RTX workstation boards with
fp32 accumulation, and the systems HGX B200 and B300, GB200 and GB300 NVL72, per GPU), AWS's figure for its A10G, and
AMD's datasheets of Instinct. A800, H800 and H20 are the export models as sold. Figures with sparsity are halved.

Power is the board's limit from the same datasheets. Memory is the total that `nvidia-smi` shows: slightly less than the
rounded number in the datasheet. A rank of Trainium 2 under TorchNeuron is a logical core: a quarter of a chip's 96 GiB
and 667 dense bfloat16 TFLOP/s (AWS's page of Trn2 instances, 64 ranks on a trn2.48xlarge). Its power is an assumption:
AWS publishes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PEAK_TFLOPS: Mapping[str, float] = {
    "A10": 125,
    "A10G": 70,
    "A30": 165,
    "A40": 149.7,
    "A100": 312,
    "A800": 312,
    "L4": 121,
    "L20": 119.5,
    "L40": 181,
    "L40S": 362,
    "H20": 148,
    "H100": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H200": 989,
    "H200 NVL": 835,
    "H800": 989,
    "H800 PCIe": 756,
    "GH200": 989,
    "B200": 2250,
    "B300": 2250,
    "GB200": 2500,
    "GB300": 2500,
    "RTX A6000": 154.8,
    "RTX 6000 Ada Generation": 364,
    "RTX PRO 6000 Blackwell Server Edition": 503.8,
    "RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "GeForce RTX 3090": 71,
    "GeForce RTX 4090": 165.2,
    "GeForce RTX 5090": 209.5,
    "Instinct MI250X": 191.5,
    "Instinct MI300X": 1307,
    "Instinct MI325X": 1307,
    "Instinct MI350X": 2307,
    "Instinct MI355X": 2517,
    "Trainium2 rank": 166.75,
}
"""Dense bfloat16 TFLOP/s by model name, without the vendor's; an MI250X is two devices, each with half of that."""


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """Device model of plans.

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


def _device(name: str, title: str, model: str, memory_mib: int, power_w: float) -> tuple[str, DeviceModel]:
    return name, DeviceModel(
        name=name, title=title, memory_bytes=memory_mib << 20, peak_flops=PEAK_TFLOPS[model] * 1e12, power_w=power_w
    )


DEVICES: Mapping[str, DeviceModel] = dict(
    [
        _device("a10g", "NVIDIA A10G", "A10G", 23028, 300),
        _device("l4", "NVIDIA L4", "L4", 23034, 72),
        _device("l40s", "NVIDIA L40S", "L40S", 46068, 350),
        _device("a100-40gb", "NVIDIA A100 SXM 40 GB", "A100", 40960, 400),
        _device("a100", "NVIDIA A100 SXM 80 GB", "A100", 81920, 400),
        _device("h100", "NVIDIA H100 SXM", "H100", 81559, 700),
        _device("h100-pcie", "NVIDIA H100 PCIe", "H100 PCIe", 81559, 350),
        _device("h100-nvl", "NVIDIA H100 NVL", "H100 NVL", 95830, 400),
        _device("h200", "NVIDIA H200 SXM", "H200", 143771, 700),
        _device("b200", "NVIDIA B200", "B200", 183359, 1000),
        _device("trn2", "AWS Trainium2 rank (a quarter of a chip)", "Trainium2 rank", 24576, 125),
    ]
)
"""Devices of plans by name."""

OTHER_ENGINES_DEVICES: Mapping[str, str] = {"trn1": "neuron"}
"""Engine that plans a device which the gpu engine does not have."""
