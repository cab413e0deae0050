"""What lt knows of the engine before torch is loaded: options, capabilities, and whether a recipe can run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lt_trainer.errors import RecipeError
from lt_trainer_gpu import flight_recorder
from lt_trainer_gpu.options import GpuOptions
from lt_trainer_gpu.refusals import check_compile_version, check_layout, check_memory_history, check_vocabulary

if TYPE_CHECKING:
    from lt_model import LlamaConfig
    from lt_trainer.engine import Engine, World
    from lt_trainer.recipe import Recipe


class GpuSpec:
    """The torch-native engine: FSDP2 and tensor parallelism on CUDA, and with the same code on the CPU."""

    name = "gpu"
    options = GpuOptions
    capabilities = frozenset({"document_mask", "profile", "memory_snapshot"})

    def check(self, recipe: Recipe, world: World) -> None:
        """Refuse what this engine cannot do on `world`.

        Raises:
            RecipeError: naming field, value and remedy.
        """
        parallel = recipe.parallel
        if parallel.n_nodes != world.n_nodes:
            raise RecipeError(
                f"the ranks were started on {world.n_nodes} node(s)",
                values={"parallel.n_nodes": parallel.n_nodes},
                remedy="set parallel.n_nodes (NUM_NODES) to the number of nodes, or start the ranks on that many",
            )
        check_layout(recipe, world.size)
        check_memory_history(recipe.metrics, recipe.engine["gpu"].device)
        recipe.accumulation(world.size)

    def env(self, recipe: Recipe) -> dict[str, str]:
        """Variables to set before torch loads.

        Deterministic cuBLAS needs its workspace fixed beforehand; the flight recorder is told where its dumps go.
        """
        options = recipe.engine["gpu"]
        fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if options.deterministic else {}
        return fixed | flight_recorder.variables(Path(recipe.run.out) / "logs", os.environ)

    def open(self, recipe: Recipe, model: LlamaConfig, world: World) -> Engine:
        """Take the device, build the model, the optimizer and the process group."""
        check_vocabulary(model, recipe.parallel.tp)
        import torch

        check_compile_version(recipe.engine["gpu"], recipe.parallel.tp, torch.__version__)
        from lt_trainer_gpu.engine import GpuEngine

        return GpuEngine(recipe, model, world)


SPEC = GpuSpec()
