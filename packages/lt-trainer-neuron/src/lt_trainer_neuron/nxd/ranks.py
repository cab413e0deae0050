"""What ranks say to each other in a step, by axis of NxD's box of ranks (`lt_trainer_neuron.grid`).

On Trainium a collective is an operation of the graph; NxD's `comm` modules have them for that and, in its CPU mode,
over gloo. Every call returns its result: NxD's in-place forms are kept inside.

What one stage gives another is an all-gather of the two ranks there, to which the taking rank adds zeros; it knows
shape and dtype, so nothing is announced beforehand. It is in the graph only if its result is kept until the graph ends,
and must be alone in it: all ranks of a collective load a graph that has it, and stages run other graphs in between.

Cost: one collective per call.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lt_trainer_neuron.grid import Axis

__all__ = ["Alone", "Neighbours", "NxdNeighbours", "NxdRanks", "Ranks", "Way"]

Way = Literal["onward", "back"]
"""Onward: outputs, from a stage to the next; back: their gradients."""


class Ranks(Protocol):
    """See the module's text; `axis` names the ranks that take part, in their order."""

    def summed(self, tensor: Tensor, axis: Axis) -> Tensor:
        """The sum over the ranks of the axis."""
        ...

    def largest(self, tensor: Tensor, axis: Axis) -> Tensor:
        """The elementwise maximum over the ranks of the axis."""
        ...

    def scattered(self, tensor: Tensor, axis: Axis) -> Tensor:
        """This rank's equal share of the rows of the sum; the rows must divide by the ranks."""
        ...

    def gathered(self, tensor: Tensor, axis: Axis) -> Tensor:
        """The rows of all ranks, one below the other."""
        ...


class Neighbours(Protocol):
    """The stages before and after this one; see the module's text."""

    def give(self, tensor: Tensor, way: Way) -> Tensor:
        """Let the neighbour that lies this way have the tensor; keep the result until the graph has ended."""
        ...

    def take(self, shape: Sequence[int], dtype: torch.dtype, way: Way) -> Tensor:
        """What the neighbour gives that lies against this way; it needs no gradient."""
        ...


class Alone:
    """A world of one rank."""

    def summed(self, tensor: Tensor, axis: Axis) -> Tensor:
        """The tensor itself."""
        return tensor

    def largest(self, tensor: Tensor, axis: Axis) -> Tensor:
        """The tensor itself."""
        return tensor

    def scattered(self, tensor: Tensor, axis: Axis) -> Tensor:
        """The tensor itself."""
        return tensor

    def gathered(self, tensor: Tensor, axis: Axis) -> Tensor:
        """The tensor itself."""
        return tensor


class NxdRanks:
    """The groups that NxD has made, which must be initialised."""

    def __init__(self) -> None:
        from neuronx_distributed.parallel_layers import comm, parallel_state
        from neuronx_distributed.utils import cpu_mode
        from torch_xla.core import xla_model

        self._comm, self._xm, self._on_host = comm, xla_model, cpu_mode()
        self._groups: dict[Axis, Any] = {
            "tp": parallel_state.get_tensor_model_parallel_group(),
            "dp": parallel_state.get_data_parallel_group(),
            "pp": parallel_state.get_pipeline_model_parallel_group(),
        }
        self._sizes: dict[Axis, int] = {
            "tp": parallel_state.get_tensor_model_parallel_size(),
            "dp": parallel_state.get_data_parallel_size(),
            "pp": parallel_state.get_pipeline_model_parallel_size(),
        }

    def summed(self, tensor: Tensor, axis: Axis) -> Tensor:
        """The sum over the ranks of the axis."""
        return self._reduced(self._xm.REDUCE_SUM, tensor, axis)

    def largest(self, tensor: Tensor, axis: Axis) -> Tensor:
        """The elementwise maximum over the ranks of the axis."""
        return self._reduced(self._xm.REDUCE_MAX, tensor, axis)

    def _reduced(self, how: str, tensor: Tensor, axis: Axis) -> Tensor:
        if self._sizes[axis] == 1:
            return tensor
        bucket = [tensor.detach().clone()]  # reduced in place
        self._comm.all_reduce(how, bucket, groups=self._groups[axis], pin_layout=False)
        return bucket[0]

    def scattered(self, tensor: Tensor, axis: Axis) -> Tensor:
        """This rank's equal share of the rows of the sum."""
        size = self._sizes[axis]
        if size == 1:
            return tensor
        rows = torch.empty((tensor.shape[0] // size, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        self._comm.reduce_scatter(
            self._xm.REDUCE_SUM,
            tensor.detach().clone(),  # NxD's CPU mode sums into its argument
            scale=1,
            scatter_dim=0,
            shard_count=size,
            groups=self._groups[axis],
            output=rows,
            pin_layout=False,
        )
        return rows

    def gathered(self, tensor: Tensor, axis: Axis) -> Tensor:
        """The rows of all ranks, one below the other."""
        if self._sizes[axis] == 1:
            return tensor
        return self._comm.all_gather(tensor.detach(), dim=0, groups=self._groups[axis], pin_layout=False)


@dataclass(frozen=True)
class _Meta:
    """What NxD asks of a tensor that is to come."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool = False


class NxdNeighbours:
    """NxD's pairs of stages; its groups must be initialised."""

    def __init__(self) -> None:
        from neuronx_distributed.pipeline import comm

        self._comm = comm

    def give(self, tensor: Tensor, way: Way) -> Tensor:
        """Let the neighbour that lies this way have the tensor."""
        return self._comm.send(tensor.detach().contiguous(), send_next=way == "onward")

    def take(self, shape: Sequence[int], dtype: torch.dtype, way: Way) -> Tensor:
        """What the neighbour gives that lies against this way."""
        return self._comm.recv_from(_Meta(torch.Size(shape), dtype), recv_prev=way == "onward")
