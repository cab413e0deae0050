"""Attention through torch's flex_attention: compiled for the mask, skipping fully masked blocks.

The block mask is built once per forward pass: B * T * T booleans temporarily, then B * (T/128)^2 numbers. The kernel is
fast only when compiled, and has no backward pass on the CPU. The first call compiles for about a minute; inside a
compiled block it becomes part of that graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lt_model.sdpa import reference_attention, sdpa_attention

if TYPE_CHECKING:
    from lt_model.documents import DocumentBoundaries


def flex_mask(boundaries: DocumentBoundaries, device: torch.device, window: int = 0) -> Any:
    """Return the BlockMask that is causal within each document, and of the last `window` keys if that is not 0."""
    from torch.nn.attention.flex_attention import create_block_mask

    documents_BT = boundaries.document_indices(device)

    def seen(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_seen = (query >= key) & (documents_BT[row, query] == documents_BT[row, key])
        return is_seen & (query - key < window) if window else is_seen

    n_rows, n_tokens = documents_BT.shape
    return create_block_mask(seen, n_rows, None, n_tokens, n_tokens, device=str(device))


def flex_mask_attention(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: Any, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Attend through compiled flex_attention with the block mask; by the formula with a dense one or none.

    Those come without documents, and from a cache, whose few queries need no kernel.
    """
    if mask is not None and not isinstance(mask, Tensor):
        return call_flex(_flex_kernel(), q_BTHK, k_BSGK, v_BSGK, mask, softcap, sinks)
    if softcap or sinks is not None:
        return reference_attention(q_BTHK, k_BSGK, v_BSGK, mask, softcap, sinks)
    return sdpa_attention(q_BTHK, k_BSGK, v_BSGK, mask)


def call_flex(
    kernel: Callable[..., Any],
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    mask: Any,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Call flex_attention, compiled or eager, with heads and tokens in its order.

    A sink s beside keys whose scores have the log-sum-exp l leaves them 1 / (1 + exp(s - l)) of the softmax.
    """

    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    options = {"score_mod": cap if softcap else None, "block_mask": mask, "enable_gqa": q.shape[1] != k.shape[1]}
    if sinks is None:
        return kernel(q, k, v, **options).transpose(1, 2)
    from torch.nn.attention.flex_attention import AuxRequest

    out_BHTK, found = kernel(q, k, v, **options, return_aux=AuxRequest(lse=True))
    shares_BHT = torch.sigmoid(found.lse - sinks[:, None].to(found.lse.dtype))
    return (out_BHTK * shares_BHT[..., None]).to(v.dtype).transpose(1, 2)


def _flex_kernel() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
