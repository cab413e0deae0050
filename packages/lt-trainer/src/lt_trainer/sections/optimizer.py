"""`[optimizer]`: AdamW."""

from dataclasses import dataclass
from typing import Literal

from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import above_zero, at_least, wrong

SLOWEST_BF16 = 1 - 2**-8
"""Half the distance between 1 and the bfloat16 above it is 2**-8 of 1: a decay by less than that is rounded away."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW."""

    lr: float = option(1.6e-3, "highest learning rate", hp="LEARNING_RATE")
    weight_decay: float = option(0.01, "decoupled weight decay; norms have none", hp="WEIGHT_DECAY")
    beta1: float = option(0.9, "decay of the first moment", hp="BETA1")
    beta2: float = option(0.95, "decay of the second moment", hp="BETA2")
    eps: float = option(1e-8, "added to the root of the second moment")
    grad_clip: float = option(1.0, "largest norm of the gradient; 0 = no clipping", hp="GRAD_CLIP")
    decay_embeddings: bool = option(False, "weight decay for the input embedding too")
    moments: Literal["float32", "bfloat16"] = option(
        "float32", "dtype in which both moments are kept; float32 means that of the weights"
    )
    z_loss: float = option(0.0, "weight of logsumexp(logits)^2, which keeps logits small; 1e-4 is usual, 0 = off")

    def __post_init__(self) -> None:
        check_types(self, "optimizer")
        at_least(self, "optimizer", 0, "weight_decay", "grad_clip", "z_loss")
        above_zero(self, "optimizer", "lr", "eps")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                default = getattr(OptimizerOptions, name)
                raise wrong(self, "optimizer", name, "must lie in [0, 1)", f"the default is {default!r}")
        if self.decay_embeddings and self.weight_decay == 0:
            problem = "without weight decay there is none for the embedding"
            remedy = "set optimizer.weight_decay (WEIGHT_DECAY) above 0, or leave optimizer.decay_embeddings out"
            raise wrong(self, "optimizer", "decay_embeddings weight_decay", problem, remedy)
        if self.moments == "bfloat16":
            for name in ("beta1", "beta2"):
                if getattr(self, name) > SLOWEST_BF16:
                    problem = "a moment in bfloat16 that decays so slowly is rounded back to what it was"
                    remedy = f"set optimizer.{name} to at most {SLOWEST_BF16}, or optimizer.moments to float32"
                    raise wrong(self, "optimizer", f"{name} moments", problem, remedy)
