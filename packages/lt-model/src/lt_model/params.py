"""Parameter table: every tensor of a Llama as data, in model order, without torch.

Sharding, optimizers, initialization and checkpoint conversion read this table. Names are those of `transformers`'
`LlamaForCausalLM.state_dict()`, and equal `Decoder.named_parameters()` in name, shape and order.
Cost: 9 small objects per layer.

Initial weights follow GPT-2: normal with standard deviation 0.02, and 0.02 / sqrt(2 * n_layers) for the two
projections that write into the residual stream (o_proj, down_proj), so that its variance does not grow with depth.
Norm weights are ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lt_model.config import ModelConfig

INIT_STD = 0.02
ParamRole = Literal["embed", "block", "final"]


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """Parameter tensor of the model.

    Attributes:
        name: its name in the state dict, as in transformers.
        shape: its full (unsharded) shape; linear weights are [out, in].
        layer: index of its block, or None outside the blocks.
        role: "embed" (input embedding), "block", or "final" (last norm and head); the unit of pipeline stages.
        kind: module name within its role: "embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj",
            "up_proj", "down_proj", "norm", "lm_head".
        tp_dim: the dimension that tensor parallelism splits: 0 (vocabulary rows or output features), 1 (input
            features), or None when every rank has all of it.
        decay: whether weight decay applies (not to norms and the input embedding).
        init_std: standard deviation of the initial values; 0: ones.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    role: ParamRole
    kind: str
    tp_dim: int | None
    decay: bool
    init_std: float

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def param_specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """Return the parameter table of a model, in model order. A tied model has no lm_head.weight."""
    return tuple(_iter_param_specs(config))


def _iter_param_specs(config: ModelConfig) -> Iterator[ParamSpec]:
    hidden, vocab = config.hidden_size, config.vocab_size
    yield _matrix_spec("model.embed_tokens", (vocab, hidden), None, "embed", 0, decay=False)
    for layer in range(config.n_layers):
        yield from _block_specs(config, layer)
    yield _norm_spec("model.norm", hidden, None, "final")
    if not config.tie_word_embeddings:
        yield _matrix_spec("lm_head", (vocab, hidden), None, "final", 0)


def _block_specs(config: ModelConfig, layer: int) -> Iterator[ParamSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    kv_width = config.n_kv_heads * config.head_dim
    residual_std = INIT_STD / math.sqrt(2 * config.n_layers)
    prefix = f"model.layers.{layer}"
    yield _matrix_spec(f"{prefix}.self_attn.q_proj", (hidden, hidden), layer, "block", 0)
    yield _matrix_spec(f"{prefix}.self_attn.k_proj", (kv_width, hidden), layer, "block", 0)
    yield _matrix_spec(f"{prefix}.self_attn.v_proj", (kv_width, hidden), layer, "block", 0)
    yield _matrix_spec(f"{prefix}.self_attn.o_proj", (hidden, hidden), layer, "block", 1, std=residual_std)
    yield _matrix_spec(f"{prefix}.mlp.gate_proj", (inner, hidden), layer, "block", 0)
    yield _matrix_spec(f"{prefix}.mlp.up_proj", (inner, hidden), layer, "block", 0)
    yield _matrix_spec(f"{prefix}.mlp.down_proj", (hidden, inner), layer, "block", 1, std=residual_std)
    yield _norm_spec(f"{prefix}.input_layernorm", hidden, layer, "block")
    yield _norm_spec(f"{prefix}.post_attention_layernorm", hidden, layer, "block")


def _matrix_spec(
    module: str,
    shape: tuple[int, int],
    layer: int | None,
    role: ParamRole,
    tp_dim: int,
    *,
    std: float = INIT_STD,
    decay: bool = True,
) -> ParamSpec:
    return ParamSpec(
        name=f"{module}.weight",
        shape=shape,
        layer=layer,
        role=role,
        kind=module.rpartition(".")[2],
        tp_dim=tp_dim,
        decay=decay,
        init_std=std,
    )


def _norm_spec(module: str, width: int, layer: int | None, role: ParamRole) -> ParamSpec:
    return ParamSpec(
        name=f"{module}.weight",
        shape=(width,),
        layer=layer,
        role=role,
        kind="norm",
        tp_dim=None,
        decay=False,
        init_std=0.0,
    )
