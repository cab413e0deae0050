"""Files of a pack of several groups: workers write the blocks of groups, which are then joined.

A block's arrays are files in a folder beside; joining copies each to its place in the pack's `.npy` file and removes
it, so that the disk never holds much more than the pack. The fingerprint is computed meanwhile.

Cost: the pack is written, read and written once more, in pieces of one group.
"""

import hashlib
import io
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.packing.groups import Group, PackMode, document_dtype, fill_group
from lt_data.storage import create_file, fsync, read_file, translate_os_errors, write, write_file
from lt_data.store.token_store import TokenStore


@dataclass(frozen=True)
class StoreLengths:
    """Lengths of a store's documents, read by ranges.

    Attributes:
        store: the store.
    """

    store: TokenStore

    @property
    def size(self) -> int:
        """Number of documents."""
        return self.store.n_documents

    def __getitem__(self, documents: slice, /) -> np.ndarray:
        """Return the lengths of a range (int32)."""
        first, last, _ = documents.indices(self.size)
        return self.store.read_lengths(first, last)


@dataclass(frozen=True, kw_only=True)
class BlockSize:
    """Size of a block whose arrays are in files.

    Attributes:
        n_slices: its slices.
        n_rows: its rows.
        max_slices_per_row: most slices of a row.
    """

    n_slices: int
    n_rows: int
    max_slices_per_row: int


@dataclass(frozen=True, kw_only=True)
class GroupPacker:
    """Packer of groups to files; a worker gets it with each group.

    Attributes:
        folder: folder of the blocks' files.
        mode: the algorithm.
        row_lengths: lengths of rows, longest first.
        n_documents: documents of all groups.
    """

    folder: Path
    mode: PackMode
    row_lengths: list[int]
    n_documents: int

    def __call__(self, number: int, group: Group) -> list[BlockSize]:
        """Pack a group and write its blocks; return their sizes, one for each row length."""
        sizes = []
        blocks = fill_group(group, self.mode, self.row_lengths, document_dtype(self.n_documents))
        for index, block in enumerate(blocks):
            for name, array in block.arrays.items():
                write_file(self.path(number, index, name), np.ascontiguousarray(array).data.cast("B"))
            sizes.append(
                BlockSize(n_slices=block.n_slices, n_rows=block.n_rows, max_slices_per_row=block.max_slices_per_row)
            )
        return sizes

    def path(self, number: int, index: int, name: str) -> Path:
        """Return the file of an array of the block of group `number` and row length `index`."""
        return self.folder / f"{number:06}-{index:02}-{name}"


def pack_groups(groups: Iterable[Group], packer: GroupPacker, workers: int) -> list[list[BlockSize]]:
    """Pack all groups, each by any worker; return the sizes of their blocks by group and row length.

    Raises:
        DataError: a file system error, or a worker process died.
    """
    if workers == 1:
        return [packer(number, group) for number, group in enumerate(groups)]
    sizes: list[list[BlockSize]] = []
    in_flight: deque[Future[list[BlockSize]]] = deque()
    with _open_executor(workers) as executor:
        for number, group in enumerate(groups):
            if len(in_flight) > workers:  # one more than are at work: a group's lengths are in memory until then
                sizes.append(in_flight.popleft().result())
            in_flight.append(executor.submit(packer, number, group))
        sizes.extend(future.result() for future in in_flight)
    return sizes


@contextmanager
def _open_executor(workers: int) -> Iterator[ProcessPoolExecutor]:
    executor = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        yield executor
    except BrokenProcessPool as exc:
        raise DataError("a worker process died; if memory ran out (see dmesg), use fewer workers") from exc
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def join_blocks(
    packer: GroupPacker,
    sizes: list[list[BlockSize]],
    target: Path,
    arrays: dict[str, np.dtype[Any]],
    digest: "hashlib._Hash",
) -> dict[str, int]:
    """Join the blocks' arrays to `.npy` files, removing the blocks; return the number of items of each.

    Args:
        packer: the packer that wrote the blocks.
        sizes: sizes by group and row length.
        target: folder of the `.npy` files.
        arrays: dtypes by name, in the order in which they are hashed.
        digest: hash that takes each array: a line with its name, dtype and size, then its items.
    """
    n_slices = sum(block.n_slices for group in sizes for block in group)
    n_rows = sum(block.n_rows for group in sizes for block in group)
    items = {name: {"row_offsets": n_rows + 1, "valid": n_rows}.get(name, n_slices) for name in arrays}
    for name, dtype in arrays.items():
        digest.update(f"{name} {dtype.str} {items[name]}\n".encode())
        path = target / f"{name}.npy"
        with translate_os_errors("write", path), create_file(path) as file:
            write(file, _npy_header(dtype, items[name]))
            for content in _joined(packer, sizes, name, dtype):
                write(file, content)
                digest.update(content)
            file.flush()
            fsync(file.fileno())
    return items


def _joined(packer: GroupPacker, sizes: list[list[BlockSize]], name: str, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Yield the bytes of an array, and remove the files of its blocks."""
    first_slice = 0
    if name == "row_offsets":
        yield np.zeros(1, dtype).tobytes()
    for index in range(len(sizes[0])):
        for number, group in enumerate(sizes):
            block, part = group[index], packer.path(number, index, name)
            content = read_file(part, max_bytes=max(block.n_slices, block.n_rows) * dtype.itemsize)
            if name == "row_offsets":
                content = (np.frombuffer(content, dtype) + first_slice).tobytes()
                first_slice += block.n_slices
            yield content
            with translate_os_errors("remove", part):
                part.unlink()


def _npy_header(dtype: np.dtype[Any], n_items: int) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype.str, "fortran_order": False, "shape": (n_items,)})
    return header.getvalue()
