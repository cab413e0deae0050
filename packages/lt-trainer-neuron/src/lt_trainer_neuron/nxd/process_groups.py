"""NxD's process groups: initialization, and check against `lt_trainer_neuron.grid`.

NxD orders ranks by its own rules (in the trn1 image a tensor-parallel degree of 4 is strided over the node). The rows
that a rank reads and the files it writes follow from `lt_trainer_neuron.grid`, so a mismatch raises: training would
silently use wrong rows.

Cost: one rendezvous of all ranks, and one group per axis.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import datetime
from importlib import import_module

import torch.distributed as dist

from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer_neuron.grid import Grid


def init_process_groups(recipe: Recipe, *, on_host: bool) -> None:
    """Initialize torch.distributed and NxD's process groups if not done yet."""
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.parallel_layers.utils import requires_init_pg_override

    if not dist.is_initialized():
        timeout = datetime.timedelta(seconds=recipe.fault_tolerance.collective_timeout_s)
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
    """Raise unless NxD's groups match those of `grid`.

    Raises:
        RecipeError: they differ.
    """
    from neuronx_distributed.parallel_layers import parallel_state

    nxd_groups = {
        "tp": parallel_state.get_tensor_model_parallel_replica_groups(),
        "dp": parallel_state.get_data_parallel_replica_groups(),
        "pp": parallel_state.get_pipeline_model_parallel_replica_groups(),
    }
    for axis, groups in nxd_groups.items():
        expected = grid.groups(axis)  # pyright: ignore[reportArgumentType] - the keys are the axes
        actual = sorted([int(rank) for rank in group] for group in groups)
        if actual != sorted(expected):
            raise RecipeError(
                f"neuronx-distributed groups the ranks along {axis} differently than lt: {_format_groups(actual)}, not "
                f"{_format_groups(sorted(expected))}",
                values={"parallel.tp": grid.tp, "parallel.pp": grid.pp},
                remedy="set parallel.tp to 2, 8 or 32: NxD strides a degree of 4 over a node",
            )


def _format_groups(groups: list[list[int]]) -> str:
    return ", ".join(map(str, groups[:2])) + (", ..." if len(groups) > 2 else "")
