"""Attention backends by name. All compute softmax(q k^T / sqrt(K) + bias) v.

A position sees itself and earlier positions, or only those of its own document when a bias says so, which
`document_bias` builds once per forward pass. "reference" spells the formula out: the oracle. "sdpa" is torch's fused
attention.

Shapes: B batch, T query tokens, S key tokens (S >= T; the last T of them are the queries' own), H query heads, G
key/value heads (G divides H), K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from lt_model.errors import ModelError

# (q_BTHK, k_BSGK, v_BSGK, bias) -> out_BTHK. The bias [B, 1, T, S] is added to the scores: 0 or -inf; None is causal.
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def document_bias(doc_ids_BT: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return 0 where a query may see a key and -inf elsewhere, [B, 1, T, T], or None where every earlier key is seen.

    Equal numbers in a row share attention, so documents of one row need different ones; padding with a number of its
    own (-1) sees only padding. On the CPU, rows of one document each are noticed and take the plain causal path; on
    other devices the answer would have to be waited for, so leave `doc_ids_BT` out there when documents do not
    matter.
    Cost: B * T * T numbers, once per forward pass.
    """
    if doc_ids_BT is None:
        return None
    if doc_ids_BT.device.type == "cpu" and bool((doc_ids_BT == doc_ids_BT[:, :1]).all()):
        return None
    same_BTT = doc_ids_BT[:, :, None] == doc_ids_BT[:, None, :]
    return _bias(same_BTT.tril_()[:, None], dtype)


def reference_attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, bias: Tensor | None) -> Tensor:
    """Attend by the formula; softmax in fp32 or wider. Memory: B * H * T * S scores."""
    repeats = q_BTHK.shape[2] // k_BSGK.shape[2]
    k_BSHK, v_BSHK = (x.repeat_interleave(repeats, dim=2) for x in (k_BSGK, v_BSGK))
    scores = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK) * q_BTHK.shape[3] ** -0.5
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores + (_causal_bias(q_BTHK, k_BSGK) if bias is None else bias)
    return torch.einsum("bhts,bshk->bthk", scores.softmax(dim=-1).to(v_BSHK.dtype), v_BSHK)


def sdpa_attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, bias: Tensor | None) -> Tensor:
    """Attend through torch's scaled_dot_product_attention; plain causal attention needs no bias tensor."""
    n_tokens, n_keys = q_BTHK.shape[1], k_BSGK.shape[1]
    if bias is None and 1 < n_tokens < n_keys:  # is_causal would align the triangle with the first key, not the last
        bias = _causal_bias(q_BTHK, k_BSGK)
    out_BHTK = F.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2),
        k_BSGK.transpose(1, 2),
        v_BSGK.transpose(1, 2),
        attn_mask=bias,
        is_causal=bias is None and n_tokens > 1,
        enable_gqa=q_BTHK.shape[2] != k_BSGK.shape[2],
    )
    return out_BHTK.transpose(1, 2)


def _causal_bias(q_BTHK: Tensor, k_BSGK: Tensor) -> Tensor:
    """Return the [T, S] bias of T queries that are the last T of S tokens."""
    n_tokens, n_keys = q_BTHK.shape[1], k_BSGK.shape[1]
    seen = torch.ones(n_tokens, n_keys, dtype=torch.bool, device=q_BTHK.device).tril_(n_keys - n_tokens)
    return _bias(seen, q_BTHK.dtype)


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


BACKENDS: Mapping[str, Attention] = MappingProxyType({"reference": reference_attention, "sdpa": sdpa_attention})


def attention_backend(name: str) -> Attention:
    """Return the backend called `name`.

    Raises:
        ModelError: no such backend.
    """
    if name not in BACKENDS:
        raise ModelError(f"attention = {name!r} is unknown; the backends are {', '.join(BACKENDS)}")
    return BACKENDS[name]
