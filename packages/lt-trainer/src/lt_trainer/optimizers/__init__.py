"""Optimizers by name: each is a file with its `OptimizerSpec` and an entry of `OPTIMIZERS`."""

from lt_trainer.config.optimizer_section import OptimizerOptions
from lt_trainer.config.section import default_of, suggest
from lt_trainer.errors import RecipeError
from lt_trainer.optimizers.adamw import ADAMW
from lt_trainer.optimizers.muon import MUON
from lt_trainer.optimizers.spec import OptimizerSpec

OPTIMIZERS: dict[str, OptimizerSpec] = {spec.name: spec for spec in (ADAMW, MUON)}
"""Values of `optimizer.name`."""


def optimizer_spec(name: str) -> OptimizerSpec:
    """Return the optimizer of a recipe, `recipe.optimizer.name`, which was checked against the registry."""
    return OPTIMIZERS[name]


def check_options(options: OptimizerOptions) -> None:
    """Check that the optimizer exists and has the options that are set.

    Raises:
        RecipeError: naming the field.
    """
    if options.name not in OPTIMIZERS:
        similar = suggest(options.name, OPTIMIZERS)
        remedy = f"did you mean {similar!r}?" if similar else f"use one of {', '.join(OPTIMIZERS)}"
        raise RecipeError("unknown optimizer", values={"optimizer.name": options.name}, remedy=remedy)
    spec = OPTIMIZERS[options.name]
    for name in sorted(set().union(*(other.options for other in OPTIMIZERS.values())) - spec.options):
        if (value := getattr(options, name)) != default_of(OptimizerOptions, name):
            problem = f"has no effect with optimizer.name = {spec.name!r}"
            raise RecipeError(problem, values={f"optimizer.{name}": value}, remedy="remove it")
    spec.check(options)
