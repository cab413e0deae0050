"""Product of sorted rows with the matrix of their group, for experts.

Two operators of torch, so that a compiled block is one graph and recomputation can save their outputs: `product` and
the gradient of the weights. Both run torch's grouped kernel where it takes the tensors (fp32, bf16 and fp16, strides of
16 bytes, from torch 2.10 on), else a loop over the groups, which waits for the host. A CPU takes the loop in bf16: it
compiles such a product for each new number of rows, so that groups are filled up with zero rows to a few numbers.

Cost: 2 * R * D * F FLOPs forward, and twice as many backward.

Shapes: R rows, E groups, D and F widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library
from torch.nn import functional as F

_DEFINITIONS = library.Library("lt_model", "DEF")
_DEFINITIONS.define("grouped_product(Tensor x, Tensor weights, Tensor ends) -> Tensor")
_DEFINITIONS.define("grouped_outer_product(Tensor upstream, Tensor x, Tensor ends) -> Tensor")


FILLED_ROWS = 64
"""A CPU multiplies bf16 groups of multiples of this many rows."""


def grouped_product(x_RD: Tensor, weights_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Return x @ weights[e]^T [R, F], e the group of each row; the rows of group e end before `ends_E[e]` (int32)."""
    return _GroupedProduct.apply(x_RD, weights_EFD, ends_E)


def has_grouped_kernel(*tensors: Tensor) -> bool:
    """Return whether torch's grouped product takes these tensors."""
    narrow = min(size * x.element_size() % 16 == 0 for x in tensors for size in x.shape[-2:])
    return hasattr(F, "grouped_mm") and tensors[0].dtype != torch.float64 and narrow and not _is_filled(tensors[0])


def _is_filled(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.bfloat16


def _fill(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, 0, 0, -len(rows) % FILLED_ROWS)) if _is_filled(rows) else rows


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weights_EFD: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_RD, weights_EFD, ends_E)
        return torch.ops.lt_model.grouped_product(x_RD, weights_EFD, ends_E)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_RD, weights_EFD, ends_E = ctx.saved_tensors
        upstream = upstream.contiguous()
        grad_x = torch.ops.lt_model.grouped_product(upstream, weights_EFD.transpose(1, 2), ends_E)
        return grad_x, torch.ops.lt_model.grouped_outer_product(upstream, x_RD, ends_E), None


def _product(x_RD: Tensor, weights_EFD: Tensor, ends_E: Tensor) -> Tensor:
    if has_grouped_kernel(weights_EFD):
        return F.grouped_mm(x_RD, weights_EFD.transpose(1, 2), offs=ends_E)
    groups = zip(_split(x_RD, ends_E), weights_EFD.unbind(), strict=True)
    return torch.cat([(_fill(rows) @ weight_FD.T)[: len(rows)] for rows, weight_FD in groups])


def _outer_product(upstream_RF: Tensor, x_RD: Tensor, ends_E: Tensor) -> Tensor:
    if has_grouped_kernel(upstream_RF[:0].T @ x_RD[:0]):
        return F.grouped_mm(upstream_RF.T, x_RD, offs=ends_E)
    groups = zip(_split(upstream_RF, ends_E), _split(x_RD, ends_E), strict=True)
    return torch.stack([_fill(upstream).T @ _fill(rows) for upstream, rows in groups])


def _split(x: Tensor, ends_E: Tensor) -> tuple[Tensor, ...]:
    return x.tensor_split(ends_E[:-1].tolist())


_DEFINITIONS.impl("grouped_product", _product, "CompositeExplicitAutograd")
_DEFINITIONS.impl("grouped_outer_product", _outer_product, "CompositeExplicitAutograd")
_DEFINITIONS.impl("grouped_product", lambda x, weights, ends: x.new_empty(x.shape[0], weights.shape[1]), "Meta")
_DEFINITIONS.impl(
    "grouped_outer_product",
    lambda upstream, x, ends: x.new_empty(ends.shape[0], upstream.shape[1], x.shape[1]),
    "Meta",
)
