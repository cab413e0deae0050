"""What lt-trainer knows about this engine through the entry point `lt.engines`; imports no torch, nothing of Neuron."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lt_trainer.errors import RecipeError
from lt_trainer.recipe import Recipe, Resolved, engine_options
from lt_trainer_neuron.aliases import fields_of
from lt_trainer_neuron.checks import check, check_model
from lt_trainer_neuron.environment import Variable, check_environment, neuron_env, settings, variables
from lt_trainer_neuron.options import SECTION, NeuronOptions
from lt_trainer_neuron.sdk import installed, require

if TYPE_CHECKING:
    from lt_model import LlamaConfig
    from lt_trainer.engine import Engine, World
    from lt_trainer.planning.answer import Answer

__all__ = ["SPEC", "NeuronSpec"]


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

    def plan(self, resolved: Resolved, *, device: str, devices: int, nodes: int | None, mfu: float | None) -> "Answer":
        """Memory of a core by part, steps of an epoch and time, for `lt train plan`."""
        from lt_trainer.planning.answer import Answer
        from lt_trainer_neuron.plan_text import page
        from lt_trainer_neuron.planning import make

        plan = make(resolved, device=device, devices=devices, nodes=nodes, mfu=mfu)
        return Answer(fits=plan.fits, page=lambda: page(plan), values=plan.values)

    def open(self, recipe: Recipe, model: "LlamaConfig", world: "World") -> "Engine":
        """Check once more, with the model's vocabulary, open the backend and fill it.

        Raises:
            RecipeError: the recipe would not run.
            NotInstalledError: the packages of Trainium are not there, or are placeholders.
        """
        check(recipe, world)
        check_model(recipe, model)
        options = engine_options(recipe, "neuron", NeuronOptions)
        if options.backend == "cpu":
            if world.size != options.num_neuroncores * recipe.parallel.n_nodes:
                raise RecipeError(
                    f"there is one rank per core, and {world.size} were started",
                    values={f"{SECTION}.num_neuroncores": options.num_neuroncores},
                    remedy=f"set it to {world.local_size}, or start as many ranks",
                )
            from lt_trainer_neuron.cpu.backend import CpuBackend
            from lt_trainer_neuron.engine import NeuronEngine

            return NeuronEngine(recipe, model, CpuBackend(recipe, model, world))
        from lt_trainer_neuron.arenas import limit_arenas

        limit_arenas(neuron_env(recipe, environ=os.environ)["MALLOC_ARENA_MAX"])
        if options.backend == "nxd":
            require(installed())
            from lt_trainer_neuron.compile_key import require_compiled

            warning = require_compiled(recipe, model, os.environ)
            if warning and world.rank == 0:
                sys.stderr.write(f"warning: {warning}\n")
        from lt_trainer_neuron.engine import NeuronEngine
        from lt_trainer_neuron.nxd.backend import NxdBackend

        return NeuronEngine(recipe, model, NxdBackend(recipe, model, world))


SPEC = NeuronSpec()
