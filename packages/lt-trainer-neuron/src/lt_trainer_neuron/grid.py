"""Rank coordinates in neuronx-distributed's (NxD's) rank mesh, and NxD's sharding options.

Pure arithmetic. Ranks of one tensor-parallel group are consecutive (they share a node), then data-parallel ranks, then
pipeline stages: rank = (pp_rank * dp + dp_rank) * tp + tp_rank. Tensor-parallel and pipeline peers read the same rows.

Cost: nothing is computed; `groups` lists every rank once per axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lt_trainer.config.recipe import engine_options
from lt_trainer.config.sections import Recipe
from lt_trainer.engine import Topology
from lt_trainer_neuron.options import NeuronOptions

if TYPE_CHECKING:
    from lt_ckpt.nxd.options import NxdOptions
    from lt_trainer.config.sections import ParallelOptions


Axis = Literal["tp", "dp", "pp"]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Parallel degrees and this rank's coordinates.

    Attributes:
        tp: tensor-parallel degree.
        dp: data-parallel degree; these ranks read different rows.
        pp: number of pipeline stages.
        tp_rank: index among the tensor-parallel ranks.
        dp_rank: index among the data-parallel ranks.
        pp_rank: index of the pipeline stage.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    tp_rank: int = 0
    dp_rank: int = 0
    pp_rank: int = 0

    @staticmethod
    def from_options(parallel: ParallelOptions, rank: int, world_size: int) -> Grid:
        """Return the coordinates of `rank` in a world of `world_size` ranks.

        Raises:
            RecipeError: the degrees do not multiply to `world_size`.
        """
        dp, tp = parallel.data_parallel_size(world_size), parallel.tp
        return Grid(tp=tp, dp=dp, pp=parallel.pp, tp_rank=rank % tp, dp_rank=rank // tp % dp, pp_rank=rank // (tp * dp))

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return self.tp * self.dp * self.pp

    @property
    def rank(self) -> int:
        """Global rank."""
        return (self.pp_rank * self.dp + self.dp_rank) * self.tp + self.tp_rank

    @property
    def is_first_stage(self) -> bool:
        """True on the first stage, which holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True on the last stage, which holds the final norm, the head and the loss."""
        return self.pp_rank == self.pp - 1

    @property
    def topology(self) -> Topology:
        """Topology for the data loader."""
        return Topology(rank=self.rank, world_size=self.world_size, dp_rank=self.dp_rank, dp_size=self.dp)

    def groups(self, axis: Axis) -> list[list[int]]:
        """Return the groups of ranks that differ only in `axis`; each rank is in exactly one."""
        stride = {"tp": 1, "dp": self.tp, "pp": self.tp * self.dp}[axis]
        size = {"tp": self.tp, "dp": self.dp, "pp": self.pp}[axis]
        firsts = (rank for rank in range(self.world_size) if rank // stride % size == 0)
        return [[first + stride * index for index in range(size)] for first in firsts]


def build_nxd_options(recipe: Recipe) -> NxdOptions:
    """Return NxD's sharding options of this recipe.

    They apply to the model files of its NxD checkpoints and to the weights that its ranks hold.

    Raises:
        CheckpointError: NxD checkpoints do not support these options.
    """
    from lt_ckpt.nxd.options import NxdOptions

    options = engine_options(recipe, "neuron", NeuronOptions)
    qkv = ("gqa_fused" if options.fuse_qkv else "gqa") if options.qkv_linear else "separate"
    return NxdOptions(
        tp=recipe.parallel.tp,
        pp=recipe.parallel.pp,
        kv_size_multiplier=options.kv_size_multiplier,
        qkv=qkv,
        xser=options.save_xser,
    )
