"""The planner: stored slices × wanted slices → copies, sorted by where they lie in the files.

Each wanted slice is intersected with the stored slices of its tensor; each intersection is one `Copy`, a box of the
same shape in a stored slice and in a target buffer. Loading, resharding and export are all this join: nothing else in
the package computes byte offsets. `run_copies` carries a plan out. A box that is contiguous on both sides, or whose
contiguous runs are long, is read straight into the target; many short runs are read as whole rows into a small buffer
and copied from there. A matrix whose file holds its transpose is always read that way.

Cost: O(stored slices of the tensor) per wanted slice; memory: the targets and one staging buffer of `STAGE_BYTES`
(or one row, if that is longer).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lt_ckpt.errors import CheckpointError
from lt_ckpt.shards import Box, Ints, intersect

STAGE_BYTES = 8 * 2**20
"""Size of the staging buffer for copies of many short runs."""

RUN_BYTES = 16 * 2**10
"""A run at least this long is read by itself; shorter ones are read with what lies between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A slice that a file holds: `offset` and `shape` in the tensor.

    It lies in an array whose bytes begin at `begin` in `file`: it is all of that array, or, where `whole` is given, the
    box at `at` of an array of that shape (a part of a fused tensor, or a view into a larger storage). Where
    `transposed` is set, the file holds the transpose of that array (column after column); the numbers are the array's.
    """

    file: str
    begin: int
    offset: Ints
    shape: Ints
    whole: Ints | None = None
    at: Ints | None = None
    transposed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One box to be copied from a stored slice to a target buffer.

    Attributes:
        file: The file that holds the stored slice.
        begin: Byte in the file at which the stored array begins.
        stored_shape: Shape of the stored array, as the file holds it.
        stored_offset: Where the box begins in the stored array.
        target: Index of the wanted slice.
        target_shape: Shape of the wanted slice.
        target_offset: Where the box begins in the wanted slice.
        shape: Shape of the box, as the file holds it.
        item_bytes: Bytes per element.
        transposed: Whether the target wants the transpose of the box.
    """

    file: str
    begin: int
    stored_shape: Ints
    stored_offset: Ints
    target: int
    target_shape: Ints
    target_offset: Ints
    shape: Ints
    item_bytes: int
    transposed: bool = False

    @property
    def first_byte(self) -> int:
        """Position in the file of the box's first element."""
        return self.begin + self.item_bytes * _flat(self.stored_shape, self.stored_offset)


def _flat(shape: Ints, index: Ints) -> int:
    """Returns the C-order position of an index."""
    position = 0
    for size, i in zip(shape, index, strict=True):
        position = position * size + i
    return position


def plan_copies(wanted: Sequence[tuple[Box, Sequence[Stored], int, str]]) -> list[Copy]:
    """Joins wanted slices with stored ones.

    Args:
        wanted: For each target: the wanted box, the stored slices of its tensor (not overlapping), bytes per element,
            and the tensor's name for messages.

    Returns:
        The copies, sorted by file and first byte, so that carrying them out in order reads each file forwards.

    Raises:
        CheckpointError: The stored slices do not hold all of a wanted slice.
    """
    copies: list[Copy] = []
    for target, (box, stored, item, name) in enumerate(wanted):
        held = 0
        for source in stored:
            common = intersect(box, (source.offset, source.shape))
            if common is None:
                continue
            offset, shape = common
            held += math.prod(shape)
            at = source.at or (0,) * len(shape)
            turn = -1 if source.transposed else 1  # what the file holds has its dimensions in this order
            copies.append(
                Copy(
                    file=source.file,
                    begin=source.begin,
                    stored_shape=(source.shape if source.whole is None else source.whole)[::turn],
                    stored_offset=tuple(o - s + a for o, s, a in zip(offset, source.offset, at, strict=True))[::turn],
                    target=target,
                    target_shape=box[1],
                    target_offset=tuple(o - t for o, t in zip(offset, box[0], strict=True)),
                    shape=shape[::turn],
                    item_bytes=item,
                    transposed=source.transposed,
                )
            )
        if held != math.prod(box[1]):
            raise CheckpointError(
                f"{name}: {held} of the {math.prod(box[1])} wanted elements at offset {list(box[0])} are stored"
            )
    copies.sort(key=lambda copy: (copy.file, copy.first_byte))
    return copies


ReadAt = Callable[[str, int, memoryview], None]
"""Fills the buffer from a file, beginning at a byte position: (file, position, buffer)."""


def run_copies(
    copies: Sequence[Copy], targets: Sequence[np.ndarray], read_at: ReadAt, *, later: ReadAt | None = None
) -> None:
    """Carries out a plan.

    Args:
        copies: What `plan_copies` returned.
        targets: One buffer per wanted slice: one-dimensional uint8, as many bytes as the slice has.
        read_at: Reads bytes of a file into a buffer, all of it or an error.
        later: Takes the reads that go straight into a target, and need not be done when it returns.
    """
    stage = np.empty(0, np.uint8)
    for copy in copies:
        element = np.dtype(f"<u{copy.item_bytes}")
        whole = targets[copy.target].view(element).reshape(copy.target_shape)
        shape = copy.shape[::-1] if copy.transposed else copy.shape
        # The ellipsis keeps a 0-dim tensor a view.
        box = whole[(..., *(slice(o, o + n) for o, n in zip(copy.target_offset, shape, strict=True)))]
        if copy.transposed:
            box = box.T
        row_bytes = copy.item_bytes * math.prod(copy.stored_shape[1:])
        needed = min(max(STAGE_BYTES, row_bytes), copy.item_bytes * math.prod(copy.stored_shape))
        if stage.size < needed and not _reads_directly(copy):
            stage = np.empty(needed, np.uint8)
        _run_copy(copy, box, stage, read_at, later or read_at)


def _outer_dims(copy: Copy) -> tuple[int, int]:
    """Returns how many leading dimensions number the runs that are contiguous on both sides, and a run's bytes."""
    run = copy.item_bytes
    for dim in reversed(range(len(copy.shape))):
        run *= copy.shape[dim]
        if not copy.shape[dim] == copy.stored_shape[dim] == copy.target_shape[dim]:
            return dim, run
    return 0, run


def one_run(copies: Sequence[Copy]) -> Copy | None:
    """Returns the one copy of a plan whose bytes lie side by side in a file, as they are wanted; else None."""
    if len(copies) != 1 or copies[0].transposed:
        return None
    outer, _ = _outer_dims(copies[0])
    return copies[0] if math.prod(copies[0].shape[:outer]) == 1 else None


def _reads_directly(copy: Copy) -> bool:
    if copy.transposed:
        return False
    outer, run = _outer_dims(copy)
    return math.prod(copy.shape[:outer]) == 1 or run >= RUN_BYTES


def _run_copy(copy: Copy, box: np.ndarray, stage: np.ndarray, read_at: ReadAt, later: ReadAt) -> None:
    if _reads_directly(copy):
        outer, _ = _outer_dims(copy)
        tail = copy.stored_offset[outer:]
        for index in np.ndindex(*copy.shape[:outer]):
            stored_index = (*(o + i for o, i in zip(copy.stored_offset, index, strict=False)), *tail)
            position = copy.begin + copy.item_bytes * _flat(copy.stored_shape, stored_index)
            # [index] of a 0-dim or contiguous part is a view; ravel and view as bytes do not copy it.
            run = box[index] if index else box
            later(copy.file, position, run.reshape(-1).view(np.uint8).data)
        return
    row_bytes = copy.item_bytes * math.prod(copy.stored_shape[1:])
    rows = max(1, stage.size // row_bytes)
    columns = tuple(slice(o, o + n) for o, n in zip(copy.stored_offset[1:], copy.shape[1:], strict=True))
    for start in range(0, copy.shape[0], rows):
        n_rows = min(rows, copy.shape[0] - start)
        part = stage[: n_rows * row_bytes]
        read_at(copy.file, copy.begin + (copy.stored_offset[0] + start) * row_bytes, part.data)
        block = part.view(box.dtype).reshape(n_rows, *copy.stored_shape[1:])
        box[start : start + n_rows] = block[(slice(None), *columns)]
