"""Rank coordinates in the device mesh and shard ranges of tensors. Torch-free.

The mesh is pp x dp_replicate x dp_shard x cp x tp, the last axis adjacent: tensor-parallel ranks communicate most, in
every layer, so they should share a node; then context parallelism, in every attention; then the ranks that share one
replica of the weights; pipeline stages, which exchange only activations, are farthest apart.

Pipeline parallelism divides the layers. Of a stage's tensors, tensor parallelism shards each one first, along its
`tp_dim` in `lt_model.params`; sharding over dp_shard x cp (`fsdp_size` ranks) splits the result along dimension 0.

Expert parallelism (ep > 1) is for stacked experts another mesh of the same ranks: dp_shard x cp x tp = efsdp x ep, the
last axis adjacent. Each of ep ranks has E/ep whole experts, sharded over efsdp ranks along dimension 0, or dimension 1
where there are fewer experts than ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lt_model import ParamSpec
from lt_trainer.config.sections import ParallelOptions
from lt_trainer.engine import Topology


@dataclass(frozen=True, kw_only=True)
class MeshLayout:
    """Degrees of parallelism and this rank's coordinate in each.

    Attributes:
        pp: pipeline-parallel ranks, each with its stages of the model.
        dp_replicate: replicas of the weights.
        dp_shard: data-parallel ranks over which each replica is sharded.
        cp: context-parallel ranks, each with its positions of the same rows; weights are sharded over them too.
        tp: tensor-parallel ranks, which compute each layer together.
        ep: expert-parallel ranks, among which the experts are divided.
        pp_rank: this rank's index in its pipeline.
        dp_replicate_rank: this rank's replica.
        dp_shard_rank: this rank's index within the replica.
        cp_rank: this rank's index within its context-parallel group.
        tp_rank: this rank's index within its tensor-parallel group.
        sequence_parallel: whether positions are sharded over tensor-parallel ranks between layers.
        tie_word_embeddings: the head is the embedding; with several stages the first and the last one hold it.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    pp_rank: int = 0
    dp_replicate_rank: int = 0
    dp_shard_rank: int = 0
    cp_rank: int = 0
    tp_rank: int = 0
    sequence_parallel: bool = False
    tie_word_embeddings: bool = False

    @staticmethod
    def from_options(
        parallel: ParallelOptions, rank: int, world_size: int, *, tie_word_embeddings: bool = False
    ) -> MeshLayout:
        """Return the layout of rank `rank` of `world_size`.

        Raises:
            RecipeError: the product of the degrees is not `world_size`.
        """
        shards = parallel.data_parallel_size(world_size) // parallel.dp_replicate
        coordinates = []
        for size in (parallel.tp, parallel.cp, shards, parallel.dp_replicate, parallel.pp):
            coordinates.append(rank % size)
            rank //= size
        tp_rank, cp_rank, dp_shard_rank, dp_replicate_rank, pp_rank = coordinates
        return MeshLayout(
            pp=parallel.pp,
            dp_replicate=parallel.dp_replicate,
            dp_shard=shards,
            cp=parallel.cp,
            tp=parallel.tp,
            ep=parallel.ep,
            pp_rank=pp_rank,
            dp_replicate_rank=dp_replicate_rank,
            dp_shard_rank=dp_shard_rank,
            cp_rank=cp_rank,
            tp_rank=tp_rank,
            sequence_parallel=parallel.sequence_parallel,
            tie_word_embeddings=tie_word_embeddings,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_replicate * self.fsdp_size * self.tp

    @property
    def rank(self) -> int:
        """This rank's number: the mesh is row-major, tensor-parallel ranks adjacent."""
        dp_rank = self.dp_replicate_rank * self.dp_shard + self.dp_shard_rank
        return ((self.pp_rank * self.dp_replicate * self.dp_shard + dp_rank) * self.cp + self.cp_rank) * self.tp + (
            self.tp_rank
        )

    @property
    def fsdp_size(self) -> int:
        """Ranks over which each replica of a weight is sharded: dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def fsdp_rank(self) -> int:
        """This rank's index among the ranks that share a replica's weights, before tensor parallelism."""
        return self.dp_shard_rank * self.cp + self.cp_rank

    @property
    def uses_fsdp(self) -> bool:
        """True if weights are sharded or replicated; else there is nothing to gather or to reduce."""
        return self.dp_replicate * self.fsdp_size > 1

    @property
    def efsdp_size(self) -> int:
        """Ranks over which each replica of an expert is sharded, with expert parallelism."""
        return self.fsdp_size * self.tp // self.ep

    @property
    def router_copies(self) -> int:
        """Tensor-parallel ranks that route the same tokens."""
        return self.tp if self.ep == 1 else 1

    @property
    def topology(self) -> Topology:
        """Data-parallel topology for the data loader; pp, cp and tp ranks read the same rows."""
        return Topology(
            rank=self.rank,
            world_size=self.world_size,
            dp_rank=self.dp_replicate_rank * self.dp_shard + self.dp_shard_rank,
            dp_size=self.dp_replicate * self.dp_shard,
        )

    @property
    def has_embedding_twice(self) -> bool:
        """True if the first and the last stage are on two ranks and both hold the tied embedding."""
        return self.tie_word_embeddings and self.pp > 1

    def positions_per_rank(self, seq_len: int) -> int:
        """Return the positions of a row that this rank holds between layers."""
        return seq_len // self.cp // (self.tp if self.sequence_parallel else 1)

    def pipeline_rank(self, pp_rank: int) -> int:
        """Return the number of the rank with these coordinates in another stage of the pipeline."""
        return self.rank + (pp_rank - self.pp_rank) * (self.world_size // self.pp)

    def part_of(
        self, parameter: ParamSpec, fsdp_rank: int | None = None, tp_rank: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return offset and shape of the part of `parameter` that FSDP shards, on this rank unless another is given."""
        fsdp_rank = self.fsdp_rank if fsdp_rank is None else fsdp_rank
        tp_rank = self.tp_rank if tp_rank is None else tp_rank
        offset, shape = [0] * len(parameter.shape), list(parameter.shape)
        dim, size, index = parameter.tp_dim, self.tp, tp_rank
        if self._has_ep(parameter):
            dim, size, index = 0, self.ep, (fsdp_rank * self.tp + tp_rank) % self.ep
        if dim is not None:
            offset[dim], shape[dim] = shard_range(shape[dim], size, index)
        return offset, shape

    def slice_of(self, parameter: ParamSpec, fsdp_rank: int, tp_rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return offset and shape of the slice that a rank of this pipeline stage has of `parameter`.

        FSDP gives each rank ceil(rows / ranks) rows as long as there are any (`torch.chunk`).
        """
        offset, shape = self.part_of(parameter, fsdp_rank, tp_rank)
        dim, size, index = 0, self.fsdp_size, fsdp_rank
        if self._has_ep(parameter):
            dim, size = self.expert_fsdp_dim(shape), self.efsdp_size
            index = (fsdp_rank * self.tp + tp_rank) // self.ep
        first = min(shape[dim], index * math.ceil(shape[dim] / size))
        end = min(shape[dim], (index + 1) * math.ceil(shape[dim] / size))
        offset[dim] += first
        shape[dim] = end - first
        return tuple(offset), tuple(shape)

    def expert_fsdp_dim(self, shape: Sequence[int]) -> int:
        """Return the dimension along which FSDP shards an expert-parallel rank's stacked experts of this shape.

        Fewer experts than ranks are sharded along dimension 1, if they can be in equal parts, as FSDP needs it.
        """
        return int(self.efsdp_size > shape[0] and shape[1] % self.efsdp_size == 0)

    def _has_ep(self, parameter: ParamSpec) -> bool:
        return self.ep > 1 and parameter.type == "experts"

    def replica_count_and_index(self, parameter: ParamSpec) -> tuple[int, int]:
        """Return the number of ranks that hold this rank's elements, and its index among them."""
        count, index = self.dp_replicate, self.dp_replicate_rank
        if parameter.tp_dim is None and not self._has_ep(parameter):
            count, index = count * self.tp, index * self.tp + self.tp_rank
        if not parameter.is_trained:  # FSDP shards parameters alone
            count, index = count * self.fsdp_size, index * self.fsdp_size + self.fsdp_rank
        if parameter.role == "embed" and self.has_embedding_twice:
            count, index = count * 2, index * 2 + (self.pp_rank > 0)
        return count, index


def shard_range(size: int, n_shards: int, index: int) -> tuple[int, int]:
    """Return start and length of shard `index`; `size` is split into shards as equal as possible."""
    first = size * index // n_shards
    return first, size * (index + 1) // n_shards - first
