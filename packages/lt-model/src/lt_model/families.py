"""Model families of `transformers` as rows: what is fixed, the keys of config.json, the names of tensors in files.

A row is data alone; `hf.py` reads and writes config.json by it, `ModelConfig` refuses what it cannot express, and
lt-ckpt converts tensors by it. To add a family: a row here and a case in `tests/test_families.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

COMMON_KEYS: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "max_position_embeddings": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
    "init_std": "initializer_range",
}
"""Field of `ModelConfig` to key of config.json, where the row names no other."""
COMMON_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "use_sliding_window": False,
    "router_aux_loss_coef": 0.001,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}
"""What an absent key means to transformers, where the row names nothing else; sizes of a model mean nothing."""
COMMON_REQUIRED: Mapping[str, Any] = {"clip_qkv": None, "quantization_config": None}
EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""Two keys of one number."""
DENSE_KEYS = ("decoder_sparse_step", "mlp_only_layers")
"""Every n-th layer has experts, but for those listed."""
COMMON_IGNORED = frozenset(
    "_name_or_path architectures bos_token_id chunk_size_feed_forward dtype eos_token_id id2label is_encoder_decoder "  # noqa: SIM905
    "label2id model_type output_attentions output_hidden_states pad_token_id problem_type return_dict torch_dtype "
    "transformers_version use_cache".split()
)
DROPOUTS = tuple(f"{place}_dropout" for place in ("attention", "hidden", "residual", "embedding"))
DROPOUTS += ("resid_pdrop", "embd_pdrop")
"""Keys that must be 0 for training, and change nothing else."""
SLIDING_KEYS: Mapping[str, tuple[str, ...]] = {
    "": (),
    "all": ("sliding_window",),
    "last": ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    "pattern": ("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"),
    "nope": ("sliding_window", "use_sliding_window", "layer_types", "no_rope_layers", "no_rope_layer_interval"),
}
"""Keys that say which layers slide, by `Family.sliding`."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is particular to a family.

    Attributes:
        architecture: class of transformers.
        since: the oldest transformers with the family.
        fixed: fields of `ModelConfig` with one value in the whole family.
        own_keys: field to key of config.json, beyond `COMMON_KEYS` or in place of it; None: it has no key.
        defaults: what an absent key means, beyond `COMMON_DEFAULTS`.
        required: keys with one supported value, beyond `COMMON_REQUIRED`.
        ignored: keys without effect on a decoder's output, beyond `COMMON_IGNORED`.
        sliding: which layers slide where a file does not list them: none, all, those from `max_window_layers` on, all
            but each `period`-th, or those without rotary positions, which are each `period`-th.
        period: see there.
        has_whole_heads: hidden_size is a multiple of n_heads, whatever a head's width is.
        has_own_head_dim: a head's width does not follow from hidden_size and n_heads.
        has_two_ropes: sliding layers have a rotary base of their own, and no scaling.
        has_dense_layers: a file may name layers without experts (`DENSE_KEYS`).
        partial_key: key of the rotated share of a head before transformers 5, or "" where all is rotated.
        renames: part of our tensor names to part of theirs, in order.
        fused: their tensor of a layer to ours, which it has one below the other ("rows"), or head by head ("heads").
    """

    architecture: str
    since: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    own_keys: Mapping[str, str | None] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    sliding: Literal["", "all", "last", "pattern", "nope"] = ""
    period: int = 1
    has_whole_heads: bool = False
    has_own_head_dim: bool = False
    has_two_ropes: bool = False
    has_dense_layers: bool = False
    partial_key: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    fused: Mapping[str, tuple[tuple[str, ...], Literal["rows", "heads"]]] = field(default_factory=dict)

    @cached_property
    def keys(self) -> Mapping[str, str]:
        """Field to key of config.json."""
        return {name: key for name, key in {**COMMON_KEYS, **self.own_keys}.items() if key is not None}

    @cached_property
    def other_fields(self) -> frozenset[str]:
        """Fields that are read from several keys."""
        found = {
            "sliding_window": self.sliding,
            "sliding_rope_theta": self.has_two_ropes,
            "rotary_fraction": self.partial_key,
        }
        return frozenset(name for name, is_read in found.items() if is_read)

    @property
    def theta_key(self) -> str:
        """Key of the rotary base before transformers 5."""
        return "rotary_emb_base" if self.partial_key == "rotary_pct" else "rope_theta"

    @property
    def read_keys(self) -> frozenset[str]:
        """Every key of config.json that decides the model."""
        rope = ("rope_parameters", "rope_scaling", self.theta_key, self.partial_key or "partial_rotary_factor")
        local = ("rope_local_base_freq",) if self.has_two_ropes else ()
        experts = EXPERT_COUNTS if "n_experts" in self.keys else ()
        dense = DENSE_KEYS if self.has_dense_layers else ()
        return frozenset((*self.keys.values(), *rope, *local, *experts, *dense, *SLIDING_KEYS[self.sliding]))


_BIASES = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_GEMMA_KEYS = {**_BIASES, "head_dim": "head_dim", "activation": "hidden_activation"}
_GEMMA_KEYS |= {"attention_scale": "query_pre_attn_scalar", "logits_softcap": "final_logit_softcapping"}
_GEMMA_DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA_FIXED = {"norm": "rms_plus_one", "norm_place": "both", "embed_scale": 0.0}
_GEMMA_REQUIRED = {"use_bidirectional_attention": False}
_EXPERT_KEYS = {"n_experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
_EXPERT_KEYS |= {"expert_size": "intermediate_size", "router_aux_loss_coef": "router_aux_loss_coef"}
_QWEN_EXPERT_KEYS = {**_EXPERT_KEYS, "expert_size": "moe_intermediate_size", "normalize_top_k": "norm_topk_prob"}
_EXPERT_IGNORED = frozenset({"output_router_logits"})

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        since="4.48",
        own_keys={**_BIASES, "mlp_bias": "mlp_bias", "head_dim": "head_dim"},
        defaults={"max_position_embeddings": 2048},
        ignored=frozenset({"pretraining_tp"}),
        has_whole_heads=True,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        since="4.48",
        own_keys={"head_dim": "head_dim"},
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
        sliding="all",
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        since="4.48",
        fixed={"qkv_bias": True},
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32},
        sliding="last",
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        since="4.51",
        fixed={"qk_norm": "head"},
        own_keys={**_BIASES, "head_dim": "head_dim"},
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
        sliding="last",
        has_own_head_dim=True,
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        since="4.48",
        fixed={"qk_norm": "full", "norm_place": "post"},
        own_keys=_BIASES,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    ),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        since="4.57",
        fixed={"qk_norm": "full", "norm_place": "post"},
        own_keys=_BIASES,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
        sliding="pattern",
        period=4,
        has_two_ropes=True,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        since="4.53",
        own_keys={**_BIASES, "mlp_bias": "mlp_bias"},
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "sliding_window": None,
        },
        sliding="nope",
        period=4,
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        since="4.48",
        fixed=_GEMMA_FIXED,
        own_keys={**_GEMMA_KEYS, "attention_softcap": "attn_logit_softcapping"},
        defaults={
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "num_key_value_heads": 4,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        required=_GEMMA_REQUIRED,
        ignored=frozenset({"hidden_act", "cache_implementation"}),
        sliding="pattern",
        period=2,
        has_own_head_dim=True,
        has_whole_heads=True,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        since="4.50",
        fixed={**_GEMMA_FIXED, "qk_norm": "head"},
        own_keys=_GEMMA_KEYS,
        defaults={
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "final_logit_softcapping": None,
        },
        required=_GEMMA_REQUIRED,
        ignored=frozenset({"hidden_act", "cache_implementation", "attn_logit_softcapping"}),
        sliding="pattern",
        period=6,
        has_own_head_dim=True,
        has_two_ropes=True,
        has_whole_heads=True,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        since="4.48",
        fixed={"rope_scaling": None},
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None},
        ignored=frozenset({"original_max_position_embeddings"}),
        sliding="all",
        partial_key="partial_rotary_factor",
        fused={
            "self_attn.qkv_proj": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "rows"),
            "mlp.gate_up_proj": (("mlp.gate_proj", "mlp.up_proj"), "rows"),
        },
    ),
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM",
        since="4.48",
        fixed={"norm": "layer", "gated": False, "mlp_bias": True},
        own_keys={
            **_BIASES,
            "n_kv_heads": None,
            "norm_eps": "layer_norm_eps",
            "parallel_residual": "use_parallel_residual",
        },
        defaults={
            "attention_bias": True,
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "use_parallel_residual": True,
            "rotary_pct": 0.25,
            "hidden_act": "gelu",
        },
        ignored=frozenset({"classifier_dropout", "is_decoder"}),
        partial_key="rotary_pct",
        renames=(
            ("model.embed_tokens", "gpt_neox.embed_in"),
            ("model.norm", "gpt_neox.final_layer_norm"),
            ("lm_head", "embed_out"),
            ("model.layers", "gpt_neox.layers"),
            ("self_attn.o_proj", "attention.dense"),
            ("mlp.up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ),
        fused={
            "attention.query_key_value": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "heads"),
        },
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        since="4.48",
        own_keys={
            **_BIASES,
            "mlp_bias": "mlp_bias",
            "embed_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention_scale": "attention_multiplier",
            "logits_divisor": "logits_scaling",
        },
        defaults={
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM",
        since="4.48",
        fixed={"norm": "layer", "gated": False},
        own_keys={"qkv_bias": "use_bias", "o_bias": "use_bias", "mlp_bias": "use_bias", "norm_eps": "norm_epsilon"},
        defaults={
            "use_bias": True,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
            "initializer_range": 0.018042,
            "sliding_window": None,
        },
        sliding="all",
        renames=(("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        since="4.48",
        fixed={"normalize_top_k": True},
        own_keys={**_EXPERT_KEYS, "n_experts": "num_local_experts", "head_dim": "head_dim"},
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
        },
        required={"router_jitter_noise": 0.0},
        ignored=_EXPERT_IGNORED,
        sliding="all",
        renames=(("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        since="4.48",
        fixed={"qk_norm": "full"},
        own_keys={**_BIASES, **_EXPERT_KEYS, "normalize_top_k": "norm_topk_prob"},
        defaults={"router_aux_loss_coef": 0.01, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        ignored=_EXPERT_IGNORED,
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        since="4.48",
        fixed={"shared_expert_gate": True},
        own_keys={**_QWEN_EXPERT_KEYS, "qkv_bias": "qkv_bias", "shared_expert_size": "shared_expert_intermediate_size"},
        defaults={"qkv_bias": True, "max_position_embeddings": 32768, "num_key_value_heads": 16},
        required={"use_sliding_window": False},
        ignored=_EXPERT_IGNORED | {"sliding_window", "max_window_layers", "layer_types"},
        has_dense_layers=True,
        renames=(("mlp.shared_experts", "mlp.shared_expert"),),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        since="4.51",
        fixed={"qk_norm": "head"},
        own_keys={**_BIASES, **_QWEN_EXPERT_KEYS, "head_dim": "head_dim"},
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4},
        required={"use_sliding_window": False},
        ignored=_EXPERT_IGNORED | {"sliding_window", "max_window_layers"},
        has_dense_layers=True,
    ),
}
"""Families by transformers' model_type."""
