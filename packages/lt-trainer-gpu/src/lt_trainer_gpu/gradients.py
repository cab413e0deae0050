"""The norm over all gradients of all ranks, each element counted once, and clipping by it.

Ranks hold slices. A slice that several ranks hold alike (a replica's; a norm's weight under tensor parallelism) is
counted by the first of them. One sum over all ranks then gives the same number on each, and carries the loss along.

Cost: one pass over this rank's gradients, one all-reduce of two float64 numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_torch: Any = torch  # its functions on lists of tensors have no types


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of the gradients, in float64: norms by tensor in their own dtype, then summed."""
    tensors = [gradient for gradient in gradients if gradient.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = _torch._foreach_norm(tensors)
    return torch.stack(norms).to(torch.float64).square().sum()


def summed_over_ranks(loss: Tensor, squares: Tensor, *, ranks: int) -> tuple[Tensor, Tensor]:
    """Both float64 scalars as sums over all ranks, equal on every rank."""
    both = torch.stack((loss, squares))
    if ranks > 1:
        dist.all_reduce(both)
    return both[0], both[1]


def clip(gradients: Mapping[str, Tensor], norm: Tensor, most: float) -> None:
    """Scale the gradients down, in place, to a norm of `most` where theirs is above it."""
    # As torch.nn.utils.clip_grads_with_norm_ does it, with no question that the host would have to wait for.
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    tensors = list(gradients.values())
    if tensors:
        _torch._foreach_mul_(tensors, factor.to(tensors[0].dtype))
