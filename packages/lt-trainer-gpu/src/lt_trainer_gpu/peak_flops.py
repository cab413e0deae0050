"""Peak FLOP/s for MFU: from the datasheet if the device is known, else from a timed matmul.

A datasheet peak makes MFU comparable between machines; for a CPU only a measured one is meaningful. The measurement
takes about a quarter of a second; the returned source names its size and dtype.
"""

from __future__ import annotations

import time

import torch

DATASHEET_BF16_FLOPS = {
    "A100": 312e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
}
"""Dense bfloat16 FLOP/s from NVIDIA's datasheets, by a substring of the device's name; the longest match counts."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the peak FLOP/s of one device at `dtype`, and the source of the number."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        matches = [key for key in DATASHEET_BF16_FLOPS if key in name]
        if matches:
            key = max(matches, key=len)
            return DATASHEET_BF16_FLOPS[key], f"datasheet of {key}, dense bfloat16"
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
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    best = float("inf")
    end = time.perf_counter() + 0.25
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return 2 * size**3 / best, f"measured, best {size}^3 matrix product in {str(dtype).removeprefix('torch.')}{threads}"
