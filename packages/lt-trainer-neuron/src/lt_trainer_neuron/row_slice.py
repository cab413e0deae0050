"""Rows of a layer's tensor that a rank's optimizer updates, and their way to host memory and back.

Cost: a copy of the whole tensor from or to a device; nothing on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

MASTER_WEIGHTS = "weights"
"""State group of the weights that the optimizer updates: fp32 master weights if any, else the layers' weights."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSlice:
    """Rows of one of this rank's layer tensors, in memory of the device.

    Only whole tensors move between host and device, and not their views: on a lazy device a slice is a graph, and after
    a backward pass so is what `detach` returns; each would be compiled.

    Attributes:
        stored: the rows, followed by ZeRO-1's padding.
        n_rows: number of rows without padding; 0 if this rank holds only padding.
        start_row: index of the first row in the layer's tensor.
    """

    stored: Tensor
    n_rows: int
    start_row: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows, without padding."""
        return (self.n_rows, *self.stored.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        return self.stored.dtype

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows, without padding."""
        return prod(self.shape) * self.stored.element_size()

    @property
    def is_on_host(self) -> bool:
        """True if host memory holds the rows, so that they can be used in place."""
        return self.stored.device.type == "cpu"

    def to_host(self) -> Tensor:
        """Return the rows: a copy from a device, else a view."""
        return self.stored.cpu().detach()[: self.n_rows]

    def empty_on_host(self) -> Tensor:
        """Return memory for new rows, for `store`: on the host the rows themselves."""
        return self.to_host() if self.is_on_host else torch.zeros(self.shape, dtype=self.dtype)

    def store(self, rows: Tensor) -> None:
        """Copy rows from `empty_on_host` to the device."""
        if not self.is_on_host:
            padding = [0, 0] * (rows.ndim - 1) + [0, self.stored.shape[0] - self.n_rows]
            with torch.no_grad():
                self.stored.copy_(functional.pad(rows, padding))
