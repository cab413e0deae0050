"""Core attention on a rank's heads: by the formula, or NxD's flash attention kernel.

Where a query may not look, the score becomes -10000 as in NxD's models and not -inf: what the device's exponential
makes of infinities is not relied on.

Cost: the formula holds B * H * T * T scores in the wide dtype; the kernel a block of them.

Shapes: B batch, H query heads, T positions, K head_dim; keys and values have been repeated to H heads.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["NOT_SEEN", "Attend", "by_formula", "flash"]

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(queries, keys, values, whether a query sees a key) → [B, H, T, K]."""

NOT_SEEN = -10000.0
"""Score of a position that a query may not look at."""


def by_formula(wide: torch.dtype) -> Attend:
    """softmax(q k / sqrt(K)) v with the softmax in `wide`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        scores = (q @ k.transpose(2, 3)).to(wide) * q.shape[-1] ** -0.5
        scores = torch.where(seen, scores, torch.full((), NOT_SEEN, dtype=wide, device=scores.device))
        return scores.softmax(dim=-1).to(v.dtype) @ v

    return attend


def flash() -> Attend:
    """NxD's kernel, which is causal and knows no documents."""
    from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return nki_flash_attn_func(q, k, v, transpose_nki_inputs=False)

    return attend
