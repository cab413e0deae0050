"""Whole matrices from the slices of FSDP and tensor-parallel ranks, for updates that need them (Muon).

The ranks that share one replica of the weights of a pipeline stage (fsdp x tp) own its matrices by turns: in each round
every rank gets one whole matrix. An all-to-all takes the slices to the owners, each owner transforms its matrix, a
second one takes the slices of the results back. Rounds take the matrices by cost, the most expensive first, so that
those of one round cost about the same and no rank waits long.

Ranks with whole matrices of a stack, as with expert parallelism, transform these themselves, at once.

A matrix is transformed by one rank as a whole, so results have the same bits on every mesh that gives the same slices.
Replicas (dp_replicate) do the same work, each for itself.

Cost, with n ranks: two all-to-alls per n matrices, which move each element twice; memory of about four matrices in the
dtype of the transformation, and its own temporaries.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lt_model import ParamSpec
from lt_trainer.optimizers.driver import MatrixExchange, exchange_nothing
from lt_trainer.optimizers.spec import OptimizerSpec
from lt_trainer.torch import LocalShard
from lt_trainer_gpu.mesh_layout import MeshLayout

Index = tuple[slice, ...]


def matrix_exchange(
    spec: OptimizerSpec,
    shards: Mapping[str, LocalShard],
    specs: Mapping[str, ParamSpec],
    mesh_layout: MeshLayout,
    timeout_s: float,
) -> MatrixExchange:
    """Return the exchange for an optimizer; ranks meet only if it needs whole matrices, which they share.

    Args:
        spec: the optimizer.
        shards: this rank's slices of the parameters.
        specs: parameters by name.
        mesh_layout: degrees of parallelism and this rank's coordinates.
        timeout_s: timeout of a collective.
    """
    if spec.transform is None or mesh_layout.fsdp_size * mesh_layout.tp == 1:
        return exchange_nothing
    for name, shard in shards.items():
        expected = mesh_layout.slice_of(specs[name], mesh_layout.fsdp_rank, mesh_layout.tp_rank)
        assert (shard.offset, tuple(shard.local.shape)) == expected or not shard.local.numel(), (name, expected)
    return ShardedMatrices(specs, mesh_layout, timeout_s).transform


class ShardedMatrices:
    """Matrices that are exchanged between the ranks that share one replica of the weights.

    Every rank of the run constructs it, in the same order as other process groups.

    Args:
        specs: parameters by name.
        mesh_layout: degrees of parallelism and this rank's coordinates.
        timeout_s: timeout of a collective.
    """

    def __init__(self, specs: Mapping[str, ParamSpec], mesh_layout: MeshLayout, timeout_s: float) -> None:
        self._specs, self._mesh_layout = specs, mesh_layout
        size = mesh_layout.fsdp_size * mesh_layout.tp
        self._size, self._rank = size, mesh_layout.rank % size
        # fsdp and tp are the last axes of the mesh
        ranks = torch.arange(mesh_layout.world_size).view(-1, size).tolist()
        group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=datetime.timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup), "each rank is in one group"
        self._group = group

    def transform(
        self, names: Sequence[str], direction: Callable[[str], Tensor], transform: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with this rank's slice of its transformed matrix; arguments as in `MatrixExchange`."""
        whole = dict.fromkeys(filter(self._has_whole, names))
        for name in whole:
            own = direction(name)
            yield name, transform(own) if own.numel() else own
        by_cost = sorted([name for name in names if name not in whole], key=self._cost, reverse=True)
        for first in range(0, len(by_cost), self._size):
            matrices = by_cost[first : first + self._size]
            yield from self._transform_round(matrices, [direction(name) for name in matrices], transform)

    def _has_whole(self, name: str) -> bool:
        """Return whether every rank has whole matrices of this stack."""
        spec = self._specs[name]
        return spec.type == "experts" and all(
            self._slice_of(spec, peer)[1][1:] == spec.shape[1:] for peer in range(self._size)
        )

    def _cost(self, name: str) -> int:
        shape = self._specs[name].shape
        return math.prod(shape) * min(shape[-2:])

    def _transform_round(
        self, names: Sequence[str], slices: Sequence[Tensor], transform: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Transform one matrix per rank; `names[i]` is rank i's."""
        like = slices[0]
        spec = self._specs[names[self._rank]] if self._rank < len(names) else None
        indices = [self._index_of(spec, peer) for peer in range(self._size)] if spec else []
        matrix = like.new_empty(spec.shape if spec else (0, 0))
        sizes = [one.numel() for one in slices] + [0] * (self._size - len(slices))
        owned = [matrix[index].numel() for index in indices] or [0] * self._size
        received = self._exchange(torch.cat([one.flatten() for one in slices]), sizes, owned)
        for index, values in zip(indices, received.split(owned), strict=False):
            matrix[index] = values.view(matrix[index].shape)
        del received
        if spec:
            matrix = transform(matrix)
        sent = torch.cat([matrix[index].flatten() for index in indices] or [like.new_empty(0)])
        results = self._exchange(sent, owned, sizes).split(sizes)
        for name, one, values in zip(names, slices, results, strict=False):
            yield name, values.view(one.shape)

    def _index_of(self, spec: ParamSpec, peer: int) -> Index:
        offset, shape = self._slice_of(spec, peer)
        return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))

    def _slice_of(self, spec: ParamSpec, peer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._mesh_layout.slice_of(spec, *divmod(peer, self._mesh_layout.tp))

    def _exchange(self, sent: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> Tensor:
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self._group)
        return received
