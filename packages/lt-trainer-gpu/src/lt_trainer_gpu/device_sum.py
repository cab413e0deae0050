"""Sum of a step's losses on the device: in float64, or in pairs of float32 where there is no float64.

The second number holds what the additions to the first have rounded away (Knuth's TwoSum, 6 operations), so the sum is
exact to one rounding for any number of micro-batches.

Cost: one kernel per addition in float64, eight in float32; never waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lt_trainer_gpu.devices import accumulation_dtype


class DeviceSum:
    """Sum of scalars on a device.

    Args:
        device: the device.
        dtype: dtype of the sum; the default is the device's widest.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self._sum = torch.zeros((), dtype=dtype or accumulation_dtype(device), device=device)
        self._rounded_away = None if self._sum.dtype == torch.float64 else torch.zeros_like(self._sum)

    def add(self, value: Tensor) -> None:
        """Add a scalar."""
        if self._rounded_away is None:
            self._sum += value
            return
        old, value = self._sum, value.to(self._sum.dtype)
        self._sum = old + value
        added = self._sum - old
        self._rounded_away += (old - (self._sum - added)) + (value - added)

    @property
    def total(self) -> Tensor:
        """The sum so far, a scalar on the device."""
        return self._sum if self._rounded_away is None else self._sum + self._rounded_away
