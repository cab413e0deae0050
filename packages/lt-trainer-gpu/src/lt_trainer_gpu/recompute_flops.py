"""FLOPs recomputed by activation checkpointing, for HFU. Torch-free."""

from __future__ import annotations

import math

from lt_model import LlamaConfig
from lt_model.params import param_specs

RECOMPUTED_PRODUCTS = {
    "none": (),
    "full": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
    "selective": ("k_proj", "o_proj", "up_proj"),
}
"""Recomputed matrix products of a block, by mode. With "full" the recomputation stops before the last product: torch
ends it once the backward pass has all that it needs, and the output of down_proj is not needed. With "selective" it is
every second product (see `activation_checkpointing.py`)."""


def recomputed_flops_per_token(config: LlamaConfig, seq_len: int, activation_checkpointing: str) -> float:
    """Return recomputed FLOPs per token, in the "full" convention of `lt_model.flops_per_token`.

    Recomputation inside a flash attention kernel's backward pass is never counted.

    Args:
        config: the model.
        seq_len: tokens per row.
        activation_checkpointing: the engine's option; nan for "memory_budget", where the compiler chooses.
    """
    if activation_checkpointing not in RECOMPUTED_PRODUCTS:
        return math.nan
    kinds = RECOMPUTED_PRODUCTS[activation_checkpointing]
    products = 2 * sum(spec.numel for spec in param_specs(config) if spec.layer is not None and spec.kind in kinds)
    attention = 4 * config.n_layers * config.n_heads * config.head_dim * seq_len
    return products + (attention if activation_checkpointing == "full" else 0)
