"""Hashes of stored slices that were read as wholes, taken from the memory they were read into.

A slice that lies in its target as in its file is hashed by the thread that has read the end of it (`check_run`), while
others read on; the rest afterwards, one that is not contiguous in its target block by block. A slice of which only a
part was read cannot be compared: whoever reshards verifies the checkpoint beforehand, once, by one rank
(`lt_ckpt.find_latest_valid`).

Cost: one pass over the memory of whole slices; a block where they are not contiguous.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from lt_ckpt import files
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.records import SliceRecord, TensorRecord
from lt_ckpt.shards import Box, intersect, split_rows


class SliceHashes:
    """Comparison of the slices that lie completely in boxes to read with their hashes.

    Args:
        folder: Folder of the records' files.
        tensors: For each box to read: the tensor's record, its name for messages, the box.
    """

    def __init__(self, folder: Path, tensors: Sequence[tuple[TensorRecord, str, Box]]) -> None:
        self._folder, self._tensors = folder, tensors
        self._whole = [
            [
                piece
                for piece in record.slices
                if piece.xxh3_128 and intersect((piece.offset, piece.shape), box) == (piece.offset, piece.shape)
            ]
            for record, _, box in tensors
        ]
        self._runs = {
            (piece.file, piece.byte_offset, record.slice_bytes(piece)): (piece, name)
            for (record, name, _), pieces in zip(tensors, self._whole, strict=True)
            for piece in pieces
        }
        self._checked: set[SliceRecord] = set()

    def check_run(self, file: str, position: int, data: memoryview) -> None:
        """Compare bytes that were read from a position of a file, if they are a whole slice.

        Raises:
            CheckpointError: They have changed since they were written.
        """
        found = self._runs.get((file, position, len(data)))
        if found is not None:
            piece, name = found
            self._compare(piece, name, xxhash.xxh3_128_hexdigest(data))
            self._checked.add(piece)

    def check_rest(self, targets: Sequence[np.ndarray]) -> None:
        """Compare the other slices.

        Args:
            targets: What was read of each box: one-dimensional uint8.

        Raises:
            CheckpointError: Bytes have changed since they were written.
        """
        for (record, name, box), pieces, target in zip(self._tensors, self._whole, targets, strict=True):
            values = target.view(f"<u{item_bytes(record.dtype)}").reshape(box[1])
            for piece in pieces:
                if piece not in self._checked:
                    at = tuple(o - b for o, b in zip(piece.offset, box[0], strict=True))
                    self._compare(piece, name, _hash_box(values, (at, piece.shape)))

    def _compare(self, piece: SliceRecord, name: str, digest: str) -> None:
        if digest != piece.xxh3_128:
            raise CheckpointError(
                f"{self._folder / piece.file}: {name}: its bytes have changed since they were written"
            )


def _hash_box(values: np.ndarray, box: Box) -> str:
    """Return the hash of a box of an array, in C order."""
    digest = xxhash.xxh3_128()
    for begin, shape in split_rows(box[1], files.BLOCK_BYTES // values.itemsize):
        first = (b + o for b, o in zip(box[0], begin, strict=True))
        block = values[(..., *(slice(o, o + n) for o, n in zip(first, shape, strict=True)))]
        digest.update(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
