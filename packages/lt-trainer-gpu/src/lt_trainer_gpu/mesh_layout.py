"""Rank coordinates in the device mesh and shard ranges of tensors. Torch-free.

The mesh is dp_replicate x dp_shard x tp, tensor-parallel ranks adjacent (they communicate most, so they should share a
node), then the ranks that share one replica of the weights. Tensor parallelism shards a tensor first, along its
`tp_dim` in `lt_model.params`; data-parallel sharding splits the result along dimension 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from lt_model import ParamSpec
from lt_trainer.config import ParallelOptions
from lt_trainer.engine import Topology


@dataclass(frozen=True, kw_only=True)
class MeshLayout:
    """Degrees of parallelism and this rank's coordinate in each.

    Attributes:
        dp_replicate: replicas of the weights.
        dp_shard: ranks over which each replica is sharded.
        tp: tensor-parallel ranks, which compute each layer together.
        dp_replicate_rank: this rank's replica.
        dp_shard_rank: this rank's index within the replica.
        tp_rank: this rank's index within its tensor-parallel group.
        sequence_parallel: whether positions are sharded over tensor-parallel ranks between layers.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    dp_replicate_rank: int = 0
    dp_shard_rank: int = 0
    tp_rank: int = 0
    sequence_parallel: bool = False

    @staticmethod
    def from_options(parallel: ParallelOptions, rank: int, world_size: int) -> MeshLayout:
        """Return the layout of rank `rank` of `world_size`.

        Raises:
            RecipeError: the product of the degrees is not `world_size`.
        """
        shards = parallel.data_parallel_size(world_size) // parallel.dp_replicate
        return MeshLayout(
            dp_replicate=parallel.dp_replicate,
            dp_shard=shards,
            tp=parallel.tp,
            dp_replicate_rank=rank // (shards * parallel.tp),
            dp_shard_rank=rank // parallel.tp % shards,
            tp_rank=rank % parallel.tp,
            sequence_parallel=parallel.sequence_parallel,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def topology(self) -> Topology:
        """Data-parallel topology for the data loader; tensor-parallel ranks read the same rows."""
        dp_rank = self.dp_replicate_rank * self.dp_shard + self.dp_shard_rank
        return Topology(
            rank=dp_rank * self.tp + self.tp_rank,
            world_size=self.world_size,
            dp_rank=dp_rank,
            dp_size=self.dp_replicate * self.dp_shard,
        )

    def tp_shard_range(self, parameter: ParamSpec) -> tuple[int, int]:
        """Return start and length of this rank's tensor-parallel shard along `parameter.tp_dim`."""
        assert parameter.tp_dim is not None
        return shard_range(parameter.shape[parameter.tp_dim], self.tp, self.tp_rank)

    def replica_count_and_index(self, parameter: ParamSpec) -> tuple[int, int]:
        """Return the number of ranks that hold this rank's elements, and its index among them."""
        if parameter.tp_dim is None:
            return self.dp_replicate * self.tp, self.dp_replicate_rank * self.tp + self.tp_rank
        return self.dp_replicate, self.dp_replicate_rank


def shard_range(size: int, n_shards: int, index: int) -> tuple[int, int]:
    """Return start and length of shard `index`; `size` is split into shards as equal as possible."""
    first = size * index // n_shards
    return first, size * (index + 1) // n_shards - first
