"""Tensor parallelism applied from outside: sharded weights and module classes with collectives.

The parameter table names the sharded dimension. Column-parallel weights (dimension 0: queries, keys, values, gate, up)
yield this rank's heads or inner features; row-parallel weights (dimension 1: o, down) take them and yield a partial sum
of the layer's output, to which each adds its share of a bias. Of experts each rank has a part of every width, in
stacked weights (dimensions 1 and 2). Embedding and head are sharded along the vocabulary, in shards that may differ by
a row. Norms are replicated, but for a norm of all queries or keys together, whose weight is sharded and whose mean of
squares is over the ranks.

Parameters become smaller plain tensors, not DTensors: FSDP shards each rank's shard as it shards a model, and
`mesh_layout` maps the shard to the unsharded tensor. Modules change their class to one that differs only in `forward`,
so parameter names are unchanged.

Shapes: B batch, T positions, D hidden_size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt_model import param_specs
from lt_model.decoder import Attention, LatentAttention, vocab_parallel_embedding
from lt_model.feed_forward import MLP, MoE, Router
from lt_model.norm import RMSNorm, rms_norm_plus_one
from lt_trainer_gpu.collectives import (
    TensorParallelGroup,
    copy_to_tp,
    reduce_from_tp,
    reduce_grad_in_backward,
    sum_grad,
    sum_over_ranks,
)
from lt_trainer_gpu.mesh_layout import MeshLayout
from lt_trainer_gpu.model import DecoderStage, LossHead, stage_param_specs
from lt_trainer_gpu.module_class import exchange_class


class ParallelRegion(nn.Module):
    """Begin and end of a module's parallel region; comes before the module's own class."""

    tp_group: TensorParallelGroup

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of all ranks' parts, summed; the input comes first."""
        group = self.tp_group
        return reduce_from_tp(super().forward(copy_to_tp(args[0], group), *args[1:], **kwargs), group)


class TensorParallelAttention(ParallelRegion, Attention):
    """Attention over this rank's heads."""


class TensorParallelLatentAttention(ParallelRegion, LatentAttention):
    """The same of latents, which every rank computes whole, on all positions."""


class TensorParallelMLP(ParallelRegion, MLP):
    """Feed-forward layer over this rank's inner features."""


class TensorParallelMoE(ParallelRegion, MoE):
    """Mixture of experts of which each rank has a part of every width; the router is within the parallel region."""


class PartialGradRouter(Router):
    """Router, the same on every rank; each rank's part of the experts gives it a part of its gradient."""

    tp_group: TensorParallelGroup

    def forward(self, x_ND: Tensor) -> tuple[Tensor, ...]:
        """Return the choice of experts."""
        return self.choose(x_ND, sum_grad(self.weight, self.tp_group))


class PartialGradLinear(nn.Linear):
    """Product of latents, or gate of a shared expert: the same on every rank, of whose gradient each has a part."""

    tp_group: TensorParallelGroup

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight^T + bias."""
        bias = None if self.bias is None else sum_grad(self.bias, self.tp_group)
        return F.linear(input, sum_grad(self.weight, self.tp_group), bias)


class TensorParallelRMSNorm(RMSNorm):
    """RMSNorm over all positions (SP: this rank's) with the full gradient of its weight."""

    tp_group: TensorParallelGroup

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x."""
        return self.normalize(x, reduce_grad_in_backward(self.weight, self.tp_group), self.eps)


class TensorParallelLayerNorm(nn.LayerNorm):
    """LayerNorm over all positions (SP: this rank's) with the full gradients of weight and bias."""

    tp_group: TensorParallelGroup

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input."""
        weight, bias = (reduce_grad_in_backward(one, self.tp_group) for one in (self.weight, self.bias))
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class HeadNorm(TensorParallelRMSNorm):
    """RMSNorm of latents, or of each of this rank's heads by one weight, of whose gradient it has a part."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x."""
        return self.normalize(x, sum_grad(self.weight, self.tp_group), self.eps)


class SplitNorm(TensorParallelRMSNorm):
    """RMSNorm over the heads of all ranks; x and weight are this rank's."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = sum_over_ranks(wide.square().sum(dim=-1, keepdim=True), self.tp_group)
        scale = (squares / (x.shape[-1] * self.tp_group.size) + self.eps).rsqrt()
        weight = self.weight.to(wide.dtype)
        return (wide * scale * (1 + weight if self.normalize is rms_norm_plus_one else weight)).to(x.dtype)


class RowParallelLinear(nn.Linear):
    """Linear layer whose output is summed over ranks afterwards: each adds its share of the bias."""

    tp_group: TensorParallelGroup

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's part of input @ weight^T + bias."""
        return F.linear(input, self.weight, row_parallel_bias(self))


def row_parallel_bias(linear: nn.Linear) -> Tensor | None:
    """Return the bias to add to the output of a linear layer; of a row-parallel one a share of it."""
    tp_group: TensorParallelGroup | None = getattr(linear, "tp_group", None)
    if linear.bias is None or tp_group is None:
        return linear.bias
    return sum_grad(linear.bias, tp_group) / tp_group.size


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
    LatentAttention: TensorParallelLatentAttention,
    MLP: TensorParallelMLP,
    MoE: TensorParallelMoE,
    Router: PartialGradRouter,
    RMSNorm: TensorParallelRMSNorm,
    nn.LayerNorm: TensorParallelLayerNorm,
    nn.Embedding: VocabParallelEmbedding,
}


def apply_tensor_parallel(model: DecoderStage, mesh_layout: MeshLayout, tp_group: TensorParallelGroup) -> None:
    """Replace the parameters of `model` (on the meta device) by this rank's shards, in place."""
    classes: dict[str, type] = {}
    for name, parameter in stage_param_specs(model).items():
        if parameter.kind in ("q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm"):
            classes[name.rpartition(".")[0]] = HeadNorm if parameter.tp_dim is None else SplitNorm
        elif parameter.type in ("matrix", "router") and parameter.tp_dim is None and parameter.kind != "gate":
            classes[name.rpartition(".")[0]] = PartialGradLinear
        elif parameter.type == "matrix" and parameter.tp_dim == 1:
            classes[name.rpartition(".")[0]] = RowParallelLinear
        offset, shape = mesh_layout.part_of(parameter)
        if shape == list(parameter.shape):
            continue
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        full = getattr(module, attribute)
        assert full.is_meta, "values are set after sharding"
        setattr(module, attribute, nn.Parameter(torch.empty(shape, dtype=full.dtype, device="meta")))
        if parameter.type == "embedding":
            module.vocab_start_index = offset[0]  # pyright: ignore[reportArgumentType]
    if model.is_last:  # a tied head has no row of its own in the table
        head = model.lm_head
        assert isinstance(head, LossHead)
        head.vocab_start_index = mesh_layout.part_of(param_specs(model.config)[0])[0][0]
        head.tp_group = tp_group
    model.tie_weights()
    has_ep = mesh_layout.ep > 1
    for name, module in model.named_modules():
        kind = classes.get(name) or _TENSOR_PARALLEL_CLASSES.get(type(module))
        if has_ep and kind is TensorParallelMoE:  # each rank routes its own positions to whole experts
            continue
        if kind is not None and (has_ep or not name.endswith(".shared_experts")):  # else the mixture sums over ranks
            exchange_class(module, kind)
            module.tp_group = tp_group  # pyright: ignore[reportArgumentType]
