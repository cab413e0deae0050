"""Slices of tensors in files, and reads of any box of a tensor from them.

A slice's elements lie at `byte_offset` and at strides, so a view of a storage, a transpose and every second row are
slices like any other. All are read with `pread`: a contiguous box into its place, any other in spans of
`files.BLOCK_BYTES`, from which its elements are picked. A slice that has a hash is compared with it when it is read as
a whole; parts of it, and slices without one, must be verified before.

Cost: O(slices of the tensor) and the requested bytes; no file stays open.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import xxhash

from lt_ckpt import files
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.shards import Box, Ints, intersect


@dataclass(frozen=True, kw_only=True)
class StoredSlice:
    """Slice of a tensor stored in a file.

    Attributes:
        file: The file, relative to the source's root.
        byte_offset: Byte in the file of the slice's first element.
        offset: Offset of the slice in the tensor.
        shape: Shape of the slice.
        strides: Elements between neighbors, per dimension; None: the slice is contiguous.
        key: In a checkpoint of ours, the slice's name in the file: the tensor's name, with `#1`, `#2`, ... appended
            where a rank holds several slices of one tensor.
        xxh3_128: Hash of its bytes, as hex; empty if it has none of its own.
    """

    file: str
    byte_offset: int
    offset: Ints
    shape: Ints
    strides: Ints | None = None
    key: str = ""
    xxh3_128: str = ""

    @property
    def box(self) -> Box:
        """Its box in the tensor."""
        return self.offset, self.shape


def contiguous_strides(shape: Ints) -> Ints:
    """Return the strides of a contiguous array, in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def slice_box(stored: StoredSlice, box: Box, item: int) -> StoredSlice:
    """Return the part of a slice in a box of the tensor, which must lie in the slice; the hash is that of a whole."""
    if box == stored.box:
        return stored
    strides = stored.strides or contiguous_strides(stored.shape)
    skipped = sum((o - s) * step for o, s, step in zip(box[0], stored.offset, strides, strict=True))
    begin = stored.byte_offset + skipped * item
    return replace(stored, byte_offset=begin, offset=box[0], shape=box[1], strides=strides, xxh3_128="")


def read_box(root: Path, slices: Sequence[StoredSlice], box: Box, dtype: str, where: str) -> np.ndarray:
    """Read a box of a tensor; return its elements as unsigned integers of their width, of the box's shape."""
    out = np.empty(box[1], f"<u{item_bytes(dtype)}")
    read_box_into(root, slices, box, out, where)
    return out


def read_box_into(root: Path, slices: Sequence[StoredSlice], box: Box, out: np.ndarray, where: str) -> None:
    """Read a box of a tensor into an array.

    Args:
        root: Folder of the files.
        slices: The tensor's slices; they do not overlap.
        box: The box to read.
        out: Unsigned integers of the elements' width, of the box's shape.
        where: The tensor, for messages.

    Raises:
        CheckpointError: A file cannot be read or ends too early, a whole slice differs from its hash, or the slices do
            not cover the box.
    """
    n_found = 0
    for stored in slices:
        common = intersect(box, stored.box)
        if common is not None:
            n_found += prod(common[1])
            inside = tuple(slice(o - b, o - b + n) for o, b, n in zip(common[0], box[0], common[1], strict=True))
            _read_slice(root / stored.file, slice_box(stored, common, out.itemsize), out[(..., *inside)])
    if n_found != out.size:
        raise CheckpointError(f"{where}: {n_found} of the {out.size} elements at offset {list(box[0])} are stored")


def _read_slice(path: Path, stored: StoredSlice, target: np.ndarray) -> None:
    """Read a slice into an array of its shape."""
    expected = contiguous_strides(stored.shape)
    strides = stored.strides or expected
    with translate_os_errors("reading", path):
        descriptor = files.open_for_reading(path)
        try:
            if all(n == 1 or a == b for n, a, b in zip(stored.shape, strides, expected, strict=True)):
                data = target if target.flags.c_contiguous else np.empty(stored.shape, target.dtype)
                raw = data.reshape(-1).view(np.uint8).data
                files.read_exactly(descriptor, stored.byte_offset, raw, path)
                if stored.xxh3_128 and xxhash.xxh3_128_hexdigest(raw) != stored.xxh3_128:
                    raise CheckpointError(f"{path}: the bytes of tensor {stored.key} have changed since the save")
                if data is not target:
                    target[...] = data
            else:
                _read_strided(descriptor, path, stored.byte_offset, strides, target)
        finally:
            os.close(descriptor)


def _read_strided(descriptor: int, path: Path, begin: int, strides: Ints, target: np.ndarray) -> None:
    """Read elements at strides, in runs of steps along the dimension with the largest stride."""
    item, steps = target.itemsize, tuple(step * target.itemsize for step in strides)
    axis = max(range(target.ndim), key=lambda d: strides[d])
    inside = item + sum((n - 1) * step for n, step in zip(target.shape, steps, strict=True))
    inside -= (target.shape[axis] - 1) * steps[axis]
    n_steps = max(1, files.BLOCK_BYTES // max(1, steps[axis]))
    for first in range(0, target.shape[axis], n_steps):
        part = target[(*[slice(None)] * axis, slice(first, first + n_steps))]
        span = np.empty((part.shape[axis] - 1) * steps[axis] + inside, np.uint8)
        files.read_exactly(descriptor, begin + first * steps[axis], span.data, path)
        part[...] = np.ndarray(part.shape, target.dtype, span, 0, steps)
