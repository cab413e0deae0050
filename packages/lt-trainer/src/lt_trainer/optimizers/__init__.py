"""Optimizers by name: each is a file with its `OptimizerSpec` and an entry of `OPTIMIZERS`."""

from lt_trainer.optimizers.adamw import ADAMW
from lt_trainer.optimizers.muon import MUON
from lt_trainer.optimizers.spec import OptimizerSpec

OPTIMIZERS: dict[str, OptimizerSpec] = {spec.name: spec for spec in (ADAMW, MUON)}
"""Values of `optimizer.name`."""


def optimizer_spec(name: str) -> OptimizerSpec:
    """Return the optimizer of a recipe, `recipe.optimizer.name`, which was checked against the registry."""
    return OPTIMIZERS[name]
