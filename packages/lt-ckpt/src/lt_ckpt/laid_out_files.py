"""Files that are laid out first and then filled tensor by tensor, in any order and by several threads.

A format's `LayOut` writes the headers of a file and says where each tensor's bytes go. `write_layout` then reads the
model tensors in blocks of rows, each block once, and writes the boxes of it to all places that the layout has for
them. So every source byte is read once, every target byte written once, and memory is a block per thread, whether the
output is one file or thousands.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from lt_ckpt import files
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.layout import FileLayout, Layout, TensorRegion, stored_specs
from lt_ckpt.parallel import iter_in_threads
from lt_ckpt.shards import Box, intersect, split_rows
from lt_ckpt.tensorfile import TensorSpec, make_header

BLOCK_BYTES = 8 * 2**20
"""Bytes of a tensor that a thread reads, casts and writes in one go."""

Place = tuple[Path, int]
"""File, and the byte in it at which a tensor's bytes begin."""

LayOut = Callable[[Path, FileLayout, Mapping[str, TensorSpec]], Mapping[str, Place]]
"""Writes the headers of a file of tensors (key → spec); returns the place of each."""

ReadBlock = Callable[[str, Box], np.ndarray]
"""Returns a box of a model tensor in the target's dtype, as unsigned integers, of the box's shape."""

CountBytes = Callable[[int], None]
Settle = Callable[[Path, int], None]
"""Told that the bytes of a file up to a position do not change any more."""
Fill = Callable[[Path, ReadBlock, CountBytes, Settle], None]
"""Writes all tensor files of an output into a folder."""


@dataclass(slots=True)
class _Destination:
    """Region of a model tensor, the place of its first row in a file, and the bytes of it that are written."""

    region: TensorRegion
    path: Path
    byte_offset: int
    n_bytes: int
    n_written: int = 0

    def write(self, box: Box, block: np.ndarray) -> int:
        """Write the part of a block of whole rows that belongs here; return its bytes."""
        common = intersect(self.region.box, box) if box[1] else box
        if common is None:
            return 0
        part = block[tuple(slice(o - b, o - b + n) for o, b, n in zip(common[0], box[0], common[1], strict=True))]
        first_row = common[0][0] - self.region.offset[0] if box[1] else 0
        position = self.byte_offset + first_row * prod(self.region.shape[1:]) * block.itemsize
        pwrite((self.path, position), np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        return part.nbytes


def write_layout(layout: Layout, specs: Mapping[str, TensorSpec], lay_out: LayOut) -> Fill:
    """Return the function that writes the files of a layout.

    Args:
        layout: The files, whose tensors consist of boxes with all columns of the stored tensor.
        specs: Model tensor → dtype and shape.
        lay_out: Lays out one file.
    """

    def fill(folder: Path, read: ReadBlock, count_bytes: CountBytes, settle: Settle) -> None:
        destinations: dict[str, list[_Destination]] = {}
        waiting: dict[Path, list[_Destination]] = {}
        for file in layout:
            path = folder / file.path
            files.make_folders(path.parent)
            stored = stored_specs(file.tensors, specs)
            places = lay_out(path, file, stored)
            for tensor in file.tensors:
                target, begin = places[tensor.key]
                row_bytes = prod(tensor.shape[1:]) * item_bytes(stored[tensor.key].dtype)
                for region in tensor.regions:
                    assert region.shape[1:] == tensor.shape[1:], f"{tensor.key}: joined along columns"
                    at = begin + (region.stored_offset[0] * row_bytes if tensor.shape else 0)
                    n_bytes = prod(region.shape) * item_bytes(stored[tensor.key].dtype)
                    destination = _Destination(region, target, at, n_bytes)
                    destinations.setdefault(region.name, []).append(destination)
                    waiting.setdefault(target, []).append(destination)
        for found in waiting.values():
            found.sort(key=lambda destination: -destination.byte_offset)

        def copy(name: str, box: Box) -> list[tuple[_Destination, int]]:
            block = read(name, box)
            return [(destination, destination.write(box, block)) for destination in destinations[name]]

        blocks = [
            (name, box)
            for name in destinations
            for box in split_rows(specs[name].shape, BLOCK_BYTES // item_bytes(specs[name].dtype))
        ]
        for written in iter_in_threads(copy, blocks):
            for destination, n_bytes in written:
                count_bytes(n_bytes)
                destination.n_written += n_bytes
                ahead = waiting[destination.path]
                while ahead and ahead[-1].n_written == ahead[-1].n_bytes:
                    ahead.pop()
                if ahead:
                    settle(destination.path, ahead[-1].byte_offset + ahead[-1].n_written)

    return fill


def pwrite(place: Place, data: memoryview) -> None:
    """Write bytes at a place of an existing file."""
    path, position = place
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        while len(data):
            n = os.pwrite(descriptor, data, position)
            data, position = data[n:], position + n
    finally:
        os.close(descriptor)


def lay_out_safetensors(path: Path, file: FileLayout, tensors: Mapping[str, TensorSpec]) -> dict[str, Place]:
    """Lay out a safetensors file (`LayOut`)."""
    header, placed = make_header(tensors, {"format": "pt"})
    descriptor = files.create_file(path)
    try:
        files.write_all(descriptor, header)
        os.ftruncate(descriptor, len(header) + sum(spec.n_bytes for spec in tensors.values()))
    finally:
        os.close(descriptor)
    return {key: (path, stored.byte_offset) for key, stored in placed.items()}
