"""Copy planner: stored slices × requested slices → copies, sorted by file position.

Each requested slice is intersected with the stored slices of its tensor; each intersection is one `SliceCopy`, a box of
the same shape in a stored slice and in a target buffer. Loading, resharding and export are all this join: nothing else
in the package computes byte offsets. `run_copies` executes a plan. A box that is contiguous on both sides, or whose
contiguous runs are long, is read straight into the target; many short runs are read as whole rows into a small buffer
and copied from there. A matrix stored as its transpose is always read that way.

Cost: O(stored slices of the tensor) per requested slice; memory: the targets and one staging buffer of `STAGING_BYTES`
(or one row, if that is longer).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lt_ckpt.errors import CheckpointError
from lt_ckpt.shards import Box, Ints, intersect

STAGING_BYTES = 8 * 2**20
"""Size of the staging buffer for copies of many short runs."""

MIN_RUN_BYTES = 16 * 2**10
"""Runs at least this long are read one by one; shorter ones together with the bytes between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSlice:
    """Slice of a tensor stored in a file: `offset` and `shape` in the tensor.

    Its array begins at `byte_offset` in `file`; the slice is all of that array or, with `array_shape`, the box at
    `array_offset` of an array of that shape (part of a fused tensor, or a view into a larger storage). If `transposed`,
    the file holds the array's transpose (column after column); the shapes and offsets are the array's.
    """

    file: str
    byte_offset: int
    offset: Ints
    shape: Ints
    array_shape: Ints | None = None
    array_offset: Ints | None = None
    transposed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceCopy:
    """Box to copy from a stored slice to a target buffer.

    Attributes:
        file: The file that holds the stored slice.
        byte_offset: Byte in the file at which the stored array begins.
        stored_shape: Shape of the stored array, as the file holds it.
        stored_offset: Offset of the box in the stored array.
        target_index: Index of the requested slice.
        target_shape: Shape of the requested slice.
        target_offset: Offset of the box in the requested slice.
        shape: Shape of the box, as the file holds it.
        item_bytes: Bytes per element.
        transposed: Whether the target needs the transpose of the box.
    """

    file: str
    byte_offset: int
    stored_shape: Ints
    stored_offset: Ints
    target_index: int
    target_shape: Ints
    target_offset: Ints
    shape: Ints
    item_bytes: int
    transposed: bool = False

    @property
    def first_byte(self) -> int:
        """Position in the file of the box's first element."""
        return self.byte_offset + self.item_bytes * _flat_index(self.stored_shape, self.stored_offset)


def _flat_index(shape: Ints, index: Ints) -> int:
    """Return the C-order position of an index."""
    position = 0
    for size, i in zip(shape, index, strict=True):
        position = position * size + i
    return position


def plan_copies(wanted: Sequence[tuple[Box, Sequence[StoredSlice], int, str]]) -> list[SliceCopy]:
    """Join requested slices with stored ones.

    Args:
        wanted: For each target: the requested box, the stored slices of its tensor (not overlapping), bytes per
            element, and the tensor's name for messages.

    Returns:
        The copies, sorted by file and first byte, so that executing them in order reads each file front to back.

    Raises:
        CheckpointError: The stored slices do not cover a requested slice.
    """
    copies: list[SliceCopy] = []
    for target, (box, stored, item, name) in enumerate(wanted):
        n_found = 0
        for source in stored:
            common = intersect(box, (source.offset, source.shape))
            if common is None:
                continue
            offset, shape = common
            n_found += math.prod(shape)
            at = source.array_offset or (0,) * len(shape)
            flip = -1 if source.transposed else 1  # order of the dimensions in the file
            copies.append(
                SliceCopy(
                    file=source.file,
                    byte_offset=source.byte_offset,
                    stored_shape=(source.shape if source.array_shape is None else source.array_shape)[::flip],
                    stored_offset=tuple(o - s + a for o, s, a in zip(offset, source.offset, at, strict=True))[::flip],
                    target_index=target,
                    target_shape=box[1],
                    target_offset=tuple(o - t for o, t in zip(offset, box[0], strict=True)),
                    shape=shape[::flip],
                    item_bytes=item,
                    transposed=source.transposed,
                )
            )
        if n_found != math.prod(box[1]):
            raise CheckpointError(
                f"{name}: {n_found} of the {math.prod(box[1])} requested elements at offset {list(box[0])} are stored"
            )
    copies.sort(key=lambda copy: (copy.file, copy.first_byte))
    return copies


ReadAt = Callable[[str, int, memoryview], None]
"""Fills a buffer from a file, starting at a byte position: (file, position, buffer)."""


def run_copies(
    copies: Sequence[SliceCopy],
    targets: Sequence[np.ndarray],
    read_at: ReadAt,
    *,
    deferred_read_at: ReadAt | None = None,
) -> None:
    """Execute a plan.

    Args:
        copies: What `plan_copies` returned.
        targets: One buffer per requested slice: one-dimensional uint8, as many bytes as the slice has.
        read_at: Reads bytes of a file into a buffer, all of it or an error.
        deferred_read_at: Takes the reads that go straight into a target; they may finish after it returns.
    """
    stage = np.empty(0, np.uint8)
    for copy in copies:
        element = np.dtype(f"<u{copy.item_bytes}")
        target = targets[copy.target_index].view(element).reshape(copy.target_shape)
        shape = copy.shape[::-1] if copy.transposed else copy.shape
        # The ellipsis keeps a 0-dim tensor a view.
        box = target[(..., *(slice(o, o + n) for o, n in zip(copy.target_offset, shape, strict=True)))]
        if copy.transposed:
            box = box.T
        row_bytes = copy.item_bytes * math.prod(copy.stored_shape[1:])
        needed = min(max(STAGING_BYTES, row_bytes), copy.item_bytes * math.prod(copy.stored_shape))
        if stage.size < needed and not _should_read_directly(copy):
            stage = np.empty(needed, np.uint8)
        _run_copy(copy, box, stage, read_at, deferred_read_at or read_at)


def _outer_dims(copy: SliceCopy) -> tuple[int, int]:
    """Return the number of leading dimensions that index runs contiguous on both sides, and a run's bytes."""
    run = copy.item_bytes
    for dim in reversed(range(len(copy.shape))):
        run *= copy.shape[dim]
        if not copy.shape[dim] == copy.stored_shape[dim] == copy.target_shape[dim]:
            return dim, run
    return 0, run


def single_contiguous_copy(copies: Sequence[SliceCopy]) -> SliceCopy | None:
    """Return a plan's only copy if its bytes are contiguous in file and target; else None."""
    if len(copies) != 1 or copies[0].transposed:
        return None
    outer, _ = _outer_dims(copies[0])
    return copies[0] if math.prod(copies[0].shape[:outer]) == 1 else None


def _should_read_directly(copy: SliceCopy) -> bool:
    if copy.transposed:
        return False
    outer, run = _outer_dims(copy)
    return math.prod(copy.shape[:outer]) == 1 or run >= MIN_RUN_BYTES


def _run_copy(copy: SliceCopy, box: np.ndarray, stage: np.ndarray, read_at: ReadAt, deferred_read_at: ReadAt) -> None:
    if _should_read_directly(copy):
        outer, _ = _outer_dims(copy)
        tail = copy.stored_offset[outer:]
        for index in np.ndindex(*copy.shape[:outer]):
            stored_index = (*(o + i for o, i in zip(copy.stored_offset, index, strict=False)), *tail)
            position = copy.byte_offset + copy.item_bytes * _flat_index(copy.stored_shape, stored_index)
            # [index] of a 0-dim or contiguous part is a view; ravel and view as bytes do not copy it.
            run = box[index] if index else box
            deferred_read_at(copy.file, position, run.reshape(-1).view(np.uint8).data)
        return
    row_bytes = copy.item_bytes * math.prod(copy.stored_shape[1:])
    rows = max(1, stage.size // row_bytes)
    columns = tuple(slice(o, o + n) for o, n in zip(copy.stored_offset[1:], copy.shape[1:], strict=True))
    for start in range(0, copy.shape[0], rows):
        n_rows = min(rows, copy.shape[0] - start)
        part = stage[: n_rows * row_bytes]
        read_at(copy.file, copy.byte_offset + (copy.stored_offset[0] + start) * row_bytes, part.data)
        block = part.view(box.dtype).reshape(n_rows, *copy.stored_shape[1:])
        box[start : start + n_rows] = block[(slice(None), *columns)]
