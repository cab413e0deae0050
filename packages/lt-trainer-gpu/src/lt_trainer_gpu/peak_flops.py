"""Peak FLOP/s for MFU: from the datasheet of a GPU, from a timed matmul elsewhere.

A datasheet peak makes MFU comparable between machines; for a CPU, and for dtypes other than bfloat16, only a measured
one is meaningful. A GPU is looked up by its exact model name: what follows may only be its memory or form factor
("A100-SXM4-80GB" is an A100; "RTX A1000", "RTX 4090 Laptop GPU" and a MIG slice are not what their names contain). A
GPU outside of the table has no peak: MFU is nan, and the log says so. With fp8 layers the peak stays that of bfloat16,
so that the MFU of a run with and without fp8 can be compared; it may exceed that of any bfloat16 run.

The measurement takes about a quarter of a second; the returned source names its size and dtype.

Sources: NVIDIA's product datasheets (A10, A30, A40, A100, H100, H200, L4, L40, L40S, RTX A6000), architecture papers
(Ampere GA102, Ada, Blackwell: GeForce and RTX workstation boards with fp32 accumulation, and the systems HGX B200 and
B300, GB200 and GB300 NVL72, per GPU), AWS's figure for its A10G, and AMD's datasheets of Instinct. A800, H800 and H20
are the export models as sold. Figures with sparsity are halved.
"""

from __future__ import annotations

import math
import re
import time

import torch

DATASHEET_BF16_FLOPS = {
    "A10": 125e12,
    "A10G": 70e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "A100": 312e12,
    "A800": 312e12,
    "L4": 121e12,
    "L20": 119.5e12,
    "L40": 181e12,
    "L40S": 362e12,
    "H20": 148e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H800": 989e12,
    "H800 PCIe": 756e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "RTX A6000": 154.8e12,
    "RTX 6000 Ada Generation": 364e12,
    "RTX PRO 6000 Blackwell Server Edition": 503.8e12,
    "RTX PRO 6000 Blackwell Workstation Edition": 503.8e12,
    "GeForce RTX 3090": 71e12,
    "GeForce RTX 4090": 165.2e12,
    "GeForce RTX 5090": 209.5e12,
    "Instinct MI250X": 191.5e12,
    "Instinct MI300X": 1307e12,
    "Instinct MI325X": 1307e12,
    "Instinct MI350X": 2307e12,
    "Instinct MI355X": 2517e12,
}
"""Dense bfloat16 FLOP/s by model name, without the vendor's; an MI250X is two devices, each with half of its FLOP/s."""

FORM_FACTOR = re.compile(r"(SXM\d?|PCIE|PCIe|AC|OAM|HBM\d\w?|\d+GB?)")
"""Word after a model name that does not change the peak of those in the table."""


def find_datasheet_peak(device_name: str) -> tuple[str, float] | None:
    """Return model and dense bfloat16 FLOP/s of a GPU by the name that torch reports, if known."""
    words = re.split(r"[ -]", re.sub(r"^(NVIDIA|AMD) ", "", device_name.strip()))
    for n_words in range(len(words), 0, -1):
        model = " ".join(words[:n_words])
        if model in DATASHEET_BF16_FLOPS and all(FORM_FACTOR.fullmatch(word) for word in words[n_words:]):
            return model, DATASHEET_BF16_FLOPS[model]
    return None


def peak_flops(device: torch.device, dtype: torch.dtype, device_name: str) -> tuple[float, str]:
    """Return the peak FLOP/s of one device at `dtype`, or nan, and the source of the number.

    Args:
        device: the compute device.
        dtype: dtype of forward and backward.
        device_name: its name as torch reports it.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        found = find_datasheet_peak(device_name)
        if found is None:
            return math.nan, f"unknown: {device_name!r} is not in the table of lt_trainer_gpu.peak_flops"
        return found[1], f"datasheet of {found[0]}, dense bfloat16"
    return measure_matmul_flops(device, dtype)


def measure_matmul_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Measure the best FLOP/s of several matrix products on `device`, with torch's threads.

    1024^3 on a CPU; 4096^3 on a GPU, where 1024^3 takes less time than a launch and a synchronization.
    """
    size = 1024 if device.type == "cpu" else 4096
    a = torch.randn(size, size, dtype=torch.float32).to(device, dtype)
    b = torch.randn(size, size, dtype=torch.float32).to(device, dtype)
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)  # the first product loads cuBLAS, which takes longer than all the others
    _wait(device)
    best = float("inf")
    end = time.perf_counter() + 0.25
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return 2 * size**3 / best, f"measured, best {size}^3 matrix product in {str(dtype).removeprefix('torch.')}{threads}"


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
