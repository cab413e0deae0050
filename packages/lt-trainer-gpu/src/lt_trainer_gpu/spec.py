"""Engine spec without torch: options, capabilities and recipe checks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lt_trainer_gpu import flight_recorder
from lt_trainer_gpu.checks import check_recipe
from lt_trainer_gpu.options import GpuOptions, gpu_options

if TYPE_CHECKING:
    from lt_model import ModelConfig
    from lt_trainer.config.sections import Recipe
    from lt_trainer.engine import Engine, World

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the settings of torch's CUDA allocator, the newer name first."""


class GpuSpec:
    """Torch-native engine spec: FSDP2, TP and CP, on CUDA and with the same code on CPU."""

    name = "gpu"
    options = GpuOptions
    capabilities = frozenset({"document_mask", "profile", "memory_snapshot"})

    def check(self, recipe: Recipe, world: World) -> None:
        """Reject a recipe that this engine cannot run on `world`.

        Raises:
            RecipeError: naming field, value and remedy.
        """
        check_recipe(recipe, world)

    def env(self, recipe: Recipe) -> dict[str, str]:
        """Return the environment variables to set before torch loads.

        Deterministic cuBLAS needs a fixed workspace; the flight recorder needs its dump path. Expandable segments keep
        GPU memory from fragmenting where tensors vary in size; the user's own allocator settings are kept as they are.
        """
        options = gpu_options(recipe)
        fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if options.deterministic else {}
        if options.device != "cpu" and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
            fixed[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
        return fixed | flight_recorder.env_variables(Path(recipe.run.dir) / "logs", os.environ)

    def open(self, recipe: Recipe, model: ModelConfig, world: World) -> Engine:
        """Select the device; build the process group, the model and the optimizer."""
        from lt_trainer_gpu.engine import GpuEngine

        return GpuEngine(recipe, model, world)


SPEC = GpuSpec()
