"""Safetensors format: a writer and a header reader.

A file is 8 bytes (the header's length, little-endian), the header (a JSON object of name → dtype, shape, data_offsets,
padded with spaces) and the tensors' bytes without gaps. The writer lays out the header from shapes alone and then takes
the tensors one by one, hashing them (xxh3, 128 bits) while writing; wide elements come first so that every tensor is
aligned. The reader checks that sizes match shapes and dtypes and that the tensors tile the data, without overlap or
gap.

Cost: one pass over the bytes; memory: the caller's tensor.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lt_ckpt import files, json_objects
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.shards import Ints
from lt_ckpt.stored_slices import StoredSlice

MAX_HEADER_BYTES = 100_000_000
"""Header limit, the same as that of the safetensors library."""

HASH_BLOCK_BYTES = 2**20
"""Bytes hashed and written at a time: still in the processor's cache for the second pass."""

WRITEBACK_BYTES = 32 * 2**20
"""Bytes after which the system is told to write them."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Element type (safetensors code) and shape of a tensor."""

    dtype: str
    shape: Ints

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Array in a file, according to the file's header.

    Attributes:
        spec: Dtype and shape of the tensor.
        byte_offset: Byte in the file of its first element.
        strides: Elements between neighbors, per dimension; None: it is contiguous.
    """

    spec: TensorSpec
    byte_offset: int
    strides: Ints | None = None

    def stored_slice(self, file: str, offset: Ints | None = None) -> StoredSlice:
        """Return it as the slice of a tensor at an offset; by default the whole tensor."""
        at = (0,) * len(self.spec.shape) if offset is None else offset
        return StoredSlice(
            file=file, byte_offset=self.byte_offset, offset=at, shape=self.spec.shape, strides=self.strides
        )


def file_order(entries: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """Return the names in file order: wide elements first, else as given."""
    return tuple(sorted(entries, key=lambda name: -item_bytes(entries[name].dtype)))


def make_header(entries: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, StoredArray]]:
    """Lay out a file.

    Returns:
        The bytes before the first tensor, and the position of each tensor.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name in file_order(entries):
        spec = entries[name]
        end = position + spec.n_bytes
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json_objects.dumps(header, "the header").rstrip()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"a header of {len(text)} bytes is more than the {MAX_HEADER_BYTES} that readers accept")
    raw = len(text).to_bytes(8, "little") + text
    placed = {
        name: StoredArray(entries[name], len(raw) + header[name]["data_offsets"][0]) for name in file_order(entries)
    }
    return raw, placed


def write_safetensors(
    path: Path, entries: Mapping[str, TensorSpec], metadata: Mapping[str, str], read: Callable[[str], np.ndarray]
) -> tuple[bytes, dict[str, StoredArray], dict[str, str]]:
    """Write a new file and flush it to the disk; an exception leaves it unfinished.

    Args:
        path: The file to make.
        entries: The tensors.
        metadata: Text for readers.
        read: Returns a tensor's bytes, one-dimensional uint8; called for each in `file_order`, when it is written.

    Returns:
        The bytes before the first tensor; the position of each tensor, in file order; and its xxh3_128 as hex.
    """
    raw, placed = make_header(entries, metadata)
    hashes: dict[str, str] = {}
    n_waiting = 0
    descriptor = files.create_file(path)
    try:
        files.write_all(descriptor, raw)
        for name in placed:
            view, digest = read(name).data, xxhash.xxh3_128()
            assert len(view) == entries[name].n_bytes, name
            for start in range(0, len(view), HASH_BLOCK_BYTES):
                part = view[start : start + HASH_BLOCK_BYTES]
                digest.update(part)
                files.write_all(descriptor, part)
                n_waiting += len(part)
                if n_waiting >= WRITEBACK_BYTES:
                    files.start_writeback(descriptor)
                    n_waiting = 0
            hashes[name] = digest.hexdigest()
        files.fsync(descriptor)
        files.start_writeback(descriptor)
    finally:
        os.close(descriptor)
    return raw, placed, hashes


def read_header(path: Path) -> dict[str, StoredArray]:
    """Return the position of each tensor of a safetensors file, in file order.

    Raises:
        CheckpointError: The file cannot be read, or violates the format.
    """
    with translate_os_errors("reading", path), open(path, "rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        header_bytes = 8 + int.from_bytes(prefix, "little")
        if n_bytes < 10 or header_bytes > min(n_bytes, MAX_HEADER_BYTES + 8):
            raise CheckpointError(f"{path}: is no safetensors file, or is truncated: its header exceeds the file")
        header = json_objects.loads(file.read(header_bytes - 8), str(path))
    with json_objects.translate_format_errors(str(path)):
        header.pop("__metadata__", None)
        return _parse_entries(header, header_bytes, n_bytes, str(path))


def _parse_entries(header: dict[str, Any], header_bytes: int, n_bytes: int, source: str) -> dict[str, StoredArray]:
    """Check the entries of a header and return them in file order."""
    position = header_bytes
    found: dict[str, StoredArray] = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        spec = TensorSpec(entry["dtype"], tuple(entry["shape"]))
        are_sizes = all(type(size) is int and size >= 0 for size in spec.shape)
        if not are_sizes or header_bytes + begin != position or end - begin != spec.n_bytes:
            raise CheckpointError(
                f"{source}: tensor {name!r} of {spec.dtype} {list(spec.shape)} at {begin} to {end} does not follow "
                "the one before it, or has another size; the file is damaged"
            )
        found[name] = StoredArray(spec, position)
        position += spec.n_bytes
    if position != n_bytes:
        raise CheckpointError(
            f"{source}: has {n_bytes} bytes, its header lists {position}; the file is truncated or has trailing bytes"
        )
    return found
