"""Safetensors format: a streaming writer and a header reader.

A file is 8 bytes (the header's length, little-endian), the header (a JSON object of name → dtype, shape, data_offsets,
padded with spaces) and the tensors' bytes without gaps. The writer lays out the header from shapes alone and then takes
the bytes in blocks, hashing them (xxh3, 128 bits) while writing; wide elements come first so that every tensor is
aligned. The reader checks that sizes match shapes and dtypes and that the tensors tile the data, without overlap or
gap.

Cost: one pass over the bytes; memory: the caller's blocks.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from lt_ckpt import files, json_objects
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.shards import Ints

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
class StoredTensor(TensorSpec):
    """Tensor in a file: its type and shape, and the position of its bytes."""

    byte_offset: int


@dataclass(frozen=True, kw_only=True)
class SafetensorsHeader:
    """Header of a safetensors file.

    Attributes:
        n_bytes: Size of the file.
        header_bytes: Bytes before the first tensor (the length field and the padded header).
        header_hash: xxh3_128 of those bytes, as hex.
        tensors: Name → type, shape, position; in file order.
    """

    n_bytes: int
    header_bytes: int
    header_hash: str
    tensors: dict[str, StoredTensor]


def file_order(entries: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """Return the names in file order: wide elements first, else as given."""
    return tuple(sorted(entries, key=lambda name: -item_bytes(entries[name].dtype)))


def make_header(
    entries: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, StoredTensor]]:
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
        name: StoredTensor(entries[name].dtype, entries[name].shape, len(raw) + header[name]["data_offsets"][0])
        for name in file_order(entries)
    }
    return raw, placed


class HashingSafetensorsWriter:
    """Writes one new safetensors file, tensor by tensor, and flushes it to the disk when closed.

    A context manager; leaving it by an exception closes the descriptor and leaves an unfinished file behind, so it
    belongs into a folder that is renamed only after success.

    Attributes:
        header: The file's header; set from the start.
    """

    def __init__(self, path: Path, entries: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> None:
        raw, placed = make_header(entries, metadata)
        self._waiting = list(reversed(file_order(entries)))
        self.header = SafetensorsHeader(
            n_bytes=len(raw) + sum(spec.n_bytes for spec in entries.values()),
            header_bytes=len(raw),
            header_hash=xxhash.xxh3_128_hexdigest(raw),
            tensors=placed,
        )
        self._position = self._written_back = 0
        self._descriptor = files.create_file(path)
        try:
            self._write(memoryview(raw))
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def write(self, name: str, blocks: Iterable[np.ndarray]) -> str:
        """Write the next tensor.

        Args:
            name: The next tensor in `file_order`.
            blocks: Its bytes in order, each block one-dimensional uint8.

        Returns:
            xxh3_128 of the bytes, as hex.
        """
        assert self._waiting[-1:] == [name], (name, self._waiting[-1:])
        digest, remaining = xxhash.xxh3_128(), self.header.tensors[name].n_bytes
        for block in blocks:
            view = block.data
            remaining -= len(view)
            assert remaining >= 0, name
            for start in range(0, len(view), HASH_BLOCK_BYTES):
                part = view[start : start + HASH_BLOCK_BYTES]
                digest.update(part)
                self._write(part)
        assert remaining == 0, name
        self._waiting.pop()
        return digest.hexdigest()

    def _write(self, part: memoryview) -> None:
        files.write_all(self._descriptor, part)
        self._position += len(part)
        if self._position - self._written_back >= WRITEBACK_BYTES:
            files.start_writeback(self._descriptor, self._written_back, self._position - self._written_back)
            self._written_back = self._position

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        try:
            if kind is None:
                assert not self._waiting, self._waiting
                files.fsync(self._descriptor)
                files.start_writeback(self._descriptor)
        finally:
            os.close(self._descriptor)


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: The file cannot be read, or violates the format.
    """
    with translate_os_errors("reading", path), open(path, "rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        header_bytes = 8 + int.from_bytes(prefix, "little")
        if n_bytes < 10 or header_bytes > min(n_bytes, MAX_HEADER_BYTES + 8):
            raise CheckpointError(f"{path}: is no safetensors file, or is truncated: its header exceeds the file")
        raw = prefix + file.read(header_bytes - 8)
    header = json_objects.loads(raw[8:], str(path))
    with json_objects.translate_format_errors(str(path)):
        header.pop("__metadata__", None)
        return SafetensorsHeader(
            n_bytes=n_bytes,
            header_bytes=header_bytes,
            header_hash=xxhash.xxh3_128_hexdigest(raw),
            tensors=_parse_entries(header, header_bytes, n_bytes, str(path)),
        )


def _parse_entries(header: dict[str, Any], header_bytes: int, n_bytes: int, source: str) -> dict[str, StoredTensor]:
    """Check the entries of a header and return them in file order."""
    position = header_bytes
    found: dict[str, StoredTensor] = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        tensor = StoredTensor(entry["dtype"], tuple(entry["shape"]), header_bytes + begin)
        are_sizes = all(type(size) is int and size >= 0 for size in tensor.shape)
        if not are_sizes or tensor.byte_offset != position or end - begin != tensor.n_bytes:
            raise CheckpointError(
                f"{source}: tensor {name!r} of {tensor.dtype} {list(tensor.shape)} at {begin} to {end} does not follow "
                "the one before it, or has another size; the file is damaged"
            )
        found[name] = tensor
        position += tensor.n_bytes
    if position != n_bytes:
        raise CheckpointError(
            f"{source}: has {n_bytes} bytes, its header lists {position}; the file is truncated or has trailing bytes"
        )
    return found
