"""How many FLOPs activation checkpointing does a second time, for HFU. Torch-free."""

from __future__ import annotations

import math

from lt_model import LlamaConfig
from lt_model.params import parameters


def recomputed_flops_per_token(config: LlamaConfig, seq_len: int, activation_checkpointing: str) -> float:
    """Training FLOPs per token that are computed again, counted as `flops_per_token(..., "full")` counts.

    "none" recomputes nothing: what a flash attention kernel computes again inside its backward pass is never counted.
    "full" runs the forward pass of every block a second time: a third of all that the blocks do, embedding, last norm
    and head not being among them. For "budget" a compiler chooses what to keep, and no formula knows: nan.

    Args:
        config: the model.
        seq_len: positions of a row.
        activation_checkpointing: the engine's option.
    """
    if activation_checkpointing == "none":
        return 0.0
    if activation_checkpointing != "full":
        return math.nan
    blocks = sum(parameter.size for parameter in parameters(config) if parameter.layer is not None)
    return 2 * blocks + 4 * config.n_layers * config.n_heads * config.head_dim * seq_len
