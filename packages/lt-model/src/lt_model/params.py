"""Parameter table: every tensor of a decoder as data, in model order, without torch.

Sharding, optimizers, initialization, recomputation, costs and checkpoint conversion read this table, never a name or a
number of dimensions. Names are those of `transformers`' `LlamaForCausalLM.state_dict()`, and equal
`Decoder.named_parameters()` in name, shape and order; `families` has other families' names in files.
Cost: 9 small objects per layer of a Llama.

Initial weights follow GPT-2: normal with standard deviation `init_std`, and init_std / sqrt(2 * n_layers) for the two
projections that write into the residual stream (o_proj, down_proj), so that its variance does not grow with depth;
not where a norm follows them. Experts start as feed-forward layers do, routers and gates with `init_std`. Norm weights
are ones (zeros where they are 1 + w), biases zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Literal

from lt_model.config import ModelConfig

ParamRole = Literal["embed", "block", "final"]
ParamType = Literal["matrix", "experts", "router", "embedding", "head", "norm", "bias"]
PRODUCTS: tuple[ParamType, ...] = ("matrix", "experts", "router")
"""Types of what a block multiplies by, in the order of the table."""


@dataclass(frozen=True)
class ParamSpec:
    """Parameter tensor of the model.

    Attributes:
        name: its name in the state dict, as in transformers.
        shape: its full (unsharded) shape; linear weights are [out, in].
        layer: index of its block, or None outside the blocks.
        type: what it is: "matrix" (of a product in a block), "experts" (stacked matrices [experts, out, in]), "router"
            (scores of experts, and the gate of a shared one), "embedding", "head", "norm" or "bias".
        tp_dim: the dimension that tensor parallelism splits: 0 (vocabulary rows or output features), 1 (input
            features), one more of stacked matrices, or None when every rank has all of it.
        init: initial values: the standard deviation of normal ones, or "ones" or "zeros".
        is_trained: False of a buffer without gradient: the selection bias of a router, fp32 in every dtype.
        is_saved: whether "selective" recomputation saves the output of its product: every other one of a block, of
            experts the first and the last.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    type: ParamType
    _: KW_ONLY
    tp_dim: int | None
    init: float | Literal["ones", "zeros"]
    is_saved: bool = False
    is_trained: bool = True

    @property
    def role(self) -> ParamRole:
        """The unit of pipeline stages: "embed" (input embedding), "block", or "final" (last norm and head)."""
        return "block" if self.layer is not None else "embed" if self.type == "embedding" else "final"

    @property
    def kind(self) -> str:
        """Name of its module: "embed_tokens", "q_proj", "down_proj", "input_layernorm", "lm_head" and so on."""
        return self.name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]

    @property
    def decay(self) -> bool:
        """Whether weight decay applies: to matrices, experts, routers and the head."""
        return self.type in (*PRODUCTS, "head")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_per_expert(self) -> bool:
        """Whether the first dimension is that of experts, of which a token uses some."""
        return ".experts." in self.name


NORM_NAMES: dict[str, tuple[str, str, str, str]] = {
    "pre": ("input_layernorm", "", "post_attention_layernorm", ""),
    "post": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""`norm_place` to the norms before and after attention, before and after the feed-forward layer; "": none."""


@lru_cache(maxsize=8)
def param_specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """Return the parameter table of a model, in model order. A tied model has no lm_head.weight."""
    return tuple(_iter_param_specs(config))


def _iter_param_specs(config: ModelConfig) -> Iterator[ParamSpec]:
    vocab = (config.vocab_size, config.hidden_size)
    std = config.init_std
    yield ParamSpec("model.embed_tokens.weight", vocab, None, "embedding", tp_dim=0, init=std)
    for layer in range(config.n_layers):
        yield from _block_specs(config, layer)
    yield from _norm_specs(config, "model.norm", config.hidden_size, None)
    if not config.tie_word_embeddings:
        yield ParamSpec("lm_head.weight", vocab, None, "head", tp_dim=0, init=std)


def _block_specs(config: ModelConfig, layer: int) -> Iterator[ParamSpec]:
    hidden = config.hidden_size
    is_deep = config.init_residual == "depth" or (config.init_residual == "auto" and config.norm_place == "pre")
    residual_std = config.init_std / math.sqrt(2 * config.n_layers) if is_deep else config.init_std
    products = _latent_products(config) if config.kv_rank else _attention_products(config)
    if not config.layer(layer).experts:
        products += _mlp_products("mlp", hidden, config.intermediate_size, config)
    else:
        products.append(("mlp.gate", (config.n_experts, hidden), None, config.expert_bias))
        products += _mlp_products("mlp.experts", hidden, config.expert_size, config)
        if config.shared_expert_size:
            products += _mlp_products("mlp.shared_experts", hidden, config.shared_expert_size, config)
        if config.shared_expert_gate:
            products.append(("mlp.shared_expert_gate", (1, hidden), None, False))
    prefix = f"model.layers.{layer}"
    if config.sinks:
        yield ParamSpec(f"{prefix}.self_attn.sinks", (config.n_heads,), layer, "bias", tp_dim=0, init="zeros")
    for index, (name, shape, tp_dim, has_bias) in enumerate(products):
        std, is_saved = residual_std if tp_dim == 1 else config.init_std, index % 2 == 0
        if name.startswith("mlp.experts."):
            shape, dim, is_saved = (config.n_experts, *shape), 1 + (tp_dim or 0), not name.endswith("up_proj")
            yield ParamSpec(f"{prefix}.{name}", shape, layer, "experts", tp_dim=dim, init=std, is_saved=is_saved)
            if config.expert_bias:
                row_dim = 1 if dim == 1 else None
                yield ParamSpec(f"{prefix}.{name}_bias", shape[:2], layer, "bias", tp_dim=row_dim, init="zeros")
            continue
        type_: ParamType = "router" if name.startswith("mlp.") and tp_dim is None else "matrix"
        yield ParamSpec(f"{prefix}.{name}.weight", shape, layer, type_, tp_dim=tp_dim, init=std, is_saved=is_saved)
        if has_bias:  # of a row-parallel product whole on every rank, and added once, after the sum
            yield ParamSpec(
                f"{prefix}.{name}.bias", shape[:1], layer, "bias", tp_dim=0 if tp_dim == 0 else None, init="zeros"
            )
        yield from _specs_after(config, layer, name)
    for name in filter(None, NORM_NAMES[config.norm_place]):
        yield from _norm_specs(config, f"{prefix}.{name}", hidden, layer)


def _specs_after(config: ModelConfig, layer: int, product: str) -> Iterator[ParamSpec]:
    """Yield what follows a product in the table: norms of latents, of queries and keys, and the selection bias."""
    attention, place = f"model.layers.{layer}.self_attn", product.rpartition(".")[2]
    latents = {"q_a_proj": ("q_a_layernorm", config.q_rank), "kv_a_proj_with_mqa": ("kv_a_layernorm", config.kv_rank)}
    if place in latents:
        norm, rank = latents[place]
        yield ParamSpec(f"{attention}.{norm}.weight", (rank,), layer, "norm", tp_dim=None, init="ones")
    elif product == "mlp.gate" and config.selection_bias:
        name, shape = f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (config.n_experts,)
        yield ParamSpec(name, shape, layer, "bias", tp_dim=None, init="zeros", is_trained=False)
    elif place == "o_proj" and config.qk_norm != "none":
        is_full, width = config.qk_norm == "full", config.head_width
        for norm, n_heads in (("q_norm", config.n_heads), ("k_norm", config.n_kv_heads)):
            size = width * n_heads if is_full else width
            yield from _norm_specs(config, f"{attention}.{norm}", size, layer, 0 if is_full else None)


_Product = tuple[str, tuple[int, ...], int | None, bool]
"""Name, shape, dimension of tensor parallelism, whether there is a bias."""


def _attention_products(config: ModelConfig) -> list[_Product]:
    hidden, width = config.hidden_size, config.head_width
    q_width, kv_width = config.n_heads * width, config.n_kv_heads * width
    return [
        ("self_attn.q_proj", (q_width, hidden), 0, config.qkv_bias),
        ("self_attn.k_proj", (kv_width, hidden), 0, config.qkv_bias),
        ("self_attn.v_proj", (kv_width, hidden), 0, config.qkv_bias),
        ("self_attn.o_proj", (hidden, q_width), 1, config.o_bias),
    ]


def _latent_products(config: ModelConfig) -> list[_Product]:
    hidden, heads, latent = config.hidden_size, config.n_heads, config.kv_rank
    queries: list[_Product] = [("self_attn.q_proj", (heads * config.head_width, hidden), 0, False)]
    if config.q_rank:
        queries = [
            ("self_attn.q_a_proj", (config.q_rank, hidden), None, config.qkv_bias),
            ("self_attn.q_b_proj", (heads * config.head_width, config.q_rank), 0, False),
        ]
    return [
        *queries,
        ("self_attn.kv_a_proj_with_mqa", (latent + config.rope_width, hidden), None, config.qkv_bias),
        ("self_attn.kv_b_proj", (heads * (config.nope_width + config.value_width), latent), 0, False),
        ("self_attn.o_proj", (hidden, heads * config.value_width), 1, config.o_bias),
    ]


def _mlp_products(name: str, hidden: int, inner: int, config: ModelConfig) -> list[_Product]:
    return [
        *([(f"{name}.gate_proj", (inner, hidden), 0, config.mlp_bias)] if config.gated else []),
        (f"{name}.up_proj", (inner, hidden), 0, config.mlp_bias),
        (f"{name}.down_proj", (hidden, inner), 1, config.mlp_bias),
    ]


def _norm_specs(
    config: ModelConfig, module: str, width: int, layer: int | None, tp_dim: int | None = None
) -> Iterator[ParamSpec]:
    init: Literal["ones", "zeros"] = "zeros" if config.norm == "rms_plus_one" else "ones"
    yield ParamSpec(f"{module}.weight", (width,), layer, "norm", tp_dim=tp_dim, init=init)
    if config.norm == "layer":
        yield ParamSpec(f"{module}.bias", (width,), layer, "bias", tp_dim=tp_dim, init="zeros")
