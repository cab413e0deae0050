"""Stochastic rounding of float32 to bfloat16 with counter-based random bits.

A value between two bfloat16 numbers becomes the upper one with probability (value - lower) / (upper - lower), so sums
of small updates are unbiased, where rounding to nearest would lose them. 16 random bits are added below bfloat16's last
bit, and the lower half of the word is cut off; what bfloat16 can represent stays as it is.

The bits are a function of (seed, parameter, element, step) alone, so any slice is rounded alike on any mesh and after a
resume. As in `lt_model.init`, a key is made of seed and name; a step's state is SplitMix64's finalizer of key + step *
gamma, and word i of the step the finalizer of state + i * gamma. The element in row r and column c of C takes 16-bit
lane c % 4, from the lowest, of word r * ceil(C / 4) + c // 4; a vector is one row.

Cost: about 10 integer operations per element, and scratch for `CHUNK_NUMEL` elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lt_model.init import GAMMA, parameter_key, splitmix64_finalize, to_signed64
from lt_model.params import ParamSpec

CHUNK_NUMEL = 1 << 22
LANES = 4


def rounding_key(seed: int, param_spec: ParamSpec) -> int:
    """Return the 64-bit key of a parameter's random bits, other than those of its initial values."""
    return parameter_key(seed, f"stochastic rounding of {param_spec.name}")


def round_stochastically(
    target: Tensor, values: Tensor, param_spec: ParamSpec, *, key: int, step: Tensor, offset: Sequence[int]
) -> None:
    """Write the rounded float32 `values` of a slice into `target`, bfloat16.

    Args:
        target: of the shape of `values`.
        values: finite.
        param_spec: the parameter.
        key: from `rounding_key`.
        step: number of the step, an integer scalar on the device.
        offset: start of the slice in the parameter.
    """
    columns = param_spec.shape[-1]
    state = splitmix64_finalize(step.to(torch.int64) * to_signed64(GAMMA) + to_signed64(key))
    first_row, first = (0, offset[0]) if values.ndim == 1 else (offset[0], offset[1])
    values_RC, target_RC = values.view(-1, values.shape[-1]), target.view(-1, values.shape[-1])
    end = first + values.shape[-1]
    words_W = torch.arange(first // LANES, -(-end // LANES), device=values.device)
    n_rows = max(1, CHUNK_NUMEL // max(1, values.shape[-1]))
    for start in range(0, values_RC.shape[0], n_rows):
        chunk_RC = values_RC[start : start + n_rows]
        rows_R = torch.arange(start, start + chunk_RC.shape[0], device=values.device) + first_row
        index_RW = rows_R[:, None] * -(-columns // LANES) + words_W
        random_RW = splitmix64_finalize(index_RW.mul_(to_signed64(GAMMA)).add_(state))
        skipped = first % LANES
        lanes_RC = random_RW.view(torch.int16)[:, skipped : skipped + chunk_RC.shape[1]].to(torch.int32)
        bits_RC = chunk_RC.contiguous().view(torch.int32) + lanes_RC.bitwise_and_(0xFFFF)
        target_RC[start : start + n_rows] = (bits_RC >> 16).to(torch.int16).view(torch.bfloat16)
