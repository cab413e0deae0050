"""The norm over all gradients of all ranks, each element counted once, and clipping by it.

Ranks hold slices. A slice that several ranks hold alike (a replica's; a norm's weight under tensor parallelism) is
counted by the first of them. One sum over all ranks then gives the same number on each, and carries the loss along.

Cost: one pass over this rank's gradients, one all-reduce of two float64 numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_torch: Any = torch  # its functions on lists of tensors have no types


SLAB = 1 << 18
"""Numbers that a CPU widens at a time; they stay in its cache."""


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of the gradients, in float64: norms by tensor in fp32 or wider, then summed."""
    tensors = list(gradients)
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].dtype == wide:
        norms = list(torch._foreach_norm(tensors))  # pyright: ignore[reportPrivateImportUsage]
    elif device.type == "cpu":
        norms = [_norm_by_slabs(tensor, wide) for tensor in tensors]
    else:
        norms = [torch.linalg.vector_norm(tensor, dtype=wide) for tensor in tensors]
    return torch.stack(norms).to(torch.float64).square().sum()


def _norm_by_slabs(tensor: Tensor, wide: torch.dtype) -> Tensor:
    """The norm in a wider dtype. On a CPU, asked for it, torch would copy the whole tensor into fresh memory first."""
    buffer = torch.empty(min(SLAB, tensor.numel()), dtype=wide)
    norms = [torch.linalg.vector_norm(buffer[: slab.numel()].copy_(slab)) for slab in tensor.flatten().split(SLAB)]
    return torch.linalg.vector_norm(torch.stack(norms))


def summed_over_ranks(loss: Tensor, squares: Tensor, *, ranks: int) -> tuple[Tensor, Tensor]:
    """Both float64 scalars as sums over all ranks, equal on every rank."""
    both = torch.stack((loss, squares))
    if ranks > 1:
        dist.all_reduce(both)
    return both[0], both[1]


def clip_factor(norm: Tensor, most: float) -> Tensor:
    """What scales gradients of this norm down to one of `most`, or 1 where theirs is not above it."""
    # As torch.nn.utils.clip_grads_with_norm_ does it, with no question that the host would have to wait for.
    return (most / (norm + 1e-6)).clamp(max=1.0)
