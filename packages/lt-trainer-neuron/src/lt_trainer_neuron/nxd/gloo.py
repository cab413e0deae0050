"""NxD's layers, collectives and stage transfers over gloo on the host, for runs without neuronx-distributed.

Model, loss, schedule and step are those of Trainium; only what NxD provides is computed here in its place, by
`gloo_collectives`, with every sum in fp32 or wider. Under sequence parallelism positions are the first dimension
between layers, as with NxD.

Cost: a reduce-scatter is an all-reduce of which a part is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lt_trainer_neuron.grid import Axis
from lt_trainer_neuron.nxd.collectives import Collectives, Direction
from lt_trainer_neuron.nxd.gloo_collectives import (
    RankGroup,
    all_gather,
    all_reduce_max,
    all_reduce_sum,
    copy_to_tp,
    reduce_from_tp,
)
from lt_trainer_neuron.nxd.gloo_groups import ProcessGroups
from lt_trainer_neuron.nxd.layers import META, LayerFactory


class GlooCollectives(Collectives):
    """Collectives over the groups of a rank."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups: dict[Axis, RankGroup] = {"tp": groups.tp, "dp": groups.dp, "pp": groups.pp}

    def all_reduce_sum(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Return the sum over the ranks of the axis."""
        return all_reduce_sum(tensor.detach(), self._groups[axis])

    def all_reduce_max(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Return the elementwise maximum over the ranks of the axis."""
        return all_reduce_max(tensor.detach(), self._groups[axis])

    def reduce_scatter(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Return this rank's equal share of the rows of the sum."""
        group = self._groups[axis]
        return self.all_reduce_sum(tensor, axis).chunk(group.size)[group.rank].clone()

    def all_gather(self, tensor: Tensor, axis: Axis) -> Tensor:
        """Concatenate the ranks' rows in rank order."""
        return all_gather(tensor.detach(), self._groups[axis], 0)


class GlooPipelineP2P:
    """Transfers with the stages before and after; a send blocks until it is received."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def send(self, tensor: Tensor, direction: Direction) -> Tensor:
        """Send to the next stage in `direction`."""
        dist.send(tensor.contiguous(), self._peer(direction == "forward"), group=self._group.process_group)
        return tensor

    def recv(self, shape: Sequence[int], dtype: torch.dtype, direction: Direction) -> Tensor:
        """Receive from the previous stage in `direction`."""
        received = torch.empty(tuple(shape), dtype=dtype)
        dist.recv(received, self._peer(direction != "forward"), group=self._group.process_group)
        return received

    def _peer(self, is_next: bool) -> int:
        return self._group.ranks[self._group.rank + (1 if is_next else -1)]


class _Layer(nn.Module):
    def __init__(self, factory: GlooLayerFactory, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=factory.dtype, device=META)))
        self._tp, self._kv_heads = factory.groups.tp, factory.groups.kv_heads
        self._sequence = factory.sequence_parallel

    def _turned(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self._sequence else x

    def _enter(self, x: Tensor) -> Tensor:
        return self._turned(copy_to_tp(self._turned(x), self._tp, sequence_parallel=self._sequence))

    def _leave(self, x: Tensor) -> Tensor:
        return self._turned(reduce_from_tp(self._turned(x), self._tp, sequence_parallel=self._sequence))


class _Embedding(_Layer):
    weight: nn.Parameter

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self._tp.rank * self.weight.shape[0]
        absent = (local < 0) | (local >= self.weight.shape[0])
        own = nn.functional.embedding(local.masked_fill(absent, 0), self.weight)
        return self._leave(self._turned(own.masked_fill(absent[..., None], 0)))


class _Columns(_Layer):
    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self._enter(x), self.weight)


class _Rows(_Layer):
    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return self._leave(nn.functional.linear(x, self.weight))


class _Qkv(_Layer):
    """The GQA layer; the ranks that hold a key/value head sum its gradient."""

    sizes: tuple[int, ...]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weights = list(self.parameters())
        q, *shared = weights if len(weights) > 1 else weights[0].split(self.sizes)
        x = self._enter(x)
        own = [q, *(copy_to_tp(weight, self._kv_heads, sequence_parallel=False) for weight in shared)]
        return tuple(nn.functional.linear(x, weight) for weight in own)


class GlooLayerFactory(LayerFactory):
    """Layers over tensor-parallel ranks.

    Args:
        dtype: dtype of weights and computation.
        groups: process groups of this rank.
        sequence_parallel: shard positions over the ranks between layers.
    """

    def __init__(self, dtype: torch.dtype, groups: ProcessGroups, *, sequence_parallel: bool) -> None:
        super().__init__(dtype)
        self.groups = groups
        self.tp, self.tp_rank = groups.tp.size, groups.tp.rank
        self.sequence_parallel = sequence_parallel and self.tp > 1

    def embedding(self, num_embeddings: int, embedding_dim: int) -> nn.Module:
        """Return an embedding sharded along the vocabulary."""
        return _Embedding(self, weight=(num_embeddings // self.tp, embedding_dim))

    def column_parallel(self, in_features: int, out_features: int, *, n_stacked: int = 1) -> nn.Module:
        """Return a linear layer sharded along its outputs."""
        return _Columns(self, weight=(out_features // self.tp, in_features))

    def row_parallel(self, in_features: int, out_features: int) -> nn.Module:
        """Return a linear layer sharded along its inputs; its output is summed over ranks."""
        return _Rows(self, weight=(out_features, in_features // self.tp))

    def qkv(
        self, in_features: int, q_out_features: int, kv_out_features: int, *, kv_size_multiplier: int, fuse_qkv: bool
    ) -> nn.Module:
        """Return q, k and v under the names of NxD's GQA layer."""
        q, kv = q_out_features // self.tp, kv_out_features * kv_size_multiplier // self.tp
        rows = {"weight_qkv": q + 2 * kv} if fuse_qkv else {"weight_q": q, "weight_k": kv, "weight_v": kv}
        layer = _Qkv(self, **{name: (out, in_features) for name, out in rows.items()})
        layer.sizes = (q, kv, kv)
        return layer
