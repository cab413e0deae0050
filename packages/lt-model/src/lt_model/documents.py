"""Attention over documents laid end to end: each one by itself, so nothing is spent on pairs that are masked.

The kernels of torch ("varlen") and of flash-attn take the rows of a batch as one long row and the positions at which
documents begin. "split" does the same with torch's fused attention, one call per document: on the CPU, where a dense
mask costs the whole square (`docs/benchmarks/model.md` has the figures). Here a document is a run of equal numbers in a
row; padding is one more.

Cost: the sum of the squares of the documents' lengths. Where documents begin has to be known to the host, so numbers
that lie on a GPU are waited for: leave them on the CPU, where the data comes from.

Shapes: as in `attention`.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lt_model.errors import ModelError
from lt_model.sdpa import sdpa_attention


class Documents(NamedTuple):
    """Where the documents of a batch lie when its rows are put end to end.

    Attributes:
        bounds: first position of each document, and the end of the last; int32 on the device of the queries.
        lengths: tokens of each document.
        longest: tokens of a row, which no document exceeds. It stays the same from batch to batch.
        options: what this version of the kernel calls its options.
    """

    bounds: Tensor
    lengths: list[int]
    longest: int
    options: dict[str, Any]


def find_documents(doc_ids_BT: Tensor | None, device: torch.device) -> Documents | None:
    """Return where documents lie, or None where every row is one.

    Raises:
        ModelError: a row comes back to a number that it has left.
    """
    if doc_ids_BT is None:
        return None
    ids_BT = doc_ids_BT.detach().cpu()
    if bool((ids_BT == ids_BT[:, :1]).all()):
        return None
    starts_BT = _starts(ids_BT)
    again_B = starts_BT.sum(dim=1) != _starts(ids_BT.sort(dim=1).values).sum(dim=1)
    if bool(again_B.any()):
        raise ModelError(
            f"doc_ids: row {int(again_B.nonzero()[0])} comes back to a document that it has left; this attention takes "
            "runs of equal numbers for documents: number each run by itself, or take attention 'sdpa' or 'reference'"
        )
    first = starts_BT.flatten().nonzero().flatten()
    bounds = torch.cat((first, first.new_tensor([ids_BT.numel()])))
    on_device = bounds.to(torch.int32).to(device, non_blocking=True)
    return Documents(on_device, bounds.diff().tolist(), ids_BT.shape[1], {})


def _starts(ids_BT: Tensor) -> Tensor:
    return torch.cat((torch.ones_like(ids_BT[:, :1], dtype=torch.bool), ids_BT[:, 1:] != ids_BT[:, :-1]), dim=1)


def split_attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, documents: Documents | None) -> Tensor:
    """Attend within each document by a call of its own."""
    if documents is None:
        return sdpa_attention(q_BTHK, k_BSGK, v_BSGK, None)
    parts = (x.flatten(0, 1)[None].split(documents.lengths, dim=1) for x in (q_BTHK, k_BSGK, v_BSGK))
    outs = [sdpa_attention(q, k, v, None) for q, k, v in zip(*parts, strict=True)]
    return torch.cat(outs, dim=1).view(q_BTHK.shape)


def varlen_documents(doc_ids_BT: Tensor | None, device: torch.device) -> Documents | None:
    """Return `find_documents` with the options that torch's kernel has in this version (it has renamed them)."""
    documents = find_documents(doc_ids_BT, device)
    if documents is None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    return documents._replace(options=options)


def varlen_attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, documents: Documents | None) -> Tensor:
    """Attend through `torch.nn.attention.varlen`; keys and values are repeated where it knows no grouped heads."""
    if documents is None:
        return sdpa_attention(q_BTHK, k_BSGK, v_BSGK, None)
    from torch.nn.attention.varlen import varlen_attn

    repeats = q_BTHK.shape[2] // k_BSGK.shape[2]
    if repeats > 1 and "enable_gqa" not in documents.options:
        k_BSGK, v_BSGK = (x.repeat_interleave(repeats, dim=2) for x in (k_BSGK, v_BSGK))
    q, k, v = (x.flatten(0, 1) for x in (q_BTHK, k_BSGK, v_BSGK))
    bounds, longest = documents.bounds, documents.longest
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, **documents.options)
    assert isinstance(out, Tensor)
    return out.view(q_BTHK.shape)


def flash_attn_attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, documents: Documents | None) -> Tensor:
    """Attend through the package flash-attn (2.1 or later: its causal triangle ends at the last key, as ours)."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func  # pyright: ignore[reportMissingImports] - optional

    if documents is None:
        return flash_attn_func(q_BTHK, k_BSGK, v_BSGK, causal=True)
    q, k, v = (x.flatten(0, 1) for x in (q_BTHK, k_BSGK, v_BSGK))
    bounds, longest = documents.bounds, documents.longest
    return flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, causal=True).view(q_BTHK.shape)
