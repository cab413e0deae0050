"""Attention backends by name. All compute softmax(q k^T / sqrt(K)) v over the positions that a mask allows.

A backend takes a `Mask` that `attention_mask` builds once per forward: plain causal, or causal within documents.
"reference" spells the formula out with a dense mask: the oracle. "sdpa" is torch's fused attention.

Shapes: B batch, T query tokens, S key tokens (S >= T; the last T of them are the queries' own), H query heads, G key/value
heads (G divides H), K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from lt_model.errors import ModelError

# (q_BTHK, k_BSGK, v_BSGK, allowed) -> out_BTHK; allowed is [B, 1, T, S] bool, or None for plain causal attention.
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def document_mask(doc_ids_BT: Tensor | None) -> Tensor | None:
    """Return which key each query may see, [B, 1, T, T] bool, or None when that is every earlier position.

    Documents that share a number share attention, so number them differently within a row; padding with a number of its
    own (-1) sees only padding. On the CPU, rows of one document each are noticed and get the plain causal path; on other
    devices that would have to wait for the device, so pass None there when documents do not matter.
    """
    if doc_ids_BT is None:
        return None
    if doc_ids_BT.device.type == "cpu" and bool((doc_ids_BT == doc_ids_BT[:, :1]).all()):
        return None
    same_BTT = doc_ids_BT[:, :, None] == doc_ids_BT[:, None, :]
    return same_BTT.tril_()[:, None]


def reference_attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, allowed: Tensor | None) -> Tensor:
    """Attend by the formula, with a dense mask; softmax in fp32 or wider. Memory: B * H * T * S scores."""
    n_tokens, n_keys = q_BTHK.shape[1], k_BSGK.shape[1]
    repeats = q_BTHK.shape[2] // k_BSGK.shape[2]
    k_BSHK, v_BSHK = (x.repeat_interleave(repeats, dim=2) for x in (k_BSGK, v_BSGK))
    if allowed is None:
        ones = torch.ones(n_tokens, n_keys, dtype=torch.bool, device=q_BTHK.device)
        allowed = ones.tril(n_keys - n_tokens)
    scores = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK) * q_BTHK.shape[3] ** -0.5
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~allowed, float("-inf"))
    return torch.einsum("bhts,bshk->bthk", scores.softmax(dim=-1).to(v_BSHK.dtype), v_BSHK)


def sdpa_attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, allowed: Tensor | None) -> Tensor:
    """Attend through torch's scaled_dot_product_attention; plain causal attention needs no mask tensor."""
    n_tokens, n_keys = q_BTHK.shape[1], k_BSGK.shape[1]
    if allowed is None and 1 < n_tokens < n_keys:  # is_causal would align the triangle at the first key, not the last
        allowed = torch.ones(n_tokens, n_keys, dtype=torch.bool, device=q_BTHK.device).tril_(n_keys - n_tokens)
    out_BHTK = F.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2),
        k_BSGK.transpose(1, 2),
        v_BSGK.transpose(1, 2),
        attn_mask=allowed,
        is_causal=allowed is None and n_tokens > 1,
        enable_gqa=q_BTHK.shape[2] != k_BSGK.shape[2],
    )
    return out_BHTK.transpose(1, 2)


BACKENDS: Mapping[str, Attention] = MappingProxyType({"reference": reference_attention, "sdpa": sdpa_attention})


def attention_backend(name: str) -> Attention:
    """Return the backend called `name`.

    Raises:
        ModelError: no such backend.
    """
    if name not in BACKENDS:
        raise ModelError(f"attention = {name!r} is unknown; the backends are {', '.join(BACKENDS)}")
    return BACKENDS[name]
