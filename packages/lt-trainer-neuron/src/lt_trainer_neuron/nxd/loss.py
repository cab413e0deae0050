"""Cross-entropy with the vocabulary sharded over tensor-parallel ranks, for lazy devices.

The formula is `lt_model.loss.vocab_parallel_softmax`. The chunked loss of lt-model, which saves memory, uses operations
that torch-xla falls back to the host for; here the logits of a micro-batch are held once, and their exponentials. The
backward pass is explicit: NxD's collectives are not differentiable, and the gradient needs none.

Cost: three collectives of one number per position. Memory: twice this rank's logits in the upcast dtype.

Shapes: N positions, V columns of this rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lt_model.loss import LossParts, SoftmaxTerms, vocab_parallel_softmax
from lt_trainer_neuron.nxd.collectives import Collectives


def vocab_parallel_loss(
    logits_NV: Tensor,
    labels_N: Tensor,
    *,
    collectives: Collectives,
    vocab_start_index: int,
    z_loss: float,
    upcast_dtype: torch.dtype,
) -> LossParts:
    """Return the summed loss in nats, equal on all tensor-parallel ranks; skips IGNORE_INDEX labels.

    Args:
        logits_NV: this rank's columns of the logits.
        labels_N: token ids in the whole vocabulary, or IGNORE_INDEX.
        collectives: collectives, used over "tp".
        vocab_start_index: token id of this rank's first column.
        z_loss: coefficient of logsumexp(logits)^2.
        upcast_dtype: compute dtype.
    """
    parts = _VocabParallelLoss.apply(logits_NV, labels_N, collectives, vocab_start_index, z_loss, upcast_dtype)
    return LossParts(*cast(tuple[Tensor, Tensor, Tensor], parts))


class _VocabParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        labels_N: Tensor,
        collectives: Collectives,
        vocab_start_index: int,
        z_loss: float,
        upcast_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        terms = vocab_parallel_softmax(
            logits_NV,
            labels_N,
            vocab_start_index=vocab_start_index,
            upcast_dtype=upcast_dtype,
            all_reduce_max=lambda x: collectives.all_reduce_max(x, "tp"),
            all_reduce_sum=lambda x: collectives.all_reduce_sum(x, "tp"),
        )
        parts = terms.loss_parts(z_loss)
        ctx.save_for_backward(*terms)
        ctx.z_loss, ctx.dtype = z_loss, logits_NV.dtype
        ctx.mark_non_differentiable(parts.cross_entropy, parts.z_loss)
        return parts.total, parts.cross_entropy, parts.z_loss

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (torch's has no names)
        ctx: Any, upstream: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_NV = SoftmaxTerms(*ctx.saved_tensors).logits_grad(ctx.z_loss)
        return (grad_NV * upstream).to(ctx.dtype), None, None, None, None, None
