"""The formula of attention, and torch's fused scaled_dot_product_attention with a dense mask or none.

Shapes: as in `attention`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def document_bias(doc_ids_BT: Tensor | None, dtype: torch.dtype, device: torch.device | None = None) -> Tensor | None:
    """Return 0 where a query may see a key and -inf elsewhere, [B, 1, T, T], or None where every earlier key is seen.

    Equal numbers in a row share attention, so documents of one row need different ones; padding with a number of its
    own (-1) sees only padding. Where the numbers lie on the CPU, rows of one document each are noticed and take the
    plain causal path; on other devices the answer would have to be waited for, so leave `doc_ids_BT` out there when
    documents do not matter. The bias is made on `device` (the numbers' own when absent).
    Cost: B * T * T numbers, once per forward pass.
    """
    if doc_ids_BT is None:
        return None
    if doc_ids_BT.device.type == "cpu" and bool((doc_ids_BT == doc_ids_BT[:, :1]).all()):
        return None
    doc_ids_BT = doc_ids_BT.to(device or doc_ids_BT.device, non_blocking=True)
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


def sdpa_with(*kernels: str) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Return `sdpa_attention` with torch's choice narrowed to these members of `SDPBackend`, the first that can.

    Queries that go on after a cache (generation) take whatever torch chooses: no training kernel is meant for them.
    """
    choice = [getattr(SDPBackend, kernel) for kernel in kernels]

    def attend(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, bias: Tensor | None) -> Tensor:
        if q_BTHK.shape[1] != k_BSGK.shape[1]:
            return sdpa_attention(q_BTHK, k_BSGK, v_BSGK, bias)
        with sdpa_kernel(choice, set_priority=True):
            return sdpa_attention(q_BTHK, k_BSGK, v_BSGK, bias)

    return attend


def _causal_bias(q_BTHK: Tensor, k_BSGK: Tensor) -> Tensor:
    """Return the [T, S] bias of T queries that are the last T of S tokens."""
    n_tokens, n_keys = q_BTHK.shape[1], k_BSGK.shape[1]
    seen = torch.ones(n_tokens, n_keys, dtype=torch.bool, device=q_BTHK.device).tril_(n_keys - n_tokens)
    return _bias(seen, q_BTHK.dtype)


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
