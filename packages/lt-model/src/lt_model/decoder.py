"""Llama decoder as plain torch modules; parameter names are those of transformers' LlamaForCausalLM.

Pre-norm blocks (RMSNorm, rotary grouped-query attention, SwiGLU) between an embedding and a head. This is the
architecture alone: parallelism, precision policy and recomputation are applied from outside. RMSNorm, rotary angles and
the loss are computed in fp32, or in float64 when the weights are float64.

Cost: `lt_model.costs` counts FLOPs and bytes.

Shapes: B batch, T tokens, D hidden_size, H query heads, G key/value heads, K head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt_model.attention import AttentionFn, attention_backend
from lt_model.config import ModelConfig
from lt_model.documents import DocumentBoundaries
from lt_model.errors import ModelError
from lt_model.loss import LossParts, linear_loss_parts
from lt_model.norm import RMSNorm
from lt_model.rope import apply_rope, rope_tables
from lt_model.swiglu import swiglu


class KVCache:
    """Key/value cache of one layer for `max_length` tokens, allocated at the first update."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.n_tokens = 0
        self.k_BSGK = self.v_BSGK = torch.empty(0)

    def update(self, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of T more tokens and return views of all so far."""
        if not self.n_tokens:
            batch, _, heads, width = k_BTGK.shape
            self.k_BSGK = k_BTGK.new_empty(batch, self.max_length, heads, width)
            self.v_BSGK = torch.empty_like(self.k_BSGK)
        end = self.n_tokens + k_BTGK.shape[1]
        assert end <= self.max_length, f"{end} tokens in a cache for {self.max_length}"
        self.k_BSGK[:, self.n_tokens : end] = k_BTGK
        self.v_BSGK[:, self.n_tokens : end] = v_BTGK
        self.n_tokens = end
        return self.k_BSGK[:, :end], self.v_BSGK[:, :end]


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: ModelConfig, attend: AttentionFn) -> None:
        super().__init__()
        kv_width = config.n_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.attend = attend
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Any, cache: KVCache | None = None) -> Tensor:
        """Return the attention output [B, T, D]; head counts follow the projections, so they may be sharded."""
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTHK = apply_rope(self.q_proj(x_BTD).view(heads), rope)
        k_BTGK = apply_rope(self.k_proj(x_BTD).view(heads), rope)
        v_BTGK = self.v_proj(x_BTD).view(heads)
        if cache is not None:
            k_BTGK, v_BTGK = cache.update(k_BTGK, v_BTGK)
        return self.o_proj(self.attend(q_BTHK, k_BTGK, v_BTGK, mask).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the feed-forward output [B, T, D]."""
        return self.down_proj(swiglu(self.gate_proj(x_BTD), self.up_proj(x_BTD)))


class DecoderBlock(nn.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attend: AttentionFn) -> None:
        super().__init__()
        self.self_attn = Attention(config, attend)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: Any, cache: KVCache | None = None) -> Tensor:
        """Return the residual stream after this layer, [B, T, D]."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rope, mask, cache)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


def vocab_parallel_embedding(input_ids: Tensor, weight_VD: Tensor, vocab_start_index: int) -> Tensor:
    """Return embeddings of the ids in this rank's rows `weight_VD`, and 0 for other ids.

    The sum over ranks is the embedding of all ids.
    """
    rows = input_ids - vocab_start_index
    absent = (rows < 0) | (rows >= weight_VD.shape[0])
    return F.embedding(rows.masked_fill(absent, 0), weight_VD).masked_fill(absent[..., None], 0)


def _new_embedding(vocab_size: int, hidden_size: int) -> nn.Embedding:
    """Return an nn.Embedding with torch's default weights.

    On the meta device none are drawn, as that would import all of torch._dynamo.
    """
    weight = torch.empty(vocab_size, hidden_size)
    return nn.Embedding.from_pretrained(weight if weight.is_meta else nn.init.normal_(weight), freeze=False)


class DecoderLayers(nn.Module):
    """Decoder without its head: embedding, blocks, last norm."""

    def __init__(self, config: ModelConfig, attend: AttentionFn) -> None:
        super().__init__()
        self.embed_tokens = _new_embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderBlock(config, attend) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Decoder(nn.Module):
    """Llama language model. Weights are torch's defaults until `init_model` or a checkpoint sets them.

    Args:
        config: the shape.
        attention: name of the attention backend (`attention.BACKENDS`). Whether it can run on the weights' device and
            in their dtype is checked at the first forward pass.
        pad_vocab_to_multiple_of: the loss does its matrix products with the vocabulary rounded up to a multiple of
            this. Results, parameters and their shapes are the same for every value (see `loss`).

    Attributes:
        config: as given.
        pad_vocab_to_multiple_of: as given.
        model: embedding, `layers` (an `nn.ModuleList` of `DecoderBlock`) and last norm.
        lm_head: the output head; tied to the embedding when the config says so.
    """

    def __init__(self, config: ModelConfig, *, attention: str = "auto", pad_vocab_to_multiple_of: int = 1) -> None:
        super().__init__()
        if pad_vocab_to_multiple_of < 1:
            raise ModelError(
                f"pad_vocab_to_multiple_of = {pad_vocab_to_multiple_of}: must be at least 1 (1: no padding)"
            )
        self.config = config
        self.pad_vocab_to_multiple_of = pad_vocab_to_multiple_of
        self._attention_backend = attention_backend(attention)
        self.model = DecoderLayers(config, self._attention_backend.attend)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids_BT: Tensor,
        *,
        position_ids_BT: Tensor | None = None,
        doc_ids_BT: Tensor | None = None,
        labels_BT: Tensor | None = None,
        z_loss: float = 0.0,
        return_parts: bool = False,
    ) -> Tensor | LossParts:
        """Compute logits, or the summed loss when labels are given.

        Args:
            input_ids_BT: token ids, integers.
            position_ids_BT: rotary position of each token; 0..T-1 when absent.
            doc_ids_BT: document number of each token: it sees earlier tokens with the same number only; all one
                document when absent. Equal numbers lie next to each other. Keep them on the CPU whatever the model's
                device: boundaries are found on the host (`DocumentBoundaries.from_doc_ids`).
            labels_BT: the token that follows each position (already shifted), -100 where there is none.
            z_loss: coefficient of logsumexp(logits)^2, added for every counted label; for training only: 0 for a
                validation loss.
            return_parts: return a `LossParts`: the loss with its cross-entropy and z-loss.

        Returns:
            Logits [B, T, V] in the weights' dtype; or the sum of cross-entropy (and z-loss) over labels != -100 in
            nats, a scalar in fp32 (float64 for float64 weights). With labels the head's weight is used a chunk of
            tokens at a time (`linear_cross_entropy_sum`), so `lm_head` is not called and its hooks do not run.

        Raises:
            ModelError: a negative or infinite `z_loss`, or an attention backend that cannot run here.
        """
        boundaries = None if doc_ids_BT is None else DocumentBoundaries.from_doc_ids(doc_ids_BT)
        hidden_BTD = self.hidden_states(input_ids_BT, position_ids_BT=position_ids_BT, boundaries=boundaries)
        if labels_BT is None:
            return self.lm_head(hidden_BTD)
        parts = linear_loss_parts(
            hidden_BTD, self.lm_head.weight, labels_BT, z_loss=z_loss, pad_to_multiple_of=self.pad_vocab_to_multiple_of
        )
        return parts if return_parts else parts.total

    def hidden_states(
        self,
        input_ids_BT: Tensor,
        *,
        position_ids_BT: Tensor | None = None,
        boundaries: DocumentBoundaries | None = None,
        caches: Sequence[KVCache] | None = None,
    ) -> Tensor:
        """Return the final norm's output [B, T, D], the input of the head.

        Args:
            input_ids_BT: as in `forward`.
            position_ids_BT: as in `forward`; when absent, positions continue after the cached ones.
            boundaries: document boundaries; one document per row when absent. Not together with caches.
            caches: one `KVCache` per layer; the tokens attend to all cached ones and are appended.
        """
        assert caches is None or boundaries is None, "a cache holds one document"
        assert boundaries is None or (boundaries.n_rows, boundaries.seq_len) == input_ids_BT.shape
        x_BTD = self.model.embed_tokens(input_ids_BT)
        if position_ids_BT is None:
            first = caches[0].n_tokens if caches else 0
            position_ids_BT = torch.arange(first, first + input_ids_BT.shape[1], device=input_ids_BT.device)
        rope = rope_tables(self.config, position_ids_BT, x_BTD.dtype)
        mask = self._attention_backend.make_mask(boundaries, x_BTD.device, x_BTD.dtype)
        for index, layer in enumerate(self.model.layers):
            x_BTD = layer(x_BTD, rope, mask, caches[index]) if caches else layer(x_BTD, rope, mask)
        return self.model.norm(x_BTD)
