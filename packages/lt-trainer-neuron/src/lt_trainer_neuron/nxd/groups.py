"""NxD's groups of ranks: made by NxD, then compared with where we believe each rank to stand.

NxD orders ranks by rules of its own (in the trn1 image a tensor-parallel degree of 4 is strided over the node). Which
rank reads which rows and writes which file follows from `lt_trainer_neuron.grid`, so a difference is refused: it would
train on wrong rows without a word.

Cost: the meeting of all ranks, and one group per axis.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import datetime
from importlib import import_module

import torch.distributed as dist

from lt_trainer.errors import RecipeError
from lt_trainer.recipe import Recipe
from lt_trainer_neuron.grid import Grid

__all__ = ["check_grid", "join"]


def join(recipe: Recipe, *, on_host: bool) -> None:
    """Meet the other ranks and make NxD's groups, where that is not done yet."""
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.parallel_layers.utils import requires_init_pg_override

    if not dist.is_initialized():
        timeout = datetime.timedelta(seconds=recipe.guard.collective_timeout_s)
        if on_host:
            dist.init_process_group("gloo", timeout=timeout)
        elif requires_init_pg_override():
            import_module("torch_xla.experimental.pjrt_backend")
            dist.init_process_group("xla", init_method="pjrt://")
        else:
            import_module("torch_xla.distributed.xla_backend")  # registers "xla"
            dist.init_process_group("xla")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=recipe.parallel.tp,
            pipeline_model_parallel_size=recipe.parallel.pp,
        )


def check_grid(grid: Grid) -> None:
    """Compare NxD's groups with ours.

    Raises:
        RecipeError: they differ.
    """
    from neuronx_distributed.parallel_layers import parallel_state

    found = {
        "tp": parallel_state.get_tensor_model_parallel_replica_groups(),
        "dp": parallel_state.get_data_parallel_replica_groups(),
        "pp": parallel_state.get_pipeline_model_parallel_replica_groups(),
    }
    for axis, groups in found.items():
        ours = grid.groups(axis)  # pyright: ignore[reportArgumentType] - the keys are the axes
        theirs = sorted([int(rank) for rank in group] for group in groups)
        if theirs != sorted(ours):
            raise RecipeError(
                f"neuronx-distributed groups its ranks along {axis} in another way than lt does: "
                f"{_shortened(theirs)}, not {_shortened(sorted(ours))}",
                values={"parallel.tp": grid.tp, "parallel.pp": grid.pp},
                remedy="choose another parallel.tp: NxD strides a degree of 4 over a node; 2, 8 and 32 are as here",
            )


def _shortened(groups: list[list[int]]) -> str:
    return ", ".join(map(str, groups[:2])) + (", ..." if len(groups) > 2 else "")
