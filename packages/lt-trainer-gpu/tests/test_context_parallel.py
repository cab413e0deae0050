"""Attention over the keys of all context-parallel ranks against attention over whole rows, for each backend.

Torch's kernel for documents runs on CUDA only; here a double stands in for it, which does what it documents (causal
within each segment, aligned to the last key) and what it leaves open: gradients of keys in no segment are nan. So does
one for flex_attention, which has no backward pass on a CPU: it evaluates the mask at every pair.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lt_model.attention import BACKENDS
from lt_model.documents import DocumentBoundaries
from lt_model.sdpa import document_bias, reference_attention
from lt_trainer_gpu import context_parallel
from lt_trainer_gpu.checks import CONTEXT_PARALLEL_ATTENTION
from lt_trainer_gpu.context_parallel import context_parallel_backend, init_context_parallel_group
from lt_trainer_gpu.context_parallel_rows import rank_positions, split_boundaries
from lt_trainer_gpu.mesh_layout import MeshLayout

B, T, H, G, K = 2, 32, 4, 2, 8
DOCUMENTS = ((32, 32), (5, 27, 32), (1, 2, 3, 10, 15, 1, 20, 12), (4,) * 16, (31, 1, 16, 16))


class _VarlenDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, bounds_q, bounds_k)
        out = torch.full_like(q, torch.nan)
        for i, j, s, e in _segments(bounds_q, bounds_k):
            out[i:j] = reference_attention(q[None, i:j], k[None, s:e], v[None, s:e], None)[0]
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, bounds_q, bounds_k = ctx.saved_tensors
        gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        for i, j, s, e in _segments(bounds_q, bounds_k):
            parts = [x.detach().requires_grad_() for x in (q[i:j], k[s:e], v[s:e])]
            with torch.enable_grad():
                out = reference_attention(*(x[None] for x in parts), None)[0]
            found = torch.autograd.grad(out, parts, upstream[i:j])
            for whole, part, run in zip(gradients, found, (slice(i, j), slice(s, e), slice(s, e)), strict=True):
                whole[run] = part
        return (*gradients, None, None)


def _segments(bounds_q: Tensor, bounds_k: Tensor) -> list[tuple[int, int, int, int]]:
    q, k = bounds_q.tolist(), bounds_k.tolist()
    return [run for run in zip(q[:-1], q[1:], k[:-1], k[1:], strict=True) if run[0] < run[1]]


def varlen_double(
    q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Tensor:
    assert options in ({"is_causal": True}, {"window_size": (-1, 0), "enable_gqa": True}, {"window_size": (-1, 0)})
    assert cu_seq_q is not cu_seq_k, "torch would take a kernel that aligns the triangle to the first key"
    assert max(cu_seq_q.diff()) <= max_q
    assert max(cu_seq_k.diff()) <= max_k
    return _VarlenDouble.apply(q, k, v, cu_seq_q, cu_seq_k)


def flex_double(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: Any, softcap: float) -> Tensor:
    from torch.nn.attention.flex_attention import create_mask

    sizes = q_BTHK.shape[0], 1, q_BTHK.shape[1], k_BSGK.shape[1]
    assert mask.shape == sizes
    seen = create_mask(mask.mask_mod, *sizes, device="cpu")
    bias = torch.zeros(seen.shape, dtype=q_BTHK.dtype).masked_fill_(~seen, float("-inf"))
    return reference_attention(q_BTHK, k_BSGK, v_BSGK, bias, softcap)


def whole_rows(lengths: tuple[int, ...], seed: int) -> tuple[DocumentBoundaries, list[Tensor], Tensor]:
    rng = np.random.default_rng(seed)
    tensors = [torch.from_numpy(rng.normal(size=(B, T, heads, K))) for heads in (H, G, G)]
    upstream = torch.from_numpy(rng.normal(size=(B, T, H, K)))
    cu_seqlens = torch.tensor(np.append(0, np.cumsum(lengths)), dtype=torch.int32)
    return DocumentBoundaries(cu_seqlens, B, T), tensors, upstream


def own(x: Tensor, cp: int, rank: int) -> Tensor:
    return torch.from_numpy(rank_positions(x.transpose(1, -1).numpy(), cp, rank)).transpose(1, -1)


def attend_and_compare(cp: int) -> int:
    """In a rank: output and gradients of its positions, for each backend and documents; returns the number of cases."""
    import torch.nn.attention.varlen as torch_varlen

    torch_varlen.varlen_attn = varlen_double  # pyright: ignore[reportAttributeAccessIssue]
    context_parallel.flex_mask_attention = flex_double
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = init_context_parallel_group(MeshLayout(cp=cp, cp_rank=rank), timeout_s=60)
    cases = [(kind, seed, lengths) for kind in KINDS for seed, lengths in enumerate(DOCUMENTS)]
    for (name, fixed_length, window, softcap), seed, lengths in cases:
        boundaries, wholes, upstream = whole_rows(lengths, seed)
        padding = torch.full((3 * fixed_length,), B * T, dtype=torch.int32)
        padded = DocumentBoundaries(torch.cat((boundaries.cu_seqlens, padding)), B, T)
        segments = split_boundaries(padded, cp, rank, fixed_length=fixed_length)
        backend = context_parallel_backend(BACKENDS[name], group, softcap)
        mask = backend.mask_factory(segments, torch.device("cpu"), torch.float64, window)
        parts = [own(x, cp, rank).requires_grad_() for x in wholes]
        out = backend.attend(parts[0], parts[1], parts[2], mask)
        found = torch.autograd.grad(out, parts, own(upstream, cp, rank))
        q, k, v = (x.requires_grad_() for x in wholes)
        bias = document_bias(boundaries, torch.device("cpu"), torch.float64, window)
        wanted = reference_attention(q, k, v, bias, softcap)
        torch.testing.assert_close(out, own(wanted.detach(), cp, rank), rtol=1e-12, atol=1e-12)
        for part, whole in zip(found, torch.autograd.grad(wanted, (q, k, v), upstream), strict=True):
            torch.testing.assert_close(part, own(whole, cp, rank), rtol=1e-12, atol=1e-12)
    dist.destroy_process_group()
    return len(cases)


KINDS = [(name, False, 0, 0.0) for name in ("auto", "split", "reference", "sdpa", "varlen", "flex")]
KINDS += [(name, True, 0, 0.0) for name in ("reference", "sdpa", "varlen", "flex")]
KINDS += [(name, False, window, 0.7) for name in ("auto", "reference", "flex") for window in (0, 1, 9)]
KINDS += [(name, True, 9, 0.0) for name in ("reference", "sdpa", "flex")]
KINDS += [("split", False, window, 0.0) for window in (1, 9)]
"""Backend, padded shapes, window and cap of the scores."""


@pytest.mark.parametrize("cp", [2, 4])
def test_attention_over_ranks_is_attention_over_whole_rows(ranks, cp: int) -> None:
    assert ranks.run(attend_and_compare, cp, ranks=cp) == [len(KINDS) * len(DOCUMENTS)] * cp


def test_the_backends_are_those_that_check_accepts() -> None:
    assert set(CONTEXT_PARALLEL_ATTENTION) == set(context_parallel._MASK_FACTORIES)
    assert set(CONTEXT_PARALLEL_ATTENTION) < set(BACKENDS)
