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

from lt_model.decoder import vocab_parallel_embedding
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
from lt_trainer_neuron.nxd.layers import META, LayerFactory, QkvProjections


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
        for name in ("weight", "bias"):
            value = torch.empty(shapes[name], dtype=factory.dtype, device=META) if name in shapes else None
            self.register_parameter(name, None if value is None else nn.Parameter(value))
        self._factory = factory


class _Embedding(_Layer):
    weight: nn.Parameter

    def forward(self, ids: Tensor) -> Tensor:
        own = vocab_parallel_embedding(ids, self.weight, self._factory.tp_rank * self.weight.shape[0])
        return self._factory.leave(self._factory.turned(own))


class _Columns(_Layer):
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self._factory.enter(x), self.weight, self.bias)


class _Rows(_Layer):
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        summed = self._factory.leave(nn.functional.linear(x, self.weight))
        return summed if self.bias is None else summed + self.bias


class _Qkv(QkvProjections):
    """The GQA layer; the ranks that hold a key/value head sum its gradient."""

    factory: GlooLayerFactory

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(self.factory.enter(x))

    def _split(self, key: str) -> tuple[Tensor, ...]:
        q, *shared = super()._split(key)
        return q, *(copy_to_tp(x, self.factory.groups.kv_heads, sequence_parallel=False) for x in shared)


class GlooLayerFactory(LayerFactory):
    """Layers over tensor-parallel ranks.

    Args:
        dtype: dtype of weights and computation.
        upcast_dtype: dtype of norms, softmax and soft-caps.
        groups: process groups of this rank.
        sequence_parallel: shard positions over the ranks between layers.
    """

    def __init__(
        self, dtype: torch.dtype, upcast_dtype: torch.dtype, groups: ProcessGroups, *, sequence_parallel: bool
    ) -> None:
        super().__init__(dtype, upcast_dtype)
        self.groups = groups
        self.tp, self.tp_rank = groups.tp.size, groups.tp.rank
        self.sequence_parallel = sequence_parallel and self.tp > 1

    def turned(self, x: Tensor) -> Tensor:
        """Return x with the first two dimensions exchanged under sequence parallelism, else x."""
        return x.transpose(0, 1) if self.sequence_parallel else x

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of a column-parallel layer: of all positions."""
        return self.turned(copy_to_tp(self.turned(x), self.groups.tp, sequence_parallel=self.sequence_parallel))

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of a row-parallel layer's outputs: of this rank's positions."""
        return self.turned(reduce_from_tp(self.turned(x), self.groups.tp, sequence_parallel=self.sequence_parallel))

    def sum_over_tp(self, x: Tensor) -> Tensor:
        """Return the sum over tensor-parallel ranks; its gradient is summed likewise."""
        summed = reduce_from_tp(x, self.groups.tp, sequence_parallel=False)
        return copy_to_tp(summed, self.groups.tp, sequence_parallel=False)

    def embedding(self, num_embeddings: int, embedding_dim: int) -> nn.Module:
        """Return an embedding sharded along the vocabulary."""
        return _Embedding(self, weight=(num_embeddings // self.tp, embedding_dim))

    def column_parallel(
        self, in_features: int, out_features: int, *, n_stacked: int = 1, bias: bool = False
    ) -> nn.Module:
        """Return a linear layer sharded along its outputs."""
        out = out_features // self.tp
        return _Columns(self, weight=(out, in_features), **({"bias": (out,)} if bias else {}))

    def row_parallel(self, in_features: int, out_features: int, *, bias: bool = False) -> nn.Module:
        """Return a linear layer sharded along its inputs; its output is summed over ranks."""
        return _Rows(self, weight=(out_features, in_features // self.tp), **({"bias": (out_features,)} if bias else {}))

    def qkv(
        self, in_features: int, q_out: int, kv_out: int, *, kv_size_multiplier: int, fuse_qkv: bool, bias: bool
    ) -> nn.Module:
        """Return q, k and v under the names of NxD's GQA layer."""
        q, kv = q_out // self.tp, kv_out * kv_size_multiplier // self.tp
        layer = _Qkv(in_features, (q, kv, kv), self.dtype, fuse_qkv=fuse_qkv, bias=bias)
        layer.factory = self
        return layer
