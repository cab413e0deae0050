"""What lt-trainer knows about this engine through the entry point `lt.engines`; imports no torch, nothing of Neuron."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from lt_trainer.recipe import Recipe, Resolved
from lt_trainer_neuron.aliases import fields_of
from lt_trainer_neuron.checks import check, check_model
from lt_trainer_neuron.environment import Variable, check_environment, settings, variables
from lt_trainer_neuron.options import NeuronOptions

if TYPE_CHECKING:
    from lt_model import LlamaConfig
    from lt_trainer.engine import World
    from lt_trainer_neuron.planning import NeuronPlan

__all__ = ["SPEC", "NeuronSpec", "NotYetError"]


class NotYetError(ValueError):
    """Something that this version cannot do."""

    exit_code: int = 64


class NeuronSpec:
    """The Trainium engine before it is opened: options, checks and environment."""

    name: str = "neuron"
    options: type = NeuronOptions
    capabilities: frozenset[str] = frozenset({"document_mask"})
    """What a recipe may ask for; `check` knows the exceptions (flash attention takes no document mask)."""

    def check(self, recipe: Recipe, world: "World") -> None:
        """Refuse a recipe that the engine could not run on `world` (RecipeError)."""
        check(recipe, world)
        check_environment(recipe, os.environ)

    def env(self, recipe: Recipe) -> dict[str, str]:
        """The variables of the Neuron runtime and compiler for this recipe; what the person has set stays."""
        return settings(recipe, os.environ)

    def hyperparameter(self, name: str, value: Any) -> Mapping[str, Any] | None:
        """The recipe's fields that a knob of the NxD Llama scripts sets; None where there is no such knob."""
        return fields_of(name, value)

    def variables(self, recipe: Recipe, environ: Mapping[str, str]) -> Sequence[Variable]:
        """The same as `env`, each with its reason and with what the recipe alone would say."""
        return variables(recipe, environ=environ)

    def plan(
        self, resolved: Resolved, *, device: str, devices: int, nodes: int | None, mfu: float | None
    ) -> "NeuronPlan":
        """Memory of a core by part, steps of an epoch and time, for `lt train plan`."""
        from lt_trainer_neuron.planning import make

        return make(resolved, device=device, devices=devices, nodes=nodes, mfu=mfu)

    def open(self, recipe: Recipe, model: "LlamaConfig", world: "World") -> NoReturn:
        """Check once more, with the model's vocabulary, and say that training comes later.

        Raises:
            RecipeError: the recipe would not run.
            NotYetError: always, otherwise.
        """
        check(recipe, world)
        check_model(recipe, model)
        raise NotYetError(
            "run.engine = 'neuron': this version of lt-trainer-neuron checks a recipe for Trainium and makes its "
            "environment, and this recipe passes; training on Trainium arrives in a later version. "
            "To train on this machine, set run.engine to 'gpu' (pip install lt-trainer-gpu)"
        )


SPEC = NeuronSpec()
