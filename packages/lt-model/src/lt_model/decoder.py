"""Decoder of every family as plain torch modules; each branch reads a field of `ModelConfig`.

Blocks of norms, rotary grouped-query attention and a feed-forward layer between an embedding and a head; parameter
names are those of transformers' LlamaForCausalLM. This is the architecture alone: parallelism, precision policy and
recomputation are applied from outside. Norms, rotary angles and the loss are computed in fp32, or in float64 when the
weights are float64.

Cost: `lt_model.costs` counts FLOPs and bytes.

Shapes: B batch, T tokens, D hidden_size, H query heads, G key/value heads, K head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt_model.attention import AttentionFn, attention_backend
from lt_model.config import LayerKind, ModelConfig
from lt_model.documents import DocumentBoundaries
from lt_model.errors import ModelError
from lt_model.feed_forward import MLP, MoE
from lt_model.loss import LossParts, linear_loss_parts
from lt_model.norm import RMSNorm, make_norm
from lt_model.params import NORM_NAMES
from lt_model.rope import apply_rope, apply_rope_to_pairs, rope_tables
from lt_model.shared_input import apply_to_shared_input

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever that of the others is."""


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
            self.v_BSGK = v_BTGK.new_empty(batch, self.max_length, heads, v_BTGK.shape[-1])
        end = self.n_tokens + k_BTGK.shape[1]
        assert end <= self.max_length, f"{end} tokens in a cache for {self.max_length}"
        self.k_BSGK[:, self.n_tokens : end] = k_BTGK
        self.v_BSGK[:, self.n_tokens : end] = v_BTGK
        self.n_tokens = end
        return self.k_BSGK[:, :end], self.v_BSGK[:, :end]


class Attention(nn.Module):
    """Grouped-query self-attention."""

    def __init__(self, config: ModelConfig, attend: AttentionFn) -> None:
        super().__init__()
        width = config.head_width
        q_width, kv_width = config.n_heads * width, config.n_kv_heads * width
        self.head_dim = width
        self.attend = attend
        self.qk_norm = config.qk_norm
        self.query_scale = config.attention_scale * width**0.5 if config.attention_scale else 1.0
        self.sinks = nn.Parameter(torch.zeros(config.n_heads)) if config.sinks else None
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=config.o_bias)
        if config.qk_norm != "none":
            is_full = config.qk_norm == "full"
            self.q_norm = make_norm(config.norm, q_width if is_full else width, config.norm_eps)
            self.k_norm = make_norm(config.norm, kv_width if is_full else width, config.norm_eps)

    def forward(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Any, cache: KVCache | None = None
    ) -> Tensor:
        """Return the attention output [B, T, D]; head counts follow the projections, so they may be sharded."""
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q, k, v = apply_to_shared_input(x_BTD, self.q_proj, self.k_proj, self.v_proj)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BTHK, k_BTGK, v_BTGK = q.view(heads), k.view(heads), v.view(heads)
        if self.qk_norm == "head":
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        if rope is not None:
            q_BTHK, k_BTGK = apply_rope(q_BTHK, rope), apply_rope(k_BTGK, rope)
        if self.query_scale != 1:
            q_BTHK = q_BTHK * self.query_scale
        if cache is not None:
            k_BTGK, v_BTGK = cache.update(k_BTGK, v_BTGK)
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        return self.o_proj(self.attend(q_BTHK, k_BTGK, v_BTGK, mask, **sinks).flatten(2))


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values are made from a narrow latent, and here expanded for each head.

    The rotated part of a key comes from the stream itself and is the same for all heads. Files have its numbers in
    neighboring pairs, and so has our weight.
    """

    def __init__(self, config: ModelConfig, attend: AttentionFn) -> None:
        super().__init__()
        hidden, n_heads, q_width = config.hidden_size, config.n_heads, config.n_heads * config.head_width
        self.attend, self.rank = attend, config.kv_rank
        self.nope, self.rope, self.value = config.nope_width, config.rope_width, config.value_width
        self.query_scale = config.rope_scaling.score_factor if config.rope_scaling else 1.0
        self.has_query_latent = config.q_rank > 0
        if self.has_query_latent:
            self.q_a_proj = nn.Linear(hidden, config.q_rank, bias=config.qkv_bias)
            self.q_a_layernorm = RMSNorm(config.q_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(config.q_rank, q_width, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, q_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rope, bias=config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(self.rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(self.rank, n_heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(n_heads * self.value, hidden, bias=config.o_bias)

    def forward(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Any, cache: KVCache | None = None
    ) -> Tensor:
        """Return the attention output [B, T, D]; head counts follow the projections, so they may be sharded."""
        assert rope is not None
        places = (*x_BTD.shape[:2], -1)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD))) if self.has_query_latent else self.q_proj(x_BTD)
        q_nope, q_rope = q.view(*places, self.nope + self.rope).split((self.nope, self.rope), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x_BTD).split((self.rank, self.rope), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(*places, self.nope + self.value)
        k_nope, v_BTHV = kv.split((self.nope, self.value), dim=-1)
        k_rope = apply_rope_to_pairs(k_rope[:, :, None], rope).expand(-1, -1, kv.shape[2], -1)
        q_BTHK, k_BTHK = torch.cat((q_nope, apply_rope_to_pairs(q_rope, rope)), -1), torch.cat((k_nope, k_rope), -1)
        if self.query_scale != 1:
            q_BTHK = q_BTHK * self.query_scale
        if cache is not None:
            k_BTHK, v_BTHV = cache.update(k_BTHK, v_BTHV)
        return self.o_proj(self.attend(q_BTHK, k_BTHK, v_BTHV, mask).flatten(2))


class DecoderBlock(nn.Module):
    """One decoder layer: x + attention(x), then x + mlp(x), with up to four norms (`NORM_NAMES`)."""

    def __init__(self, config: ModelConfig, attend: AttentionFn, kind: LayerKind) -> None:
        super().__init__()
        self.self_attn = (LatentAttention if config.kv_rank else Attention)(config, attend)
        self.mlp = MoE(config) if kind.experts else MLP(config, config.intermediate_size)
        self.norm_names = NORM_NAMES[config.norm_place]
        for name in filter(None, self.norm_names):
            setattr(self, name, make_norm(config.norm, config.hidden_size, config.norm_eps))
        self.is_parallel, self.residual_scale = config.parallel_residual, config.residual_scale

    def forward(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Any, cache: KVCache | None = None
    ) -> Tensor:
        """Return the residual stream after this layer, [B, T, D]."""
        added_BTD = self._norm(1, self.self_attn(self._norm(0, x_BTD), rope, mask, cache))
        middle_BTD = self._add(x_BTD, added_BTD)
        added_BTD = self._norm(3, self.mlp(self._norm(2, x_BTD if self.is_parallel else middle_BTD)))
        return self._add(middle_BTD, added_BTD)

    def _norm(self, place: int, x_BTD: Tensor) -> Tensor:
        name = self.norm_names[place]
        return getattr(self, name)(x_BTD) if name else x_BTD

    def _add(self, x_BTD: Tensor, added_BTD: Tensor) -> Tensor:
        return x_BTD + (added_BTD if self.residual_scale == 1 else added_BTD * self.residual_scale)


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
        self.layers = nn.ModuleList(DecoderBlock(config, attend, config.layer(i)) for i in range(config.n_layers))
        self.norm = make_norm(config.norm, config.hidden_size, config.norm_eps)


class Decoder(nn.Module):
    """Language model. Weights are torch's defaults until `init_model` or a checkpoint sets them.

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
        layers: the range of its layers; a pipeline stage has some of the model's.
        blocks: their blocks, in order.
    """

    layers: range
    blocks: list[DecoderBlock]

    def __init__(self, config: ModelConfig, *, attention: str = "auto", pad_vocab_to_multiple_of: int = 1) -> None:
        super().__init__()
        if pad_vocab_to_multiple_of < 1:
            raise ModelError(
                f"pad_vocab_to_multiple_of = {pad_vocab_to_multiple_of}: must be at least 1 (1: no padding)"
            )
        self.config = config
        self.pad_vocab_to_multiple_of = pad_vocab_to_multiple_of
        self._attention_backend = attention_backend(attention).for_model(config)
        self.model = DecoderLayers(config, self._attention_backend.attend)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.layers, self.blocks = range(config.n_layers), list(self.model.layers)  # pyright: ignore[reportAttributeAccessIssue]

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
            tokens at a time (`linear_loss_parts`), so `lm_head` is not called and its hooks do not run.

        Raises:
            ModelError: a negative or infinite `z_loss`, or an attention backend that cannot run here.
        """
        boundaries = None if doc_ids_BT is None else DocumentBoundaries.from_doc_ids(doc_ids_BT)
        hidden_BTD = self.hidden_states(input_ids_BT, position_ids_BT=position_ids_BT, boundaries=boundaries)
        if labels_BT is None:
            return self.logits(hidden_BTD)
        parts = linear_loss_parts(
            hidden_BTD,
            self.lm_head.weight,
            labels_BT,
            z_loss=z_loss,
            pad_to_multiple_of=self.pad_vocab_to_multiple_of,
            softcap=self.config.logits_softcap,
        )
        return parts if return_parts else parts.total

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of `hidden_states` [..., D]."""
        logits, cap = self.lm_head(hidden), self.config.logits_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def hidden_states(
        self,
        inputs: Tensor,
        *,
        position_ids_BT: Tensor | None = None,
        boundaries: DocumentBoundaries | None = None,
        caches: Sequence[KVCache] | None = None,
    ) -> Tensor:
        """Return what the head reads, [B, T, D]: the last norm's output, with the scale of the logits.

        Pipeline stages, generation and scores run this function too. A stage without the embedding takes and a stage
        without the last norm returns the residual stream.

        Args:
            inputs: token ids as in `forward`, or x_BTD of the stage before.
            position_ids_BT: as in `forward`; when absent, positions continue after the cached ones.
            boundaries: document boundaries; one document per row when absent. Not together with caches.
            caches: one `KVCache` per layer; the tokens attend to all cached ones and are appended.
        """
        assert caches is None or boundaries is None, "a cache holds one document"
        config, embed, norm = self.config, self.model.embed_tokens, self.model.norm
        # Between stages positions may be sharded.
        assert boundaries is None or embed is None or (boundaries.n_rows, boundaries.seq_len) == inputs.shape
        x_BTD = inputs if embed is None else embed(inputs)
        if embed is not None and config.embed_scale != 1:
            scale = config.embed_scale or config.hidden_size**0.5
            x_BTD = x_BTD * torch.tensor(scale, dtype=x_BTD.dtype)  # rounded as in transformers
        first = caches[0].n_tokens if caches else 0
        if position_ids_BT is None:
            position_ids_BT = torch.arange(first, first + inputs.shape[1], device=inputs.device)
        kinds = dict.fromkeys(map(config.rope, self.layers))
        ropes = {rope: rope_tables(rope, position_ids_BT, x_BTD.dtype) for rope in kinds if rope}
        shape = (inputs.shape[0], inputs.shape[1], first + inputs.shape[1])
        masks = {
            window: self._attention_backend.make_mask(boundaries, x_BTD.device, x_BTD.dtype, window, shape)
            for window in dict.fromkeys(map(config.window, self.layers))
        }
        for index, block in zip(self.layers, self.blocks, strict=True):
            rope, mask = config.rope(index), masks[config.window(index)]
            tables = None if rope is None else ropes[rope]
            x_BTD = block(x_BTD, tables, mask, caches[index]) if caches else block(x_BTD, tables, mask)
        if norm is None:
            return x_BTD
        x_BTD = norm(x_BTD)
        return x_BTD if config.logits_divisor == 1 else x_BTD / config.logits_divisor
