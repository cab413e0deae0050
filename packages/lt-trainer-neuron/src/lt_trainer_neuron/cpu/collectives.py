"""What tensor-parallel ranks say to each other within a layer, each with the gradient that belongs to it.

               without sequence parallelism      with it (ranks hold T/tp positions between layers)
    enter      forward nothing, backward sum     forward gather positions, backward sum and keep own
    leave      forward sum, backward nothing     forward sum and keep own positions, backward gather

All sums are made in fp32 or wider and rounded once. (NxD 0.18 loses the sum of a bf16 input gradient at its default
`reduce_dtype`; here there is no such choice.)

Cost: sums are all-reduces also where a reduce-scatter would do, for every gloo has those.

Shapes: B batch, T positions, D hidden_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

SEQUENCE = 1  # the dimension of positions in [B, T, D]


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Some ranks that share work, seen from one of them.

    Attributes:
        ranks: their numbers.
        rank: which of them this is.
        group: their process group; None for one rank alone.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)


def total(x: Tensor, peers: Peers) -> Tensor:
    """The sum of the ranks' tensors, in a new tensor of the same dtype."""
    if peers.size == 1:
        return x.clone()
    wide = x.to(torch.promote_types(x.dtype, torch.float32), copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(wide, group=peers.group)
    return wide.to(x.dtype)


def largest(x: Tensor, peers: Peers) -> Tensor:
    """The largest of the ranks' numbers, element by element."""
    found = x.clone(memory_format=torch.contiguous_format)
    if peers.size > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=peers.group)
    return found


def gathered(x: Tensor, peers: Peers, dim: int) -> Tensor:
    """The ranks' tensors, of one shape, behind each other along `dim`."""
    if peers.size == 1:
        return x
    boxes = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in peers.ranks]
    dist.all_gather(boxes, x.contiguous(), group=peers.group)
    return torch.cat(boxes, dim)


def own(x: Tensor, peers: Peers, dim: int) -> Tensor:
    """This rank's one of as many equal parts of `x` along `dim` as there are ranks."""
    return x.chunk(peers.size, dim)[peers.rank].contiguous()


def enter(x_BTD: Tensor, peers: Peers, *, sequence: bool) -> Tensor:
    """What every rank's part of a layer is given: all positions."""
    return cast(Tensor, _Enter.apply(x_BTD, peers, sequence))


def leave(x_BTD: Tensor, peers: Peers, *, sequence: bool) -> Tensor:
    """The sum of every rank's part of a layer: all positions, or this rank's."""
    return cast(Tensor, _Leave.apply(x_BTD, peers, sequence))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, sequence: bool) -> Tensor:
        ctx.peers, ctx.sequence = peers, sequence
        return gathered(x, peers, SEQUENCE) if sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        summed = total(upstream, ctx.peers)
        return (own(summed, ctx.peers, SEQUENCE) if ctx.sequence else summed), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, sequence: bool) -> Tensor:
        ctx.peers, ctx.sequence = peers, sequence
        summed = total(x, peers)
        return own(summed, peers, SEQUENCE) if sequence else summed

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (gathered(upstream, ctx.peers, SEQUENCE) if ctx.sequence else upstream), None, None
