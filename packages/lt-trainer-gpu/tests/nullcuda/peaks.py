"""Jobs of real sizes for the null device, and the memory that the plan says for them.

Memory is never touched there, so the shapes are those of real runs: a billion parameters, rows of 4096 tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from null_device.ranks import Job, RankResult

from lt_model import ModelConfig
from lt_model.config import LayerKind
from lt_model.families import FAMILIES
from lt_trainer.config.model_section import architecture_values
from lt_trainer.config.recipe import load
from lt_trainer.config.section import unflatten
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import PlannedMemory, plan_memory

NEAR = 0.03
SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "n_heads": 16, "n_kv_heads": 4, "n_layers": 8}


FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 1024, "layers": (LayerKind(sliding=True),)},
    "qwen2": {},
    "qwen3": {"head_dim": 256},
    "olmo2": {"qkv_bias": True, "o_bias": True},
    "gemma3_text": {
        **{"head_dim": 256, "activation": "gelu_tanh", "logits_softcap": 30.0},
        **{"sliding_window": 512, "sliding_rope_theta": 1e4},
        "layers": (LayerKind(sliding=True), LayerKind()),
    },
    "gemma2": {
        **{"head_dim": 128, "activation": "gelu_tanh", "attention_softcap": 50.0, "logits_softcap": 30.0},
        **{"sliding_window": 512, "layers": (LayerKind(sliding=True), LayerKind())},
    },
    "gpt_neox": {
        **{"n_kv_heads": 16, "qkv_bias": True, "o_bias": True, "activation": "gelu", "rotary_fraction": 0.25},
        "parallel_residual": True,
    },
    "olmoe": {
        **{"n_experts": 8, "experts_per_token": 2, "expert_size": 5632, "router_aux_loss_coef": 0.01},
        "layers": (LayerKind(experts=True),),
    },
    "deepseek_v3": {
        **{"n_kv_heads": 16, "q_rank": 512, "kv_rank": 512, "nope_width": 128, "rope_width": 64, "value_width": 128},
        **{"n_experts": 8, "experts_per_token": 3, "expert_size": 1408, "shared_expert_size": 2816},
        "layers": (LayerKind(), *(LayerKind(experts=True),) * 7),
    },
    "granite": {"embed_scale": 12.0, "residual_scale": 0.22, "attention_scale": 0.015625, "logits_divisor": 8.0},
}


def job(
    *overrides: str, seq_len: int = 4096, tied: bool = False, n_layers: int = 8, family: str = "llama", **fields: Any
) -> Job:
    shape = SHAPE | {"n_layers": n_layers, "tie_word_embeddings": tied}
    if family != "llama":
        shape |= {"family": family, **FAMILIES[family].fixed, **FAMILY_FIELDS[family]}
    values = {"vocab_size": 32000, "rows": fields.get("ranks", 1), **fields}
    return Job(model=tuple(shape.items()), overrides=overrides, row_lengths=(seq_len,) * 3, **values)


def config_of(asked: Job) -> ModelConfig:
    return ModelConfig(vocab_size=asked.vocab_size, max_position_embeddings=asked.row_lengths[0], **dict(asked.model))


def planned_memory(asked: Job) -> PlannedMemory:
    seq_len = asked.row_lengths[0]
    base = {
        "model": unflatten(architecture_values(config_of(asked))),
        "data": {"store": "unused", "seq_len": seq_len},
        "batch": {"global_batch_size": asked.rows, "micro_batch_size": asked.micro_batch_size},
    }
    recipe = load(base=base, overrides=asked.overrides).recipe
    layout = layout_from_recipe(recipe, devices=asked.ranks, nodes=1)
    return plan_memory(config_of(asked), seq_len, replace(layout, expert_imbalance=asked.expert_skew))


def check_peak(asked: Job, results: Sequence[RankResult]) -> None:
    """All ranks hold what the plan says; in a pipeline, the fullest one does."""
    planned, peaks = planned_memory(asked).peak, [result.peak_bytes[-1] for result in results]
    assert max(peaks) == pytest.approx(planned, rel=NEAR)
    if not any(text.startswith("parallel.pp=") for text in asked.overrides):
        assert min(peaks) == pytest.approx(planned, rel=NEAR)
