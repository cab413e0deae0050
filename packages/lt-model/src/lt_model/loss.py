"""Summed cross-entropy with z-loss, chunked and vocabulary-parallel, in fp32 (or float64).

`linear_loss_parts` goes from the last hidden states to the loss a few hundred tokens at a time: the logits of a
chunk are computed, turned in place into their gradient (softmax - one-hot), and used for the gradients of hidden
states and head before the next chunk overwrites them. The full [N, V] matrix never exists, forward does the work of
backward, and backward only scales. The multiplications are those of the plain form; on CPUs it has been between 0.9 and
1.8 times as fast. Without gradients only the forward half runs. Idea: Liger Kernel
(arXiv:2410.10989).

The z-loss adds z_loss * logsumexp(logits)^2 per label (PaLM, arXiv:2204.02311, section 5), which keeps the softmax's
normalizer near 1. With p = softmax(logits), its gradient is 2 * z_loss * logsumexp(logits) * p, so it costs one factor
per row.

Vocabulary sizes that are not a multiple of a matrix unit's tile are padded inside the matrix products only:
`pad_to_multiple_of` adds rows of zeros to a copy of the head's weight while the loss is computed. The resulting columns
are excluded from the softmax and have zero gradients, so loss and gradients are those of the true vocabulary.
Parameters, checkpoints and optimizers never have a padded shape. Cost: a copy of the weight in its own dtype per call.

The head may be split along the vocabulary over ranks (Megatron-LM, arXiv:1909.08053): each has the logits of its own
rows, and the ranks exchange three numbers per token: the largest logit, the sum of exp(logit - largest), and the
label's logit on the rank that has its row (0 elsewhere). Every rank computes the same loss, the gradient of its own
rows of the head and a partial sum of the hidden states' gradient. `vocab_parallel_loss_parts` is that formula on
unchunked logits, in operations that lazy devices support: `linear_loss_parts` is tested against it, and engines whose
devices cannot run the chunked form use it.

`compile=True` compiles what lies between a chunk's matrix products (`compiled_loss`), which are library calls either
way.

Shapes: N = B * T tokens, C tokens of a chunk, P of a part of it, D hidden_size, V vocabulary (a rank's rows of it),
W = V and its padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lt_model.activation_memory import loss_chunk_tokens, loss_part_tokens
from lt_model.compiled_loss import compiled, softmax_terms, write_logits_grad
from lt_model.errors import ModelError

IGNORE_INDEX = -100  # a label of this value is not counted (as in torch and transformers)

_CPU_CHUNK_LOGITS = 2**25  # of a chunk: 64 MiB in bfloat16
_CPU_PART_TOKENS = 128  # of a chunk, computed in fp32 at a time
_CPU_CHUNK_ROWS = 2048  # rows of the head's gradient that a CPU updates at a time


AllReduceSoftmax = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Combines over ranks the largest logit, the sum of exp(logit - largest) and the label's logit (0 on ranks that do not
have its row); [C, 1] each."""


class LossParts(NamedTuple):
    """Loss with its two summands; sums over labels in nats, scalars in fp32 or wider.

    Attributes:
        total: cross_entropy + z_loss; the only differentiable one.
        cross_entropy: the loss that is reported, and that perplexity and bits per byte are made of.
        z_loss: the coefficient times the sum of logsumexp(logits)^2.
    """

    total: Tensor
    cross_entropy: Tensor
    z_loss: Tensor


class SoftmaxTerms(NamedTuple):
    """Vocabulary-parallel softmax terms from which loss and gradient are computed; [N, 1] each.

    Attributes:
        exp_NV: exp(logit - largest logit) of this rank's columns.
        sum_N1: sum of those of all ranks.
        log_sum_N1: logsumexp of all logits.
        at_label_N1: logit of the label.
        column_N1: this rank's column of the label (int64); arbitrary if it has none.
        own_N1: 1 if this rank has the label's column, else 0.
        counted_N1: 1 if the label is counted, else 0.
    """

    exp_NV: Tensor
    sum_N1: Tensor
    log_sum_N1: Tensor
    at_label_N1: Tensor
    column_N1: Tensor
    own_N1: Tensor
    counted_N1: Tensor

    def loss_parts(self, z_loss: float) -> LossParts:
        """Return the summed loss, equal on all ranks."""
        cross_entropy = ((self.log_sum_N1 - self.at_label_N1) * self.counted_N1).sum()
        z_part = (self.log_sum_N1.square() * self.counted_N1).sum() * z_loss
        return LossParts(cross_entropy + z_part, cross_entropy, z_part)

    def logits_grad(self, z_loss: float) -> Tensor:
        """Return the gradient of the summed loss with respect to this rank's logits, [N, V]."""
        factor_N1 = self.counted_N1 * (1 + 2 * z_loss * self.log_sum_N1) / self.sum_N1
        return (self.exp_NV * factor_N1).scatter_add(1, self.column_N1, -self.own_N1)


def vocab_parallel_softmax(
    logits_NV: Tensor,
    labels_N: Tensor,
    *,
    vocab_start_index: int = 0,
    upcast_dtype: torch.dtype | None = None,
    all_reduce_max: Callable[[Tensor], Tensor] = lambda x: x,
    all_reduce_sum: Callable[[Tensor], Tensor] = lambda x: x,
) -> SoftmaxTerms:
    """Return the cross-entropy terms of vocabulary-parallel logits.

    Args:
        logits_NV: this rank's columns.
        labels_N: integers in the whole vocabulary, or IGNORE_INDEX.
        vocab_start_index: token id of this rank's first column.
        upcast_dtype: dtype to compute in; fp32 or wider when absent.
        all_reduce_max: elementwise maximum over the ranks; needs no gradient.
        all_reduce_sum: elementwise sum over the ranks; for autograd through the result its gradient is the identity.
    """
    dtype = upcast_dtype or _upcast_dtype(logits_NV.dtype)
    n_columns = logits_NV.shape[1]
    column_N1 = labels_N.long()[:, None] - vocab_start_index
    own_N1 = ((column_N1 >= 0) & (column_N1 < n_columns)).to(dtype)
    column_N1 = column_N1.clamp(0, n_columns - 1)
    wide_NV = logits_NV.to(dtype)
    top_N1 = all_reduce_max(wide_NV.detach().amax(dim=1, keepdim=True))
    exp_NV = (wide_NV - top_N1).exp()
    sum_N1 = all_reduce_sum(exp_NV.sum(dim=1, keepdim=True))
    at_label_N1 = all_reduce_sum(wide_NV.gather(1, column_N1) * own_N1)
    counted_N1 = (labels_N != IGNORE_INDEX).to(dtype)[:, None]
    return SoftmaxTerms(exp_NV, sum_N1, sum_N1.log() + top_N1, at_label_N1, column_N1, own_N1, counted_N1)


def vocab_parallel_loss_parts(logits_NV: Tensor, labels_N: Tensor, *, z_loss: float = 0.0, **options: Any) -> LossParts:
    """Return the differentiable summed loss of vocabulary-parallel logits, equal on all ranks.

    Args:
        logits_NV: this rank's columns.
        labels_N: integers in the whole vocabulary, or IGNORE_INDEX.
        z_loss: coefficient of logsumexp(logits)^2.
        options: keyword arguments of `vocab_parallel_softmax`.
    """
    parts = vocab_parallel_softmax(logits_NV, labels_N, **options).loss_parts(z_loss)
    return LossParts(parts.total, parts.cross_entropy.detach(), parts.z_loss.detach())


def linear_loss_parts(
    hidden: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    *,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    pad_to_multiple_of: int = 1,
    vocab_start_index: int = 0,
    all_reduce_softmax: AllReduceSoftmax | None = None,
    chunk_tokens: int = 0,
    compile: bool = False,
    softcap: float = 0.0,
) -> LossParts:
    """Return the sum of -log softmax(hidden @ weight.T)[label] over labels != IGNORE_INDEX, and its parts.

    The logits of all tokens never exist at once.

    Args:
        hidden: [..., D] last hidden states.
        weight_VD: the head's weight, same dtype as `hidden`.
        labels: [...] integers in [0, V) or IGNORE_INDEX.
        z_loss: coefficient of logsumexp(logits)^2, added for every counted label.
        vocab_size: number of rows of the weight that are token ids; the rest has neither probability nor gradient.
        pad_to_multiple_of: the matrix products are done with a multiple of this many rows; the result is the same.
        vocab_start_index: token id of the weight's first row, if the head is vocabulary-parallel.
        all_reduce_softmax: reduction over the ranks with the other rows; None if the weight has all. `hidden` and
            `labels` are the same on all ranks, and the gradient of `hidden` is this rank's partial sum.
        chunk_tokens: tokens whose logits exist at a time; 0: `default_chunk_tokens`.
        compile: compile what lies between the matrix products (`compiled_loss`); not with a softcap.
        softcap: logits z become softcap * tanh(z / softcap); 0: they stay.

    Raises:
        ModelError: a negative or infinite `z_loss`, a `pad_to_multiple_of` below 1, a `vocab_size` that the weight does
            not have, or a negative `chunk_tokens`.
    """
    _check_arguments(
        z_loss=z_loss, pad_to_multiple_of=pad_to_multiple_of, vocab_size=vocab_size, n_columns=weight_VD.shape[0]
    )
    if chunk_tokens < 0:
        raise ModelError(f"chunk_tokens = {chunk_tokens}: must be at least 0 (0: chosen by device and vocabulary)")
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight_VD.requires_grad)
    parts = _LinearCrossEntropy.apply(
        hidden.flatten(0, -2),
        weight_VD,
        labels.flatten().long(),
        float(z_loss),
        weight_VD.shape[0] if vocab_size is None else vocab_size,
        pad_to_multiple_of,
        vocab_start_index,
        all_reduce_softmax,
        needs_grad,
        chunk_tokens or default_chunk_tokens(hidden, weight_VD),
        compile and not softcap,
        softcap,
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
        pad_to_multiple_of: int,
        vocab_start_index: int,
        all_reduce_softmax: AllReduceSoftmax | None,
        needs_grad: bool,
        chunk_tokens: int,
        compile: bool,
        softcap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = _upcast_dtype(hidden_ND.dtype)
        own_N, columns_N = labels_N != IGNORE_INDEX, labels_N
        counted_N1 = own_N1 = own_N.to(wide)[:, None]
        if all_reduce_softmax is not None:
            own_N = (labels_N >= vocab_start_index) & (labels_N < vocab_start_index + vocab_size)
            own_N1, columns_N = own_N.to(wide)[:, None], labels_N - vocab_start_index
        # A label outside an unsharded vocabulary makes `gather` raise.
        targets_N1, minus_own_N1 = (columns_N * own_N)[:, None], own_N1 if compile else -own_N1
        terms = [(counted_N1[:0],) * 3]  # largest logit, sum, label's logit of each part; empty without tokens
        rows, width = weight_VD.shape[0], -(-weight_VD.shape[0] // pad_to_multiple_of) * pad_to_multiple_of
        weight_WD = F.pad(weight_VD, (0, 0, 0, width - rows)) if width > rows else weight_VD
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_grad else None
        chunk_rows = min(chunk_tokens, hidden_ND.shape[0])
        # A sum over chunks is fp32 even when the weight is narrower; a single chunk's product is rounded once anyway.
        sum_dtype = wide if chunk_rows < hidden_ND.shape[0] else weight_VD.dtype
        unwritten = torch.empty_like if hidden_ND.shape[0] else torch.zeros_like  # the first chunk writes all of it
        grad_weight_WD = unwritten(weight_WD, dtype=sum_dtype) if needs_grad else None
        # Overwritten by every chunk: fresh memory would cost a CPU more than the arithmetic on it.
        buffer_CW = hidden_ND.new_empty(chunk_rows, width)
        # Its parts are what is computed in fp32 at a time; on a CPU they stay in its cache.
        part_tokens = _CPU_PART_TOKENS if hidden_ND.device.type == "cpu" else loss_part_tokens(rows)
        part_rows = chunk_rows if compile else min(chunk_rows, part_tokens)
        is_wide = buffer_CW.dtype == wide or compile
        wide_buffer_PW = buffer_CW if is_wide else buffer_CW.new_empty(part_rows, width, dtype=wide)
        for chunk in (slice(first, first + chunk_rows) for first in range(0, hidden_ND.shape[0], max(1, chunk_rows))):
            hidden_CD = hidden_ND[chunk]
            product_CW = torch.mm(hidden_CD, weight_WD.T, out=buffer_CW[: hidden_CD.shape[0]])
            of_chunk = (product_CW, targets_N1[chunk], counted_N1[chunk], own_N1[chunk], minus_own_N1[chunk])
            parts = zip(*(tensor.split(part_rows) for tensor in of_chunk), strict=True)
            for product_PW, targets_P1, counted_P1, own_P1, minus_own_P1 in parts:
                padded_PW = product_PW if is_wide else wide_buffer_PW[: product_PW.shape[0]].copy_(product_PW)
                exp_PV = slope_PV = None
                if compile:
                    top_P1, sum_P1, at_target_P1 = compiled(softmax_terms)(product_PW, targets_P1, own_P1, vocab_size)
                else:
                    logits_PV = padded_PW[:, :vocab_size]
                    slope_PV = _cap_logits(logits_PV, softcap)
                    at_target_P1 = logits_PV.gather(1, targets_P1)
                    top_P1 = logits_PV.amax(dim=1, keepdim=True)
                    exp_PV = logits_PV.sub_(top_P1).exp_()
                    sum_P1 = exp_PV.sum(dim=1, keepdim=True)
                own_top_P1, factor_P1 = top_P1, counted_P1
                if all_reduce_softmax is not None:
                    top_P1, sum_P1, at_target_P1 = all_reduce_softmax(top_P1, sum_P1, at_target_P1 * own_P1)
                    factor_P1 = factor_P1 * (own_top_P1 - top_P1).exp()
                terms.append((top_P1, sum_P1, at_target_P1))
                factor_P1 = factor_P1 / sum_P1
                if z_loss:
                    factor_P1 = factor_P1 * (1 + 2 * z_loss * (sum_P1.log() + top_P1))
                if needs_grad:
                    if exp_PV is None:
                        compiled(write_logits_grad)(product_PW, own_top_P1, factor_P1, targets_P1, own_P1, vocab_size)
                    else:
                        _write_logits_grad(exp_PV, factor_P1, targets_P1, minus_own_P1, slope_PV)
                        padded_PW[:, vocab_size:] = 0
                        product_PW.copy_(padded_PW)  # nothing where it is itself
            if grad_hidden_ND is not None and grad_weight_WD is not None:
                torch.mm(product_CW, weight_WD, out=grad_hidden_ND[chunk])
                _add_product(grad_weight_WD, product_CW.T, hidden_CD, first=chunk.start == 0)
        for buffer in (buffer_CW, wide_buffer_PW):  # freed before the head's gradient exists twice: views are left
            buffer.untyped_storage().resize_(0)
        if grad_weight_WD is not None:
            ctx.save_for_backward(grad_hidden_ND, grad_weight_WD[:rows].to(weight_VD.dtype))
        top_N1, sum_N1, at_target_N1 = terms[1] if len(terms) == 2 else map(torch.cat, zip(*terms, strict=True))
        log_sum_N1 = sum_N1.log_().add_(top_N1)
        cross_entropy = ((log_sum_N1 - at_target_N1) * counted_N1).sum()
        z_part = (log_sum_N1.square_() * counted_N1).sum() * z_loss if z_loss else torch.zeros_like(cross_entropy)
        ctx.mark_non_differentiable(cross_entropy, z_part)
        return cross_entropy + z_part if z_loss else cross_entropy.detach(), cross_entropy, z_part

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (once_differentiable hides the names)
        ctx: Any, upstream: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        return _scale_grad(grad_hidden_ND, upstream), _scale_grad(grad_weight_VD, upstream), *(None,) * 10


def _cap_logits(logits: Tensor, softcap: float) -> Tensor | None:
    """Replace logits z by softcap * tanh(z / softcap); return the derivative, or None where there is no cap."""
    if not softcap:
        return None
    slope = logits.div_(softcap).tanh_().square().neg_().add_(1)
    logits.mul_(softcap)
    return slope


def _write_logits_grad(exp: Tensor, factor: Tensor, targets: Tensor, minus_own: Tensor, slope: Tensor | None) -> None:
    """Overwrite exp(logit - largest) with the loss's gradient: exp * factor - one-hot of the label, times the slope."""
    exp.mul_(factor).scatter_add_(1, targets, minus_own)
    if slope is not None:
        exp.mul_(slope)


def _check_arguments(*, z_loss: float, pad_to_multiple_of: int, vocab_size: int | None, n_columns: int) -> None:
    if not 0 <= z_loss < float("inf"):
        raise ModelError(f"z_loss = {z_loss}: must be a finite number of at least 0 (0: none; PaLM used 1e-4)")
    if pad_to_multiple_of < 1:
        raise ModelError(f"pad_to_multiple_of = {pad_to_multiple_of}: must be at least 1 (1: no padding)")
    if vocab_size is not None and not 1 <= vocab_size <= n_columns:
        raise ModelError(f"vocab_size = {vocab_size}: must be between 1 and the {n_columns} columns of the logits")


def default_chunk_tokens(hidden: Tensor, weight_VD: Tensor) -> int:
    """Return the tokens whose logits exist at a time, by device and vocabulary."""
    if hidden.device.type == "cpu":
        return max(1, _CPU_CHUNK_LOGITS // weight_VD.shape[0] // _CPU_PART_TOKENS) * _CPU_PART_TOKENS
    return loss_chunk_tokens(weight_VD.shape[0])


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Add a @ b to `total`, which may have a wider dtype; the first product overwrites it.

    A CPU upcasts the product into fresh memory before it adds: some rows at a time, that memory stays in the cache.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=0 if first else 1)
    elif total.device.type == "cuda":  # one kernel adds in fp32: the product is never rounded nor written
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=0 if first else 1, out=total)
    elif total.device.type != "cpu":
        total.copy_(a @ b) if first else total.add_(a @ b)
    else:
        for row in range(0, total.shape[0], _CPU_CHUNK_ROWS):
            rows, product = total[row : row + _CPU_CHUNK_ROWS], a[row : row + _CPU_CHUNK_ROWS] @ b
            rows.copy_(product) if first else rows.add_(product)


def _scale_grad(grad: Tensor, upstream: Tensor) -> Tensor:
    """Return grad * upstream; in place unless the graph is kept, which saves a copy of the head."""
    # No public function says whether the graph is kept for another backward pass.
    kept = torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
    if kept:
        return (grad * upstream).to(grad.dtype)
    return grad.mul_(upstream)


def _upcast_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
