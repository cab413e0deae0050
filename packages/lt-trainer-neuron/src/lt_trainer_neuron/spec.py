"""Engine specification for lt-trainer's entry point `lt.engines`; imports no torch and no Neuron."""

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lt_trainer.config.recipe import ResolvedRecipe, engine_options
from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer_neuron.checks import check_model, check_recipe
from lt_trainer_neuron.compile_key import check_compiled
from lt_trainer_neuron.environment import check_environment, launch_env, neuron_env
from lt_trainer_neuron.hyperparameter_aliases import resolve_alias
from lt_trainer_neuron.malloc import limit_malloc_arenas
from lt_trainer_neuron.options import SECTION, NeuronOptions
from lt_trainer_neuron.sdk import require_installed

if TYPE_CHECKING:
    from lt_model import ModelConfig
    from lt_trainer.engine import Engine, World


class NeuronSpec:
    """Specification of the Trainium engine: options, checks, environment and plan."""

    name: str = "neuron"
    options: type = NeuronOptions
    capabilities: frozenset[str] = frozenset({"document_mask"})
    """Supported recipe features; `check` handles exceptions (flash attention has no document mask)."""

    def check(self, recipe: Recipe, world: "World") -> None:
        """Raise RecipeError unless the engine can run the recipe on `world`."""
        check_recipe(recipe, world)
        check_environment(recipe, os.environ)

    def env(self, recipe: Recipe) -> dict[str, str]:
        """Return the variables of the Neuron runtime, compiler and torch-xla; values set by the user are kept."""
        return neuron_env(recipe, os.environ) | launch_env(os.environ)

    def hyperparameter(self, name: str, value: Any) -> Mapping[str, Any] | None:
        """Return the recipe fields that an NxD Llama script's hyperparameter sets, or None if unknown."""
        return resolve_alias(name, value)

    def plan(
        self, resolved: ResolvedRecipe, *, device: str, devices: int, nodes: int | None, mfu: float | None
    ) -> tuple[bool, str, dict[str, Any]]:
        """Return whether a core has enough memory; its memory by part and time, as text and JSON."""
        from lt_trainer_neuron.planning import format_plan, make_plan

        plan = make_plan(resolved, device=device, devices=devices, nodes=nodes, mfu=mfu)
        return plan["fits"], format_plan(plan), plan

    def open(self, recipe: Recipe, model: "ModelConfig", world: "World") -> "Engine":
        """Repeat the checks with the model's vocabulary, then open the engine.

        Raises:
            RecipeError: the recipe cannot run.
            NotInstalledError: the Neuron packages are missing or cannot be imported.
        """
        check_recipe(recipe, world)
        check_model(recipe, model)
        options = engine_options(recipe, "neuron", NeuronOptions)
        if options.backend == "cpu" and world.size != options.num_neuroncores * recipe.parallel.n_nodes:
            raise RecipeError(
                f"requires one rank per core; {world.size} ranks were started",
                values={f"{SECTION}.num_neuroncores": options.num_neuroncores},
                remedy=f"set it to {world.local_size}, or start as many ranks",
            )
        if options.backend != "cpu":
            limit_malloc_arenas(neuron_env(recipe, os.environ)["MALLOC_ARENA_MAX"])
        if options.backend == "nxd":
            require_installed()
            warning = check_compiled(recipe, model, os.environ)
            if warning and world.rank == 0:
                sys.stderr.write(f"warning: {warning}\n")
        from lt_trainer_neuron.engine import NeuronEngine
        from lt_trainer_neuron.nxd.backend import NxdBackend

        return NeuronEngine(recipe, model, NxdBackend(recipe, model, world))


SPEC = NeuronSpec()
