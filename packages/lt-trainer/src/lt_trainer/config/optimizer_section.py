"""The section `[optimizer]`. `Recipe` compares it with the registry of optimizers, which read it."""

from typing import Literal

from lt_trainer.config.section import Section, option

Dtype = Literal["float32", "bfloat16"]


class LrScaleOptions(Section, table="optimizer.lr_scale"):
    """`[optimizer.lr_scale]`: factors of the learning rate by the role of a parameter."""

    embedding: float = option(1.0, "factor for the input embedding (and a tied head)", ge=0)
    head: float = option(1.0, "factor of the learning rate for the head", ge=0)
    norm: float = option(1.0, "factor of the learning rate for norms", ge=0)
    matrices: float = option(1.0, "factor of the learning rate for the matrices of the blocks", ge=0)


class OptimizerOptions(Section, table="optimizer"):
    """Optimizer options. Those that only some optimizers have are in `OptimizerSpec.options`."""

    name: str = option("adamw", "optimizer: adamw or muon")
    lr: float = option(1.6e-3, "peak learning rate", hyperparameter="LEARNING_RATE", gt=0)
    weight_decay: float = option(0.01, "weight decay; not of norms", hyperparameter="WEIGHT_DECAY", ge=0)
    beta1: float = option(0.9, "decay of the first moment", hyperparameter="BETA1", ge=0, lt=1)
    beta2: float = option(0.95, "decay of the second moment", hyperparameter="BETA2", ge=0, lt=1)
    eps: float = option(1e-8, "epsilon, added to the root of the second moment", gt=0)
    grad_clip: float = option(1.0, "maximum gradient norm; 0 = no clipping", hyperparameter="GRAD_CLIP", ge=0)
    decay_embeddings: bool = option(False, "apply weight decay to the input embedding too")
    moments_dtype: Dtype = option("float32", "dtype of all moments; float32 means that of the master weights")
    weights_dtype: Dtype = option("float32", "dtype of the weights; bfloat16 is rounded stochastically")
    momentum: float = option(0.95, "muon: decay of the momentum", ge=0, lt=1)
    nesterov: bool = option(True, "muon: Nesterov momentum")
    adjust_lr: Literal["match_rms_adamw", "original"] = option("match_rms_adamw", "muon: as AdamW, or sqrt(max(1,R/C))")
    newton_schulz_steps: int = option(5, "muon: steps of the Newton-Schulz iteration", ge=1)
    newton_schulz_dtype: Dtype = option("bfloat16", "muon: its dtype; float32 means that of the master weights")
    lr_scale: LrScaleOptions = LrScaleOptions()
    z_loss: float = option(0.0, "weight of logsumexp(logits)^2; 1e-4 is typical, 0 = off", ge=0)

    def check(self) -> None:
        """Check that decay has something to decay with."""
        if self.decay_embeddings and not self.weight_decay:
            raise self.wrong("decay_embeddings weight_decay", "has no effect without weight decay", "remove it")
