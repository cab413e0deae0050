"""Tensor-parallel collectives within a layer, with their gradients.

Attention and feed-forward each begin with `copy_to_tp` and end with `reduce_from_tp` (Megatron-LM, arXiv:1909.08053;
with sequence parallelism, where ranks hold T/tp positions between layers, arXiv:2205.05198):

                      without sequence parallelism             with sequence parallelism
    copy_to_tp        forward identity, backward all-reduce    forward all-gather, backward reduce-scatter
    reduce_from_tp    forward all-reduce, backward identity    forward reduce-scatter, backward all-gather

Between layers all ranks hold the same activations, or their own positions of them. A weight that every rank applies to
its own positions (a norm's) has a partial gradient on each rank: `reduce_grad_in_backward` sums it.

All are plain functions on plain tensors over torch's functional collectives, so eager and compiled code do the same,
and gradients are plain tensors, not a subclass. Cost per layer of a model: two of each, B * T * D elements, forward and
backward.

Shapes: B batch, T positions, D hidden_size, N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ops = torch.ops._c10d_functional  # ops behind torch's functional collectives; public names vary by version
SEQ_DIM = 1  # of [B, T, D]


@dataclass(frozen=True, kw_only=True)
class TensorParallelGroup:
    """Tensor-parallel process group, seen from one rank.

    Attributes:
        size: number of ranks.
        rank: this rank's index in the group.
        group_name: name of the process group.
        sequence_parallel: whether positions are sharded over the ranks between layers.
    """

    size: int
    rank: int
    group_name: str
    sequence_parallel: bool


def copy_to_tp(x_BTD: Tensor, tp_group: TensorParallelGroup) -> Tensor:
    """Apply identity forward, all-reduce backward (SP: all-gather / reduce-scatter)."""
    kind: Any = _GatherFromSequenceParallel if tp_group.sequence_parallel else _CopyToTp
    return kind.apply(x_BTD, tp_group)


def reduce_from_tp(x_BTD: Tensor, tp_group: TensorParallelGroup) -> Tensor:
    """Apply all-reduce forward, identity backward (SP: reduce-scatter / all-gather)."""
    kind: Any = _ReduceScatterToSequenceParallel if tp_group.sequence_parallel else _ReduceFromTp
    return kind.apply(x_BTD, tp_group)


def sum_grad(weight: Tensor, tp_group: TensorParallelGroup) -> Tensor:
    """Apply identity forward, all-reduce backward to a replicated weight of which each rank uses a part."""
    return _CopyToTp.apply(weight, tp_group)


def sum_over_ranks(x: Tensor, tp_group: TensorParallelGroup) -> Tensor:
    """Apply all-reduce forward and backward, whatever the sequence parallelism."""
    return _ReduceFromTp.apply(_CopyToTp.apply(x, tp_group), tp_group)


def reduce_grad_in_backward(weight: Tensor, tp_group: TensorParallelGroup) -> Tensor:
    """Apply identity forward, all-reduce backward to a replicated weight if SP is on.

    Without sequence parallelism every rank already computes the full gradient, and `weight` is returned as is.
    """
    return sum_grad(weight, tp_group) if tp_group.sequence_parallel else weight


def all_reduce_softmax_terms(
    top: Tensor, exp_sum: Tensor, at_label: Tensor, tp_group: TensorParallelGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the terms of `lt_model.loss.AllReduceSoftmax` over ranks.

    The order of summation is the same on every rank. Not differentiable.
    """
    terms = torch.stack((top, exp_sum, at_label))
    gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(terms, tp_group.size, tp_group.group_name))
    tops, sums, labels = gathered.view(tp_group.size, *terms.shape).unbind(dim=1)
    top = tops.amax(dim=0)
    return top, ((tops - top).exp() * sums).sum(dim=0), labels.sum(dim=0)


def _all_reduce_sum(x: Tensor, tp_group: TensorParallelGroup) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", tp_group.group_name))


def _all_gather_sequence(x_BTD: Tensor, tp_group: TensorParallelGroup) -> Tensor:
    # Collectives concatenate along dimension 0, so positions are moved there.
    x_TBD = x_BTD.transpose(0, SEQ_DIM).contiguous()
    gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(x_TBD, tp_group.size, tp_group.group_name))
    return gathered.transpose(0, SEQ_DIM).contiguous()


def _reduce_scatter_sequence(x_BTD: Tensor, tp_group: TensorParallelGroup) -> Tensor:
    x_TBD = x_BTD.transpose(0, SEQ_DIM).contiguous()
    summed = _ops.wait_tensor(_ops.reduce_scatter_tensor(x_TBD, "sum", tp_group.size, tp_group.group_name))
    return summed.transpose(0, SEQ_DIM).contiguous()


class _CopyToTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp_group: TensorParallelGroup) -> Tensor:
        ctx.tp_group = tp_group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_reduce_sum(upstream, ctx.tp_group), None


class _ReduceFromTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp_group: TensorParallelGroup) -> Tensor:
        return _all_reduce_sum(x, tp_group)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return upstream, None


class _GatherFromSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp_group: TensorParallelGroup) -> Tensor:
        ctx.tp_group = tp_group
        return _all_gather_sequence(x, tp_group)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _reduce_scatter_sequence(upstream, ctx.tp_group), None


class _ReduceScatterToSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp_group: TensorParallelGroup) -> Tensor:
        ctx.tp_group = tp_group
        return _reduce_scatter_sequence(x, tp_group)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_gather_sequence(upstream, ctx.tp_group), None
