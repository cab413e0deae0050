"""Element types by safetensors code, and casts between the floating-point ones in numpy alone.

bfloat16 has no numpy type: its elements are handled as 16-bit patterns. A cast rounds to nearest, ties to even, exactly
once (F64 to BF16 goes through a float32 rounded to odd, so the second rounding is exact). NaN stays NaN, a value beyond
the range becomes an infinity. Cost: a few passes over the block that is cast; callers cast block by block.
"""

import numpy as np

from lt_ckpt.errors import CheckpointError

TORCH_NAMES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8"},
}
"""Name in torch of every supported element type."""
ITEM_BYTES = {code: 1 if "8" in code or code == "BOOL" else int(code[-2:]) // 8 for code in TORCH_NAMES}
"""Bytes per element."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_BY_RANGE = ("F16", "BF16", "F32", "F64")
"""Floating-point types, the one with the smallest largest value first."""
_NUMPY = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


def item_bytes(dtype: str) -> int:
    """Return the bytes per element of a safetensors code; raise a CheckpointError for an unknown one."""
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"dtype {dtype!r} is not known; known are {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def parse_float_dtype(name: str) -> str:
    """Return the safetensors code of a floating-point dtype name: bf16, bfloat16, BF16, fp32."""
    for code in _FLOATS:
        if name.lower() in (code.lower(), code.lower().replace("f", "fp"), TORCH_NAMES[code]):
            return code
    raise CheckpointError(f"dtype {name!r} is not a floating type that can be cast to; use f64, f32, f16 or bf16")


def _to_float32_round_to_odd(values: np.ndarray) -> np.ndarray:
    """Cast float64 to float32, truncating and setting the last bit where precision was lost."""
    with np.errstate(over="ignore", under="ignore"):
        nearest = values.astype("<f4")
    bits = nearest.view("<u4")
    finite = np.isfinite(values)
    inexact = finite & (nearest.astype("<f8") != values)
    too_far = inexact & (np.abs(nearest.astype("<f8")) > np.abs(values))
    bits -= too_far.astype("<u4")  # one step towards zero: bit patterns of floats are ordered by magnitude
    bits |= inexact.astype("<u4")
    return nearest


def _to_bf16(values: np.ndarray) -> np.ndarray:
    single = _to_float32_round_to_odd(values) if values.dtype == np.dtype("<f8") else values.astype("<f4")
    bits = single.view("<u4")
    # Adding 0x7FFF plus the last kept bit rounds to nearest even; a carry into the exponent is the right result.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(single), quiet_nan, rounded).astype("<u2")


def count_overflows(data: np.ndarray, source: str, result: np.ndarray, target: str) -> int:
    """Return the number of finite elements of `data` that a cast made infinite in `result`.

    A value that underflows is not counted: it lost no more than half the smallest number of the target.
    """
    if source not in _BY_RANGE or target not in _BY_RANGE or _BY_RANGE.index(target) >= _BY_RANGE.index(source):
        return 0
    infinite = _is_infinite(result, target)
    return int((infinite & ~_is_infinite(data, source)).sum()) if infinite.any() else 0


def _is_infinite(data: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (data.view("<u2") & np.uint16(0x7FFF)) == np.uint16(0x7F80)
    return np.isinf(data.view(_NUMPY[dtype]))


def cast(data: np.ndarray, source: str, target: str) -> np.ndarray:
    """Cast the bytes of a block of elements.

    Args:
        data: One-dimensional uint8, the elements in little-endian order.
        source: Safetensors code of the elements.
        target: Safetensors code to cast to: F64, F32, F16 or BF16, or the same as `source`.

    Returns:
        One-dimensional uint8; `data` itself if there is nothing to do.

    Raises:
        CheckpointError: One of the two is not a castable floating-point type.
    """
    if source == target:
        return data
    if source not in _FLOATS or target not in _FLOATS:
        raise CheckpointError(f"cannot cast {source} to {target}: only {', '.join(_FLOATS)} are cast")
    if source == "BF16":
        values = (data.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    else:
        values = data.view(_NUMPY[source])
    if target == "BF16":
        return _to_bf16(values).view(np.uint8)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(_NUMPY[target]).view(np.uint8)


def check_castable(source: str, target: str) -> None:
    """Raise a CheckpointError for an impossible cast, before anything is read."""
    cast(np.empty(0, np.uint8), source, target)
