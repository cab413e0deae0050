"""Core attention on a rank's heads: eager, or NxD's flash attention kernel.

Masked scores are -10000 as in NxD's models, not -inf: the code does not rely on how the device's exponential handles
infinities.

Cost: eager attention holds B * H * T * T scores in the upcast dtype; the kernel one block of them.

Shapes: B batch, H query heads, T positions, K head_dim; keys and values have been repeated to H heads.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CoreAttention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(queries, keys, values, attention mask) → [B, H, T, K]."""

MASKED_SCORE = -10000.0
"""Attention score of masked positions."""


def eager_attention(upcast_dtype: torch.dtype, softcap: float = 0.0) -> CoreAttention:
    """Return attention as softmax(q k / sqrt(K)) v with cap and softmax of the scores in `upcast_dtype`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        scores = (q @ k.transpose(2, 3)).to(upcast_dtype) * q.shape[-1] ** -0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = torch.where(seen, scores, torch.full((), MASKED_SCORE, dtype=upcast_dtype, device=scores.device))
        return scores.softmax(dim=-1).to(v.dtype) @ v

    return attend


def flash_attention() -> CoreAttention:
    """Return NxD's flash attention kernel, which is causal and has no document mask."""
    from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return nki_flash_attn_func(q, k, v, transpose_nki_inputs=False)

    return attend
