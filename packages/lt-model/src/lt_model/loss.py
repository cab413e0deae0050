"""Cross-entropy summed over labels, in fp32 (float64 for float64 models). Labels are already shifted by the data.

`linear_cross_entropy_sum` goes from the last hidden states to the loss a few hundred tokens at a time: logits of one
chunk are computed, turned in place into their gradient (softmax - one-hot), and used for the gradients of hidden
states and head before the next chunk overwrites them. The whole [N, V] matrix never exists, forward does the work of
backward, and backward only scales. This does the same multiplications as the plain way and is about 1.8 times as fast
on the CPU, where fresh large tensors are dear. Without gradients only the forward half runs. Idea: Liger Kernel
(arXiv:2410.10989).

Shapes: N = B * T tokens, C tokens of a chunk, D hidden_size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORE = -100  # a label of this value is not counted (as in torch and transformers)

_CPU_ROWS = 256  # a chunk's logits stay in cache for small vocabularies
_DEVICE_ELEMENTS = 1 << 27  # 0.5 GiB of fp32 logits: large enough to keep a GPU busy


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over labels != IGNORE of -log softmax(logits)[label], a scalar in nats.

    Args:
        logits: [..., V] of any float dtype; used in fp32 or wider.
        labels: [...] integers; IGNORE is not counted.
    """
    logits_NV = logits.flatten(0, -2).to(_wide(logits.dtype))
    return F.cross_entropy(logits_NV, labels.flatten().long(), ignore_index=IGNORE, reduction="sum")


def linear_cross_entropy_sum(hidden: Tensor, weight_VD: Tensor, labels: Tensor) -> Tensor:
    """Return `cross_entropy_sum(hidden @ weight_VD.T, labels)` without holding all logits at once.

    Args:
        hidden: [..., D] last hidden states.
        weight_VD: the head's weight, same dtype as `hidden`.
        labels: [...] integers in [0, V) or IGNORE.

    Returns:
        A scalar in nats, fp32 or wider. It can be differentiated once.
    """
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight_VD.requires_grad)
    return _LinearCrossEntropy.apply(hidden.flatten(0, -2), weight_VD, labels.flatten().long(), needs_grad)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, needs_grad: bool) -> Tensor:
        wide = _wide(hidden_ND.dtype)
        counted_N = labels_N != IGNORE
        targets_N1 = labels_N.masked_fill(~counted_N, 0)[:, None]
        counted_N1 = counted_N.to(wide)[:, None]
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_grad else None
        # Summed over chunks, so in fp32 even when the weight is narrower.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if needs_grad else None
        rows = _chunk_rows(hidden_ND, weight_VD)
        for chunk in (slice(first, first + rows) for first in range(0, hidden_ND.shape[0], rows)):
            hidden_CD, targets_C1, counted_C1 = hidden_ND[chunk], targets_N1[chunk], counted_N1[chunk]
            logits_CV = (hidden_CD @ weight_VD.T).to(wide)
            at_target_C1 = logits_CV.gather(1, targets_C1)
            top_C1 = logits_CV.amax(dim=1, keepdim=True)
            exp_CV = logits_CV.sub_(top_C1).exp_()
            sum_C1 = exp_CV.sum(dim=1, keepdim=True)
            total += ((sum_C1.log() + top_C1 - at_target_C1) * counted_C1).sum()
            if grad_hidden_ND is not None and grad_weight_VD is not None:
                exp_CV.mul_(counted_C1 / sum_C1).scatter_add_(1, targets_C1, -counted_C1)
                grad_logits_CV = exp_CV.to(hidden_CD.dtype)
                torch.mm(grad_logits_CV, weight_VD, out=grad_hidden_ND[chunk])
                _add_product(grad_weight_VD, grad_logits_CV.T, hidden_CD)
        if grad_weight_VD is not None:
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (once_differentiable hides the names)
        ctx: Any, upstream: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        return _scaled(grad_hidden_ND, upstream), _scaled(grad_weight_VD, upstream), None, None


def _chunk_rows(hidden_ND: Tensor, weight_VD: Tensor) -> int:
    if hidden_ND.device.type == "cpu":
        return _CPU_ROWS
    return max(1024, _DEVICE_ELEMENTS // weight_VD.shape[0] // 128 * 128)  # whole tiles of a matrix product


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _scaled(grad: Tensor, upstream: Tensor) -> Tensor:
    return (grad * upstream).to(grad.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
