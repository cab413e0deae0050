"""Document boundaries, and attention over packed documents without computing masked pairs.

The kernels of torch ("varlen") and of flash-attn take the rows of a batch concatenated into one, with the positions at
which documents begin. "split" does the same with torch's fused attention, one call per document: for the CPU, where a
dense mask costs the whole square.

Cost: the sum of the squares of the documents' lengths. Boundaries stay on the host, where the data comes from, so there
is no device synchronization.

Shapes: as in `attention`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lt_model.errors import ModelError
from lt_model.sdpa import document_attention, sdpa_attention, window_bias


@dataclass(frozen=True, eq=False)
class DocumentBoundaries:
    """Boundaries of the documents in a batch of concatenated rows.

    A token attends only to its own document; padding is a document. This is a dataclass, not a tuple, so that FSDP
    leaves its tensor on the host.

    Attributes:
        cu_seqlens: int32 [S + 1] on the CPU: the first position of each document in order, then B * T. More entries of
            B * T may follow, up to a length that is the same for every batch: they are empty documents.
        n_rows: B. Each row begins with a document.
        seq_len: T, tokens in a row, which no document exceeds.
    """

    cu_seqlens: Tensor
    n_rows: int
    seq_len: int

    @classmethod
    def from_doc_ids(cls, doc_ids_BT: Tensor) -> DocumentBoundaries:
        """Return the boundaries of documents given as runs of equal ids in a row.

        Ids on a GPU cause a synchronization.

        Raises:
            ModelError: an id occurs in two separate runs of a row.
        """
        ids_BT = doc_ids_BT.detach().cpu()
        starts_BT = _run_starts(ids_BT)
        returning_B = starts_BT.sum(dim=1) != _run_starts(ids_BT.sort(dim=1).values).sum(dim=1)
        if bool(returning_B.any()):
            raise ModelError(
                f"doc_ids: row {int(returning_B.nonzero()[0])} returns to a document that it has left; number each run "
                "by itself"
            )
        starts = starts_BT.flatten().nonzero().flatten()
        cu_seqlens = torch.cat((starts, starts.new_tensor([ids_BT.numel()]))).to(torch.int32)
        return cls(cu_seqlens, *ids_BT.shape)

    @classmethod
    def one_per_row(cls, n_rows: int, seq_len: int) -> DocumentBoundaries:
        """Return the boundaries of rows of one document each."""
        return cls(torch.arange(n_rows + 1, dtype=torch.int32) * seq_len, n_rows, seq_len)

    @property
    def row_length(self) -> int:
        """Tokens of a whole row, of which a rank may have a part."""
        return self.seq_len

    @property
    def is_one_per_row(self) -> bool:
        """True if every row is one document: the B-th boundary is then the end."""
        return int(self.cu_seqlens[self.n_rows]) == self.n_rows * self.seq_len

    def lengths(self) -> list[int]:
        """Return the length in tokens of each non-empty document."""
        return [length for length in self.cu_seqlens.diff().tolist() if length]

    def document_indices(self, device: torch.device) -> Tensor:
        """Return the index of each token's document, int32 [B, T], on `device`."""
        counts = self.cu_seqlens.diff()
        indices = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts)
        return copy_to_device(indices.view(self.n_rows, self.seq_len), device)


class VarlenMetadata(NamedTuple):
    """Arguments of a variable-length attention kernel.

    Attributes:
        cu_seqlens: as in `DocumentBoundaries`, on the device of the queries.
        max_seqlen: tokens of a row; constant over batches.
        kernel_options: further keyword arguments, named as in the installed version.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    kernel_options: dict[str, Any]


class SplitMask(NamedTuple):
    """Arguments of `split_attention`: the lengths of documents, and the keys that a query sees (0: all earlier)."""

    lengths: list[int]
    window: int


def varlen_metadata(boundaries: DocumentBoundaries, device: torch.device, window: int = 0) -> VarlenMetadata:
    """Return the arguments for `flash_attn_attention`."""
    options = {"window_size": (window - 1, 0)} if window else {}
    return VarlenMetadata(copy_to_device(boundaries.cu_seqlens, device), boundaries.seq_len, options)


def torch_varlen_metadata(boundaries: DocumentBoundaries, device: torch.device, window: int = 0) -> VarlenMetadata:
    """Return the arguments for `varlen_attention`, with the option names of the installed torch.

    Raises:
        ModelError: a window, which the kernel of torch 2.10 does not have.
    """
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    if window and "window_size" not in known:
        raise ModelError(
            f"attention = 'varlen': torch {torch.__version__} has no windows; take 'flex' or a newer torch"
        )
    is_causal = not window and "is_causal" in known
    options: dict[str, Any] = {"is_causal": True} if is_causal else {"window_size": (window - 1, 0)}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    return varlen_metadata(boundaries, device)._replace(kernel_options=options)


def split_attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: SplitMask | None) -> Tensor:
    """Attend within each document by a separate call, of longer ones than a window by a call for so many queries."""
    if mask is None:
        return sdpa_attention(q_BTHK, k_BSGK, v_BSGK, None)
    parts = (x.flatten(0, 1)[None].split(mask.lengths, dim=1) for x in (q_BTHK, k_BSGK, v_BSGK))
    outs = [_attend_window(q, k, v, mask.window) for q, k, v in zip(*parts, strict=True)]
    return torch.cat(outs, dim=1).view(*q_BTHK.shape[:3], -1)


def _attend_window(q_1THK: Tensor, k_1TGK: Tensor, v_1TGK: Tensor, window: int) -> Tensor:
    """Attend in a document; each block of `window` queries sees itself and the block before: linear in T."""
    n_tokens = q_1THK.shape[1]
    if not window or n_tokens <= window:
        return document_attention(q_1THK, k_1TGK, v_1TGK, None)
    bias = window_bias(window, 2 * window, window, q_1THK.device, q_1THK.dtype)
    outs = [document_attention(q_1THK[:, :window], k_1TGK[:, :window], v_1TGK[:, :window], None)]
    for first in range(window, n_tokens, window):
        keys = slice(first - window, first + window)
        n_queries = min(window, n_tokens - first)
        block_bias = bias[:n_queries, : window + n_queries]
        outs.append(document_attention(q_1THK[:, first : first + window], k_1TGK[:, keys], v_1TGK[:, keys], block_bias))
    return torch.cat(outs, dim=1)


def varlen_attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, metadata: VarlenMetadata | None) -> Tensor:
    """Attend through `torch.nn.attention.varlen`; repeats keys and values if it lacks GQA."""
    if metadata is None:
        return sdpa_attention(q_BTHK, k_BSGK, v_BSGK, None)
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens, max_seqlen, options = metadata
    repeats = q_BTHK.shape[2] // k_BSGK.shape[2]
    if repeats > 1 and "enable_gqa" not in options:
        k_BSGK, v_BSGK = (x.repeat_interleave(repeats, dim=2) for x in (k_BSGK, v_BSGK))
    q, k, v = (x.flatten(0, 1) for x in (q_BTHK, k_BSGK, v_BSGK))
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
    assert isinstance(out, Tensor)
    return out.view(q_BTHK.shape)


def flash_attn_attention(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, metadata: VarlenMetadata | None, softcap: float = 0.0
) -> Tensor:
    """Attend through flash-attn 2.1 or later, whose causal mask is aligned to the last key, as ours."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func  # pyright: ignore[reportMissingImports] - optional

    cap = {"softcap": softcap} if softcap else {}
    if metadata is None:
        return flash_attn_func(q_BTHK, k_BSGK, v_BSGK, causal=True, **cap)
    cu_seqlens, max_seqlen, options = metadata
    q, k, v = (x.flatten(0, 1) for x in (q_BTHK, k_BSGK, v_BSGK))
    bounds = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    out = flash_attn_varlen_func(q, k, v, *bounds, causal=True, **options, **cap)
    return out.view(q_BTHK.shape)


def _run_starts(ids_BT: Tensor) -> Tensor:
    return torch.cat((torch.ones_like(ids_BT[:, :1], dtype=torch.bool), ids_BT[:, 1:] != ids_BT[:, :-1]), dim=1)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from the host without synchronizing with the device."""
    if device.type == "cuda" and tensor.is_cpu:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
