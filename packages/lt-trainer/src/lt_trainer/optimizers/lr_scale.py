"""Learning rate by the role of a parameter: `[optimizer.lr_scale]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_model import ParamSpec
    from lt_trainer.config.sections.optimizer import OptimizerOptions


ROLES = {"embed_tokens": "embedding", "lm_head": "head", "norm": "norm"}
"""Kind of a parameter → field of `[optimizer.lr_scale]`; all others are matrices of blocks."""


def lr_scale(spec: ParamSpec, options: OptimizerOptions) -> float:
    """Return the factor of a parameter's learning rate."""
    return getattr(options.lr_scale, ROLES.get(spec.kind, "matrices"))
