"""A model's tensors in any format, open for reading: where every box lies, and the one way to read it.

Each format's reader (`open_source` in `formats.py` finds the right one) ends in a `Source`. A model tensor is found in
`Stored` places that tile it exactly once; equal copies that a format keeps besides (norms on every rank, repeated key
and value heads) are listed apart, so that verification can compare them.

Cost of reading: the bytes wanted and the planner's staging buffer; the files used last are kept open until `close`.
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

from lt_ckpt import direct, files
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.layout import Layout
from lt_ckpt.plan import Stored, one_run, plan_copies, run_copies
from lt_ckpt.readahead import DirectFile
from lt_ckpt.shards import Box, Ints, inside
from lt_ckpt.tensorfile import TensorSpec

OPEN_FILES = 64
"""Most files that a reader keeps open for each thread; a format with a file per tensor has far more."""

DIRECT_FROM_BYTES = 256 * 2**10
"""Reads of so many bytes go past the page cache; for smaller ones the system's own reading ahead is faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """An array in a file, as the file's own header tells it.

    Attributes:
        spec: Dtype and shape of the tensor.
        begin: Byte in the file at which the array begins.
        whole: Shape of the array where the tensor is only a box of it (a strided view into a storage), else None.
        at: Where the tensor begins in that array.
        transposed: The file holds the array's transpose, column after column; `whole` and `at` are the array's own.
    """

    spec: TensorSpec
    begin: int
    whole: Ints | None = None
    at: Ints | None = None
    transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class Group:
    """The tensors of one kind: `weights`, `exp_avg`, `exp_avg_sq`, ...

    Attributes:
        specs: Model tensor → dtype and whole shape, in model order.
        places: Model tensor → where it lies, each element exactly once.
        copies: Model tensor → further places that must hold the same bytes as those boxes of it.
    """

    specs: Mapping[str, TensorSpec]
    places: Mapping[str, tuple[Stored, ...]]
    copies: Mapping[str, tuple[Stored, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model in some format.

    Attributes:
        format: `hf`, `nxd`, `lt`, `dcp` or `pt`.
        path: What was opened; the files of `Stored` are relative to `root`.
        root: Folder of the files.
        config: The model as Hugging Face's config.json has it, or None when the format carries none and none was given.
        groups: Kind → tensors. Every source has `weights`.
        small: Tokenizer files and the like, by name.
        about: What was found out about the format, for people and for manifests (degrees, layout, revision, ...).
    """

    format: str
    path: Path
    root: Path
    config: Mapping[str, Any] | None
    groups: Mapping[str, Group]
    small: Mapping[str, bytes] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> Group:
        """The group that every source has."""
        return self.groups["weights"]


def join(layout: Layout, holders: Mapping[str, Mapping[str, Held]], shapes: Mapping[str, Ints], where: str) -> Group:
    """Joins a format's layout with what its files hold.

    Args:
        layout: What should be where.
        holders: File path, as in the layout → key → what the file holds under it.
        shapes: Model tensor → shape, in model order.
        where: The source, for messages.

    Raises:
        CheckpointError: A key is missing, unknown, or has another shape; or one model tensor has two dtypes.
    """
    layout.check(shapes)
    dtypes: dict[str, str] = {}
    places: dict[str, dict[Box, Stored]] = {name: {} for name in shapes}
    copies: dict[str, list[Stored]] = {}
    for file in layout.files:
        held = holders[file.path]
        unlike = {tensor.key for tensor in file.tensors} ^ set(held)
        if unlike:
            key = min(unlike)
            raise CheckpointError(
                f"{where}: {file.path}: {key!r} " + ("is not expected here" if key in held else "is missing")
            )
        for tensor in file.tensors:
            found = held[tensor.key]
            if found.spec.shape != tensor.shape:
                raise CheckpointError(
                    f"{where}: {file.path}: {tensor.key} has shape {list(found.spec.shape)}, the layout says "
                    f"{list(tensor.shape)}"
                )
            zeros = (0,) * len(tensor.shape)
            for piece in tensor.pieces:
                known = dtypes.setdefault(piece.name, found.spec.dtype)
                if known != found.spec.dtype:
                    raise CheckpointError(
                        f"{where}: {file.path}: {tensor.key} is {found.spec.dtype}, "
                        f"another part of {piece.name} is {known}"
                    )
                stored = Stored(
                    file=file.path,
                    begin=found.begin,
                    offset=piece.offset,
                    shape=piece.shape,
                    whole=found.whole or tensor.shape,
                    at=tuple(a + b for a, b in zip(piece.at, found.at or zeros, strict=True)),
                    transposed=found.transposed,
                )
                if places[piece.name].setdefault(piece.box, stored) is not stored:
                    copies.setdefault(piece.name, []).append(stored)
    return Group(
        specs={name: TensorSpec(dtypes[name], shape) for name, shape in shapes.items()},
        places={name: tuple(found.values()) for name, found in places.items()},
        copies={name: tuple(found) for name, found in copies.items()},
    )


class _Opened:
    """A file that a reader holds open: for small reads through the page cache, for big ones past it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._direct: DirectFile | None = None

    def read(self, position: int, buffer: memoryview) -> None:
        if len(buffer) >= DIRECT_FROM_BYTES:
            self._direct = self._direct or DirectFile(self._path)
            self._direct.read_into(position, buffer)
            return
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        files.read_exactly(self._descriptor, position, buffer, self._path)

    def read_aligned(self, position: int, n_bytes: int, memory: np.ndarray) -> np.ndarray:
        skip = position % direct.ALIGN
        self._direct = self._direct or DirectFile(self._path)
        self._direct.read(memory, position - skip, skip + n_bytes)
        return memory[skip : skip + n_bytes]

    def close(self) -> None:
        with suppress(OSError):  # it was only read
            if self._descriptor is not None:
                os.close(self._descriptor)
        with suppress(OSError):
            if self._direct is not None:
                self._direct.close()


class Reader:
    """Reads boxes of a source's tensors, in any number of threads; a context that keeps files open."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._opened: dict[tuple[int, str], _Opened] = {}
        """(thread, file) → the file, in the order of use, so that the first is the one to close next."""
        self._lock = threading.Lock()

    def read(
        self,
        group: Group,
        name: str,
        box: Box | None = None,
        *,
        source: str = "",
        memory: np.ndarray | None = None,
    ) -> np.ndarray:
        """Reads a box of a tensor, without one all of it.

        Args:
            group: Where the tensor lies.
            name: The tensor.
            box: What of it.
            source: What it is called in messages.
            memory: Memory to use (`direct.take_block`), at least `2 * direct.ALIGN` bytes more than the box has.

        Returns:
            Its bytes: one-dimensional uint8, C order; a view of `memory` where that is given.

        Raises:
            CheckpointError: No such tensor, a box outside of it, or a file that cannot be read.
        """
        return self.read_at(group.specs, group.places, name, box, source, memory)

    def read_at(
        self,
        specs: Mapping[str, TensorSpec],
        places: Mapping[str, tuple[Stored, ...]],
        name: str,
        box: Box | None,
        source: str,
        memory: np.ndarray | None = None,
    ) -> np.ndarray:
        """As `read`, from other places of the tensor: copies, for example."""
        where = f"{source or self._root}: {name}"
        if name not in specs:
            raise CheckpointError(f"{where}: no such tensor")
        spec = specs[name]
        wanted = box or ((0,) * len(spec.shape), spec.shape)
        if not inside(wanted, spec.shape):
            raise CheckpointError(f"{where}: the box {list(wanted)} does not lie in {list(spec.shape)}")
        size = item_bytes(spec.dtype)
        n_bytes = prod(wanted[1]) * size
        copies = plan_copies([(wanted, places[name], size, where)])
        with storage("reading", self._root):
            run = one_run(copies)
            if memory is not None and run is not None and n_bytes >= DIRECT_FROM_BYTES:
                return self._file(run.file).read_aligned(run.first_byte, n_bytes, memory)
            buffer = np.empty(n_bytes, np.uint8) if memory is None else memory[:n_bytes]
            run_copies(copies, [buffer], lambda file, position, part: self._file(file).read(position, part))
        return buffer

    def _file(self, file: str) -> _Opened:
        key, spare = (threading.get_ident(), file), None
        with self._lock:
            opened = self._opened.pop(key, None) or _Opened(self._root / file)
            mine = [other for other in self._opened if other[0] == key[0]]
            if len(mine) >= OPEN_FILES:
                spare = self._opened.pop(mine[0])
            self._opened[key] = opened
        if spare is not None:
            spare.close()
        return opened

    def close(self) -> None:
        """Close the files; no thread may read any more."""
        while self._opened:
            self._opened.popitem()[1].close()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
