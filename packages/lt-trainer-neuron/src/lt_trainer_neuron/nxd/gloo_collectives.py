"""Tensor-parallel collectives within a layer, with their gradients.

                      without sequence parallelism        with it (ranks hold T/tp positions between layers)
    copy_to_tp        forward identity, backward sum      forward all-gather, backward sum and keep own positions
    reduce_from_tp    forward sum, backward identity      forward sum and keep own positions, backward all-gather

All sums are computed in fp32 or wider and rounded once. (NxD 0.18 drops the sum of a bf16 input gradient with its
default `reduce_dtype`; there is no such option here.)

Cost: sums are all-reduces even where a reduce-scatter would suffice, since every gloo build supports them.

Shapes: B batch, T positions, D hidden_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

SEQ_DIM = 1  # the dimension of positions in [B, T, D]


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Process group and this rank's index in it.

    Attributes:
        ranks: global ranks of the group.
        rank: this rank's index in `ranks`.
        process_group: torch process group; None for a single rank.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    process_group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


def all_reduce_sum(x: Tensor, group: RankGroup) -> Tensor:
    """Return the sum over ranks in a new tensor of the same dtype."""
    if group.size == 1:
        return x.clone()
    total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group.process_group)
    return total.to(x.dtype)


def all_reduce_max(x: Tensor, group: RankGroup) -> Tensor:
    """Return the elementwise maximum over ranks in a new tensor."""
    result = x.clone(memory_format=torch.contiguous_format)
    if group.size > 1:
        dist.all_reduce(result, dist.ReduceOp.MAX, group=group.process_group)
    return result


def all_gather(x: Tensor, group: RankGroup, dim: int) -> Tensor:
    """Concatenate the ranks' tensors, of equal shape, along `dim`."""
    if group.size == 1:
        return x
    chunks = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in group.ranks]
    dist.all_gather(chunks, x.contiguous(), group=group.process_group)
    return torch.cat(chunks, dim)


def local_chunk(x: Tensor, group: RankGroup, dim: int) -> Tensor:
    """Return this rank's equal chunk of `x` along `dim`."""
    return x.chunk(group.size, dim)[group.rank].contiguous()


def copy_to_tp(x_BTD: Tensor, tp_group: RankGroup, *, sequence_parallel: bool) -> Tensor:
    """Identity forward, all-reduce backward (SP: all-gather / sum and keep own positions)."""
    return cast(Tensor, _Exchange.apply(x_BTD, tp_group, sequence_parallel, _spread, _sum))


def reduce_from_tp(x_BTD: Tensor, tp_group: RankGroup, *, sequence_parallel: bool) -> Tensor:
    """All-reduce forward, identity backward (SP: sum and keep own positions / all-gather)."""
    return cast(Tensor, _Exchange.apply(x_BTD, tp_group, sequence_parallel, _sum, _spread))


def _spread(x: Tensor, group: RankGroup, sequence_parallel: bool) -> Tensor:
    return all_gather(x, group, SEQ_DIM) if sequence_parallel else x.view_as(x)


def _sum(x: Tensor, group: RankGroup, sequence_parallel: bool) -> Tensor:
    summed = all_reduce_sum(x, group)
    return local_chunk(summed, group, SEQ_DIM) if sequence_parallel else summed


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup, sequence_parallel: bool, there: Any, back: Any) -> Tensor:
        ctx.there_and_back = group, sequence_parallel, back
        return there(x, group, sequence_parallel)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        group, sequence_parallel, back = ctx.there_and_back
        return back(upstream, group, sequence_parallel), None, None, None, None
