"""Counter-based initial weights: element i of a parameter is a function of (seed, name, i) alone.

So any slice of any parameter can be computed alone, on any device and for any sharding, with the same bits.

Algorithm. key = first 8 bytes, little-endian, of BLAKE2b(digest 8 bytes) over the seed as 8 bytes little-endian (two's
complement) followed by the name in UTF-8. Element i takes outputs 2i and 2i+1 of SplitMix64 (Steele, Lea, Flood, OOPSLA
2014) seeded with the key: mix(key + (2i+1) * gamma) and mix(key + (2i+2) * gamma) modulo 2^64. The eight 16-bit lanes
of the two outputs are summed: the sum of eight uniform numbers is close to normal (Irwin-Hall; kurtosis 2.85, cut at
4.9 standard deviations), with mean 8 * 65535 / 2 and variance 8 * (2^32 - 1) / 12 exactly. All of this is integer
arithmetic. The value is (sum - mean) * (std / sqrt(variance)): one IEEE multiplication in float64, then rounded to
fp32, and from there to a narrower dtype if requested. `tests/` has the same in plain Python integers.

Cost: about 30 integer operations per element and 10 MiB of scratch whatever the size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lt_model.decoder import Decoder
from lt_model.params import ParamSpec, param_specs

GAMMA = 0x9E3779B97F4A7C15
MEAN = 8 * 65535 // 2
VARIANCE = 8 * (2**32 - 1) / 12
_EVEN_LANES = 0x0000FFFF0000FFFF
_CPU_CHUNK_NUMEL = 1 << 17  # elements at a time; the scratch memory stays in cache
_DEVICE_CHUNK_NUMEL = 1 << 24  # 0.6 GiB of scratch; smaller chunks are launch-bound on a GPU


def parameter_key(seed: int, name: str) -> int:
    """Return the 64-bit key of a parameter's stream.

    Raises:
        OverflowError: a seed that does not fit 64 bits.
    """
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True) + name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def init_slice(
    param_spec: ParamSpec,
    seed: int,
    *,
    offset: Sequence[int] | None = None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the initial values of a rectangular slice of a parameter, without computing the rest.

    Args:
        param_spec: the parameter.
        seed: the run's seed, any 64-bit signed integer.
        offset: first index of the slice in each dimension; zeros when absent.
        shape: extent of the slice in each dimension; up to the parameter's end when absent.
        dtype: a floating dtype; everything narrower than float64 is the fp32 value, rounded.
        device: compute device; CPU and CUDA results are bit-identical.

    Returns:
        A new tensor of `shape` and `dtype`, equal to that slice of the full parameter.
    """
    offset = tuple(offset) if offset is not None else (0,) * len(param_spec.shape)
    shape = tuple(shape) if shape is not None else tuple(n - o for n, o in zip(param_spec.shape, offset, strict=True))
    for start, extent, size in zip(offset, shape, param_spec.shape, strict=True):
        assert 0 <= start <= start + extent <= size, (
            f"slice {offset} + {shape} leaves {param_spec.name} {param_spec.shape}"
        )
    if isinstance(param_spec.init, str):
        return torch.full(shape, float(param_spec.init == "ones"), dtype=dtype, device=device)
    out = torch.empty(shape, dtype=dtype, device=device)
    if out.is_meta or not out.numel():
        return out
    key, scale = parameter_key(seed, param_spec.name), param_spec.init / math.sqrt(VARIANCE)
    rows = out.view(out.shape[0], -1)
    inner = _linear_indices(offset[1:], shape[1:], param_spec.shape[1:], device)
    row_size = math.prod(param_spec.shape[1:])
    chunk = _CPU_CHUNK_NUMEL if out.device.type == "cpu" else _DEVICE_CHUNK_NUMEL
    step = max(1, chunk // max(1, inner.numel()))
    for first in range(0, rows.shape[0], step):
        index = torch.arange(first, min(first + step, rows.shape[0]), device=device) + offset[0]
        values = _sum_lanes(key, index[:, None] * row_size + inner).sub_(MEAN).to(torch.float64).mul_(scale)
        rows[first : first + step] = values if dtype == torch.float64 else values.to(torch.float32)
    return out


@torch.no_grad()
def init_model(model: Decoder, seed: int) -> None:
    """Set every parameter of an unsharded, materialized model in place, from the run's seed."""
    targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for parameter in param_specs(model.config):
        target = targets[parameter.name]
        target.copy_(init_slice(parameter, seed, dtype=target.dtype, device=target.device))


def _linear_indices(
    offset: tuple[int, ...], shape: tuple[int, ...], full_shape: tuple[int, ...], device: torch.device | str
) -> Tensor:
    """Return the flat row-major index (int64) of each slice element in a tensor of `full_shape`."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for start, extent, size in zip(offset, shape, full_shape, strict=True):
        index = (index[:, None] * size + torch.arange(start, start + extent, device=device)).flatten()
    return index


def _sum_lanes(key: int, index: Tensor) -> Tensor:
    """Return the sum of the eight 16-bit lanes of each index's two hashes (int64, below 2^19)."""
    first = (index * to_signed64(2 * GAMMA)).add_(to_signed64(key + GAMMA))
    second = first + to_signed64(GAMMA)
    # Two lanes of a word are added at a time, in the two halves of a word; four sums of 16 bits fit a half.
    first, second = splitmix64_finalize(first), splitmix64_finalize(second)
    pairs = (first >> 16).bitwise_and_(_EVEN_LANES).add_((second >> 16).bitwise_and_(_EVEN_LANES))
    pairs.add_(first.bitwise_and_(_EVEN_LANES)).add_(second.bitwise_and_(_EVEN_LANES))
    return (pairs >> 32).add_(pairs.bitwise_and_(0xFFFFFFFF))


def splitmix64_finalize(z: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer in place; int64 wraps modulo 2^64, as unsigned does."""
    z.bitwise_xor_(_shift_right(z, 30)).mul_(to_signed64(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(_shift_right(z, 27)).mul_(to_signed64(0x94D049BB133111EB))
    return z.bitwise_xor_(_shift_right(z, 31))


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift 64-bit words right, filling with zeros (torch's own shift repeats the sign bit)."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def to_signed64(word: int) -> int:
    """Return the signed integer with the same 64 bits."""
    word %= 1 << 64
    return word - (1 << 64) if word >> 63 else word
