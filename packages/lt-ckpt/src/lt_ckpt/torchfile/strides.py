"""Strided views of a torch storage, located as boxes of arrays.

A matrix of n rows taken from longer rows is a box of the array of those longer rows. All of that array must lie in the
storage, its last row too, because reading takes whole rows; so it begins where the storage's rows do, or, where the
storage ends with the view, so that its last row ends there. A matrix with contiguous columns is the same, transposed.
Any other view must be contiguous.

Pure; cost: O(dimensions).
"""

from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.shards import Ints
from lt_ckpt.source import StoredArray
from lt_ckpt.tensorfile import TensorSpec

MAX_RANK = 64


def locate_view(dtype: str, begin: int, n_items: int, offset: int, shape: Ints, strides: Ints) -> StoredArray:
    """Locate a view of a storage as a stored array.

    Args:
        dtype: Safetensors code of the elements.
        begin: Byte in the file at which the storage begins.
        n_items: Elements of the storage.
        offset: First element of the view.
        shape: Shape of the view.
        strides: Elements between neighbors, one number per dimension.

    Raises:
        CheckpointError: It does not lie in the storage, or is not a box of an array.
    """
    if len(shape) != len(strides) or len(shape) > MAX_RANK or min(*shape, *strides, offset, 0) < 0:
        raise CheckpointError("its shape, strides and offset are not those of a tensor")
    spec, size = TensorSpec(dtype, shape), item_bytes(dtype)
    if not spec.n_bytes:
        return StoredArray(spec=spec, byte_offset=begin)
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if last >= n_items:
        raise CheckpointError(f"its element {last} lies outside of its storage of {n_items}")
    if _is_contiguous(shape, strides):
        return StoredArray(spec=spec, byte_offset=begin + offset * size)
    if len(shape) != 2:
        raise _unreadable_view_error(shape, strides)
    rows_are_whole = strides[1] == 1 or shape[1] == 1
    order = 1 if rows_are_whole else -1
    (n, row), (step, inner) = shape[::order], strides[::order]
    if (inner != 1 and row != 1) or step < row:
        raise _unreadable_view_error(shape, strides)
    first_row, column = divmod(offset, step)
    if column + row <= step and (first_row + n) * step <= n_items:
        first, array_shape, array_offset = 0, (first_row + n, step), (first_row, column)
    elif offset + row >= step:
        first, array_shape, array_offset = offset + row - step, (n, step), (0, step - row)
    else:
        raise _unreadable_view_error(shape, strides)
    return StoredArray(
        spec=spec,
        byte_offset=begin + first * size,
        array_shape=array_shape[::order],
        array_offset=array_offset[::order],
        transposed=not rows_are_whole,
    )


def _is_contiguous(shape: Ints, strides: Ints) -> bool:
    expected = 1
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


def _unreadable_view_error(shape: Ints, strides: Ints) -> CheckpointError:
    return CheckpointError(
        f"its strides {list(strides)} (shape {list(shape)}) cannot be read; save it after .contiguous()"
    )
