"""What lt knows of the engine before torch is loaded: options, capabilities, and whether a recipe can run."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from lt_trainer.errors import RecipeError
from lt_trainer.sections import OptimizerOptions
from lt_trainer_gpu.options import GpuOptions

if TYPE_CHECKING:
    from lt_model import LlamaConfig
    from lt_trainer.engine import Engine, World
    from lt_trainer.recipe import Recipe


class GpuSpec:
    """The torch-native engine: FSDP2 on CUDA, and with the same code on the CPU."""

    name = "gpu"
    options = GpuOptions
    capabilities = frozenset({"document_mask"})

    def check(self, recipe: Recipe, world: World) -> None:
        """Refuse what this engine cannot do on `world`.

        Raises:
            RecipeError: naming field, value and remedy.
        """
        parallel = recipe.parallel
        for axis in ("tp", "pp", "cp", "dp_replicate"):
            degree = getattr(parallel, axis)
            if degree != 1:
                raise RecipeError(
                    "the gpu engine of this version splits the run over data-parallel shards only",
                    values={f"parallel.{axis}": degree},
                    remedy=f"set parallel.{axis} to 1; parallel.dp_shard = 0 shards over all ranks",
                )
        if parallel.n_nodes != world.n_nodes:
            raise RecipeError(
                f"the ranks were started on {world.n_nodes} node(s)",
                values={"parallel.n_nodes": parallel.n_nodes},
                remedy="set parallel.n_nodes (NUM_NODES) to the number of nodes, or start the ranks on that many",
            )
        recipe.accumulation(world.size)
        _refuse_what_is_not_built(recipe)

    def env(self, recipe: Recipe) -> dict[str, str]:
        """Variables to set before torch loads: deterministic cuBLAS needs its workspace fixed beforehand."""
        options = recipe.engine["gpu"]
        return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if options.deterministic else {}

    def open(self, recipe: Recipe, model: LlamaConfig, world: World) -> Engine:
        """Take the device, build the model, the optimizer and the process group."""
        from lt_trainer_gpu.engine import GpuEngine

        return GpuEngine(recipe, model, world)


def _refuse_what_is_not_built(recipe: Recipe) -> None:
    options, optimizer = recipe.engine["gpu"], recipe.optimizer
    plain, built = GpuOptions(), ("device", "dtype", "attention", "deterministic")
    given = {f"engine.gpu.{f.name}": (getattr(options, f.name), getattr(plain, f.name)) for f in fields(GpuOptions)}
    given = {name: pair for name, pair in given.items() if name.rpartition(".")[2] not in built}
    given |= {
        f"optimizer.{name}": (getattr(optimizer, name), getattr(OptimizerOptions, name))
        for name in ("decay_embeddings", "moments", "z_loss")
    }
    for name, (value, default) in given.items():
        if value != default:
            raise RecipeError("not built yet", values={name: value}, remedy=f"leave {name} out")


SPEC = GpuSpec()
