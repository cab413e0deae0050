"""Global gradient norm over all ranks, each element counted once, and clipping by it.

Ranks hold slices. A replicated slice (of a data-parallel replica, or a norm's weight under tensor parallelism) is
counted by the first rank that holds it. One all-reduce then yields the same norm on each rank, together with the loss.

Cost: one pass over this rank's gradients, one all-reduce of two float64 numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_trainer_gpu.devices import accumulation_dtype

_torch: Any = torch  # its functions on lists of tensors have no types


CHUNK_NUMEL = 1 << 18
"""Elements that a CPU upcasts at a time; they stay in its cache."""


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of the gradients in `accumulation_dtype`; norms in fp32 or wider."""
    tensors = list(gradients)
    if not tensors:
        return torch.zeros((), dtype=accumulation_dtype(device), device=device)
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].dtype == wide:
        norms = list(torch._foreach_norm(tensors))  # pyright: ignore[reportPrivateImportUsage]
    elif device.type == "cpu":
        norms = [_chunked_norm(tensor, wide) for tensor in tensors]
    else:
        norms = [torch.linalg.vector_norm(tensor, dtype=wide) for tensor in tensors]
    return torch.stack(norms).to(accumulation_dtype(device)).square().sum()


def _chunked_norm(tensor: Tensor, wide: torch.dtype) -> Tensor:
    """Return the norm in a wider dtype, chunk by chunk.

    On a CPU torch's own norm would first upcast the whole tensor into new memory.
    """
    buffer = torch.empty(min(CHUNK_NUMEL, tensor.numel()), dtype=wide)
    norms = [
        torch.linalg.vector_norm(buffer[: chunk.numel()].copy_(chunk)) for chunk in tensor.flatten().split(CHUNK_NUMEL)
    ]
    return torch.linalg.vector_norm(torch.stack(norms))


def all_reduce_loss_and_norm(loss: Tensor, sum_of_squares: Tensor, *, world_size: int) -> tuple[Tensor, Tensor]:
    """Sum both scalars over all ranks; equal on every rank."""
    both = torch.stack((loss, sum_of_squares))
    if world_size > 1:
        dist.all_reduce(both)
    return both[0], both[1]


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that scales gradients of `norm` to at most `max_norm`; 1 if not above it."""
    # As in torch.nn.utils.clip_grads_with_norm_, without a host synchronization.
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
