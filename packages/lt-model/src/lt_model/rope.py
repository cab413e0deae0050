"""Rotary position embeddings: angles of positions, and the rotation of queries and keys.

Pair i of a head (numbers i and i + head_dim/2, as in transformers) is rotated by position * theta^(-2i/head_dim)
(RoFormer, arXiv:2104.09864). The "llama3" scaling divides the frequencies of wavelengths beyond
original/low_freq_factor by `factor`, keeps those below original/high_freq_factor, and interpolates linearly in between
(Llama 3.1, arXiv:2407.21783). Angles are computed in fp32 with the operations of transformers, in its order, or in
float64 on request.

Shapes: B batch, T tokens, H heads, K head_dim, P = K/2 pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lt_model.config import ModelConfig


def inverse_frequencies(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the angle per position of each pair, [P] on the CPU (radians per token)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device="cpu").to(dtype) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    original = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    long = wavelengths > original / scaling.low_freq_factor
    short = wavelengths < original / scaling.high_freq_factor
    smooth = (original / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return torch.where(long, frequencies / scaling.factor, torch.where(short, frequencies, between))


def rope_tables(config: ModelConfig, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of positions [..., T] for `apply_rope`, each [..., T, 1, P].

    They are computed on the positions' device in fp32 (float64 when `dtype` is float64) and rounded to `dtype`.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # The frequencies are computed on the CPU so that all devices use the same angles; a copy this small does not wait
    # for the device.
    frequencies = inverse_frequencies(config, wide).to(position_ids.device, non_blocking=True)
    angles = (position_ids.to(wide)[..., None] * frequencies)[..., None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x_BTHK: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys by the angles of their positions; same shape and dtype as `x_BTHK`."""
    cos, sin = tables
    a, b = x_BTHK.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
