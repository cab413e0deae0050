"""A tiny model of each dense family, with every feature that sets it apart, of sizes that two ranks can share."""

from lt_model import ModelConfig, RopeScaling
from lt_model.config import LayerKind

FULL, SLIDING, NOPE = LayerKind(), LayerKind(sliding=True), LayerKind(rope=False)
THREE_OF_FOUR = (SLIDING, SLIDING, SLIDING, FULL)
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, beta_slow=0.5)
LLAMA3 = RopeScaling(factor=8.0, original_max_position_embeddings=32)
ALL_BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
OLMO = {"qk_norm": "full", "norm_place": "post"}
GEMMA = {"norm": "rms_plus_one", "norm_place": "both", "embed_scale": 0.0, "activation": "gelu_tanh", "head_dim": 6}
GEMMA |= {"attention_scale": 20**-0.5, "tie_word_embeddings": True, "logits_softcap": 1.5, "sliding_window": 5}
CODE = {"norm": "layer", "gated": False, **ALL_BIASES}
GRANITE = {"embed_scale": 12.0, "residual_scale": 0.22, "attention_scale": 0.4, "logits_divisor": 0.7}
FIELDS = {
    "llama": {"rope_scaling": LLAMA3, **ALL_BIASES, "tie_word_embeddings": True, "activation": "gelu"},
    "mistral": {"sliding_window": 7, "layers": (SLIDING,), "head_dim": 6},
    "qwen2": {"qkv_bias": True, "sliding_window": 5, "layers": (FULL, FULL, SLIDING, SLIDING)},
    "qwen3": {"qk_norm": "head", "head_dim": 6, "rope_scaling": YARN, "tie_word_embeddings": True},
    "olmo2": {**OLMO, "qkv_bias": True, "o_bias": True},
    "olmo3": {**OLMO, "sliding_window": 6, "layers": THREE_OF_FOUR, "rope_scaling": YARN, "sliding_rope_theta": 50.0},
    "smollm3": {"layers": (FULL, FULL, FULL, NOPE), "rope_scaling": RopeScaling(kind="linear", factor=2.0)},
    "gemma2": {**GEMMA, "layers": (SLIDING, FULL), "attention_softcap": 0.5},
    "gemma3_text": {
        **GEMMA,
        "layers": (SLIDING, SLIDING, SLIDING, FULL),
        "qk_norm": "head",
        "sliding_rope_theta": 50.0,
    },
    "phi3": {"rotary_fraction": 0.5, "sliding_window": 5, "layers": (SLIDING,)},
    "gpt_neox": {**CODE, "parallel_residual": True, "rotary_fraction": 0.5, "activation": "gelu", "n_kv_heads": 8},
    "granite": {**GRANITE, **ALL_BIASES},
    "starcoder2": {**CODE, "activation": "gelu_tanh", "sliding_window": 5, "layers": (SLIDING,)},
}
SIZES = {"vocab_size": 62, "hidden_size": 32, "intermediate_size": 40, "n_heads": 8, "n_kv_heads": 4, "n_layers": 4}
MODELS = {
    family: ModelConfig(**{**SIZES, "max_position_embeddings": 16, "family": family, "rope_theta": 100.0, **fields})
    for family, fields in FIELDS.items()
}
