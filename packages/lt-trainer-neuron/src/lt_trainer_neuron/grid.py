"""Where each rank stands in neuronx-distributed's (NxD's) box of ranks, and how its tensors are cut. Pure arithmetic.

Ranks of one tensor-parallel group are next to each other (they share a node), then data-parallel ranks, then pipeline
stages: rank = (pp_rank * dp + dp_rank) * tp + tp_rank. Tensor-parallel and pipeline peers read the same rows.

Cost: nothing is computed; `groups` lists every rank once per axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lt_trainer.engine import Topology
from lt_trainer.recipe import Recipe, engine_options
from lt_trainer_neuron.options import NeuronOptions

if TYPE_CHECKING:
    from lt_ckpt.nxd.options import NxdOptions
    from lt_trainer.sections import ParallelOptions

__all__ = ["Axis", "Grid", "cut_of"]

Axis = Literal["tp", "dp", "pp"]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The degrees of parallelism and this rank's place in each.

    Attributes:
        tp: ranks that compute each layer together.
        dp: ranks that read different rows.
        pp: pipeline stages.
        tp_rank: this rank's place among the tensor-parallel ranks.
        dp_rank: its place among the data-parallel ranks.
        pp_rank: its stage.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    tp_rank: int = 0
    dp_rank: int = 0
    pp_rank: int = 0

    @staticmethod
    def of(parallel: ParallelOptions, rank: int, world: int) -> Grid:
        """The place of rank number `rank` of `world`.

        Raises:
            RecipeError: the degrees do not make up `world`.
        """
        dp, tp = parallel.data_parallel(world), parallel.tp
        return Grid(tp=tp, dp=dp, pp=parallel.pp, tp_rank=rank % tp, dp_rank=rank // tp % dp, pp_rank=rank // (tp * dp))

    @property
    def world(self) -> int:
        """Ranks of the run."""
        return self.tp * self.dp * self.pp

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.rank_at(tp_rank=self.tp_rank, dp_rank=self.dp_rank, pp_rank=self.pp_rank)

    @property
    def first_stage(self) -> bool:
        """Whether this rank has the embedding."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank has the last norm and the head, and so the loss."""
        return self.pp_rank == self.pp - 1

    @property
    def topology(self) -> Topology:
        """What the data needs to know."""
        return Topology(rank=self.rank, world=self.world, dp_rank=self.dp_rank, dp_size=self.dp)

    def rank_at(self, *, tp_rank: int, dp_rank: int, pp_rank: int) -> int:
        """The number of the rank at a place."""
        return (pp_rank * self.dp + dp_rank) * self.tp + tp_rank

    def groups(self, axis: Axis) -> list[list[int]]:
        """Every group of ranks that differ in `axis` alone, by rank; each rank is in one of them."""
        stride = {"tp": 1, "dp": self.tp, "pp": self.tp * self.dp}[axis]
        size = {"tp": self.tp, "dp": self.dp, "pp": self.pp}[axis]
        firsts = (rank for rank in range(self.world) if rank // stride % size == 0)
        return [[first + stride * index for index in range(size)] for first in firsts]


def cut_of(recipe: Recipe) -> NxdOptions:
    """How the model files of an NxD checkpoint of this recipe are cut, which is how its ranks hold the weights.

    Raises:
        CheckpointError: no NxD checkpoint is like that.
    """
    from lt_ckpt.nxd.options import NxdOptions

    options = engine_options(recipe, "neuron", NeuronOptions)
    qkv = ("gqa_fused" if options.fuse_qkv else "gqa") if options.qkv_linear else "separate"
    return NxdOptions(
        tp=recipe.parallel.tp,
        pp=recipe.parallel.pp,
        kv_multiplier=options.kv_replicator,
        qkv=qkv,
        xser=options.save_xser,
    )
