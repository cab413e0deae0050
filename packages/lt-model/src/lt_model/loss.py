"""Cross-entropy summed over labels, in fp32 (float64 for float64 models). Labels are already shifted by the data.

`linear_cross_entropy_sum` goes from the last hidden states to the loss a few hundred tokens at a time: logits of one
chunk are computed, turned in place into their gradient (softmax - one-hot), and used for the gradients of hidden
states and head before the next chunk overwrites them. The whole [N, V] matrix never exists, forward does the work of
backward, and backward only scales. This does the same multiplications as the plain way; on CPUs it has been between
0.9 and 1.8 times as fast (docs/benchmarks/model.md has the latest). Without gradients only the forward half runs. Idea:
Liger Kernel (arXiv:2410.10989).

The z-loss adds z_loss * logsumexp(logits)^2 per label (PaLM, arXiv:2204.02311, section 5), which keeps the softmax's
normaliser near 1. With p = softmax(logits), its gradient is 2 * z_loss * logsumexp(logits) * p, so it costs one factor
per row.

Vocabulary sizes that are no multiple of a matrix unit's tile are padded inside the matrix products only: `pad_to` adds
rows of zeros to a copy of the head's weight for as long as the loss is computed. The columns that they make are left
out of the softmax and have gradients of zero, so loss and gradients are those of the true vocabulary. Parameters,
checkpoints and optimizers never see a padded shape. Cost: a copy of the weight in its own dtype per call.

Shapes: N = B * T tokens, C tokens of a chunk, D hidden_size, V vocabulary, W = V and its padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lt_model.errors import ModelError

IGNORE = -100  # a label of this value is not counted (as in torch and transformers)

_CPU_ROWS = 256  # a chunk's logits stay in cache for small vocabularies
_CPU_SLAB = 2048  # rows of the head's gradient that a CPU adds to at a time
_DEVICE_ELEMENTS = 1 << 27  # 0.5 GiB of fp32 logits: large enough to keep a GPU busy


class LossParts(NamedTuple):
    """A loss and what it consists of; sums over labels in nats, scalars in fp32 or wider.

    Attributes:
        total: cross_entropy + z_loss, the only one that can be differentiated.
        cross_entropy: what is reported as the loss; perplexity and bits per byte come from it.
        z_loss: the coefficient times the sum of logsumexp(logits)^2.
    """

    total: Tensor
    cross_entropy: Tensor
    z_loss: Tensor


def cross_entropy_sum(logits: Tensor, labels: Tensor, *, z_loss: float = 0.0, vocab_size: int | None = None) -> Tensor:
    """Return the sum over labels != IGNORE of -log softmax(logits)[label], a scalar in nats.

    Args:
        logits: [..., V] of any float dtype; used in fp32 or wider.
        labels: [...] integers; IGNORE is not counted.
        z_loss: coefficient of logsumexp(logits)^2, added for every counted label.
        vocab_size: how many of the columns are token ids; the rest is padding, which gets neither probability nor
            gradient. All of them when absent.

    Raises:
        ModelError: a negative or infinite `z_loss`, or a `vocab_size` that the logits do not have.
    """
    _check(z_loss=z_loss, pad_to=1, vocab_size=vocab_size, columns=logits.shape[-1])
    logits_NV = logits[..., :vocab_size].flatten(0, -2).to(_wide(logits.dtype))
    labels_N = labels.flatten().long()
    loss = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE, reduction="sum")
    if z_loss:
        loss = loss + z_loss * (logits_NV.logsumexp(dim=1).square() * (labels_N != IGNORE)).sum()
    return loss


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    *,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    pad_to: int = 1,
) -> Tensor:
    """Return `cross_entropy_sum(hidden @ weight_VD.T, labels)` without holding all logits at once.

    Args:
        hidden: [..., D] last hidden states.
        weight_VD: the head's weight, same dtype as `hidden`.
        labels: [...] integers in [0, V) or IGNORE.
        z_loss: as in `cross_entropy_sum`.
        vocab_size: how many rows of the weight are token ids; the rest gets neither probability nor gradient.
        pad_to: the matrix products are done with this multiple of rows; the result is the same.

    Returns:
        A scalar in nats, fp32 or wider. It can be differentiated once.

    Raises:
        ModelError: a negative or infinite `z_loss`, a `pad_to` below 1, or a `vocab_size` that the weight does not
            have.
    """
    return linear_loss_parts(hidden, weight_VD, labels, z_loss=z_loss, vocab_size=vocab_size, pad_to=pad_to).total


def linear_loss_parts(
    hidden: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    *,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    pad_to: int = 1,
) -> LossParts:
    """Return what `linear_cross_entropy_sum` returns and its two parts, for the same cost.

    Args:
        hidden: as there, like everything else.
        weight_VD: as there.
        labels: as there.
        z_loss: as there.
        vocab_size: as there.
        pad_to: as there.

    Raises:
        ModelError: as there.
    """
    _check(z_loss=z_loss, pad_to=pad_to, vocab_size=vocab_size, columns=weight_VD.shape[0])
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight_VD.requires_grad)
    parts = _LinearCrossEntropy.apply(
        hidden.flatten(0, -2),
        weight_VD,
        labels.flatten().long(),
        float(z_loss),
        weight_VD.shape[0] if vocab_size is None else vocab_size,
        pad_to,
        needs_grad,
    )
    return LossParts(*parts)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        z_loss: float,
        vocab_size: int,
        pad_to: int,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = _wide(hidden_ND.dtype)
        counted_N = labels_N != IGNORE
        targets_N1 = labels_N.masked_fill(~counted_N, 0)[:, None]
        counted_N1 = counted_N.to(wide)[:, None]
        cross_entropy, z_part = (torch.zeros((), dtype=wide, device=hidden_ND.device) for _ in range(2))
        rows, width = weight_VD.shape[0], -(-weight_VD.shape[0] // pad_to) * pad_to
        weight_WD = F.pad(weight_VD, (0, 0, 0, width - rows)) if width > rows else weight_VD
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_grad else None
        # Summed over chunks, so in fp32 even when the weight is narrower.
        unwritten = torch.empty_like if hidden_ND.shape[0] else torch.zeros_like  # the first chunk writes all of it
        grad_weight_WD = unwritten(weight_WD, dtype=wide) if needs_grad else None
        chunk_rows = min(_chunk_rows(hidden_ND, weight_VD), hidden_ND.shape[0])
        # Written again by every chunk: fresh memory would cost a CPU more than the arithmetic on it.
        buffer_CW = hidden_ND.new_empty(chunk_rows, width)
        wide_buffer_CW = buffer_CW if buffer_CW.dtype == wide else torch.empty_like(buffer_CW, dtype=wide)
        for chunk in (slice(first, first + chunk_rows) for first in range(0, hidden_ND.shape[0], max(1, chunk_rows))):
            hidden_CD, targets_C1, counted_C1 = hidden_ND[chunk], targets_N1[chunk], counted_N1[chunk]
            product_CW, padded_CW = (buffer[: hidden_CD.shape[0]] for buffer in (buffer_CW, wide_buffer_CW))
            torch.mm(hidden_CD, weight_WD.T, out=product_CW)
            if product_CW.dtype != wide:
                padded_CW.copy_(product_CW)
            logits_CV = padded_CW[:, :vocab_size]
            at_target_C1 = logits_CV.gather(1, targets_C1)
            top_C1 = logits_CV.amax(dim=1, keepdim=True)
            exp_CV = logits_CV.sub_(top_C1).exp_()
            sum_C1 = exp_CV.sum(dim=1, keepdim=True)
            log_sum_C1 = sum_C1.log() + top_C1
            cross_entropy += ((log_sum_C1 - at_target_C1) * counted_C1).sum()
            factor_C1 = counted_C1 / sum_C1
            if z_loss:
                z_part += (log_sum_C1.square() * counted_C1).sum() * z_loss
                factor_C1 = factor_C1 * (1 + 2 * z_loss * log_sum_C1)
            if grad_hidden_ND is not None and grad_weight_WD is not None:
                exp_CV.mul_(factor_C1).scatter_add_(1, targets_C1, -counted_C1)
                padded_CW[:, vocab_size:] = 0
                if product_CW.dtype != wide:
                    product_CW.copy_(padded_CW)
                torch.mm(product_CW, weight_WD, out=grad_hidden_ND[chunk])
                _add_product(grad_weight_WD, product_CW.T, hidden_CD, first=chunk.start == 0)
        del buffer_CW, wide_buffer_CW  # before the head's gradient is there twice
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
        return _scaled(grad_hidden_ND, upstream), _scaled(grad_weight_VD, upstream), *(None,) * 5


def _check(*, z_loss: float, pad_to: int, vocab_size: int | None, columns: int) -> None:
    if not 0 <= z_loss < float("inf"):
        raise ModelError(f"z_loss = {z_loss} must be a finite number of at least 0 (0: none; PaLM took 1e-4)")
    if pad_to < 1:
        raise ModelError(f"pad_to = {pad_to} must be at least 1 (1: no padding)")
    if vocab_size is not None and not 1 <= vocab_size <= columns:
        raise ModelError(f"vocab_size = {vocab_size} must be between 1 and the {columns} columns of the logits")


def _chunk_rows(hidden_ND: Tensor, weight_VD: Tensor) -> int:
    if hidden_ND.device.type == "cpu":
        return _CPU_ROWS
    return max(1024, _DEVICE_ELEMENTS // weight_VD.shape[0] // 128 * 128)  # whole tiles of a matrix product


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Add a @ b to `total`, which may be wider, or put it there when it is the first.

    A CPU widens the product into fresh memory before it adds; a slab at a time that memory stays in the cache.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=0 if first else 1)
    elif total.device.type != "cpu":
        total.copy_(a @ b) if first else total.add_(a @ b)
    else:
        for row in range(0, total.shape[0], _CPU_SLAB):
            slab, product = total[row : row + _CPU_SLAB], a[row : row + _CPU_SLAB] @ b
            slab.copy_(product) if first else slab.add_(product)


def _scaled(grad: Tensor, upstream: Tensor) -> Tensor:
    """Return grad * upstream; in place where nobody can come back for `grad`, which spares a copy of the head."""
    # No public function tells whether the graph is kept for another backward pass.
    kept = torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
    if kept:
        return (grad * upstream).to(grad.dtype)
    return grad.mul_(upstream)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
