"""Tiny models of every family by transformers' own modules, and their tensors under our names.

transformers computes norms, rotary angles and the softmax in float32 whatever the weights are; `NoFloat32` turns each
cast to float32 into one to float64, and nothing else about its code is changed.
"""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights

from lt_model import ModelConfig, param_specs
from lt_model.families import FAMILIES

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 256,
}
DEFAULT = {"rope_type": "default", "rope_theta": 100.0}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LATENTS = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
}
NEOX = {"num_key_value_heads": None, "layer_norm_eps": 1e-3}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "llama, biases, tied, gelu": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    "mistral, window 7, head 16": ("mistral", {"sliding_window": 7, "head_dim": 16}),
    "qwen2, window from layer 2": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3, yarn, head 12": (
        "qwen3",
        {"head_dim": 12, "tie_word_embeddings": True, "rope_parameters": {**YARN, "truncate": False}},
    ),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3, yarn in full layers": (
        "olmo3",
        {"sliding_window": 6, "rope_parameters": {"sliding_attention": DEFAULT, "full_attention": YARN}},
    ),
    "smollm3, linear, window": (
        "smollm3",
        {"rope_parameters": LINEAR, "use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 5},
    ),
    "gemma2, softcaps": (
        "gemma2",
        {**GEMMA, "sliding_window": 5, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            **GEMMA,
            "sliding_window": 6,
            "sliding_window_pattern": 3,
            "rope_parameters": {"sliding_attention": {**DEFAULT, "rope_theta": 50.0}, "full_attention": LINEAR},
        },
    ),
    "phi3, partial": ("phi3", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}, "sliding_window": 11}),
    "gpt_neox, parallel": ("gpt_neox", {**NEOX, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "gpt_neox, sequential": (
        "gpt_neox",
        {**NEOX, "use_parallel_residual": False, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 1.0}},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2, window 6": (
        "starcoder2",
        {"sliding_window": 6, "norm_epsilon": 1e-3, "rope_parameters": DEFAULT, "initializer_range": 0.018042},
    ),
    "mixtral, window": ("mixtral", {**EXPERTS, "sliding_window": 7, "head_dim": 12}),
    "olmoe": ("olmoe", EXPERTS),
    "olmoe, normalized": ("olmoe", {**EXPERTS, "norm_topk_prob": True, "router_aux_loss_coef": 0.02}),
    "qwen2_moe, dense layers": (
        "qwen2_moe",
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    ),
    "deepseek_v3, queries of the stream": (
        "deepseek_v3",
        {**LATENTS, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "v_head_dim": 16},
    ),
    "deepseek_v3, yarn, groups": (
        "deepseek_v3",
        {
            **LATENTS,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss, window 6": (
        "gpt_oss",
        {
            **EXPERTS,
            **{"head_dim": 12, "sliding_window": 6, "swiglu_limit": 0.5},
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "qwen3_moe, head 12": (
        "qwen3_moe",
        {**QWEN_EXPERTS, "head_dim": 12, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
}
"""Case to model_type and changes of `SHAPE`; together they use every field of `ModelConfig`."""


class NoFloat32(TorchFunctionMode):
    """Turn casts to float32 into casts to float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def make_config(case: str, **changes: Any) -> transformers.PretrainedConfig:
    """Return transformers' configuration of a case."""
    model_type, fields = CASES[case]
    return transformers.AutoConfig.for_model(model_type, **{**SHAPE, **fields, **changes})


def make_model(config: transformers.PretrainedConfig) -> torch.nn.Module:
    """Return a model of transformers in float64 with large random weights."""
    config._attn_implementation = config._experts_implementation = "eager"
    torch.set_default_dtype(torch.float64)
    try:
        with no_init_weights():  # all are set below
            model = getattr(transformers, FAMILIES[config.model_type].architecture)(config)
        model.tie_weights()
    finally:
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        biases = [(name, tensor) for name, tensor in model.named_buffers() if name.endswith("correction_bias")]
        for name, tensor in (*model.named_parameters(), *biases):
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            is_vector = tensor.dim() == 1 and not name.endswith("correction_bias")
            tensor.copy_(1 + 0.3 * noise if is_vector else 0.2 * noise)
    return model.double().eval()


def our_tensors(theirs: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return tensors of transformers (weights or gradients) under our names, fused ones apart."""
    row, found = FAMILIES[config.family], {}
    # in files only: the head of NeoX, the names of Mixtral
    renames = [pair for pair in row.renames if pair[0] != "lm_head" and config.family != "mixtral"]

    def rename(name: str) -> str:
        for ours, new in renames:
            name = name.replace(ours, new)
        return name

    for layer in range(config.n_layers):
        for fused, (parts, order) in row.fused.items():
            for end in ("weight", "bias"):
                whole = theirs.get(f"{rename(f'model.layers.{layer}')}.{fused}.{end}")
                if whole is None:
                    continue
                shapes = {spec.name: spec.shape for spec in param_specs(config)}
                names = [f"model.layers.{layer}.{part}.{end}" for part in parts]
                if order == "heads":
                    pieces = [x.flatten(0, 1) for x in whole.unflatten(0, (config.n_heads, 3, -1)).unbind(1)]
                else:
                    pieces = list(whole.split([shapes[name][0] for name in names]))
                found |= dict(zip(names, pieces, strict=True))
    for spec in param_specs(config):
        if row.has_transposed_experts and spec.is_per_expert:
            whole = theirs[spec.name.replace("gate_proj", "gate_up_proj").replace(".up_proj", ".gate_up_proj")]
            whole = whole.transpose(1, 2) if spec.type == "experts" else whole
            is_up = ".up_proj" in spec.name
            found[spec.name] = whole if "down_proj" in spec.name else whole[:, is_up::2]
        elif spec.type == "experts" and "down_proj" not in spec.name:
            path, _, name = spec.name.rpartition(".")
            found[spec.name] = theirs[f"{path}.gate_up_proj"].chunk(2, dim=1)[name == "up_proj"]
        elif spec.name not in found:
            found[spec.name] = theirs[rename(spec.name)]
    return found
