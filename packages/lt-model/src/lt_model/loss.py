"""Cross-entropy summed over labels, in fp32 (float64 for float64 models). Labels are already shifted by the data.

Shapes: N = B * T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100  # a label of this value is not counted (as in torch and transformers)


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over labels != IGNORE of -log softmax(logits)[label], a scalar in nats.

    Args:
        logits: [..., V] of any float dtype; used in fp32 or wider.
        labels: [...] integers; IGNORE is not counted.
    """
    logits_NV = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits_NV, labels.flatten().long(), ignore_index=IGNORE, reduction="sum")
