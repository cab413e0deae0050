"""Context parallelism applied from outside: attention of a rank's positions over the keys of all.

Only attention looks beyond a position, so it alone communicates. Its keys and values are gathered over the ranks, the
runs that this rank's queries see are selected (`context_parallel_rows`), and attention runs as over documents, with
other lengths of keys than of queries. In the backward pass the gradients of the selected keys are added up where they
belong, and summed over the ranks by a reduce-scatter. Everything else (projections, norms, feed-forward, loss) works on
B * T/n positions and never knows; weights are sharded by FSDP over the ranks too, which also sums their gradients.

Attention backends: "varlen" (torch's kernel, on CUDA), "split" (one call per segment, on a CPU), "sdpa" and
"reference" with a dense mask of [B, 1, T/n, T], and "flex" with a block mask. "auto" takes the first of these that can
run; where scores are capped, "flex" on CUDA and else "reference".

Cost per layer: one all-gather of 2 * B * T * G * K numbers forward and one reduce-scatter of as many backward; one copy
of the selected keys and values. Memory: gathered keys and values live only until they are selected. The selected
ones are kept for the backward pass as attention's input, (n + 1/2)/n of the gathered ones at most and as little as the
rank's own with short documents; with activation checkpointing "full" or "selective" they are not kept, but gathered
again in the backward pass.

Shapes: B rows, T positions of a row, H query heads, G key/value heads, K head_dim, n ranks, N = n * B * T/n gathered
keys, P selected keys, L = B * T/n queries of this rank, S = T key positions of a dense mask, J = 2 * K of a key beside
its value.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lt_model.attention import AttentionBackend, unavailable_reason
from lt_model.documents import DocumentBoundaries, copy_to_device, torch_varlen_metadata
from lt_model.flex import flex_mask_attention
from lt_model.sdpa import document_attention, reference_attention, sdpa_attention, window_bias
from lt_trainer_gpu.context_parallel_rows import QuerySegments, gathered_order
from lt_trainer_gpu.mesh_layout import MeshLayout
from lt_trainer_gpu.model import DecoderStage

_ops = torch.ops._c10d_functional  # as in collectives.py


@dataclass(frozen=True, kw_only=True)
class ContextParallelGroup:
    """Context-parallel process group.

    Attributes:
        size: number of ranks.
        group_name: name of the process group.
    """

    size: int
    group_name: str


class WholeRowsMask(NamedTuple):
    """Mask over all keys in the rows' order: a bias of "sdpa" and "reference", or the BlockMask of "flex"."""

    key_index: Tensor
    mask: Any


class SplitMask(NamedTuple):
    """Mask of "split": numbers of queries and of keys by segment, and the keys that a query sees (0: all earlier)."""

    key_index: Tensor
    query_lengths: list[int]
    key_lengths: list[int]
    window: int


class VarlenMask(NamedTuple):
    """Mask of "varlen": bounds of queries and of keys by segment, and the kernel's options."""

    key_index: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int
    kernel_options: dict[str, Any]


def init_context_parallel_group(mesh_layout: MeshLayout, timeout_s: float) -> ContextParallelGroup:
    """Return this rank's group; every rank of the run must call it."""
    mesh = torch.arange(mesh_layout.world_size).view(-1, mesh_layout.cp, mesh_layout.tp)
    ranks = mesh.transpose(1, 2).reshape(-1, mesh_layout.cp).tolist()
    group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=datetime.timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup), "each rank is in one group"
    return ContextParallelGroup(size=mesh_layout.cp, group_name=group.group_name)


def apply_context_parallel(stage: DecoderStage, cp_group: ContextParallelGroup) -> None:
    """Replace the attention of `stage`, in place.

    Its inputs are then this rank's positions, and `QuerySegments` as boundaries.
    """
    config = stage.config
    is_narrow = config.head_value_width != config.head_width
    backend = context_parallel_backend(stage._attention_backend, cp_group, config.attention_softcap, is_narrow)
    stage._attention_backend = backend
    for block in stage.blocks:
        block.self_attn.attend = backend.attend


def context_parallel_backend(
    backend: AttentionBackend, cp_group: ContextParallelGroup, softcap: float = 0.0, is_narrow: bool = False
) -> AttentionBackend:
    """Return `backend` over the keys of all ranks.

    Args:
        backend: of a rank's own keys.
        cp_group: the ranks.
        softcap: as in `ModelConfig.attention_softcap`.
        is_narrow: values have another width than keys, for which "auto" has no "varlen".
    """
    make_mask = _MASK_FACTORIES[backend.name]
    if backend.name == "auto" and (softcap or is_narrow):
        make_mask = _capped_auto_mask if softcap else _narrow_auto_mask
    attend_capped = partial(reference_attention, softcap=softcap)
    attend_with_bias = attend_capped if softcap or backend.name == "reference" else sdpa_attention
    attend_in_blocks = partial(flex_mask_attention, softcap=softcap)

    def attend(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: WholeRowsMask | SplitMask | VarlenMask) -> Tensor:
        k_PGK, v_PGK = gather_keys(k_BTGK, v_BTGK, mask.key_index, cp_group)
        if isinstance(mask, WholeRowsMask):
            attend_rows = attend_with_bias if isinstance(mask.mask, Tensor) else attend_in_blocks
            k_BSGK, v_BSGK = (x.unflatten(0, (q_BTHK.shape[0], -1)) for x in (k_PGK, v_PGK))
            return attend_rows(q_BTHK, k_BSGK, v_BSGK, mask.mask)
        q_LHK = q_BTHK.flatten(0, 1)
        if isinstance(mask, SplitMask):
            out_LHK = _attend_split(q_LHK, k_PGK, v_PGK, mask)
        else:
            out_LHK = _attend_varlen(q_LHK, k_PGK, v_PGK, mask)
        return out_LHK.view(*q_BTHK.shape[:3], -1)

    return replace(backend, attend=attend, mask_factory=make_mask)


def gather_keys(
    k_BTGK: Tensor, v_BTGK: Tensor, key_index_P: Tensor, cp_group: ContextParallelGroup
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all ranks at `key_index_P`, [P, G, K] each.

    Args:
        k_BTGK: this rank's keys.
        v_BTGK: this rank's values.
        key_index_P: places among the N gathered ones; those equal to N are padding and take no gradient.
        cp_group: the ranks.
    """
    kv_BTGJ = torch.cat((k_BTGK, v_BTGK), dim=-1)
    widths = (k_BTGK.shape[-1], v_BTGK.shape[-1])
    k_PGK, v_PGK = _GatherPositions.apply(kv_BTGJ, key_index_P, cp_group).split(widths, dim=-1)
    return k_PGK, v_PGK


class _GatherPositions(torch.autograd.Function):
    # One collective each way: gloo corrupts its heap now and then with two in flight in a group (torch 2.15).
    @staticmethod
    def forward(ctx: Any, kv_BTGJ: Tensor, key_index_P: Tensor, cp_group: ContextParallelGroup) -> Tensor:
        ctx.cp_group, ctx.shape = cp_group, kv_BTGJ.shape
        ctx.save_for_backward(key_index_P)
        kv_LGJ = kv_BTGJ.flatten(0, 1).contiguous()
        kv_NGJ = _ops.wait_tensor(_ops.all_gather_into_tensor(kv_LGJ, cp_group.size, cp_group.group_name))
        return kv_NGJ.index_select(0, key_index_P.clamp(max=kv_NGJ.shape[0] - 1))

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dkv_PGJ: Tensor
    ) -> tuple[Tensor, None, None]:
        (key_index_P,) = ctx.saved_tensors
        size, group_name = ctx.cp_group.size, ctx.cp_group.group_name
        n_gathered = ctx.shape[0] * ctx.shape[1] * size
        # A last row for padding: kernels leave gradients of keys that no segment has unwritten.
        summed = dkv_PGJ.new_zeros(n_gathered + 1, *dkv_PGJ.shape[1:]).index_add_(0, key_index_P, dkv_PGJ)
        dkv_LGJ = _ops.wait_tensor(_ops.reduce_scatter_tensor(summed[:-1], "sum", size, group_name))
        return dkv_LGJ.view(ctx.shape), None, None


def _attend_split(q_LHK: Tensor, k_PGK: Tensor, v_PGK: Tensor, mask: SplitMask) -> Tensor:
    parts = zip(
        q_LHK.split(mask.query_lengths),
        k_PGK.split(mask.key_lengths),
        v_PGK.split(mask.key_lengths),
        strict=True,
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        is_cut = 0 < mask.window < k.shape[0]
        bias = window_bias(q.shape[0], k.shape[0], mask.window, q.device, q.dtype) if is_cut else None
        return document_attention(q[None], k[None], v[None], bias)[0]

    return torch.cat([attend(q, k, v) for q, k, v in parts])


def _attend_varlen(q_LHK: Tensor, k_PGK: Tensor, v_PGK: Tensor, mask: VarlenMask) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    repeats = q_LHK.shape[1] // k_PGK.shape[1]
    if repeats > 1 and "enable_gqa" not in mask.kernel_options:
        k_PGK, v_PGK = (x.repeat_interleave(repeats, dim=1) for x in (k_PGK, v_PGK))
    # Other bounds of keys than of queries: torch takes its flash kernel, whose causal triangle ends at the last key.
    _, cu_seqlens_q, cu_seqlens_k, max_q, max_k, options = mask
    out = varlen_attn(q_LHK, k_PGK, v_PGK, cu_seqlens_q, cu_seqlens_k, max_q, max_k, **options)
    assert isinstance(out, Tensor)
    return out


def _dense_mask(boundaries: DocumentBoundaries, device: torch.device, dtype: torch.dtype, window: int) -> WholeRowsMask:
    order, first_BT, last_BT = _visible_keys(boundaries, device, window)
    key_S = torch.arange(boundaries.row_length, device=device)
    hidden_BTS = (key_S < first_BT[:, :, None]) | (key_S > last_BT[:, :, None])
    bias = torch.zeros(hidden_BTS.shape, dtype=dtype, device=device).masked_fill_(hidden_BTS, float("-inf"))[:, None]
    return WholeRowsMask(order, bias)


def _flex_mask(boundaries: DocumentBoundaries, device: torch.device, dtype: torch.dtype, window: int) -> WholeRowsMask:
    from torch.nn.attention.flex_attention import create_block_mask

    order, first_BT, last_BT = _visible_keys(boundaries, device, window)

    def seen(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first_BT[row, query] <= key) & (key <= last_BT[row, query])

    sizes = boundaries.n_rows, None, boundaries.seq_len, boundaries.row_length
    return WholeRowsMask(order, create_block_mask(seen, *sizes, device=str(device)))


def _visible_keys(boundaries: DocumentBoundaries, device: torch.device, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each key's place among the gathered ones, and the first and last key that each query sees."""
    segments = _as_segments(boundaries, window)
    first_BT, last_BT = (copy_to_device(x, device) for x in segments.visible_keys())
    if window:
        first_BT = torch.maximum(first_BT, last_BT - window + 1)
    order = torch.from_numpy(gathered_order(segments.n_rows, segments.seq_len, segments.cp).copy())
    return copy_to_device(order, device), first_BT, last_BT


def _split_mask(boundaries: DocumentBoundaries, device: torch.device, dtype: torch.dtype, window: int) -> SplitMask:
    segments = _as_segments(boundaries, window)
    lengths = segments.cu_seqlens.diff().tolist(), segments.cu_seqlens_k.diff().tolist()
    return SplitMask(copy_to_device(segments.key_index(), device), *lengths, window)


def _varlen_mask(boundaries: DocumentBoundaries, device: torch.device, dtype: torch.dtype, window: int) -> VarlenMask:
    segments = _as_segments(boundaries, window)
    queries = torch_varlen_metadata(segments, device, window)
    return VarlenMask(
        copy_to_device(segments.key_index(), device),
        queries.cu_seqlens,
        copy_to_device(segments.cu_seqlens_k, device),
        queries.max_seqlen,
        segments.seq_len * segments.cp,
        queries.kernel_options,
    )


def _auto_mask(
    boundaries: DocumentBoundaries, device: torch.device, dtype: torch.dtype, window: int
) -> WholeRowsMask | SplitMask | VarlenMask:
    if device.type == "cuda" and unavailable_reason("varlen", "cuda", dtype) is None:
        return _varlen_mask(boundaries, device, dtype, window)
    if device.type == "cpu" or window:  # no [T, T] tensor for a window
        return _split_mask(boundaries, device, dtype, window)
    return _dense_mask(boundaries, device, dtype, window)


def _capped_auto_mask(
    boundaries: DocumentBoundaries, device: torch.device, dtype: torch.dtype, window: int
) -> WholeRowsMask:
    make_mask = _flex_mask if device.type == "cuda" else _dense_mask
    return make_mask(boundaries, device, dtype, window)


def _narrow_auto_mask(
    boundaries: DocumentBoundaries, device: torch.device, dtype: torch.dtype, window: int
) -> WholeRowsMask | SplitMask:
    make_mask = _split_mask if device.type == "cpu" else _capped_auto_mask
    return make_mask(boundaries, device, dtype, window)


def _as_segments(boundaries: DocumentBoundaries, window: int) -> QuerySegments:
    assert isinstance(boundaries, QuerySegments), "boundaries of whole rows; take split_boundaries"
    return boundaries.within(window)


_MaskFactory = Callable[[DocumentBoundaries, torch.device, torch.dtype, int], Any]
_MASK_FACTORIES: dict[str, _MaskFactory] = {
    "auto": _auto_mask,
    "reference": _dense_mask,
    "sdpa": _dense_mask,
    "split": _split_mask,
    "varlen": _varlen_mask,
    "flex": _flex_mask,
}
