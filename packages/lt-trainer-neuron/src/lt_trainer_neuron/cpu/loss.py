"""Cross-entropy whose head is cut along the vocabulary: no rank holds a logit of another rank's token ids.

    top = max over ranks,    log_sum = log(sum over ranks of sum(exp(logit - top))) + top,    loss = log_sum - target

with the target's logit from the rank that has its row. Every rank computes the same loss; the gradient of the hidden
states is a sum over ranks, which is left to where they come from (`collectives.enter`).

Cost: all logits of the micro-batch in fp32, and three exchanges of a number per token.

Shapes: B batch, T positions, D hidden_size, V this rank's rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lt_model.loss import IGNORE
from lt_trainer_neuron.cpu.collectives import Peers, largest, leave


def vocabulary_loss(
    hidden_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor, *, peers: Peers, z_loss: float
) -> tuple[Tensor, Tensor]:
    """The summed loss over labels != IGNORE with its z-loss, and the cross-entropy alone; the same on every rank.

    Args:
        hidden_BTD: last hidden states of all positions, the same on every rank; their gradient is this rank's part.
        weight_VD: this rank's rows of the head; all ranks have as many.
        labels_BT: ids of the whole vocabulary, the same on every rank.
        peers: the ranks.
        z_loss: coefficient of logsumexp(logits)^2.
    """
    logits_BTV = F.linear(hidden_BTD, weight_VD)
    logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    rows = weight_VD.shape[0]
    local_BT = labels_BT - peers.rank * rows
    counted_BT = labels_BT != IGNORE
    own_BT = counted_BT & (local_BT >= 0) & (local_BT < rows)
    top_BT = largest(logits_BTV.detach().amax(-1), peers)
    sums_BT = leave((logits_BTV - top_BT[..., None]).exp().sum(-1), peers, sequence=False)
    log_sum_BT = sums_BT.log() + top_BT
    at_target_BT = logits_BTV.gather(-1, local_BT.clamp(0, rows - 1)[..., None])[..., 0]
    target_BT = leave(at_target_BT.masked_fill(~own_BT, 0), peers, sequence=False)
    cross_entropy = ((log_sum_BT - target_BT) * counted_BT).sum()
    loss = cross_entropy + z_loss * (log_sum_BT.square() * counted_BT).sum() if z_loss else cross_entropy
    return loss, cross_entropy.detach()
