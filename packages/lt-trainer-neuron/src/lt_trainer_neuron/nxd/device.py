"""Tensor devices: a torch-xla device, which runs asynchronously, or the host.

A lazy device records operations and runs them as one compiled graph when the graph ends. A graph is recompiled whenever
anything in it is new: a shape, a constant, or a tensor that was a constant and is now data. So numbers that change from
step to step are moved to the device as tensors (`scalar_tensor`): a Python 0 or 1 is a constant of the graph, and
torch-xla also treats a 0 or 1 in a zero-dimensional tensor as one. Reading a value ends the graph and waits; here only
`fetch_scalars` and `fetch_array` do.

Cost: `to_device` copies without waiting; `fetch_scalars` is one transfer for all of its values.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor


class TensorDevice:
    """Device that holds a rank's tensors; here the host, with eager execution."""

    torch_device: torch.device = torch.device("cpu")
    kind: str = "cpu"
    name: str = "cpu"

    def to_device(self, array: np.ndarray) -> Tensor:
        """Return a copy on the device; on the host a tensor that shares the array's memory."""
        return torch.from_numpy(array).to(self.torch_device)

    def scalar_tensor(self, value: float, dtype: torch.dtype) -> Tensor:
        """Return a scalar tensor, on a lazy device as data of the graph.

        A one-element tensor is copied to the device and reshaped to zero dimensions there.
        """
        return torch.tensor([value], dtype=dtype).to(self.torch_device).reshape(())

    def mark_step(self) -> None:
        """Do nothing: there is no graph."""

    def fetch_scalars(self, values: Sequence[Tensor]) -> list[float]:
        """Return scalars as floats.

        Results of a finished graph are only copied; nothing is compiled.
        """
        return [float(value.detach().cpu()) for value in values]

    def fetch_array(self, values: Tensor) -> np.ndarray:
        """Return a tensor of a finished graph as a float64 array; it is converted on the host."""
        return values.detach().cpu().to(torch.float64).numpy()

    def recompute_in_backward(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Call the function with torch's activation checkpointing."""
        from torch.utils.checkpoint import checkpoint

        return cast(Tensor, checkpoint(function, *inputs, use_reentrant=False))

    def memory_bytes(self) -> int:
        """Return the peak resident memory of this process in bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class XlaDevice(TensorDevice):
    """torch-xla device of this rank.

    A NeuronCore, or with PJRT_DEVICE=CPU the host with lazy execution.

    Raises:
        ImportError: torch-xla is not installed.
    """

    def __init__(self) -> None:
        import torch_xla
        from torch_xla import runtime

        self._xla = torch_xla
        self.torch_device = torch_xla.device()
        hardware = str(runtime.device_type() or "xla")
        self.kind = hardware.lower()
        self.name = f"torch-xla on {hardware}"

    def mark_step(self) -> None:
        """End the graph and launch it without waiting."""
        self._xla.sync()

    def recompute_in_backward(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Call the function with torch-xla's activation checkpointing.

        Its barriers prevent the compiler from merging the recomputation with the forward pass.
        """
        from torch_xla.utils.checkpoint import checkpoint

        return cast(Tensor, checkpoint(function, *inputs))

    def memory_bytes(self) -> int:
        """Return the device's peak memory in bytes.

        Falls back to this process's peak if the Neuron runtime does not report it.
        """
        from torch_xla.core import xla_model

        try:
            known = xla_model.get_memory_info(self.torch_device)
        except RuntimeError:  # not every PJRT plugin has the call
            return super().memory_bytes()
        return int(known.get("peak_bytes_used") or known.get("bytes_used") or super().memory_bytes())
