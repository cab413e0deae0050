"""Attention through torch's flex_attention: a kernel compiled for the mask, which skips blocks that nobody sees.

The block mask is built once per forward pass: B * T * T booleans for a moment, then B * (T/128)^2 numbers. The kernel
has to be compiled to be worth anything, and has no backward pass on the CPU. The first call compiles for a minute or
so; inside a block that is compiled as a whole it becomes part of that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lt_model.sdpa import sdpa_attention


def flex_mask(doc_ids_BT: Tensor | None, device: torch.device) -> Any:
    """Return the BlockMask of "earlier and of the same document", or None where every earlier key is seen."""
    if doc_ids_BT is None:
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    ids_BT = doc_ids_BT.to(device, non_blocking=True)

    def seen(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (ids_BT[row, query] == ids_BT[row, key])

    n_rows, n_tokens = ids_BT.shape
    return create_block_mask(seen, n_rows, None, n_tokens, n_tokens, device=str(device))


def flex_backend(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: Any) -> Tensor:
    """Attend by the block mask."""
    if mask is None:
        return sdpa_attention(q_BTHK, k_BSGK, v_BSGK, None)
    return call_flex(_kernel(), q_BTHK, k_BSGK, v_BSGK, mask)


def call_flex(kernel: Callable[..., Any], q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: Any) -> Tensor:
    """Call flex_attention, compiled or as it is, with heads and tokens in its order."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    return kernel(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def _kernel() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled()


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
