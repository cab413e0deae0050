"""Cross-entropy of logits whose vocabulary is cut over tensor-parallel ranks, in operations that lazy devices can take.

With m the largest logit of a row and s the sum of exp(logit - m), both over all ranks, the loss of a row is
log(s) + m - logit[label]. A rank has the label's logit or adds nothing. The gradient is (softmax - one-hot) for each
rank's own columns, so the backward pass needs no collective. The z-loss adds z * (log(s) + m)^2 per label.

lt-model's own loss goes over the vocabulary in chunks to save memory, in operations that torch-xla sends to the host;
here the logits of a micro-batch are held once, and their softmax.

Cost: three collectives of one number per position. Memory: twice this rank's logits in the wide dtype.

Shapes: N positions, V columns of this rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lt_model.loss import IGNORE, LossParts
from lt_trainer_neuron.nxd.ranks import Ranks

__all__ = ["vocabulary_loss"]


def vocabulary_loss(
    logits_NV: Tensor, labels_N: Tensor, *, ranks: Ranks, first_column: int, z_loss: float, wide: torch.dtype
) -> LossParts:
    """The summed loss in nats over labels that are not IGNORE, equal on all tensor-parallel ranks.

    Args:
        logits_NV: this rank's columns.
        labels_N: integers in the whole vocabulary, or IGNORE.
        ranks: the tensor-parallel ranks.
        first_column: which token id this rank's first column is.
        z_loss: coefficient of logsumexp(logits)^2.
        wide: dtype in which it is computed.
    """
    found = _VocabularyLoss.apply(logits_NV, labels_N, ranks, first_column, z_loss, wide)
    return LossParts(*cast(tuple[Tensor, Tensor, Tensor], found))


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        labels_N: Tensor,
        ranks: Ranks,
        first_column: int,
        z_loss: float,
        wide: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        counted_N1 = (labels_N != IGNORE).to(wide)[:, None]
        column_N1 = labels_N.long()[:, None] - first_column
        mine_N1 = ((column_N1 >= 0) & (column_N1 < logits_NV.shape[1])).to(wide)
        column_N1 = column_N1.clamp(0, logits_NV.shape[1] - 1)
        wide_NV = logits_NV.to(wide)
        top_N1 = ranks.largest(wide_NV.amax(dim=1, keepdim=True), "tp")
        exp_NV = (wide_NV - top_N1).exp()
        sum_N1 = ranks.summed(exp_NV.sum(dim=1, keepdim=True), "tp")
        at_label_N1 = ranks.summed(wide_NV.gather(1, column_N1) * mine_N1, "tp")
        log_sum_N1 = sum_N1.log() + top_N1
        cross_entropy = ((log_sum_N1 - at_label_N1) * counted_N1).sum()
        z_part = (log_sum_N1.square() * counted_N1).sum() * z_loss
        ctx.save_for_backward(exp_NV / sum_N1, log_sum_N1, column_N1, mine_N1 * counted_N1, counted_N1)
        ctx.z_loss, ctx.dtype = z_loss, logits_NV.dtype
        ctx.mark_non_differentiable(cross_entropy, z_part)
        return cross_entropy + z_part, cross_entropy, z_part

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (torch's has no names)
        ctx: Any, upstream: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        softmax_NV, log_sum_N1, column_N1, at_label_N1, counted_N1 = ctx.saved_tensors
        grad_NV = softmax_NV * (counted_N1 * (1 + 2 * ctx.z_loss * log_sum_N1))
        grad_NV = grad_NV.scatter_add(1, column_N1, -at_label_N1)
        return (grad_NV * upstream).to(ctx.dtype), None, None, None, None, None
