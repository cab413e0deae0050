"""Shards, and box operations on rectangular slices.

A slice (box) of a tensor is an offset and a shape, one number per dimension; a 0-dim tensor has the empty tuple for
both and one element. A `Shard` is such a slice with its bytes. `find_tiling_error` checks that boxes tile a tensor
exactly once: their volumes add up and no two overlap. The overlap test sweeps along the dimension with the most
distinct starts, so that n shards along one dimension cost O(n log n); arrangements that no mesh produces, for which it
would cost O(n^2), are refused.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError

Ints = tuple[int, ...]
Box = tuple[Ints, Ints]
"""(offset, shape)"""

MAX_OVERLAP_CHECKS = 250_000
"""Pairs of slices of one tensor that are compared; a grid of 1000 x 10 ranks needs 100 thousand."""

GROUP_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    offset = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = tuple(min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True))
    shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
    return (offset, shape) if all(n > 0 for n in shape) else None


def is_inside(box: Box, global_shape: Ints) -> bool:
    """Return True if the box has the tensor's rank and lies within it."""
    offset, shape = box
    return len(offset) == len(shape) == len(global_shape) and all(
        o >= 0 and n >= 0 and o + n <= size for o, n, size in zip(offset, shape, global_shape, strict=True)
    )


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the indices of two boxes that share an element, or None.

    Raises:
        CheckpointError: It would take more than `MAX_OVERLAP_CHECKS` comparisons.
    """
    full = [i for i, (_, shape) in enumerate(boxes) if math.prod(shape)]
    if len(full) < 2:
        return None
    rank = len(boxes[full[0]][0])
    if rank == 0:
        return full[0], full[1]
    dim = max(range(rank), key=lambda d: len({boxes[i][0][d] for i in full}))
    full.sort(key=lambda i: boxes[i][0][dim])
    active: list[int] = []
    pairs = 0
    for i in full:
        start = boxes[i][0][dim]
        active = [j for j in active if boxes[j][0][dim] + boxes[j][1][dim] > start]
        pairs += len(active)
        if pairs > MAX_OVERLAP_CHECKS:
            raise CheckpointError(f"{len(boxes)} slices of one tensor are arranged as no sharding would arrange them")
        for j in active:
            if intersect(boxes[i], boxes[j]) is not None:
                return j, i
        active.append(i)
    return None


def find_tiling_error(global_shape: Ints, boxes: Sequence[Box]) -> str:
    """Check that boxes, all inside the tensor, hold each of its elements exactly once.

    Returns:
        The error as text; empty if there is none.
    """
    if not boxes:
        return "no slice at all"
    pair = find_overlap(boxes)
    if pair is not None:
        (a, a_shape), (b, b_shape) = (boxes[i] for i in pair)
        return f"two slices overlap: offset {[*a]} shape {[*a_shape]} and offset {[*b]} shape {[*b_shape]}"
    n_stored, n_elements = sum(math.prod(shape) for _, shape in boxes), math.prod(global_shape)
    return "" if n_stored == n_elements else f"the slices hold {n_stored} of {n_elements} elements"


def split_rows(shape: Ints, max_elements: int) -> list[Box]:
    """Split a box along dim 0 into boxes of at most `max_elements` elements, at least one row each."""
    if not shape or math.prod(shape) <= max_elements:
        return [((0,) * len(shape), shape)]
    rows = max(1, max_elements // math.prod(shape[1:]))
    starts = [*range(0, shape[0], rows), shape[0]]
    rest = (0,) * (len(shape) - 1)
    return [((start, *rest), (end - start, *shape[1:])) for start, end in pairwise(starts)]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Rectangular slice of a tensor, as a rank holds it.

    Attributes:
        group: Kind of tensor: `weights`, a slot of an optimizer; lower-case letters, digits, `_`.
        name: The tensor's name; for parameters the Hugging Face name.
        dtype: Safetensors code: `F32`, `BF16`, `I64`, ...
        global_shape: Shape of the whole tensor.
        offset: Offset of the slice, one number per dimension.
        shape: Shape of the slice.
        data: The slice's bytes in C order, one-dimensional uint8; or a function that returns them, called once just
            before they are written (so that a device copies only one tensor at a time).
        copy_fn: Copies the bytes into a given array, where that is faster than through `data`.

    Raises:
        CheckpointError: The slice does not lie in the tensor, or the number of bytes is not that of the slice.
    """

    group: str
    name: str
    dtype: str
    global_shape: Ints
    offset: Ints
    shape: Ints
    data: np.ndarray | Callable[[], np.ndarray]
    copy_fn: Callable[[np.ndarray], None] | None = None

    def __post_init__(self) -> None:
        where = f"shard {self.group}/{self.name}"
        if not GROUP_NAME.fullmatch(self.group):
            raise CheckpointError(f"{where}: group must match {GROUP_NAME.pattern}")
        if not self.name or self.name.startswith("__") or "#" in self.name or not self.name.isprintable():
            raise CheckpointError(f"{where}: name must be printable, without '#', and not begin with '__'")
        item_bytes(self.dtype)
        if not is_inside((self.offset, self.shape), self.global_shape):
            raise CheckpointError(
                f"{where}: slice at {list(self.offset)} of shape {list(self.shape)} "
                f"does not lie in a tensor of shape {list(self.global_shape)}"
            )
        if isinstance(self.data, np.ndarray):
            self._check(self.data)

    @property
    def n_bytes(self) -> int:
        """Bytes of the slice."""
        return math.prod(self.shape) * item_bytes(self.dtype)

    def _check(self, data: np.ndarray) -> np.ndarray:
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous or data.size != self.n_bytes:
            raise CheckpointError(
                f"shard {self.group}/{self.name}: data must be {self.n_bytes} contiguous bytes in a one-dimensional "
                f"uint8 array, not shape {list(data.shape)} of {data.dtype}"
            )
        return data

    def bytes(self) -> np.ndarray:
        """Return the slice's bytes, calling `data` if it is a function."""
        return self._check(self.data if isinstance(self.data, np.ndarray) else self.data())

    def copy_into(self, target: np.ndarray) -> None:
        """Copy the slice's bytes into a one-dimensional uint8 array of the same size."""
        self._check(target)
        if self.copy_fn is not None:
            self.copy_fn(target)
        else:
            np.copyto(target, self.bytes())
