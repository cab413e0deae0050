"""Loss as torch's own function of all logits, and the chunked one as a scalar."""

from torch import Tensor
from torch.nn import functional as F

from lt_model import IGNORE_INDEX, linear_loss_parts


def cross_entropy_sum(logits: Tensor, labels: Tensor, *, z_loss: float = 0.0) -> Tensor:
    """Return the summed loss of unchunked logits, in fp32 or wider."""
    wide = logits.flatten(0, -2) if logits.dtype.itemsize >= 4 else logits.flatten(0, -2).float()
    labels = labels.flatten().long()
    loss = F.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss + z_loss * (wide.logsumexp(dim=1).square() * (labels != IGNORE_INDEX)).sum()


def linear_loss(hidden: Tensor, weight: Tensor, labels: Tensor, **options: float) -> Tensor:
    """Return the total of `linear_loss_parts`."""
    return linear_loss_parts(hidden, weight, labels, **options).total
