"""Reads of boxes with a cast that refuses values beyond the range of the new dtype.

fp16 ends at 65504, so weights that bf16 or fp32 hold may become infinite in it, and values between the largest of bf16
and of fp32 do so in bf16. A value that underflows to a subnormal number or to zero is rounded, as any other.

Cost: one more pass over the box that is cast; none where the new dtype has the larger range.
"""

import numpy as np

from lt_ckpt.dtypes import TORCH_NAMES, cast, count_overflows, item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.shards import Box
from lt_ckpt.source import Source


def read_cast(
    source: Source, name: str, box: Box, dtype: str, *, group: str = "weights", allow_overflow: bool = False
) -> np.ndarray:
    """Read a box of a tensor, cast to `dtype`.

    Args:
        source: The model.
        name: The tensor.
        box: The box to read.
        dtype: Safetensors code.
        group: The tensor's group.
        allow_overflow: Let finite values beyond the range of `dtype` become infinite.

    Returns:
        Its elements as unsigned integers of their width, of the box's shape.

    Raises:
        CheckpointError: Finite values do not fit in `dtype`; or as `Source.read`.
    """
    stored, data = source.groups[group].specs[name].dtype, source.read(name, box, group=group)
    result = cast(data, stored, dtype)
    if not allow_overflow and count_overflows(data, stored, result, dtype):
        raise CheckpointError(
            f"{name}: values exceed the range of {TORCH_NAMES[dtype]} and would become infinite; cast to a type "
            "of a larger range, or allow it (--allow-overflow)"
        )
    return result.view(f"<u{item_bytes(dtype)}").reshape(box[1])
