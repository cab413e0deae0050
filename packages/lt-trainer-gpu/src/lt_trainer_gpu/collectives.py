"""What tensor-parallel ranks say to each other within a layer, each with the gradient that belongs to it.

A layer is entered and left once (Megatron-LM, arXiv:1909.08053; with sequence parallelism arXiv:2205.05198):

               without sequence parallelism      with it (ranks hold T/tp positions between layers)
    enter      forward nothing, backward sum     forward gather positions, backward sum and scatter them
    leave      forward sum, backward nothing     forward sum and scatter positions, backward gather

Between layers all ranks hold the same numbers, or their own positions of them. A weight that every rank applies to its
own positions (a norm's) has only a part of its gradient on each of them: `shared` sums it.

All are plain functions on plain tensors over torch's functional collectives, so that eager and compiled code do the
same, and no tensor subclass stands between a weight and its gradient. Cost per layer of a model: 2 times enter and
leave, B * T * D numbers each, forward and backward.

Shapes: B batch, T positions, D hidden_size, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ops = torch.ops._c10d_functional  # what torch's functional collectives call; their own names change with versions
SEQUENCE = 1  # the dimension of positions in [B, T, D]


@dataclass(frozen=True, kw_only=True)
class TensorAxis:
    """The ranks that compute each layer together, seen from one of them.

    Attributes:
        size: how many they are.
        rank: which this is.
        group: name of their process group.
        sequence: whether they share the positions between layers.
    """

    size: int
    rank: int
    group: str
    sequence: bool


def enter(x_BTD: Tensor, axis: TensorAxis) -> Tensor:
    """What every rank's part of a layer is given: all positions."""
    return _Gather.apply(x_BTD, axis) if axis.sequence else _SumGradient.apply(x_BTD, axis)


def leave(x_BTD: Tensor, axis: TensorAxis) -> Tensor:
    """The sum of every rank's part of a layer: all positions, or this rank's."""
    return _Scatter.apply(x_BTD, axis) if axis.sequence else _Sum.apply(x_BTD, axis)


def shared(weight: Tensor, axis: TensorAxis) -> Tensor:
    """A weight that all ranks hold, with the sum of their gradients for a gradient.

    Without sequence parallelism all ranks do the same with it and each has the whole gradient already.
    """
    return _SumGradient.apply(weight, axis) if axis.sequence else weight


def gather_stacked(x: Tensor, axis: TensorAxis) -> Tensor:
    """[N, *shape]: the tensors of all ranks, on every rank. Has no gradient."""
    gathered = _ops.all_gather_into_tensor(x.contiguous(), axis.size, axis.group)
    return _ops.wait_tensor(gathered).view(axis.size, *x.shape)


def _sum(x: Tensor, axis: TensorAxis) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", axis.group))


def _gather_positions(x_BTD: Tensor, axis: TensorAxis) -> Tensor:
    # Collectives put the ranks' tensors one behind the other, so positions come first while they run.
    x_TBD = x_BTD.transpose(0, SEQUENCE).contiguous()
    gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(x_TBD, axis.size, axis.group))
    return gathered.transpose(0, SEQUENCE).contiguous()


def _sum_positions(x_BTD: Tensor, axis: TensorAxis) -> Tensor:
    x_TBD = x_BTD.transpose(0, SEQUENCE).contiguous()
    summed = _ops.wait_tensor(_ops.reduce_scatter_tensor(x_TBD, "sum", axis.size, axis.group))
    return summed.transpose(0, SEQUENCE).contiguous()


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum(upstream, ctx.axis), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        return _sum(x, axis)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return upstream, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return _gather_positions(x, axis)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum_positions(upstream, ctx.axis), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return _sum_positions(x, axis)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gather_positions(upstream, ctx.axis), None
