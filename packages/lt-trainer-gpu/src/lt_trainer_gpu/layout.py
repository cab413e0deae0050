"""Where each rank stands and which part of each tensor it holds. Pure arithmetic, without torch.

Ranks form a box of dp_replicate x dp_shard x tp, tensor-parallel ranks next to each other (they talk most, so they
should share a node), then those that share one copy of the weights. Tensor parallelism cuts a tensor first, along the
dimension that `lt_model.params` names for it; data-parallel shards cut what is left along dimension 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from lt_model import Parameter
from lt_trainer.engine import Topology
from lt_trainer.sections import ParallelOptions


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degrees of parallelism and this rank's place in each.

    Attributes:
        replicas: copies of the weights (dp_replicate).
        shards: ranks over which each copy is sharded (dp_shard).
        tp: ranks that compute each layer together.
        replica: this rank's copy.
        shard: this rank's place within the copy.
        tp_rank: this rank's place within its tensor-parallel group.
        sequence_parallel: whether tensor-parallel ranks also share the positions between layers.
    """

    replicas: int = 1
    shards: int = 1
    tp: int = 1
    replica: int = 0
    shard: int = 0
    tp_rank: int = 0
    sequence_parallel: bool = False

    @staticmethod
    def of(parallel: ParallelOptions, rank: int, world: int) -> Layout:
        """The place of rank number `rank` of `world`.

        Raises:
            RecipeError: the degrees do not make up `world`.
        """
        shards = parallel.data_parallel(world) // parallel.dp_replicate
        return Layout(
            replicas=parallel.dp_replicate,
            shards=shards,
            tp=parallel.tp,
            replica=rank // (shards * parallel.tp),
            shard=rank // parallel.tp % shards,
            tp_rank=rank % parallel.tp,
            sequence_parallel=parallel.sequence_parallel,
        )

    @property
    def world(self) -> int:
        """Ranks of the run."""
        return self.replicas * self.shards * self.tp

    @property
    def topology(self) -> Topology:
        """What the data needs to know: tensor-parallel ranks read the same rows."""
        dp_rank = self.replica * self.shards + self.shard
        return Topology(
            rank=dp_rank * self.tp + self.tp_rank,
            world=self.world,
            dp_rank=dp_rank,
            dp_size=self.replicas * self.shards,
        )

    def tp_span(self, parameter: Parameter) -> tuple[int, int]:
        """First index and number of indices along `parameter.tp_dim` that this rank's layers have."""
        assert parameter.tp_dim is not None
        return span(parameter.shape[parameter.tp_dim], self.tp, self.tp_rank)

    def copies(self, parameter: Parameter) -> tuple[int, int]:
        """How many ranks hold the same elements as this one, and which of them it is."""
        if parameter.tp_dim is None:
            return self.replicas * self.tp, self.replica * self.tp + self.tp_rank
        return self.replicas, self.replica


def span(size: int, parts: int, index: int) -> tuple[int, int]:
    """First element and length of part `index` when `size` elements are cut into parts as equal as can be."""
    first = size * index // parts
    return first, size * (index + 1) // parts - first
