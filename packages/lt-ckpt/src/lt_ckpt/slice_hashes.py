"""Hashes of stored slices that were read as wholes, taken from the memory they were read into.

A slice of which only a part was read cannot be compared: whoever reshards verifies the checkpoint beforehand, once, by
one rank (`lt_ckpt.find_latest_valid`). Threads hash while others do; a slice that is not contiguous in its target is
copied block by block.

Cost: one pass over the memory of whole slices; a block per thread.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from lt_ckpt import files
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.records import SliceRecord, TensorRecord
from lt_ckpt.shards import Box, intersect, split_rows

HASHING_THREADS = 4


def check_whole_slices(
    folder: Path, tensors: Sequence[tuple[TensorRecord, str, Box]], targets: Sequence[np.ndarray]
) -> None:
    """Compare the stored slices that lie completely in the boxes that were read with their hashes.

    Args:
        folder: Folder of the records' files.
        tensors: For each box that was read: the tensor's record, its name for messages, the box.
        targets: What was read of each: one-dimensional uint8.

    Raises:
        CheckpointError: Bytes have changed since they were written.
    """

    def check(found: tuple[SliceRecord, np.ndarray, str]) -> None:
        piece, values, name = found
        digest = xxhash.xxh3_128()
        for offset, shape in split_rows(values.shape, files.BLOCK_BYTES // values.itemsize):
            block = values[(..., *(slice(o, o + n) for o, n in zip(offset, shape, strict=True)))]
            digest.update(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
        if digest.hexdigest() != piece.xxh3_128:
            raise CheckpointError(f"{folder / piece.file}: {name}: its bytes have changed since they were written")

    whole = list(_find_whole_slices(tensors, targets))
    if sum(values.nbytes for _, values, _ in whole) < files.BLOCK_BYTES:  # not worth a thread
        for found in whole:
            check(found)
        return
    with ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="lt-ckpt-hash") as pool:
        for done in [pool.submit(check, found) for found in whole]:
            done.result()


def _find_whole_slices(
    tensors: Sequence[tuple[TensorRecord, str, Box]], targets: Sequence[np.ndarray]
) -> Iterator[tuple[SliceRecord, np.ndarray, str]]:
    """Yield each hashed slice that was read as a whole, its elements, and the tensor's name."""
    for (record, name, box), target in zip(tensors, targets, strict=True):
        values = target.view(f"<u{item_bytes(record.dtype)}").reshape(box[1])
        for piece in record.slices:
            own = piece.offset, piece.shape
            if piece.xxh3_128 and intersect(own, box) == own:
                begin = (o - b for o, b in zip(piece.offset, box[0], strict=True))
                yield piece, values[(..., *(slice(o, o + n) for o, n in zip(begin, piece.shape, strict=True)))], name
