"""Reference attention, and torch's fused scaled_dot_product_attention with a dense mask or none.

Shapes: as in `attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from lt_model.documents import DocumentBoundaries

LENGTH_MULTIPLE = 32
"""Rounds the lengths of documents up where torch keeps kernels for each: so there are few, and little is added."""


def document_bias(boundaries: DocumentBoundaries, device: torch.device, dtype: torch.dtype, window: int = 0) -> Tensor:
    """Return the additive mask of causal attention within documents, [B, 1, T, T] on `device`.

    It is 0 for visible keys, with a window the last so many, and -inf elsewhere. Cost: B * T * T elements, once per
    forward pass and window.
    """
    documents_BT = boundaries.document_indices(device)
    same_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril_()
    return _mask_to_bias((same_BTT.triu_(1 - window) if window else same_BTT)[:, None], dtype)


def window_bias(n_tokens: int, n_keys: int, window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [T, S] of T queries that are the last of S tokens and see `window` of them each."""
    seen = torch.ones(n_tokens, n_keys, dtype=torch.bool, device=device).tril_(n_keys - n_tokens)
    return _mask_to_bias(seen.triu_(n_keys - n_tokens + 1 - window), dtype)


def reference_attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    bias: Tensor | None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend by the formula; softmax in fp32 or wider. Memory: B * H * T * S scores."""
    repeats = q_BTHK.shape[2] // k_BSGK.shape[2]
    k_BSHK, v_BSHK = (x.repeat_interleave(repeats, dim=2) for x in (k_BSGK, v_BSGK))
    scores = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK) * q_BTHK.shape[3] ** -0.5
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + (_causal_bias(q_BTHK, k_BSGK) if bias is None else bias)
    if sinks is not None:
        sinks_BHT1 = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:1], -1, scores.shape[2], 1)
        scores = torch.cat((scores, sinks_BHT1), dim=-1)
    shares = scores.softmax(dim=-1)[..., : k_BSGK.shape[1]]
    return torch.einsum("bhts,bshk->bthk", shares.to(v_BSHK.dtype), v_BSHK)


def sdpa_attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, bias: Tensor | None) -> Tensor:
    """Attend through torch's scaled_dot_product_attention; plain causal attention needs no bias tensor."""
    n_tokens, n_keys = q_BTHK.shape[1], k_BSGK.shape[1]
    width = v_BSGK.shape[-1]
    if width < k_BSGK.shape[-1] and q_BTHK.device.type == "cpu":  # whose linear kernel has one width
        v_BSGK = F.pad(v_BSGK, (0, k_BSGK.shape[-1] - width))
    if bias is None and 1 < n_tokens < n_keys:  # is_causal would align the triangle with the first key, not the last
        bias = _causal_bias(q_BTHK, k_BSGK)
    # A compiled comparison of lengths that vary is a SymBool, which torch's function refuses.
    is_causal = True if bias is None and n_tokens > 1 else False  # noqa: SIM210
    out_BHTK = F.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2),
        k_BSGK.transpose(1, 2),
        v_BSGK.transpose(1, 2),
        attn_mask=bias,
        is_causal=is_causal,
        enable_gqa=q_BTHK.shape[2] != k_BSGK.shape[2],
    )
    return out_BHTK.transpose(1, 2)[..., :width]


def document_attention(q_1THK: Tensor, k_1SGK: Tensor, v_1SGK: Tensor, bias: Tensor | None) -> Tensor:
    """Attend in one document as `sdpa_attention` does; for documents of many lengths.

    In bfloat16 on a CPU torch makes kernels for each length in the backward pass and keeps them, megabytes a length. So
    lengths are rounded up there: what is added comes last, where no query looks, and its own outputs are dropped.
    """
    n_tokens, n_keys = q_1THK.shape[1], k_1SGK.shape[1]
    more_tokens, more_keys = -n_tokens % LENGTH_MULTIPLE, -n_keys % LENGTH_MULTIPLE
    keeps_kernels = q_1THK.dtype == torch.bfloat16 and q_1THK.device.type == "cpu"
    if not keeps_kernels or not (more_tokens or more_keys):
        return sdpa_attention(q_1THK, k_1SGK, v_1SGK, bias)
    if bias is None and n_tokens < n_keys:
        bias = _causal_bias(q_1THK, k_1SGK)
    if bias is not None:
        bias = F.pad(F.pad(bias, (0, more_keys), value=float("-inf")), (0, 0, 0, more_tokens))
    q_1THK = F.pad(q_1THK, (0, 0, 0, 0, 0, more_tokens))
    k_1SGK = F.pad(k_1SGK, (0, 0, 0, 0, 0, more_keys))
    v_1SGK = F.pad(v_1SGK, (0, 0, 0, 0, 0, more_keys))
    return sdpa_attention(q_1THK, k_1SGK, v_1SGK, bias)[:, :n_tokens]


def make_sdpa_attention(*kernels: str) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Return `sdpa_attention` limited to these members of `SDPBackend`, in order of preference.

    Queries that continue a cache (generation) use torch's own choice: no training kernel is made for them.
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
    return window_bias(n_tokens, n_keys, n_keys, q_BTHK.device, q_BTHK.dtype)


def _mask_to_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
