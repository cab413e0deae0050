"""Cross-entropy whose head is cut along the vocabulary: no rank ever holds a logit of another rank's token ids.

As in `lt_model.loss`, logits exist for a chunk of tokens at a time and are turned in place into their gradient. Each
rank has the logits of its own rows of the head; of a chunk the ranks exchange three numbers per token: the largest
logit, the sum of exp(logit - largest), and the target's logit where its row is (0 elsewhere). From all ranks' numbers
every rank computes the same softmax normaliser, in the same order:

    top = max_r top_r,    log_sum = log(sum_r sum_r * exp(top_r - top)) + top

With p the softmax over the whole vocabulary, the gradient of this rank's logits is p - one-hot, and with a z-loss
p * (1 + 2 * z_loss * log_sum) - one-hot: its own rows are enough. The gradient of the hidden states is a sum over
ranks, which is left to where they come from (`collectives.enter`).

Cost: the products of the unsharded loss divided by the ranks, and an all-gather of 3 fp32 numbers per token.

Shapes: N = B * T tokens, C tokens of a chunk, D hidden_size, V this rank's rows, W = V and padding, R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lt_model.loss import IGNORE, LossParts
from lt_trainer_gpu.collectives import TensorAxis, gather_stacked

_CPU_ROWS = 256
_DEVICE_ELEMENTS = 1 << 27  # 0.5 GiB of fp32 logits


def vocabulary_loss_parts(
    hidden: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    *,
    axis: TensorAxis,
    first: int,
    z_loss: float = 0.0,
    pad_to: int = 1,
) -> LossParts:
    """Return the summed loss over labels != IGNORE and its parts, the same on every rank.

    Args:
        hidden: [..., D] last hidden states, the same on every rank; their gradient is this rank's part of it.
        weight_VD: this rank's rows of the head.
        labels: [...] ids of the whole vocabulary, the same on every rank.
        axis: the ranks.
        first: id of this rank's first row.
        z_loss: coefficient of logsumexp(logits)^2.
        pad_to: the matrix products are done with this multiple of rows.
    """
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight_VD.requires_grad)
    hidden_ND, labels_N = hidden.flatten(0, -2), labels.flatten().long()
    return LossParts(*_VocabularyLoss.apply(hidden_ND, weight_VD, labels_N, axis, first, z_loss, pad_to, needs_grad))


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        axis: TensorAxis,
        first: int,
        z_loss: float,
        pad_to: int,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        rows, width = weight_VD.shape[0], -(-weight_VD.shape[0] // pad_to) * pad_to
        weight_WD = F.pad(weight_VD, (0, 0, 0, width - rows)) if width > rows else weight_VD
        counted_N1 = (labels_N != IGNORE).to(wide)[:, None]
        own_N1 = ((labels_N >= first) & (labels_N < first + rows)).to(wide)[:, None]
        targets_N1 = (labels_N - first).clamp(0, rows - 1)[:, None]
        cross_entropy, z_part = (torch.zeros((), dtype=wide, device=hidden_ND.device) for _ in range(2))
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_grad else None
        grad_weight_WD = torch.zeros_like(weight_WD, dtype=wide) if needs_grad else None
        for chunk_hidden in range(0, hidden_ND.shape[0], _chunk_rows(hidden_ND, rows)):
            chunk = slice(chunk_hidden, chunk_hidden + _chunk_rows(hidden_ND, rows))
            hidden_CD, targets_C1, own_C1, counted_C1 = (
                hidden_ND[chunk],
                targets_N1[chunk],
                own_N1[chunk],
                counted_N1[chunk],
            )
            padded_CW = (hidden_CD @ weight_WD.T).to(wide)
            logits_CV = padded_CW[:, :rows]
            at_target_C1 = logits_CV.gather(1, targets_C1) * own_C1
            top_C1 = logits_CV.amax(dim=1, keepdim=True)
            exp_CV = logits_CV.sub_(top_C1).exp_()
            log_sum_C1, at_target_C1 = _over_ranks(top_C1, exp_CV.sum(dim=1, keepdim=True), at_target_C1, axis)
            cross_entropy += ((log_sum_C1 - at_target_C1) * counted_C1).sum()
            factor_C1 = counted_C1 * (top_C1 - log_sum_C1).exp()
            if z_loss:
                z_part += (log_sum_C1.square() * counted_C1).sum() * z_loss
                factor_C1 = factor_C1 * (1 + 2 * z_loss * log_sum_C1)
            if grad_hidden_ND is not None and grad_weight_WD is not None:
                exp_CV.mul_(factor_C1).scatter_add_(1, targets_C1, -counted_C1 * own_C1)
                padded_CW[:, rows:] = 0
                grad_CW = padded_CW.to(hidden_ND.dtype)
                torch.mm(grad_CW, weight_WD, out=grad_hidden_ND[chunk])
                grad_weight_WD += grad_CW.T @ hidden_CD
        if grad_weight_WD is not None:
            ctx.save_for_backward(grad_hidden_ND, grad_weight_WD[:rows].to(weight_VD.dtype))
        ctx.mark_non_differentiable(cross_entropy, z_part)
        return cross_entropy + z_part, cross_entropy, z_part

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (once_differentiable hides the names)
        ctx: Any, upstream: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        scaled = ((grad * upstream).to(grad.dtype) for grad in (grad_hidden_ND, grad_weight_VD))
        return *scaled, *(None,) * 6


def _over_ranks(top_C1: Tensor, sum_C1: Tensor, at_target_C1: Tensor, axis: TensorAxis) -> tuple[Tensor, Tensor]:
    """The logarithm of the softmax's normaliser and the target's logit, from every rank's part of the vocabulary."""
    tops, sums, targets = gather_stacked(torch.stack((top_C1, sum_C1, at_target_C1)), axis).unbind(dim=1)
    top = tops.amax(dim=0)
    return ((tops - top).exp() * sums).sum(dim=0).log() + top, targets.sum(dim=0)


def _chunk_rows(hidden_ND: Tensor, rows: int) -> int:
    if hidden_ND.device.type == "cpu":
        return _CPU_ROWS
    return max(1024, _DEVICE_ELEMENTS // rows // 128 * 128)
