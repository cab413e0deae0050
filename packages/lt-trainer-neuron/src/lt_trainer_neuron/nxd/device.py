"""Where tensors lie: a torch-xla device, which runs ahead of the host, or the host itself.

A lazy device writes operations down and runs them as one compiled graph when the graph is ended. A graph is compiled
again whenever something in it is new: a shape, a constant, a tensor that is a constant here and data there. So numbers
that change from step to step are put on the device as tensors (`scalar`): a plain 0 or 1 is a constant of the graph,
and to torch-xla so is a 0 or 1 in a tensor without dimensions. Whatever asks for a value ends the graph and waits; here
only `read` does.

Cost: `put` copies without waiting; `read` is one transfer for all of its values.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

__all__ = ["HostDevice", "TensorDevice", "XlaDevice"]


class TensorDevice(Protocol):
    """See the module's text."""

    torch_device: torch.device
    kind: str
    name: str

    def put(self, array: np.ndarray) -> Tensor:
        """An array as a tensor on the device; not waited for."""
        ...

    def scalar(self, value: float, dtype: torch.dtype) -> Tensor:
        """A number as data of the graph, not as a constant in it."""
        ...

    def mark(self) -> None:
        """End the graph and send it off; does not wait."""
        ...

    def read(self, values: Sequence[Tensor]) -> list[float]:
        """Scalars as numbers; waits for the device."""
        ...

    def recomputed(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """What the function makes of the inputs; the backward pass computes again what it needs of what is inside."""
        ...

    def memory_bytes(self) -> int:
        """Peak memory, in bytes: of the device where it tells, else of this process."""
        ...


class HostDevice:
    """The host: every operation runs when it is called."""

    torch_device = torch.device("cpu")
    kind = "cpu"
    name = "cpu"

    def put(self, array: np.ndarray) -> Tensor:
        """The array's memory as a tensor."""
        return torch.from_numpy(array)

    def scalar(self, value: float, dtype: torch.dtype) -> Tensor:
        """A tensor of no dimensions."""
        return torch.tensor(value, dtype=dtype)

    def mark(self) -> None:
        """Nothing: there is no graph."""

    def read(self, values: Sequence[Tensor]) -> list[float]:
        """The numbers."""
        return [float(value) for value in values]

    def recomputed(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """By torch's checkpointing."""
        from torch.utils.checkpoint import checkpoint

        return cast(Tensor, checkpoint(function, *inputs, use_reentrant=False))

    def memory_bytes(self) -> int:
        """Peak resident size of this process."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class XlaDevice:
    """The device that torch-xla has for this rank: a NeuronCore, or with PJRT_DEVICE=CPU the host behind such graphs.

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

    def put(self, array: np.ndarray) -> Tensor:
        """A copy on the device; the array may be changed afterwards."""
        return torch.from_numpy(array).to(self.torch_device)

    def scalar(self, value: float, dtype: torch.dtype) -> Tensor:
        """A tensor of one element, made on the host, sent, and freed of its dimension there."""
        return torch.tensor([value], dtype=dtype).to(self.torch_device).reshape(())

    def mark(self) -> None:
        """End the graph here."""
        self._xla.sync()

    def read(self, values: Sequence[Tensor]) -> list[float]:
        """The numbers. What a marked graph has made is only copied; nothing is compiled for it."""
        return [float(value.detach().cpu()) for value in values]

    def recomputed(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """By torch-xla's checkpointing, whose barriers keep the compiler from joining both computations into one."""
        from torch_xla.utils.checkpoint import checkpoint

        return cast(Tensor, checkpoint(function, *inputs))

    def memory_bytes(self) -> int:
        """What the device says it has used at most; the Neuron runtime may not say, then this process's peak."""
        from torch_xla.core import xla_model

        try:
            known = xla_model.get_memory_info(self.torch_device)
        except RuntimeError:  # not every PJRT plugin has the call
            return HostDevice().memory_bytes()
        return int(known.get("peak_bytes_used") or known.get("bytes_used") or HostDevice().memory_bytes())
