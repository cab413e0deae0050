"""One pipeline stage of a Llama, made of whatever layers it is given; parameter names are NxD's keys.

Norm and softmax are computed in the wide dtype. It is asked of the caller, for with XLA_DOWNCAST_BF16 torch's float32
is bf16 on the device and its float64 is fp32. The tables of rotary positions are made on the host and looked up: with
XLA_USE_BF16 an angle computed on the device would have 8 bits, and positions beyond 256 would not be told apart.

Under sequence parallelism positions come first between layers: [T/tp, B, D].

Cost: `lt_model.costs` counts FLOPs and bytes. With selective checkpointing core attention and the feed-forward's
product are computed again in the backward pass instead of kept.

Shapes: B batch, T positions, D hidden_size, H this rank's query heads, G its key/value heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lt_ckpt.nxd.options import NxdOptions
from lt_model import LlamaConfig
from lt_model.rope import apply_rope, rope_tables
from lt_trainer_neuron.nxd.attention import Attend
from lt_trainer_neuron.nxd.layers import Layers

__all__ = ["Recompute", "Stage"]

Recompute = Callable[..., Any]
"""Calls its first argument with the others, keeping none of what is made inside for the backward pass."""


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in the wide dtype."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, wide: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device="meta"))
        self._eps, self._wide = eps, wide

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x, same shape and dtype."""
        wide = x.to(self._wide)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (normed * self.weight.to(self._wide)).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query self-attention on this rank's heads."""

    def __init__(
        self, config: LlamaConfig, cut: NxdOptions, layers: Layers, attend: Attend, recompute: Recompute | None
    ) -> None:
        super().__init__()
        width, kv_out = config.hidden_size, config.n_kv_heads * config.head_dim
        self._head_dim, self._attend = config.head_dim, attend
        self._recompute, self._positions_first = recompute, layers.sequence_parallel
        if cut.grouped:
            self.qkv_proj = layers.qkv(width, width, kv_out, copies=cut.kv_multiplier, fused=cut.qkv == "gqa_fused")
        else:
            self.q_proj = layers.column(width, width)
            self.k_proj = layers.column(width, kv_out)
            self.v_proj = layers.column(width, kv_out)
        self._grouped = cut.grouped
        self.o_proj = layers.row(width, width)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        """The attention output, of the shape of x."""
        parts = self.qkv_proj(x) if self._grouped else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        if self._positions_first:
            parts = [part.transpose(0, 1) for part in parts]
        q, k, v = (part.reshape(*part.shape[:2], -1, self._head_dim) for part in parts)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        repeats = q.shape[2] // k.shape[2]
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = self._recompute(self._attend, q, k, v, seen) if self._recompute else self._attend(q, k, v, seen)
        out = out.transpose(1, 2).flatten(2)
        return self.o_proj(out.transpose(0, 1) if self._positions_first else out)


class Mlp(nn.Module):
    """SwiGLU, with gate and up in one matrix as NxD keeps them."""

    def __init__(self, config: LlamaConfig, layers: Layers, recompute: Recompute | None) -> None:
        super().__init__()
        self._recompute = recompute
        self.gate_up_proj = layers.column(config.hidden_size, 2 * config.intermediate_size, stacked=2)
        self.down_proj = layers.row(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """The feed-forward output, of the shape of x."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        middle = self._recompute(_silu_times, gate, up) if self._recompute else _silu_times(gate, up)
        return self.down_proj(middle)


def _silu_times(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate) * up


class Block(nn.Module):
    """One decoder layer."""

    def __init__(
        self,
        config: LlamaConfig,
        cut: NxdOptions,
        layers: Layers,
        attend: Attend,
        dtype: torch.dtype,
        wide: torch.dtype,
        recompute: Recompute | None,
    ) -> None:
        super().__init__()
        self.self_attn = Attention(config, cut, layers, attend, recompute)
        self.mlp = Mlp(config, layers, recompute)
        self.input_layernorm = Norm(config.hidden_size, config.norm_eps, dtype, wide)
        self.post_attention_layernorm = Norm(config.hidden_size, config.norm_eps, dtype, wide)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        """The residual stream after this layer."""
        x = x + self.self_attn(self.input_layernorm(x), rope, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """What NxD's keys call `model`: the stage's part without the head."""

    embed_tokens: nn.Module
    layers: nn.ModuleDict
    norm: nn.Module


class Stage(nn.Module):
    """See the module's text. A stage has `lm_head` and parts of `model` only where it is first or last.

    Args:
        config: the model.
        cut: how it is cut.
        layers: what makes its layers.
        attend: core attention.
        numbers: the layers of this stage, by their numbers in the whole model.
        first: this stage has the embedding.
        last: this stage has the last norm and the head.
        dtype: of weights and of what is computed.
        wide: of norms and softmax.
        recompute: for selective checkpointing of core attention and of the feed-forward's product; None keeps all.
    """

    lm_head: nn.Module

    def __init__(
        self,
        config: LlamaConfig,
        cut: NxdOptions,
        layers: Layers,
        attend: Attend,
        *,
        numbers: Sequence[int],
        first: bool,
        last: bool,
        dtype: torch.dtype,
        wide: torch.dtype,
        recompute: Recompute | None = None,
    ) -> None:
        super().__init__()
        self._config, self._dtype = config, dtype
        self.model = Decoder()
        if first:
            self.model.embed_tokens = layers.embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleDict(
            {str(number): Block(config, cut, layers, attend, dtype, wide, recompute) for number in numbers}
        )
        if last:
            self.model.norm = Norm(config.hidden_size, config.norm_eps, dtype, wide)
            self.lm_head = layers.column(config.hidden_size, config.vocab_size)
        self._tables: tuple[Tensor, ...] | None = None
        self._first, self._last, self._positions_first = first, last, layers.sequence_parallel
        self._parts = layers.tp if layers.sequence_parallel else 1

    def forward(self, x: Tensor, positions_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        """What the next stage is given; from the last one this rank's columns of the logits, [B, T, V].

        Args:
            x: token ids [B, T] on the first stage, else what the stage before gave.
            positions_BT: rotary positions.
            documents_BT: document numbers, where a token sees only its own document.
        """
        rope = self.rope(positions_BT)
        seen = _seen(positions_BT, documents_BT)
        if self._first:
            x = self.model.embed_tokens(x)
        for block in self.model.layers.values():
            x = block(x, rope, seen)
        if not self._last:
            return x
        logits = self.lm_head(self.model.norm(x))
        return logits.transpose(0, 1) if self._positions_first else logits

    def rope(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the tables of cosines and sines, [B, T, 1, P]; the tables are made at the first call."""
        if self._tables is None:
            count = max(self._config.max_position_embeddings, positions_BT.shape[1])
            made = rope_tables(self._config, torch.arange(count, device="cpu"), self._dtype)
            self._tables = tuple(table.flatten(1).to(positions_BT.device) for table in made)
        cos, sin = (nn.functional.embedding(positions_BT, table)[:, :, None] for table in self._tables)
        return cos, sin

    def shape_between(self, rows: int, positions: int) -> tuple[int, int, int]:
        """Shape of what stages hand over, for a micro-batch of so many rows and positions."""
        own, width = positions // self._parts, self._config.hidden_size
        return (own, rows, width) if self._positions_first else (rows, own, width)


def _seen(positions_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
    """Whether a query (second to last dimension) sees a key, [1 or B, 1, T, T]."""
    length = positions_BT.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=positions_BT.device).tril()[None, None]
    if documents_BT is None:
        return seen
    return seen & (documents_BT[:, None, :, None] == documents_BT[:, None, None, :])
