"""Sources: a model's tensors in any format, open for reading.

Each format's reader (`open_source` in `formats.py` selects it) returns a `Source`. A model tensor's locations are
`StoredSlice`s that tile it exactly once; replicas that a format also stores (norms on every rank, repeated key and
value heads) are listed separately, so that verification can compare them.

Cost of reading: the requested bytes and the planner's staging buffer; recently used files stay open until `close`.
"""

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from lt_ckpt import direct_io, files
from lt_ckpt.copy_plan import StoredSlice, plan_copies, run_copies, single_contiguous_copy
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.hash_list import HashList
from lt_ckpt.layout import Layout
from lt_ckpt.read_verification import FindChecksums, ReadVerifier
from lt_ckpt.readahead import DirectFileReader
from lt_ckpt.records import OptimizerRecord
from lt_ckpt.shards import Box, Ints, is_inside
from lt_ckpt.tensorfile import TensorSpec

MAX_OPEN_FILES = 64
"""Files that a reader keeps open per thread; a format with a file per tensor has far more."""

MIN_DIRECT_BYTES = 256 * 2**10
"""Reads of at least this size bypass the page cache; for smaller ones the system's own read-ahead is faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredArray:
    """Array in a file, according to the file's header.

    Attributes:
        spec: Dtype and shape of the tensor.
        byte_offset: Byte in the file at which the array begins.
        array_shape: Shape of the array if the tensor is only a box of it (a strided view into a storage), else None.
        array_offset: Offset of the tensor in that array.
        transposed: The file holds the array's transpose, column after column; `array_shape` and `array_offset` are
            those of the array.
    """

    spec: TensorSpec
    byte_offset: int
    array_shape: Ints | None = None
    array_offset: Ints | None = None
    transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Tensors of one kind: `weights`, the slots of an optimizer, ...

    Attributes:
        specs: Model tensor → dtype and whole shape, in model order.
        locations: Model tensor → its stored slices, each element exactly once.
        replicas: Model tensor → further stored slices, which must equal those boxes of it.
    """

    specs: Mapping[str, TensorSpec]
    locations: Mapping[str, tuple[StoredSlice, ...]]
    replicas: Mapping[str, tuple[StoredSlice, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Model in some format, open for reading.

    Attributes:
        format: `hf`, `nxd`, `lt`, `dcp`, `pt` or `meta`.
        path: The opened path; the files of `StoredSlice` are relative to `root`.
        root: Folder of the files.
        config: The model as a Hugging Face config.json, or None if the format has none and none was given.
        groups: Kind → tensors. Every source has `weights`.
        aux_files: Tokenizer files and the like, by name.
        format_info: Properties of the format, for reports and manifests (degrees, layout, revision, ...).
        optimizer: The optimizer whose slots are among the groups, or None.
        find_checksums: Returns the checksums of a file's ranges; None if the format has none.
        other_files: Further files with checksums, which hold no tensor of the groups.
        hash_list: The list of hashes in its folder, or None.
        fallbacks: Sentences for the user about newer checkpoints of the path that are damaged and were not opened.
    """

    format: str
    path: Path
    root: Path
    config: Mapping[str, Any] | None
    groups: Mapping[str, TensorGroup]
    aux_files: Mapping[str, bytes] = field(default_factory=dict)
    format_info: Mapping[str, Any] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None
    find_checksums: FindChecksums | None = None
    other_files: tuple[str, ...] = ()
    hash_list: HashList | None = None
    fallbacks: tuple[str, ...] = ()

    @property
    def weights(self) -> TensorGroup:
        """The group `weights`."""
        return self.groups["weights"]


def build_tensor_group(
    layout: Layout, stored_arrays: Mapping[str, Mapping[str, StoredArray]], shapes: Mapping[str, Ints], where: str
) -> TensorGroup:
    """Join a format's layout with the arrays in its files.

    Args:
        layout: The expected tensors.
        stored_arrays: File path, as in the layout → key → array in the file.
        shapes: Model tensor → shape, in model order.
        where: The source, for messages.

    Raises:
        CheckpointError: A key is missing, unknown, or has another shape; or one model tensor has two dtypes.
    """
    layout.check(shapes)
    dtypes: dict[str, str] = {}
    locations: dict[str, dict[Box, StoredSlice]] = {name: {} for name in shapes}
    replicas: dict[str, list[StoredSlice]] = {}
    for file in layout.files:
        arrays = stored_arrays[file.path]
        differing = {tensor.key for tensor in file.tensors} ^ set(arrays)
        if differing:
            key = min(differing)
            raise CheckpointError(
                f"{where}: {file.path}: {key!r} " + ("is not expected here" if key in arrays else "is missing")
            )
        for tensor in file.tensors:
            array = arrays[tensor.key]
            if array.spec.shape != tensor.shape:
                raise CheckpointError(
                    f"{where}: {file.path}: {tensor.key} has shape {list(array.spec.shape)}, expected "
                    f"{list(tensor.shape)}"
                )
            zeros = (0,) * len(tensor.shape)
            for region in tensor.regions:
                dtype = dtypes.setdefault(region.name, array.spec.dtype)
                if dtype != array.spec.dtype:
                    raise CheckpointError(
                        f"{where}: {file.path}: {tensor.key} is {array.spec.dtype}, "
                        f"another part of {region.name} is {dtype}"
                    )
                stored = StoredSlice(
                    file=file.path,
                    byte_offset=array.byte_offset,
                    offset=region.offset,
                    shape=region.shape,
                    array_shape=array.array_shape or tensor.shape,
                    array_offset=tuple(
                        a + b for a, b in zip(region.stored_offset, array.array_offset or zeros, strict=True)
                    ),
                    transposed=array.transposed,
                )
                if locations[region.name].setdefault(region.box, stored) is not stored:
                    replicas.setdefault(region.name, []).append(stored)
    return TensorGroup(
        specs={name: TensorSpec(dtypes[name], shape) for name, shape in shapes.items()},
        locations={name: tuple(slices.values()) for name, slices in locations.items()},
        replicas={name: tuple(slices) for name, slices in replicas.items()},
    )


class _OpenSourceFile:
    """Open file of a reader: small reads through the page cache, large ones past it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._direct: DirectFileReader | None = None

    def read(self, position: int, buffer: memoryview) -> None:
        if len(buffer) >= MIN_DIRECT_BYTES:
            self._direct = self._direct or DirectFileReader(self._path)
            self._direct.read_into(position, buffer)
            return
        if self._descriptor is None:
            self._descriptor = files.open_for_reading(self._path)
        files.read_exactly(self._descriptor, position, buffer, self._path)

    def read_aligned(self, position: int, n_bytes: int, memory: np.ndarray) -> np.ndarray:
        skip = position % direct_io.ALIGN
        self._direct = self._direct or DirectFileReader(self._path)
        self._direct.read(memory, position - skip, skip + n_bytes)
        return memory[skip : skip + n_bytes]

    def close(self) -> None:
        with suppress(OSError):  # opened for reading only
            if self._descriptor is not None:
                os.close(self._descriptor)
        with suppress(OSError):
            if self._direct is not None:
                self._direct.close()


class TensorReader:
    """Thread-safe reader of boxes of a source's tensors; a context that keeps files open.

    Args:
        root: Folder of the files.
        find_checksums: Compare all that is read with these checksums: those of ranges that are read to their ends at
            once, the others in `finish`. None: compare nothing.
    """

    def __init__(self, root: Path, find_checksums: FindChecksums | None = None) -> None:
        self._root = root
        self._verifier = None if find_checksums is None else ReadVerifier(root, find_checksums)
        self._opened: dict[tuple[int, str], _OpenSourceFile] = {}
        """(thread, file) → the file, least recently used first."""
        self._lock = threading.Lock()

    def read(
        self,
        group: TensorGroup,
        name: str,
        box: Box | None = None,
        *,
        source: str = "",
        memory: np.ndarray | None = None,
    ) -> np.ndarray:
        """Read a box of a tensor; by default all of it.

        Args:
            group: The tensor's group.
            name: The tensor.
            box: The box to read.
            source: The source's name in messages.
            memory: Buffer to use (`direct_io.acquire_block`), at least `2 * direct_io.ALIGN` bytes larger than the box.

        Returns:
            Its bytes: one-dimensional uint8, C order; a view of `memory` if given.

        Raises:
            CheckpointError: No such tensor, a box outside of it, or a file that cannot be read.
        """
        return self.read_locations(group.specs, group.locations, name, box, source, memory)

    def read_locations(
        self,
        specs: Mapping[str, TensorSpec],
        locations: Mapping[str, tuple[StoredSlice, ...]],
        name: str,
        box: Box | None,
        source: str,
        memory: np.ndarray | None = None,
    ) -> np.ndarray:
        """Read like `read`, from other locations of the tensor, for example replicas."""
        where = f"{source or self._root}: {name}"
        if name not in specs:
            raise CheckpointError(f"{where}: no such tensor")
        spec = specs[name]
        wanted = box or ((0,) * len(spec.shape), spec.shape)
        if not is_inside(wanted, spec.shape):
            raise CheckpointError(f"{where}: the box {list(wanted)} does not lie in {list(spec.shape)}")
        size = item_bytes(spec.dtype)
        n_bytes = prod(wanted[1]) * size
        copies = plan_copies([(wanted, locations[name], size, where)])
        with translate_os_errors("reading", self._root):
            run = single_contiguous_copy(copies)
            if memory is not None and run is not None and n_bytes >= MIN_DIRECT_BYTES:
                data = self._file(run.file).read_aligned(run.first_byte, n_bytes, memory)
                if self._verifier is not None:
                    self._verifier.add(run.file, run.first_byte, data.data)
                return data
            buffer = np.empty(n_bytes, np.uint8) if memory is None else memory[:n_bytes]
            run_copies(copies, [buffer], self._read_at)
        return buffer

    def _read_at(self, file: str, position: int, part: memoryview) -> None:
        self._file(file).read(position, part)
        if self._verifier is not None:
            self._verifier.add(file, position, part)

    def finish(self) -> None:
        """Compare what was read with its checksums where only a part of their ranges was read.

        Whoever passes bytes on must call this before it calls them complete; no thread may still be reading.

        Raises:
            CheckpointError: Bytes differ from their checksum.
        """
        if self._verifier is not None:
            self._verifier.finish()

    def _file(self, file: str) -> _OpenSourceFile:
        key, evicted = (threading.get_ident(), file), None
        with self._lock:
            opened = self._opened.pop(key, None) or _OpenSourceFile(self._root / file)
            of_this_thread = [other for other in self._opened if other[0] == key[0]]
            if len(of_this_thread) >= MAX_OPEN_FILES:
                evicted = self._opened.pop(of_this_thread[0])
            self._opened[key] = opened
        if evicted is not None:
            evicted.close()
        return opened

    def close(self) -> None:
        """Close the files; no thread may still be reading."""
        while self._opened:
            self._opened.popitem()[1].close()

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
