"""Collectives of a step over the axes of NxD's rank mesh (`lt_trainer_neuron.grid`).

On Trainium a collective is an operation of the graph; NxD's `comm` modules provide it and, in NxD's CPU mode, the same
over gloo. Every call returns its result; NxD's in-place variants are not exposed.

A transfer between two stages is an all-gather of the two ranks, to which the receiver contributes zeros; the receiver
knows shape and dtype in advance. The transfer is in the graph only if its result is kept alive until the graph ends,
and it must be alone in its graph: all ranks of a collective load a graph that contains it, and stages run other graphs
in between.

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

Direction = Literal["forward", "backward"]
""""forward": activations to the next stage; "backward": their gradients to the previous one."""


class Collectives:
    """Collectives over the ranks of a mesh axis, in rank order; here those of a single rank."""

    def all_reduce_sum(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Return the sum over the ranks of the axis."""
        return tensor

    def all_reduce_max(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Return the elementwise maximum over the ranks of the axis."""
        return tensor

    def reduce_scatter(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Return this rank's equal share of the rows of the sum.

        The number of rows must be a multiple of the number of ranks.
        """
        return tensor

    def all_gather(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Concatenate the ranks' rows in rank order."""
        return tensor


class PipelineP2P(Protocol):
    """Point-to-point transfers with the adjacent pipeline stages."""

    def send(self, tensor: Tensor, direction: Direction) -> Tensor:
        """Send to the next stage in `direction`; keep the result alive until the graph has ended."""
        ...

    def recv(self, shape: Sequence[int], dtype: torch.dtype, direction: Direction) -> Tensor:
        """Receive from the previous stage in `direction`; the result requires no gradient."""
        ...


class NxdCollectives(Collectives):
    """Collectives over NxD's process groups, which must be initialized."""

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

    def all_reduce_sum(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Return the sum over the ranks of the axis."""
        return self._all_reduce(self._xm.REDUCE_SUM, tensor, axis)

    def all_reduce_max(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Return the elementwise maximum over the ranks of the axis."""
        return self._all_reduce(self._xm.REDUCE_MAX, tensor, axis)

    def _all_reduce(self, reduce_op: str, tensor: Tensor, axis: Axis) -> Tensor:
        if self._sizes[axis] == 1:
            return tensor
        bucket = [tensor.detach().clone()]  # reduced in place
        self._comm.all_reduce(reduce_op, bucket, groups=self._groups[axis], pin_layout=False)
        return bucket[0]

    def reduce_scatter(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Return this rank's equal share of the rows of the sum."""
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

    def all_gather(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Concatenate the ranks' rows in rank order."""
        if self._sizes[axis] == 1:
            return tensor
        return self._comm.all_gather(tensor.detach(), dim=0, groups=self._groups[axis], pin_layout=False)


@dataclass(frozen=True)
class _TensorMeta:
    """Metadata that NxD needs for a tensor to receive."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool = False


class NxdPipelineP2P:
    """Transfers over NxD's stage pairs; its process groups must be initialized."""

    def __init__(self) -> None:
        from neuronx_distributed.pipeline import comm

        self._comm = comm

    def send(self, tensor: Tensor, direction: Direction) -> Tensor:
        """Send to the next stage in `direction`."""
        return self._comm.send(tensor.detach().contiguous(), send_next=direction == "forward")

    def recv(self, shape: Sequence[int], dtype: torch.dtype, direction: Direction) -> Tensor:
        """Receive from the previous stage in `direction`."""
        return self._comm.recv_from(_TensorMeta(torch.Size(shape), dtype), recv_prev=direction == "forward")
