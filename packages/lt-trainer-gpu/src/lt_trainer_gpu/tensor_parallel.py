"""Tensor parallelism applied from outside: sharded weights and module classes with collectives.

The parameter table names the sharded dimension. Column-parallel weights (dimension 0: queries, keys, values, gate, up)
yield this rank's heads or inner features; row-parallel weights (dimension 1: o, down) take them and yield a partial sum
of the layer's output. Embedding and head are sharded along the vocabulary, in shards that may differ by a row. Norms
are replicated.

Parameters become smaller plain tensors, not DTensors: FSDP shards each rank's shard as it shards a model, and
`mesh_layout` maps the shard to the unsharded tensor. Modules change their class to one that differs only in `forward`,
so parameter names are unchanged.

Shapes: B batch, T positions, D hidden_size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lt_model import param_specs
from lt_model.decoder import MLP, Attention, KVCache, vocab_parallel_embedding
from lt_model.norm import RMSNorm, rms_norm
from lt_trainer_gpu.collectives import TensorParallelGroup, copy_to_tp, reduce_from_tp, reduce_grad_in_backward
from lt_trainer_gpu.mesh_layout import MeshLayout
from lt_trainer_gpu.model import DecoderStage, LossHead, stage_param_specs


class TensorParallelAttention(Attention):
    """Attention over this rank's heads."""

    tp_group: TensorParallelGroup

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Any, cache: KVCache | None = None) -> Tensor:
        """Return the output of all heads, summed over ranks."""
        return reduce_from_tp(super().forward(copy_to_tp(x_BTD, self.tp_group), rope, mask, cache), self.tp_group)


class TensorParallelMLP(MLP):
    """Feed-forward layer over this rank's inner features."""

    tp_group: TensorParallelGroup

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the output of all features, summed over ranks."""
        return reduce_from_tp(super().forward(copy_to_tp(x_BTD, self.tp_group)), self.tp_group)


class TensorParallelRMSNorm(RMSNorm):
    """RMSNorm over all positions (SP: this rank's) with the full gradient of its weight."""

    tp_group: TensorParallelGroup

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x."""
        return rms_norm(x, reduce_grad_in_backward(self.weight, self.tp_group), self.eps)


class VocabParallelEmbedding(nn.Embedding):
    """Embedding with this rank's rows; `vocab_start_index` is the token id of the first."""

    tp_group: TensorParallelGroup
    vocab_start_index: int

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings of all ids, each from the rank that holds its row."""
        x_BTD = reduce_from_tp(vocab_parallel_embedding(input, self.weight, self.vocab_start_index), self.tp_group)
        # With one row, sequence parallelism returns a view, for which FSDP warns: the hooks on it could be lost.
        return x_BTD.clone() if x_BTD._is_view() else x_BTD


_TENSOR_PARALLEL_CLASSES: dict[type, type] = {
    Attention: TensorParallelAttention,
    MLP: TensorParallelMLP,
    RMSNorm: TensorParallelRMSNorm,
    nn.Embedding: VocabParallelEmbedding,
}


def apply_tensor_parallel(model: DecoderStage, mesh_layout: MeshLayout, tp_group: TensorParallelGroup) -> None:
    """Replace the parameters of `model` (on the meta device) by this rank's shards, in place."""
    for name, parameter in stage_param_specs(model).items():
        if parameter.tp_dim is None:
            continue
        first, length = mesh_layout.tp_shard_range(parameter)
        shape = list(parameter.shape)
        shape[parameter.tp_dim] = length
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        full = getattr(module, attribute)
        assert full.is_meta, "values are set after sharding"
        setattr(module, attribute, nn.Parameter(torch.empty(shape, dtype=full.dtype, device="meta")))
        if parameter.kind == "embed_tokens":
            module.vocab_start_index = first  # pyright: ignore[reportArgumentType]
    if model.is_last:  # a tied head has no row of its own in the table
        head = model.lm_head
        assert isinstance(head, LossHead)
        head.vocab_start_index, _ = mesh_layout.tp_shard_range(param_specs(model.config)[0])
        head.tp_group = tp_group
    model.tie_weights()
    for module in model.modules():
        kind = _TENSOR_PARALLEL_CLASSES.get(type(module))
        if kind is not None:
            module.__class__ = kind
            module.tp_group = tp_group  # pyright: ignore[reportArgumentType]
