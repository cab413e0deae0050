"""`[optimizer]`: the optimizer, its hyperparameters, gradient clipping and z-loss."""

from dataclasses import dataclass, field
from typing import Any, Literal

from lt_trainer.config.fields import check_types, coerce, option
from lt_trainer.config.sections.validators import field_error, require_at_least, require_positive
from lt_trainer.optimizers import OPTIMIZERS, optimizer_spec


@dataclass(frozen=True, kw_only=True)
class LrScaleOptions:
    """`[optimizer.lr_scale]`: factors of the learning rate by the role of a parameter."""

    embedding: float = option(1.0, "factor of the learning rate for the input embedding (and a tied head)")
    head: float = option(1.0, "factor of the learning rate for the head")
    norm: float = option(1.0, "factor of the learning rate for norms")
    matrices: float = option(1.0, "factor of the learning rate for the matrices of the blocks")

    def __post_init__(self) -> None:
        check_types(self, "optimizer.lr_scale")
        require_at_least(self, "optimizer.lr_scale", 0, "embedding", "head", "norm", "matrices")


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Optimizer options. Those that only some optimizers have are in `OptimizerSpec.options`."""

    name: str = option("adamw", f"optimizer: one of {', '.join(OPTIMIZERS)}")
    lr: float = option(1.6e-3, "peak learning rate", hyperparameter="LEARNING_RATE")
    weight_decay: float = option(0.01, "decoupled weight decay; not applied to norms", hyperparameter="WEIGHT_DECAY")
    beta1: float = option(0.9, "decay of the first moment", hyperparameter="BETA1")
    beta2: float = option(0.95, "decay of the second moment", hyperparameter="BETA2")
    eps: float = option(1e-8, "epsilon, added to the root of the second moment")
    grad_clip: float = option(1.0, "maximum gradient norm; 0 = no clipping", hyperparameter="GRAD_CLIP")
    decay_embeddings: bool = option(False, "apply weight decay to the input embedding too")
    moments_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "dtype of all moments; float32 means that of the master weights", former_name="moments"
    )
    weights_dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        "dtype of the weights; bfloat16 has no float32 master weights: updates are rounded stochastically",
    )
    momentum: float = option(0.95, "muon: decay of the momentum")
    nesterov: bool = option(True, "muon: Nesterov momentum")
    adjust_lr: Literal["match_rms_adamw", "original"] = option(
        "match_rms_adamw",
        "muon: factor of the learning rate of a matrix of R rows and C columns: 0.2 sqrt(max(R, C)), which makes "
        "updates as large as AdamW's, or sqrt(max(1, R / C))",
    )
    newton_schulz_steps: int = option(5, "muon: steps of the Newton-Schulz iteration")
    newton_schulz_dtype: Literal["float32", "bfloat16"] = option(
        "bfloat16", "muon: dtype of the Newton-Schulz iteration; float32 means that of the master weights"
    )
    lr_scale: LrScaleOptions = field(default_factory=LrScaleOptions)
    z_loss: float = option(0.0, "weight of logsumexp(logits)^2, which keeps logits small; 1e-4 is typical, 0 = off")

    def __post_init__(self) -> None:
        check_types(self, "optimizer")
        require_at_least(self, "optimizer", 0, "weight_decay", "grad_clip", "z_loss")
        require_positive(self, "optimizer", "lr", "eps")
        require_at_least(self, "optimizer", 1, "newton_schulz_steps")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                default = getattr(OptimizerOptions, name)
                raise field_error(self, "optimizer", name, "must be in [0, 1)", f"the default is {default!r}")
        if self.decay_embeddings and self.weight_decay == 0:
            problem = "decay_embeddings has no effect without weight decay"
            remedy = "set optimizer.weight_decay (WEIGHT_DECAY) above 0, or remove optimizer.decay_embeddings"
            raise field_error(self, "optimizer", "decay_embeddings weight_decay", problem, remedy)
        choices: Any = Literal[tuple(OPTIMIZERS)]
        coerce(self.name, choices, name="optimizer.name")
        spec = optimizer_spec(self.name)
        for name in sorted(set().union(*(other.options for other in OPTIMIZERS.values())) - spec.options):
            if getattr(self, name) != getattr(OptimizerOptions, name):
                problem = f"has no effect with optimizer.name = {self.name!r}"
                raise field_error(self, "optimizer", name, problem, "remove it")
        spec.check(self)
