"""Log-probability and greedy flag of each label, in fp32 (or float64); not differentiable.

A label is greedy if no other token has a larger logit, and none of a smaller id an equal one: it is what `generation`
takes at temperature 0.

With the head split along the vocabulary, ranks exchange per token what the loss needs (largest logit, sum of
exponentials, the label's logit), and then whether one of their own logits beats the label's.

`linear_label_scores` computes the logits of a chunk of tokens at a time, as `loss` does, so the full [N, V] matrix
never exists. `vocab_parallel_label_scores` is the formula on unchunked logits, in operations that lazy devices support.

Cost: the matrix product of the head, once, and a few passes over the logits.

Shapes: N = B * T tokens, C tokens of a chunk, D hidden_size, V vocabulary (a rank's rows of it), W = V and its padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lt_model.loss import IGNORE_INDEX, AllReduceSoftmax, default_chunk_tokens, vocab_parallel_softmax


class LabelScores(NamedTuple):
    """Scores of labels, each of the labels' shape.

    Attributes:
        log_probs: log softmax(logits)[label] in nats, fp32 or wider; 0 where the label is IGNORE_INDEX.
        is_greedy: bool, the label is the most likely token; False where it is IGNORE_INDEX.
    """

    log_probs: Tensor
    is_greedy: Tensor


@torch.no_grad()
def linear_label_scores(
    hidden: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    *,
    pad_to_multiple_of: int = 1,
    vocab_start_index: int = 0,
    all_reduce_softmax: AllReduceSoftmax | None = None,
    chunk_tokens: int = 0,
    softcap: float = 0.0,
) -> LabelScores:
    """Return the scores of `labels` under the logits `hidden @ weight_VD.T`, equal on all ranks.

    Args:
        hidden: [..., D] last hidden states.
        weight_VD: the head's weight, same dtype as `hidden`.
        labels: [...] integers in the whole vocabulary, or IGNORE_INDEX.
        pad_to_multiple_of: the matrix products are done with a multiple of this many rows; the result is the same.
        vocab_start_index: token id of the weight's first row, if the head is vocabulary-parallel.
        all_reduce_softmax: reduction over the ranks with the other rows; None if the weight has all.
        chunk_tokens: tokens whose logits exist at a time; 0: as in `linear_loss_parts`.
        softcap: as in `linear_loss_parts`.
    """
    hidden_ND, labels_N = hidden.flatten(0, -2), labels.flatten().long()
    wide, n_rows = torch.promote_types(hidden.dtype, torch.float32), weight_VD.shape[0]
    width = -(-n_rows // pad_to_multiple_of) * pad_to_multiple_of
    weight_WD = F.pad(weight_VD, (0, 0, 0, width - n_rows)) if width > n_rows else weight_VD
    log_probs_N = torch.zeros(labels_N.shape, dtype=wide, device=hidden.device)
    is_greedy_N = torch.zeros(labels_N.shape, dtype=torch.bool, device=hidden.device)
    size = min(chunk_tokens or default_chunk_tokens(hidden, weight_VD), max(1, labels_N.shape[0]))
    for first in range(0, labels_N.shape[0], size):
        chunk = slice(first, first + size)
        columns_C1 = (labels_N[chunk] - vocab_start_index)[:, None]
        is_counted_C1 = is_own_C1 = (labels_N[chunk] != IGNORE_INDEX)[:, None]
        if all_reduce_softmax is not None:
            is_own_C1 = (columns_C1 >= 0) & (columns_C1 < n_rows)
        logits_CV = (hidden_ND[chunk] @ weight_WD.T)[:, :n_rows].to(wide)
        if softcap:
            logits_CV = softcap * torch.tanh(logits_CV / softcap)
        # A label outside an unsharded vocabulary makes `gather` raise.
        at_label_C1 = logits_CV.gather(1, columns_C1.masked_fill(~is_own_C1, 0)) * is_own_C1
        top_C1 = logits_CV.amax(dim=1, keepdim=True)
        sum_C1 = (logits_CV - top_C1).exp_().sum(dim=1, keepdim=True)
        if all_reduce_softmax is not None:
            top_C1, sum_C1, at_label_C1 = all_reduce_softmax(top_C1, sum_C1, at_label_C1)
        is_beaten_C1 = _is_beaten(logits_CV, at_label_C1, columns_C1)
        if all_reduce_softmax is not None:
            is_beaten_C1, _, _ = all_reduce_softmax(is_beaten_C1, *(torch.zeros_like(top_C1),) * 2)
        scores = _label_scores(at_label_C1 - top_C1 - sum_C1.log(), is_beaten_C1, is_counted_C1)
        log_probs_N[chunk], is_greedy_N[chunk] = scores.log_probs.squeeze(1), scores.is_greedy.squeeze(1)
    return LabelScores(log_probs_N.view(labels.shape), is_greedy_N.view(labels.shape))


@torch.no_grad()
def vocab_parallel_label_scores(
    logits_NV: Tensor,
    labels_N: Tensor,
    *,
    all_reduce_max: Callable[[Tensor], Tensor],
    vocab_start_index: int = 0,
    **options: Any,
) -> LabelScores:
    """Return the scores of labels under vocabulary-parallel logits, equal on all ranks; [N] each.

    Args:
        logits_NV: this rank's columns.
        labels_N: integers in the whole vocabulary, or IGNORE_INDEX.
        all_reduce_max: elementwise maximum over the ranks.
        vocab_start_index: token id of this rank's first column.
        options: other keyword arguments of `vocab_parallel_softmax`.
    """
    terms = vocab_parallel_softmax(
        logits_NV, labels_N, all_reduce_max=all_reduce_max, vocab_start_index=vocab_start_index, **options
    )
    columns_N1 = labels_N.long()[:, None] - vocab_start_index
    is_beaten_N1 = all_reduce_max(_is_beaten(logits_NV.to(terms.exp_NV.dtype), terms.at_label_N1, columns_N1))
    scores = _label_scores(terms.at_label_N1 - terms.log_sum_N1, is_beaten_N1, terms.counted_N1 > 0)
    return LabelScores(scores.log_probs.squeeze(1), scores.is_greedy.squeeze(1))


def _is_beaten(logits_NV: Tensor, at_label_N1: Tensor, columns_N1: Tensor) -> Tensor:
    """Return 1 where a column has a larger logit than the label, or an equal one and a smaller id; else 0."""
    ids_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    is_beaten_NV = (logits_NV > at_label_N1) | ((logits_NV == at_label_N1) & (ids_V < columns_N1))
    return is_beaten_NV.to(logits_NV.dtype).amax(dim=1, keepdim=True)


def _label_scores(log_probs: Tensor, is_beaten: Tensor, is_counted: Tensor) -> LabelScores:
    is_greedy = is_counted & (is_beaten == 0) & ~log_probs.isnan()
    return LabelScores(torch.where(is_counted, log_probs, torch.zeros_like(log_probs)), is_greedy)
