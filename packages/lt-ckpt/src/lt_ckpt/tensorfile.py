"""Safetensors format: a streaming writer and a strict header reader.

A file is 8 bytes (the header's length, little-endian), the header (a JSON object of name → dtype, shape, data_offsets,
padded with spaces) and the tensors' bytes without gaps. The writer lays out the header from shapes alone and then takes
the bytes in blocks, hashing them (xxh3, 128 bits) while writing; wide elements come first so that every tensor is
aligned. The reader trusts nothing: length limits, no duplicate key, sizes that match shape and dtype, and tensors that
tile the data exactly, without overlap or gap.

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

from lt_ckpt import files, strict_json
from lt_ckpt.direct_io import DirectFileWriter
from lt_ckpt.dtypes import ITEM_BYTES, item_bytes
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.shards import Ints

MAX_HEADER_BYTES = 100_000_000
"""Header limit, the same as that of the safetensors library."""

HASH_BLOCK_BYTES = 2**20
"""Bytes hashed and written at a time: still in the processor's cache for the second pass."""


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
class StoredTensor:
    """Tensor in a file: its type and shape, and the position of its bytes."""

    dtype: str
    shape: Ints
    byte_offset: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True)
class SafetensorsHeader:
    """Header of a safetensors file.

    Attributes:
        path: The file.
        n_bytes: Size of the file.
        header_bytes: Bytes before the first tensor (the length field and the padded header).
        header_hash: xxh3_128 of those bytes, as hex.
        tensors: Name → type, shape, position; in file order.
        metadata: The text fields under `__metadata__`.
    """

    path: Path
    n_bytes: int
    header_bytes: int
    header_hash: str
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


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
    text = strict_json.dumps(header, "the header").rstrip()
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
            path=path,
            n_bytes=len(raw) + sum(spec.n_bytes for spec in entries.values()),
            header_bytes=len(raw),
            header_hash=xxhash.xxh3_128_hexdigest(raw),
            tensors=placed,
            metadata=dict(metadata),
        )
        self._file = DirectFileWriter(path, self.header.n_bytes)
        try:
            self._file.write(raw)
        except BaseException:
            self._file.close()
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
                self._file.write(part)
        assert remaining == 0, name
        self._waiting.pop()
        return digest.hexdigest()

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        try:
            if kind is None:
                assert not self._waiting, self._waiting
                self._file.sync()
        finally:
            self._file.close()


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: The file cannot be read, or violates the format.
    """
    with translate_os_errors("reading", path):
        descriptor = files.open_for_reading(path)
        try:
            n_bytes = os.fstat(descriptor).st_size
            if n_bytes < 10:
                raise CheckpointError(
                    f"{path}: {n_bytes} bytes are too short for a safetensors file; it is truncated or not one"
                )
            length = bytearray(8)
            files.read_exactly(descriptor, 0, memoryview(length), path)
            header_bytes = 8 + int.from_bytes(length, "little")
            if header_bytes > min(n_bytes, MAX_HEADER_BYTES + 8):
                raise CheckpointError(
                    f"{path}: header of {header_bytes - 8} bytes exceeds the file or the limit; the file is damaged"
                )
            raw = bytearray(header_bytes)
            files.read_exactly(descriptor, 0, memoryview(raw), path)
        finally:
            os.close(descriptor)
    header = strict_json.loads(bytes(raw[8:]), str(path))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map names to text; the file is damaged")
    return SafetensorsHeader(
        path=path,
        n_bytes=n_bytes,
        header_bytes=header_bytes,
        header_hash=xxhash.xxh3_128_hexdigest(bytes(raw)),
        tensors=_parse_entries(header, header_bytes, n_bytes, str(path)),
        metadata=metadata,
    )


def _parse_entries(header: dict[str, Any], header_bytes: int, n_bytes: int, source: str) -> dict[str, StoredTensor]:
    """Check the entries of a header and return them in file order."""
    entries: list[tuple[int, int, str, StoredTensor]] = []
    for name, entry in header.items():
        where = f"{source}: tensor {name!r}"
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise CheckpointError(f"{where}: must have dtype, shape and data_offsets; the file is damaged")
        dtype, shape = strict_json.get_field(entry, "dtype", str, where), strict_json.get_counts(entry, "shape", where)
        offsets = strict_json.get_counts(entry, "data_offsets", where)
        if dtype not in ITEM_BYTES:
            raise CheckpointError(f"{where}: dtype {dtype!r} is not known")
        if len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * ITEM_BYTES[dtype]:
            raise CheckpointError(f"{where}: data_offsets {list(offsets)} do not fit {dtype} {list(shape)}")
        entries.append((offsets[0], offsets[1], name, StoredTensor(dtype, shape, header_bytes + offsets[0])))
    entries.sort(key=lambda item: item[:2])
    position = 0
    for begin, end, name, _ in entries:
        if begin != position:
            error = "overlaps the one before" if begin < position else f"leaves a gap of {begin - position} bytes"
            raise CheckpointError(f"{source}: tensor {name!r} at {begin} {error}; the file is damaged")
        position = end
    if header_bytes + position != n_bytes:
        raise CheckpointError(
            f"{source}: has {n_bytes} bytes, its header lists {header_bytes + position}; "
            "the file is truncated or has trailing bytes"
        )
    return {name: tensor for _, _, name, tensor in entries}
