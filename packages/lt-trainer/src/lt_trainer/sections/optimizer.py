"""`[optimizer]`: AdamW."""

from dataclasses import dataclass

from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import above_zero, at_least, wrong


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW."""

    lr: float = option(1.6e-3, "highest learning rate", hp="LEARNING_RATE")
    weight_decay: float = option(0.01, "decoupled weight decay; norms and embeddings have none", hp="WEIGHT_DECAY")
    beta1: float = option(0.9, "decay of the first moment", hp="BETA1")
    beta2: float = option(0.95, "decay of the second moment", hp="BETA2")
    eps: float = option(1e-8, "added to the root of the second moment")
    grad_clip: float = option(1.0, "largest norm of the gradient; 0 = no clipping", hp="GRAD_CLIP")

    def __post_init__(self) -> None:
        check_types(self, "optimizer")
        at_least(self, "optimizer", 0, "weight_decay", "grad_clip")
        above_zero(self, "optimizer", "lr", "eps")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                default = getattr(OptimizerOptions, name)
                raise wrong(self, "optimizer", name, "must lie in [0, 1)", f"the default is {default!r}")
