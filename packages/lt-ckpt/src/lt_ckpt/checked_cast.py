"""Reads of blocks with a cast that refuses values beyond the range of the new dtype.

fp16 ends at 65504, so weights that bf16 or fp32 hold may become infinite in it, and values between the largest of bf16
and of fp32 do so in bf16. The first such value ends a conversion; the tensor is then read once more to count them all.
A value that underflows to a subnormal number or to zero is rounded, as any other.

Cost: one more pass over the block that is cast; none where the new dtype has the larger range.
"""

import numpy as np

from lt_ckpt.dtypes import cast, count_overflows, item_bytes, torch_dtype_name
from lt_ckpt.errors import CheckpointError
from lt_ckpt.shards import Box, split_rows
from lt_ckpt.source import TensorGroup, TensorReader

COUNT_BLOCK_BYTES = 4 * 2**20


def read_cast(
    group: TensorGroup,
    name: str,
    box: Box,
    dtype: str,
    reader: TensorReader,
    memory: np.ndarray | None = None,
    *,
    allow_overflow: bool = False,
) -> np.ndarray:
    """Read a box of a tensor, cast to `dtype`; return its bytes.

    Args:
        group: The tensor's group.
        name: The tensor.
        box: The box to read.
        dtype: Safetensors code.
        reader: Reader of the source.
        memory: Buffer for the read, as for `TensorReader.read`.
        allow_overflow: Let finite values beyond the range of `dtype` become infinite.

    Raises:
        CheckpointError: Finite values do not fit in `dtype`; or as `TensorReader.read`.
    """
    stored = group.specs[name].dtype
    data = reader.read(group, name, box, memory=memory)
    result = cast(data, stored, dtype)
    if not allow_overflow and count_overflows(data, stored, result, dtype):
        raise _overflow_error(group, name, dtype, reader)
    return result


def _overflow_error(group: TensorGroup, name: str, dtype: str, reader: TensorReader) -> CheckpointError:
    """Count the overflows of the whole tensor and return the error."""
    spec = group.specs[name]
    count = 0
    for box in split_rows(spec.shape, COUNT_BLOCK_BYTES // item_bytes(spec.dtype)):
        data = reader.read(group, name, box)
        count += count_overflows(data, spec.dtype, cast(data, spec.dtype, dtype), dtype)
    verb = "exceeds" if count == 1 else "exceed"
    return CheckpointError(
        f"{name}: {count} of {spec.n_bytes // item_bytes(spec.dtype)} values {verb} the range of "
        f"{torch_dtype_name(dtype)} and would become infinite; cast to a type of a larger range, or allow it "
        "(--allow-overflow)"
    )
