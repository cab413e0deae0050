"""Tensor parallelism applied from outside: each rank's model becomes the part of the layers that it computes.

The parameter table names the dimension that is cut. What is cut along dimension 0 (queries, keys, values, gate, up)
yields this rank's heads or inner features, what is cut along dimension 1 (o, down) takes them and gives a summand of
the layer's output. Embedding and head are cut along the vocabulary, in parts that may differ by a row. Norms are whole
on every rank.

Parameters become smaller plain tensors, not DTensors: FSDP shards each rank's part as it shards a model's, and which
part of the whole it is stands in `layout`. The modules change their class to one that differs in `forward` alone, so
names of parameters stay.

Shapes: B batch, T positions, D hidden_size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt_model import parameters
from lt_model.llama import KVCache, Llama, LlamaAttention, LlamaMLP
from lt_model.norm import RMSNorm, rms_norm
from lt_trainer_gpu.collectives import TensorAxis, enter, leave, shared
from lt_trainer_gpu.layout import Layout


class TensorParallelAttention(LlamaAttention):
    """This rank's heads."""

    axis: TensorAxis

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Any, cache: KVCache | None = None) -> Tensor:
        """Return the output of all heads."""
        return leave(super().forward(enter(x_BTD, self.axis), rope, mask, cache), self.axis)


class TensorParallelMLP(LlamaMLP):
    """This rank's inner features."""

    axis: TensorAxis

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the output of all features."""
        return leave(super().forward(enter(x_BTD, self.axis)), self.axis)


class TensorParallelNorm(RMSNorm):
    """A norm of all positions, or of this rank's, with the whole gradient of its weight."""

    axis: TensorAxis

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x."""
        return rms_norm(x, shared(self.weight, self.axis), self.eps)


class VocabularyEmbedding(nn.Embedding):
    """This rank's rows of the embedding; `first` is the id of the first of them."""

    axis: TensorAxis
    first: int

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of all ids, each from the rank that has it."""
        local_BT = input - self.first
        absent_BT = (local_BT < 0) | (local_BT >= self.weight.shape[0])
        own_BTD = F.embedding(local_BT.masked_fill(absent_BT, 0), self.weight)
        return leave(own_BTD.masked_fill(absent_BT[..., None], 0), self.axis)


_CLASSES: dict[type, type] = {
    LlamaAttention: TensorParallelAttention,
    LlamaMLP: TensorParallelMLP,
    RMSNorm: TensorParallelNorm,
    nn.Embedding: VocabularyEmbedding,
}


def apply_tensor_parallel(model: Llama, layout: Layout, axis: TensorAxis) -> None:
    """Cut `model` (on the meta device) down to this rank's part, in place."""
    for parameter in parameters(model.config):
        if parameter.tp_dim is None:
            continue
        first, length = layout.tp_span(parameter)
        shape = list(parameter.shape)
        shape[parameter.tp_dim] = length
        owner, _, attribute = parameter.name.rpartition(".")
        module = model.get_submodule(owner)
        whole = getattr(module, attribute)
        assert whole.is_meta, "the parts are filled later"
        setattr(module, attribute, nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta")))
        if parameter.role == "embed":
            module.first = first  # pyright: ignore[reportArgumentType]
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    for module in model.modules():
        kind = _CLASSES.get(type(module))
        if kind is not None:
            module.__class__ = kind
            module.axis = axis  # pyright: ignore[reportArgumentType]
