"""Pipeline stage of a decoder over a layer factory; parameter names are NxD's keys.

Blocks, activations, rotary angles and the parameter table are lt-model's. NxD's joined matrices are here, and norm and
softmax in the upcast dtype. It is a parameter, since with XLA_DOWNCAST_BF16 torch's float32 is bf16 on the device and
its float64 is fp32. RoPE tables are computed on the host and looked up: with XLA_USE_BF16 an angle computed on the
device would have 8 significant bits, and positions beyond 256 would coincide.

Under sequence parallelism positions are the first dimension between layers: [T/tp, B, D].

Cost: `lt_model.costs` counts FLOPs and bytes; a window is a mask, so that a layer with one costs what the others do.
With selective checkpointing core attention and the product of gate and up are recomputed in the backward pass instead
of kept. A norm of all heads together is one more all-reduce of a number per position, for queries and for keys.

Shapes: B batch, T positions, D hidden_size, H this rank's query heads, G its key/value heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lt_ckpt.nxd.options import NxdOptions
from lt_model import ModelConfig
from lt_model.config import Rope
from lt_model.decoder import DecoderBlock
from lt_model.feed_forward import ACTIVATIONS
from lt_model.params import NORM_NAMES
from lt_model.rope import apply_rope, rope_tables
from lt_trainer_neuron.nxd.attention import CoreAttention
from lt_trainer_neuron.nxd.layers import LayerFactory

RecomputeFn = Callable[..., Any]
"""Calls its first argument with the others and recomputes intermediate tensors in the backward pass."""


class NxdNorm(nn.Module):
    """Norm over the last dimension, of a kind of `ModelConfig.norm`, computed in the upcast dtype.

    Args:
        config: model configuration.
        width: numbers that are normalized together.
        layer_factory: gives the dtypes.
        n_shares: tensor-parallel ranks over which they are spread.
    """

    def __init__(self, config: ModelConfig, width: int, layer_factory: LayerFactory, n_shares: int = 1) -> None:
        super().__init__()
        dtype = torch.promote_types(layer_factory.dtype, torch.float32)  # as in the files of NxD's own training in bf16
        self.weight = nn.Parameter(torch.empty(width // n_shares, dtype=dtype, device="meta"))
        if config.norm == "layer":
            self.bias = nn.Parameter(torch.empty(width // n_shares, dtype=dtype, device="meta"))
        self._kind, self._eps, self._width = config.norm, config.norm_eps, width
        self._dtype, self._sum = layer_factory.upcast_dtype, layer_factory.sum_over_tp if n_shares > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x, same shape and dtype."""
        wide, weight = x.to(self._dtype), self.weight.to(self._dtype)
        if self._kind == "layer":
            wide = wide - self._mean(wide)
        normed = wide * torch.rsqrt(self._mean(wide.square()) + self._eps)
        normed = normed * (weight + 1 if self._kind == "rms_plus_one" else weight)
        return (normed + self.bias.to(self._dtype) if self._kind == "layer" else normed).to(x.dtype)

    def _mean(self, x: Tensor) -> Tensor:
        if self._sum is None:
            return x.mean(-1, keepdim=True)
        return self._sum(x.sum(-1, keepdim=True)) / self._width


class NxdAttention(nn.Module):
    """Grouped-query self-attention on this rank's heads."""

    def __init__(
        self, config: ModelConfig, nxd_options: NxdOptions, layer_factory: LayerFactory, attend: CoreAttention
    ) -> None:
        super().__init__()
        hidden, width, bias = config.hidden_size, config.head_width, config.qkv_bias
        q_out, kv_out = config.n_heads * width, config.n_kv_heads * width
        self._head_dim, self._attend, self._qk_norm = width, attend, config.qk_norm
        self._query_scale = config.attention_scale * width**0.5 if config.attention_scale else 1.0
        self._sequence_first, self._fused_gqa_layer = layer_factory.sequence_parallel, nxd_options.is_gqa
        if nxd_options.is_gqa:
            multiplier, fuse = nxd_options.kv_size_multiplier, nxd_options.qkv == "gqa_fused"
            self.qkv_proj = layer_factory.qkv(
                hidden, q_out, kv_out, kv_size_multiplier=multiplier, fuse_qkv=fuse, bias=bias
            )
        else:
            self.q_proj = layer_factory.column_parallel(hidden, q_out, bias=bias)
            self.k_proj = layer_factory.column_parallel(hidden, kv_out, bias=bias)
            self.v_proj = layer_factory.column_parallel(hidden, kv_out, bias=bias)
        self.o_proj = layer_factory.row_parallel(q_out, hidden, bias=config.o_bias)
        if config.qk_norm != "none":
            is_full = config.qk_norm == "full"
            n_shares = layer_factory.tp if is_full else 1
            self.q_norm = NxdNorm(config, q_out if is_full else width, layer_factory, n_shares)
            self.k_norm = NxdNorm(config, kv_out if is_full else width, layer_factory, n_shares)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, attention_mask: Tensor, _: None = None) -> Tensor:
        """Return the attention output, same shape as x; there is no cache."""
        q, k, v = self.qkv_proj(x) if self._fused_gqa_layer else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        if self._sequence_first:
            q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        if self._qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.reshape(*part.shape[:2], -1, self._head_dim) for part in (q, k, v))
        if self._qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        if self._query_scale != 1:
            q = q * self._query_scale
        repeats = q.shape[2] // k.shape[2]
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = self._attend(q, k, v, attention_mask).transpose(1, 2).flatten(2)
        return self.o_proj(out.transpose(0, 1) if self._sequence_first else out)


class NxdMLP(nn.Module):
    """Feed-forward layer, with gate and up in one matrix as in NxD."""

    def __init__(self, config: ModelConfig, layer_factory: LayerFactory, recompute: RecomputeFn | None) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self._is_gated, activation = config.gated, ACTIVATIONS[config.activation]
        function = partial(_gate, activation) if config.gated else activation
        self._activate: Callable[..., Tensor] = partial(recompute, function) if recompute else function
        if config.gated:
            self.gate_up_proj = layer_factory.column_parallel(hidden, 2 * inner, n_stacked=2, bias=bias)
        else:
            self.up_proj = layer_factory.column_parallel(hidden, inner, bias=bias)
        self.down_proj = layer_factory.row_parallel(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP output, same shape as x."""
        parts = self.gate_up_proj(x).chunk(2, dim=-1) if self._is_gated else (self.up_proj(x),)
        return self.down_proj(self._activate(*parts))


def _gate(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


class NxdDecoderLayer(DecoderBlock):
    """Decoder layer: the residual stream of lt-model's block, with other modules."""

    def __init__(
        self,
        config: ModelConfig,
        nxd_options: NxdOptions,
        layer_factory: LayerFactory,
        core_attention: CoreAttention,
        recompute: RecomputeFn | None,
    ) -> None:
        nn.Module.__init__(self)
        attend = partial(recompute, core_attention) if recompute else core_attention
        self.self_attn = NxdAttention(config, nxd_options, layer_factory, attend)
        self.mlp = NxdMLP(config, layer_factory, recompute)
        self.norm_names = NORM_NAMES[config.norm_place]
        for name in filter(None, self.norm_names):
            setattr(self, name, NxdNorm(config, config.hidden_size, layer_factory))
        self.is_parallel, self.residual_scale = config.parallel_residual, config.residual_scale


class NxdDecoder(nn.Module):
    """Stage layers without the head, named `model` in NxD's keys."""

    embed_tokens: nn.Module
    layers: nn.ModuleDict
    norm: nn.Module


class NxdPipelineStage(nn.Module):
    """Layers of one pipeline stage.

    Only the first stage has `model.embed_tokens`; only the last one has `model.norm` and `lm_head`.

    Args:
        config: model configuration.
        nxd_options: sharding of the model.
        layer_factory: factory of its parallel layers, with their dtypes.
        core_attention: attention function on this rank's heads.
        layer_indices: indices in the whole model of this stage's layers.
        is_first: this stage has the embedding.
        is_last: this stage has the final norm and the head.
        recompute: selective checkpointing of core attention and the product of gate and up; None keeps all activations.
    """

    lm_head: nn.Module

    def __init__(
        self,
        config: ModelConfig,
        nxd_options: NxdOptions,
        layer_factory: LayerFactory,
        core_attention: CoreAttention,
        *,
        layer_indices: Sequence[int],
        is_first: bool,
        is_last: bool,
        recompute: RecomputeFn | None = None,
    ) -> None:
        super().__init__()
        self._config, self._factory, self._layer_indices = config, layer_factory, layer_indices
        self.model = NxdDecoder()
        if is_first:
            self.model.embed_tokens = layer_factory.embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleDict(
            {
                str(number): NxdDecoderLayer(config, nxd_options, layer_factory, core_attention, recompute)
                for number in layer_indices
            }
        )
        if is_last:
            self.model.norm = NxdNorm(config, config.hidden_size, layer_factory)
            self.lm_head = layer_factory.column_parallel(config.hidden_size, config.vocab_size)
        scale = config.embed_scale or config.hidden_size**0.5
        self._embed_scale = float(torch.tensor(scale, dtype=layer_factory.dtype))  # rounded as in transformers
        self._rope_tables: dict[Rope, tuple[Tensor, ...]] = {}
        self._is_first, self._is_last, self._sequence_first = is_first, is_last, layer_factory.sequence_parallel

    def forward(self, x: Tensor, position_ids_BT: Tensor, doc_ids_BT: Tensor | None) -> Tensor:
        """Return the activations for the next stage; on the last stage this rank's logits, [B, T, V].

        Args:
            x: token ids [B, T] on the first stage, else activations of the previous stage.
            position_ids_BT: rotary positions.
            doc_ids_BT: document ids, for attention within documents; None for plain causal attention.
        """
        config, layers = self._config, self._layer_indices
        ropes = {rope: self.lookup_rope(rope, position_ids_BT) for rope in dict.fromkeys(map(config.rope, layers))}
        windows = dict.fromkeys(map(config.window, layers))
        masks = {window: _attention_mask(position_ids_BT, doc_ids_BT, window) for window in windows}
        if self._is_first:
            x = self.model.embed_tokens(x)
            x = x if self._embed_scale == 1 else x * self._embed_scale
        for index, block in zip(layers, self.model.layers.values(), strict=True):
            x = block(x, ropes[config.rope(index)], masks[config.window(index)])
        if not self._is_last:
            return x
        x = self.model.norm(x)
        logits = self.lm_head(x if config.logits_divisor == 1 else x / config.logits_divisor)
        if config.logits_softcap:
            wide = logits.to(self._factory.upcast_dtype)
            logits = config.logits_softcap * torch.tanh(wide / config.logits_softcap)
        return logits.transpose(0, 1) if self._sequence_first else logits

    def lookup_rope(self, rope: Rope | None, position_ids_BT: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines of the positions, [B, T, 1, P]; the first call builds the tables."""
        if rope is None:
            return None
        if rope not in self._rope_tables:
            count = max(self._config.max_position_embeddings, position_ids_BT.shape[1])
            tables = rope_tables(rope, torch.arange(count, device="cpu"), self._factory.dtype)
            self._rope_tables[rope] = tuple(table.flatten(1).to(position_ids_BT.device) for table in tables)
        cos, sin = (nn.functional.embedding(position_ids_BT, table)[:, :, None] for table in self._rope_tables[rope])
        return cos, sin

    def activation_shape(self, batch_size: int, seq_len: int) -> tuple[int, int, int]:
        """Return the shape of activations sent between stages for a micro-batch."""
        width = self._config.hidden_size
        return (
            (seq_len // self._factory.tp, batch_size, width) if self._sequence_first else (batch_size, seq_len, width)
        )


def _attention_mask(position_ids_BT: Tensor, doc_ids_BT: Tensor | None, window: int) -> Tensor:
    """Return the boolean mask [1 or B, 1, T (query), T (key)]; True where attention is allowed.

    Where there is a window, a query sees that many positions, its own included.
    """
    length = position_ids_BT.shape[1]
    attention_mask = torch.ones(length, length, dtype=torch.bool, device=position_ids_BT.device).tril()[None, None]
    if window:
        attention_mask = attention_mask.triu(1 - window)
    if doc_ids_BT is None:
        return attention_mask
    return attention_mask & (doc_ids_BT[:, None, :, None] == doc_ids_BT[:, None, None, :])
