"""Slices of tensors in files, and reads of any box of a tensor from them.

A slice's elements lie at `byte_offset` and at strides, so a view of a storage, a transpose and every second row are
slices like any other. A box that is contiguous in its file is read with `pread`; any other is copied from a map of
the file, whose pages the system drops when memory is short.

Cost: O(slices of the tensor) and the requested bytes; no file stays open.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from lt_ckpt import files
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.shards import Box, Ints, intersect


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSlice:
    """Slice of a tensor stored in a file.

    Attributes:
        file: The file, relative to the source's root.
        byte_offset: Byte in the file of the slice's first element.
        offset: Offset of the slice in the tensor.
        shape: Shape of the slice.
        strides: Elements between neighbors, per dimension; None: the slice is contiguous.
    """

    file: str
    byte_offset: int
    offset: Ints
    shape: Ints
    strides: Ints | None = None


def contiguous_strides(shape: Ints) -> Ints:
    """Return the strides of a contiguous array, in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def slice_box(stored: StoredSlice, box: Box, item: int) -> StoredSlice:
    """Return the part of a slice in a box of the tensor, which must lie in the slice."""
    offset, shape = box
    strides = stored.strides or contiguous_strides(stored.shape)
    skipped = sum((o - s) * step for o, s, step in zip(offset, stored.offset, strides, strict=True))
    return StoredSlice(
        file=stored.file, byte_offset=stored.byte_offset + skipped * item, offset=offset, shape=shape, strides=strides
    )


def read_box(root: Path, slices: Sequence[StoredSlice], box: Box, dtype: str, where: str) -> np.ndarray:
    """Read a box of a tensor.

    Args:
        root: Folder of the files.
        slices: The tensor's slices; they do not overlap.
        box: The box to read.
        dtype: Safetensors code of the elements.
        where: The tensor, for messages.

    Returns:
        Its elements as unsigned integers of their width, of the box's shape.

    Raises:
        CheckpointError: A file cannot be read or ends too early, or the slices do not cover the box.
    """
    item = item_bytes(dtype)
    out = np.empty(box[1], f"<u{item}")
    n_found = 0
    for stored in slices:
        common = intersect(box, (stored.offset, stored.shape))
        if common is not None:
            n_found += prod(common[1])
            inside = tuple(slice(o - b, o - b + n) for o, b, n in zip(common[0], box[0], common[1], strict=True))
            read_slice(root, slice_box(stored, common, item), out[(..., *inside)])
    if n_found != out.size:
        raise CheckpointError(f"{where}: {n_found} of the {out.size} elements at offset {list(box[0])} are stored")
    return out


def read_slice(root: Path, stored: StoredSlice, target: np.ndarray) -> None:
    """Read a slice into an array of its shape.

    Raises:
        CheckpointError: The file cannot be read, or ends too early.
    """
    path = root / stored.file
    strides = stored.strides or contiguous_strides(stored.shape)
    expected = contiguous_strides(stored.shape)
    is_contiguous = all(n == 1 or a == b for n, a, b in zip(stored.shape, strides, expected, strict=True))
    with translate_os_errors("reading", path):
        descriptor = files.open_for_reading(path)
        try:
            if is_contiguous:
                data = target if target.flags.c_contiguous else np.empty(stored.shape, target.dtype)
                files.read_exactly(descriptor, stored.byte_offset, data.reshape(-1).view(np.uint8).data, path)
                if data is not target:
                    target[...] = data
                return
            with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped:
                steps = tuple(step * target.itemsize for step in strides)
                try:
                    array = np.ndarray(stored.shape, target.dtype, mapped, stored.byte_offset, steps)
                except (TypeError, ValueError) as exc:
                    raise CheckpointError(f"{path}: ends within a tensor; the file is truncated") from exc
                target[...] = array
                del array  # the map cannot be closed before
        finally:
            os.close(descriptor)
