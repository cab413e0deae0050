"""Llama pipeline stage over a layer factory; parameter names are NxD's keys.

Norm and softmax are computed in the upcast dtype. It is a parameter, since with XLA_DOWNCAST_BF16 torch's float32 is
bf16 on the device and its float64 is fp32. RoPE tables are computed on the host and looked up: with XLA_USE_BF16 an
angle computed on the device would have 8 significant bits, and positions beyond 256 would coincide.

Under sequence parallelism positions are the first dimension between layers: [T/tp, B, D].

Cost: `lt_model.costs` counts FLOPs and bytes. With selective checkpointing core attention and the SwiGLU product are
recomputed in the backward pass instead of kept.

Shapes: B batch, T positions, D hidden_size, H this rank's query heads, G its key/value heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lt_ckpt.nxd.options import NxdOptions
from lt_model import ModelConfig
from lt_model.rope import apply_rope, rope_tables
from lt_trainer_neuron.nxd.attention import CoreAttention
from lt_trainer_neuron.nxd.layers import LayerFactory

RecomputeFn = Callable[..., Any]
"""Calls its first argument with the others and recomputes intermediate tensors in the backward pass."""


class NxdRMSNorm(nn.Module):
    """RMSNorm, x / sqrt(mean(x^2) + eps) * weight, computed in the upcast dtype."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, upcast_dtype: torch.dtype) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)  # as in the files of NxD's own training in bf16
        self.weight = nn.Parameter(torch.empty(width, dtype=wide, device="meta"))
        self._eps, self._upcast_dtype = eps, upcast_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x, same shape and dtype."""
        wide = x.to(self._upcast_dtype)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (normed * self.weight.to(self._upcast_dtype)).to(x.dtype)


class NxdAttention(nn.Module):
    """Grouped-query self-attention on this rank's heads."""

    def __init__(
        self,
        config: ModelConfig,
        nxd_options: NxdOptions,
        layer_factory: LayerFactory,
        core_attention: CoreAttention,
        recompute: RecomputeFn | None,
    ) -> None:
        super().__init__()
        width, kv_out = config.hidden_size, config.n_kv_heads * config.head_width
        self._head_dim, self._core_attention = config.head_width, core_attention
        self._recompute, self._sequence_first = recompute, layer_factory.sequence_parallel
        if nxd_options.is_gqa:
            self.qkv_proj = layer_factory.qkv(
                width,
                width,
                kv_out,
                kv_size_multiplier=nxd_options.kv_size_multiplier,
                fuse_qkv=nxd_options.qkv == "gqa_fused",
            )
        else:
            self.q_proj = layer_factory.column_parallel(width, width)
            self.k_proj = layer_factory.column_parallel(width, kv_out)
            self.v_proj = layer_factory.column_parallel(width, kv_out)
        self._fused_gqa_layer = nxd_options.is_gqa
        self.o_proj = layer_factory.row_parallel(width, width)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attention_mask: Tensor) -> Tensor:
        """Return the attention output, same shape as x."""
        parts = self.qkv_proj(x) if self._fused_gqa_layer else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        if self._sequence_first:
            parts = [part.transpose(0, 1) for part in parts]
        q, k, v = (part.reshape(*part.shape[:2], -1, self._head_dim) for part in parts)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        repeats = q.shape[2] // k.shape[2]
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = (
            self._recompute(self._core_attention, q, k, v, attention_mask)
            if self._recompute
            else self._core_attention(q, k, v, attention_mask)
        )
        out = out.transpose(1, 2).flatten(2)
        return self.o_proj(out.transpose(0, 1) if self._sequence_first else out)


class NxdMLP(nn.Module):
    """SwiGLU MLP, with gate and up in one matrix as in NxD."""

    def __init__(self, config: ModelConfig, layer_factory: LayerFactory, recompute: RecomputeFn | None) -> None:
        super().__init__()
        self._recompute = recompute
        self.gate_up_proj = layer_factory.column_parallel(config.hidden_size, 2 * config.intermediate_size, n_stacked=2)
        self.down_proj = layer_factory.row_parallel(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP output, same shape as x."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        middle = self._recompute(_swiglu, gate, up) if self._recompute else _swiglu(gate, up)
        return self.down_proj(middle)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate) * up


class NxdDecoderLayer(nn.Module):
    """Llama decoder layer."""

    def __init__(
        self,
        config: ModelConfig,
        nxd_options: NxdOptions,
        layer_factory: LayerFactory,
        core_attention: CoreAttention,
        dtype: torch.dtype,
        upcast_dtype: torch.dtype,
        recompute: RecomputeFn | None,
    ) -> None:
        super().__init__()
        self.self_attn = NxdAttention(config, nxd_options, layer_factory, core_attention, recompute)
        self.mlp = NxdMLP(config, layer_factory, recompute)
        self.input_layernorm = NxdRMSNorm(config.hidden_size, config.norm_eps, dtype, upcast_dtype)
        self.post_attention_layernorm = NxdRMSNorm(config.hidden_size, config.norm_eps, dtype, upcast_dtype)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attention_mask: Tensor) -> Tensor:
        """Return the residual stream after this layer."""
        x = x + self.self_attn(self.input_layernorm(x), rope, attention_mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class NxdDecoder(nn.Module):
    """Stage layers without the head, named `model` in NxD's keys."""

    embed_tokens: nn.Module
    layers: nn.ModuleDict
    norm: nn.Module


class NxdPipelineStage(nn.Module):
    """Llama layers of one pipeline stage.

    Only the first stage has `model.embed_tokens`; only the last one has `model.norm` and `lm_head`.

    Args:
        config: model configuration.
        nxd_options: sharding of the model.
        layer_factory: factory of its parallel layers.
        core_attention: attention function on this rank's heads.
        layer_indices: indices in the whole model of this stage's layers.
        is_first: this stage has the embedding.
        is_last: this stage has the final norm and the head.
        dtype: dtype of weights and computation.
        upcast_dtype: dtype of norms and softmax.
        recompute: selective checkpointing of core attention and the SwiGLU product; None keeps all activations.
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
        dtype: torch.dtype,
        upcast_dtype: torch.dtype,
        recompute: RecomputeFn | None = None,
    ) -> None:
        super().__init__()
        self._config, self._dtype = config, dtype
        self.model = NxdDecoder()
        if is_first:
            self.model.embed_tokens = layer_factory.embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleDict(
            {
                str(number): NxdDecoderLayer(
                    config, nxd_options, layer_factory, core_attention, dtype, upcast_dtype, recompute
                )
                for number in layer_indices
            }
        )
        if is_last:
            self.model.norm = NxdRMSNorm(config.hidden_size, config.norm_eps, dtype, upcast_dtype)
            self.lm_head = layer_factory.column_parallel(config.hidden_size, config.vocab_size)
        self._rope_tables: tuple[Tensor, ...] | None = None
        self._is_first, self._is_last, self._sequence_first = is_first, is_last, layer_factory.sequence_parallel
        self._sequence_shards = layer_factory.tp if layer_factory.sequence_parallel else 1

    def forward(self, x: Tensor, position_ids_BT: Tensor, doc_ids_BT: Tensor | None) -> Tensor:
        """Return the activations for the next stage; on the last stage this rank's logits, [B, T, V].

        Args:
            x: token ids [B, T] on the first stage, else activations of the previous stage.
            position_ids_BT: rotary positions.
            doc_ids_BT: document ids, for attention within documents; None for plain causal attention.
        """
        rope = self.lookup_rope(position_ids_BT)
        attention_mask = _attention_mask(position_ids_BT, doc_ids_BT)
        if self._is_first:
            x = self.model.embed_tokens(x)
        for block in self.model.layers.values():
            x = block(x, rope, attention_mask)
        if not self._is_last:
            return x
        logits = self.lm_head(self.model.norm(x))
        return logits.transpose(0, 1) if self._sequence_first else logits

    def lookup_rope(self, position_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions, [B, T, 1, P]; the first call builds the tables."""
        if self._rope_tables is None:
            count = max(self._config.max_position_embeddings, position_ids_BT.shape[1])
            rope = self._config.rope(0)
            assert rope is not None, "the plan refuses layers without"
            tables = rope_tables(rope, torch.arange(count, device="cpu"), self._dtype)
            self._rope_tables = tuple(table.flatten(1).to(position_ids_BT.device) for table in tables)
        cos, sin = (nn.functional.embedding(position_ids_BT, table)[:, :, None] for table in self._rope_tables)
        return cos, sin

    def activation_shape(self, batch_size: int, seq_len: int) -> tuple[int, int, int]:
        """Return the shape of activations sent between stages for a micro-batch."""
        local_len, width = seq_len // self._sequence_shards, self._config.hidden_size
        return (local_len, batch_size, width) if self._sequence_first else (batch_size, local_len, width)


def _attention_mask(position_ids_BT: Tensor, doc_ids_BT: Tensor | None) -> Tensor:
    """Return the boolean mask [1 or B, 1, T (query), T (key)]; True where attention is allowed."""
    length = position_ids_BT.shape[1]
    attention_mask = torch.ones(length, length, dtype=torch.bool, device=position_ids_BT.device).tril()[None, None]
    if doc_ids_BT is None:
        return attention_mask
    return attention_mask & (doc_ids_BT[:, None, :, None] == doc_ids_BT[:, None, None, :])
