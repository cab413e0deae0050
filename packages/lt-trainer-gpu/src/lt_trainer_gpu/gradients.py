"""Global gradient norm over all ranks, each element counted once.

Ranks hold slices. A replicated slice (of a data-parallel replica, or a norm's weight under tensor parallelism) is
counted by the first rank that holds it. One all-reduce then yields the same norm on each rank, together with the loss.

Cost: one pass over this rank's gradients, one all-reduce of two float64 numbers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_NUMEL = 1 << 18
"""Elements that a CPU upcasts at a time; they stay in its cache."""


def reduce_loss_and_norm(loss: Tensor, gradients: list[Tensor], *, world_size: int) -> tuple[Tensor, Tensor]:
    """Return the loss and the global gradient norm, summed over all ranks and equal on each; the dtype is the loss's.

    Args:
        loss: this rank's part, 0 where another rank reports it.
        gradients: slices that this rank counts.
        world_size: number of ranks.
    """
    both = torch.stack((loss, squared_norm(gradients, loss)))
    if world_size > 1:
        dist.all_reduce(both)
    return both[0], both[1].sqrt()


def squared_norm(gradients: list[Tensor], like: Tensor) -> Tensor:
    """Return the sum of squares of the gradients in the dtype of `like`; norms in fp32 or wider."""
    if not gradients:
        return torch.zeros_like(like)
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    if gradients[0].dtype != wide and like.device.type == "cpu":
        norms = [_chunked_norm(tensor, wide) for tensor in gradients]
    else:
        norms = list(torch._foreach_norm(gradients, dtype=wide))  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms), dtype=like.dtype).square()


def _chunked_norm(tensor: Tensor, wide: torch.dtype) -> Tensor:
    """Return the norm in a wider dtype, chunk by chunk.

    On a CPU torch's own norm would first upcast the whole tensor into new memory.
    """
    buffer = torch.empty(min(CHUNK_NUMEL, tensor.numel()), dtype=wide)
    norms = [
        torch.linalg.vector_norm(buffer[: chunk.numel()].copy_(chunk)) for chunk in tensor.flatten().split(CHUNK_NUMEL)
    ]
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that scales gradients of `norm` to at most `max_norm`; 1 if not above it."""
    # As in torch.nn.utils.clip_grads_with_norm_, without a host synchronization.
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
