"""Rotary position embeddings: angles of positions, and the rotation of queries and keys.

Of the first W numbers of a head (all of them but in partial rotation), pair i (numbers i and i + W/2, as in
transformers) is rotated by position * theta^(-2i/W) (RoFormer, arXiv:2104.09864). Scaling changes these frequencies:

- "linear" divides all by `factor`;
- "llama3" divides those of wavelengths beyond original/low_freq_factor, keeps those below original/high_freq_factor,
  and interpolates linearly in between (Llama 3.1, arXiv:2407.21783);
- "yarn" keeps pairs that turn more than beta_fast times in the original context, divides those that turn fewer than
  beta_slow times, interpolates linearly in the pair's index in between, and multiplies cosines and sines by a magnitude
  (arXiv:2309.00071).

Angles are computed in fp32 with the operations of transformers, in its order, or in float64 on request.

Shapes: B batch, T tokens, H heads, K head width, P = W/2 pairs.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lt_model.config import Rope, RopeScaling
from lt_model.documents import copy_to_device


def inverse_frequencies(rope: Rope, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the angle per position of each pair, [P] on the CPU (radians per token)."""
    exponents = torch.arange(0, rope.width, 2, dtype=torch.int64, device="cpu").to(dtype) / rope.width
    frequencies = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        kept = _yarn_kept(rope, scaling, dtype)
        return frequencies / scaling.factor * (1 - kept) + frequencies * kept
    original = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    long = wavelengths > original / scaling.low_freq_factor
    short = wavelengths < original / scaling.high_freq_factor
    smooth = (original / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return torch.where(long, frequencies / scaling.factor, torch.where(short, frequencies, between))


def _yarn_kept(rope: Rope, scaling: RopeScaling, dtype: torch.dtype) -> Tensor:
    """Return the share of each pair's own frequency, [P]: 1 for short wavelengths, 0 for long ones."""

    def pair_of(rotations: float) -> float:
        ratio = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope.width * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    high += 0.001 * (low == high)  # as in transformers
    return 1 - ((torch.arange(rope.width // 2, dtype=dtype, device="cpu") - low) / (high - low)).clamp(0, 1)


@cache
def _frequencies_on(rope: Rope, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the frequencies on a device; computed on the CPU, so that all devices use the same angles."""
    return copy_to_device(inverse_frequencies(rope, dtype), device)


def rope_tables(rope: Rope, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of positions [..., T] for `apply_rope`, each [..., T, 1, P].

    They are computed on the positions' device in fp32 (float64 when `dtype` is float64) and rounded to `dtype`.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    find = _frequencies_on if type(position_ids) is Tensor else _frequencies_on.__wrapped__  # no fake ones are kept
    angles = (position_ids[..., None] * find(rope, wide, position_ids.device))[..., None, :]
    tables = angles.new_empty(2, *angles.shape)  # rounded by one kernel
    torch.cos(angles, out=tables[0])
    torch.sin(angles, out=tables[1])
    if rope.scaling is not None and rope.scaling.amplitude != 1:
        tables *= rope.scaling.amplitude
    cos, sin = tables.to(dtype)
    return cos, sin


def apply_rope_to_pairs(x_BTHK: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate numbers 2i and 2i + 1 by the angle of pair i; return them as numbers i and i + W/2."""
    return apply_rope(x_BTHK.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), tables)


def apply_rope(x_BTHK: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys by the angles of their positions; same shape and dtype as `x_BTHK`."""
    cos, sin = tables
    width = 2 * cos.shape[-1]
    if width < x_BTHK.shape[-1]:
        return torch.cat((apply_rope(x_BTHK[..., :width], tables), x_BTHK[..., width:]), dim=-1)
    if torch.compiler.is_compiling() or x_BTHK.device.type not in ("cpu", "cuda"):  # compilers fuse the formula
        a, b = x_BTHK.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return _Rotation.apply(x_BTHK, cos, sin)


class _Rotation(torch.autograd.Function):
    """Rotation by three kernels, where the formula under autograd has seven, and eleven backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (once_differentiable hides the names)
        ctx: Any, upstream: Tensor
    ) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(upstream, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    halves = x.unflatten(-1, (2, -1))
    rotated = halves * cos[..., None, :]
    rotated[..., 0, :].addcmul_(halves[..., 1, :], sin, value=-sign)
    rotated[..., 1, :].addcmul_(halves[..., 0, :], sin, value=sign)
    return rotated.flatten(-2)
