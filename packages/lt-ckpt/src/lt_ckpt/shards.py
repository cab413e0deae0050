"""A shard, and the algebra of rectangular slices.

A slice (box) of a tensor is an offset and a shape, one number per dimension; a 0-dim tensor has the empty tuple for
both and one element. A `Shard` is such a slice with its bytes. `covers` tells whether boxes tile a tensor exactly once:
their volumes add up and no two overlap. The overlap test sweeps along the dimension with the most distinct starts, so
that n shards cut along one dimension cost O(n log n); slices that no mesh makes, for which it would cost O(n^2), are
refused.
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

MAX_PAIRS = 250_000
"""Slices of one tensor that are compared with one another; a grid of 1000 x 10 ranks needs 100 thousand."""

GROUP = re.compile(r"[a-z][a-z0-9_]{0,63}")


def intersect(a: Box, b: Box) -> Box | None:
    """Returns the elements that both boxes hold, or None when there are none."""
    offset = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = tuple(min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True))
    shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
    return (offset, shape) if all(n > 0 for n in shape) else None


def inside(box: Box, global_shape: Ints) -> bool:
    """Tells whether the box has the tensor's rank and lies within it."""
    offset, shape = box
    return len(offset) == len(shape) == len(global_shape) and all(
        o >= 0 and n >= 0 and o + n <= size for o, n, size in zip(offset, shape, global_shape, strict=True)
    )


def overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Returns the indices of two boxes that share an element, or None when no two do.

    Raises:
        CheckpointError: To tell would take more than `MAX_PAIRS` comparisons.
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
        if pairs > MAX_PAIRS:
            raise CheckpointError(f"{len(boxes)} slices of one tensor lie so crosswise that no program would cut it so")
        for j in active:
            if intersect(boxes[i], boxes[j]) is not None:
                return j, i
        active.append(i)
    return None


def covers(global_shape: Ints, boxes: Sequence[Box]) -> str:
    """Tells whether the boxes, all inside the tensor, hold each of its elements exactly once.

    Returns:
        The empty string when they do, else what is wrong in words (`boxes 0 and 3 overlap`).
    """
    if not boxes:
        return "no slice at all"
    clash = overlap(boxes)
    if clash is not None:
        (a_offset, a_shape), (b_offset, b_shape) = boxes[clash[0]], boxes[clash[1]]
        return (
            f"two slices overlap: offset {list(a_offset)} shape {list(a_shape)} and "
            f"offset {list(b_offset)} shape {list(b_shape)}"
        )
    held, wanted = sum(math.prod(shape) for _, shape in boxes), math.prod(global_shape)
    return "" if held == wanted else f"the slices hold {held} of {wanted} elements"


def row_blocks(shape: Ints, row_limit: int) -> list[Box]:
    """Cuts a box of this shape along its first dimension into boxes of `row_limit` elements or less, at least a row."""
    if not shape or math.prod(shape) <= row_limit:
        return [((0,) * len(shape), shape)]
    rows = max(1, row_limit // math.prod(shape[1:]))
    starts = [*range(0, shape[0], rows), shape[0]]
    rest = (0,) * (len(shape) - 1)
    return [((start, *rest), (end - start, *shape[1:])) for start, end in pairwise(starts)]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rectangular slice of one tensor, as a rank holds it.

    Attributes:
        group: What the tensor is: `weights`, `exp_avg`, `exp_avg_sq`, or any name of lower-case letters, digits, `_`.
        name: The tensor's name; for parameters the Hugging Face name.
        dtype: Safetensors code: `F32`, `BF16`, `I64`, ...
        global_shape: Shape of the whole tensor.
        offset: Where the slice begins, one number per dimension.
        shape: Shape of the slice.
        data: The slice's bytes in C order, one-dimensional uint8; or a function that returns them, called once when
            their turn to be written comes (so that a device needs to copy only one tensor at a time).
        into: A function that copies the bytes into an array of that kind, where that is quicker than through `data`.

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
    into: Callable[[np.ndarray], None] | None = None

    def __post_init__(self) -> None:
        where = f"shard {self.group}/{self.name}"
        if not GROUP.fullmatch(self.group):
            raise CheckpointError(f"{where}: group must match {GROUP.pattern}")
        if not self.name or self.name.startswith("__") or "#" in self.name or not self.name.isprintable():
            raise CheckpointError(f"{where}: a name is printable, without '#', and does not begin with '__'")
        item_bytes(self.dtype)
        if not inside((self.offset, self.shape), self.global_shape):
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
        """Returns the slice's bytes, calling `data` when it is a function."""
        return self._check(self.data if isinstance(self.data, np.ndarray) else self.data())

    def copy_into(self, target: np.ndarray) -> None:
        """Copies the slice's bytes into an array of as many bytes, one-dimensional uint8."""
        self._check(target)
        if self.into is not None:
            self.into(target)
        else:
            np.copyto(target, self.bytes())
