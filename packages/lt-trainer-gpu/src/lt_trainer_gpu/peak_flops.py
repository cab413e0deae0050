"""Peak FLOP/s for MFU: from the datasheet of a GPU, from a timed matmul elsewhere.

A datasheet peak makes MFU comparable between machines; for a CPU, and for dtypes other than bfloat16, only a measured
one is meaningful. A GPU is looked up by its exact model name: what follows may only be its memory or form factor
("A100-SXM4-80GB" is an A100; "RTX A1000", "RTX 4090 Laptop GPU" and a MIG slice are not what their names contain). A
GPU outside of the table (`lt_trainer.planning.devices`) has no peak: MFU is nan, and the log says so. With fp8 layers
the peak stays that of bfloat16, so that the MFU of a run with and without fp8 can be compared; it may exceed that of
any bfloat16 run.

The measurement takes about a tenth of a second, once in a process; the returned source names its size and dtype.
"""

from __future__ import annotations

import functools
import math
import re
import time

import torch

from lt_trainer.planning.devices import PEAK_TFLOPS

FORM_FACTOR = re.compile(r"(SXM\d?|PCIE|PCIe|AC|OAM|HBM\d\w?|\d+GB?)")
"""Word after a model name that does not change the peak of those in the table."""


def find_datasheet_peak(device_name: str) -> tuple[str, float] | None:
    """Return model and dense bfloat16 FLOP/s of a GPU by the name that torch reports, if known."""
    words = re.split(r"[ -]", re.sub(r"^(NVIDIA|AMD) ", "", device_name.strip()))
    for n_words in range(len(words), 0, -1):
        model = " ".join(words[:n_words])
        if model in PEAK_TFLOPS and all(FORM_FACTOR.fullmatch(word) for word in words[n_words:]):
            return model, PEAK_TFLOPS[model] * 1e12
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
            return math.nan, f"unknown: {device_name!r} is not in the table of lt_trainer.planning.devices"
        return found[1], f"datasheet of {found[0]}, dense bfloat16"
    return measure_matmul_flops(device, dtype)


@functools.cache
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
    end = time.perf_counter() + 0.1
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
