"""How many FLOPs activation checkpointing does a second time, for HFU. Torch-free."""

from __future__ import annotations

import math

from lt_model import LlamaConfig
from lt_model.params import parameters

AGAIN = {
    "none": (),
    "full": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
    "selective": ("k_proj", "o_proj", "up_proj"),
}
"""The matrix products of a block that run a second time. With "full" the repetition ends where the last product begins:
torch stops it once the backward pass has all that it needs, and no one needs the result of down_proj. With "selective"
it is every second product (see `activation_checkpointing.py`)."""


def recomputed_flops_per_token(config: LlamaConfig, seq_len: int, activation_checkpointing: str) -> float:
    """FLOPs per token that are computed again, of those that `lt_model.flops_per_token(..., "full")` counts.

    What a flash attention kernel computes again inside its backward pass is not among them, whatever the option.

    Args:
        config: the model.
        seq_len: positions of a row.
        activation_checkpointing: the engine's option; for "budget" a compiler chooses, and no formula knows: nan.
    """
    if activation_checkpointing not in AGAIN:
        return math.nan
    kinds = AGAIN[activation_checkpointing]
    products = 2 * sum(one.size for one in parameters(config) if one.layer is not None and one.kind in kinds)
    attention = 4 * config.n_layers * config.n_heads * config.head_dim * seq_len
    return products + (attention if activation_checkpointing == "full" else 0)
