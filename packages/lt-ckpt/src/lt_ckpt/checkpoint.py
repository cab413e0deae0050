"""Reading a checkpoint: any slice of any tensor, whatever ranks wrote it.

`Checkpoint.open` checks COMMIT against the manifest, the manifest in itself, and the size of every file; it reads no
tensor. `read` lets the planner find the stored slices and reads only their bytes. Hashes are not checked on reading
(see `lt_ckpt.verify`, and `latest_valid`, which does it before a run resumes).

Cost: open: the manifest and one stat per file; read: the bytes wanted, a staging buffer, and for big reads a few blocks
(`lt_ckpt.readahead`).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import xxhash

from lt_ckpt import files
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.folders import COMMIT, MANIFEST, TOKENIZER
from lt_ckpt.manifest import MAX_MANIFEST_BYTES, Manifest, check_commit
from lt_ckpt.plan import Stored, plan_copies, run_copies
from lt_ckpt.readahead import WORTH_BYTES, Run, fill
from lt_ckpt.records import TensorRecord
from lt_ckpt.shards import Box, Ints, inside
from lt_ckpt.tensorfile import TensorSpec

RUN_AHEAD_BYTES = 256 * 2**10
"""Shorter runs of bytes are read one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Want:
    """A slice to be read: of tensor `group`/`name`, from `offset` on, of `shape`; without these the whole tensor."""

    group: str
    name: str
    offset: Ints | None = None
    shape: Ints | None = None


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint folder when its COMMIT vouches for it; looks at no other file."""
    with storage("opening the checkpoint", folder):
        if not (folder / COMMIT).is_file():
            what = "no COMMIT in it, so the save was never finished" if folder.is_dir() else "no such folder"
            raise CheckpointError(f"{folder}: not a checkpoint: {what}")
        raw = files.read_small(folder / MANIFEST, MAX_MANIFEST_BYTES)
        step = check_commit(files.read_small(folder / COMMIT, 2**16), raw, str(folder / COMMIT))
    manifest = Manifest.from_bytes(raw, str(folder / MANIFEST))
    if step != manifest.step:
        raise CheckpointError(f"{folder / COMMIT}: says step {step}, the manifest step {manifest.step}")
    return manifest


def differences(
    wanted: Mapping[str, Mapping[str, TensorSpec]], found: Mapping[str, Mapping[str, TensorSpec]]
) -> list[str]:
    """Compares tensors by name, dtype and shape, in the groups that `wanted` names.

    Returns:
        What differs, in words: missing and extra tensors, other dtypes, other shapes. At most ten of a kind are named.
    """
    missing: list[str] = []
    extra: list[str] = []
    other: list[str] = []
    for group, specs in wanted.items():
        there = found.get(group, {})
        missing += [f"{group}/{name}" for name in specs if name not in there]
        extra += [f"{group}/{name}" for name in there if name not in specs]
        for name, spec in specs.items():
            if name in there and there[name] != spec:
                is_, must = there[name], spec
                other.append(
                    f"{group}/{name} is {is_.dtype} {list(is_.shape)} instead of {must.dtype} {list(must.shape)}"
                )
    result: list[str] = []
    for title, names in (("missing", missing), ("not wanted", extra), ("different", other)):
        if names:
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            result.append(f"{title}: {', '.join(names[:10])}{more}")
    return result


def fill_slices(folder: Path, tensors: Sequence[tuple[TensorRecord, str, Box]], targets: Sequence[np.ndarray]) -> None:
    """Reads slices of tensors whose files lie in a folder.

    Args:
        folder: Where the files of the records lie.
        tensors: For each slice: the tensor's record, its name for messages, the box.
        targets: For each slice the buffer to be filled: one-dimensional uint8.
    """
    wanted = [
        (
            box,
            [Stored(file=s.file, begin=s.begin, offset=s.offset, shape=s.shape) for s in record.slices],
            item_bytes(record.dtype),
            name,
        )
        for record, name, box in tensors
    ]
    copies = plan_copies(wanted)
    descriptor, opened = -1, ""
    big: list[tuple[str, int, memoryview]] = []

    def read_at(file: str, position: int, buffer: memoryview) -> None:
        nonlocal descriptor, opened
        path = folder / file
        with storage("reading", path):
            if file != opened:  # the plan is sorted by file: one descriptor at a time is enough
                if descriptor >= 0:
                    os.close(descriptor)
                    descriptor = -1
                descriptor, opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC), file
            files.read_exactly(descriptor, position, buffer, path)

    def later(file: str, position: int, buffer: memoryview) -> None:
        if len(buffer) >= RUN_AHEAD_BYTES:
            big.append((file, position, buffer))
        else:
            read_at(file, position, buffer)

    try:
        run_copies(copies, targets, read_at, later=later)
        if sum(len(buffer) for _, _, buffer in big) >= WORTH_BYTES:
            fill([Run(folder / file, position, buffer) for file, position, buffer in big])
        else:
            for read in big:
                read_at(*read)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def read_slices(folder: Path, tensors: Sequence[tuple[TensorRecord, str, Box]]) -> list[np.ndarray]:
    """Reads slices as `fill_slices`, into new arrays, which it returns."""
    targets = [np.empty(prod(box[1]) * item_bytes(record.dtype), np.uint8) for record, _, box in tensors]
    fill_slices(folder, tensors, targets)
    return targets


class Checkpoint:
    """A committed checkpoint, open for reading. Make one with `Checkpoint.open`, `latest_valid` or `resolve`.

    Attributes:
        path: Its folder.
        manifest: What it holds.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step={self.step})"

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Checkpoint":
        """Opens a checkpoint folder.

        Raises:
            CheckpointError: No COMMIT, a manifest that does not match it, or a file that is missing or of another size.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        with storage("opening the checkpoint", folder):
            for name, record in manifest.files.items():
                size = os.stat(folder / name).st_size
                if size != record.n_bytes:
                    raise CheckpointError(f"{folder / name}: has {size} bytes, {record.n_bytes} were written")
        return cls(folder, manifest)

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.manifest.step

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of tensors, for example weights, exp_avg, exp_avg_sq."""
        return tuple(self.manifest.tensors)

    def names(self, group: str) -> tuple[str, ...]:
        """Returns the names of a group's tensors, in the order in which they were saved."""
        return tuple(self._members(group))

    def specs(self, group: str) -> dict[str, TensorSpec]:
        """Returns dtype and global shape of each tensor of a group."""
        return {name: record.spec for name, record in self._members(group).items()}

    def dtype(self, group: str, name: str) -> str:
        """Returns a tensor's safetensors code."""
        return self._record(group, name).dtype

    def global_shape(self, group: str, name: str) -> Ints:
        """Returns a tensor's global shape."""
        return self._record(group, name).shape

    def _members(self, group: str) -> dict[str, TensorRecord]:
        if group not in self.manifest.tensors:
            raise CheckpointError(f"{self.path}: no group {group!r}; there are {', '.join(self.groups) or 'none'}")
        return self.manifest.tensors[group]

    def _record(self, group: str, name: str) -> TensorRecord:
        members = self._members(group)
        if name not in members:
            raise CheckpointError(f"{self.path}: no tensor {name!r} in group {group!r}")
        return members[name]

    def require(self, expected: Mapping[str, Mapping[str, TensorSpec]]) -> None:
        """Checks that the groups named hold exactly these tensors, of these dtypes and global shapes.

        Raises:
            CheckpointError: Naming what is missing, not wanted, or different. Nothing is cast or left out silently.
        """
        trouble = differences(expected, {g: self.specs(g) for g in expected if g in self.manifest.tensors})
        if trouble:
            raise CheckpointError(
                f"{self.path}: holds another model's state than the one asked for: {'; '.join(trouble)}; "
                "check the recipe's model, or choose another checkpoint"
            )

    def read_many(self, wants: Sequence[Want]) -> list[np.ndarray]:
        """Reads several slices, each file forwards.

        Returns:
            For each want its bytes: one-dimensional uint8, C order.

        Raises:
            CheckpointError: No such tensor, a slice outside of it, or a file that cannot be read.
        """
        return read_slices(self.path, self._boxes(wants))

    def read_into(self, wants: Sequence[Want], targets: Sequence[np.ndarray]) -> None:
        """Reads several slices into memory that is there already, as `read_many`.

        Args:
            wants: The slices.
            targets: For each of them a one-dimensional uint8 array of as many bytes.

        Raises:
            CheckpointError: As `read_many`; or a target has another number of bytes.
        """
        boxes = self._boxes(wants)
        for (record, name, box), target in zip(boxes, targets, strict=True):
            n_bytes = prod(box[1]) * item_bytes(record.dtype)
            if target.dtype != np.uint8 or target.ndim != 1 or not target.flags.c_contiguous or target.size != n_bytes:
                raise CheckpointError(
                    f"{name}: needs a target of {n_bytes} contiguous bytes in a one-dimensional uint8 array, not shape "
                    f"{list(target.shape)} of {target.dtype}"
                )
        fill_slices(self.path, boxes, targets)

    def _boxes(self, wants: Sequence[Want]) -> list[tuple[TensorRecord, str, Box]]:
        boxes: list[tuple[TensorRecord, str, Box]] = []
        for want in wants:
            record = self._record(want.group, want.name)
            offset = (0,) * len(record.shape) if want.offset is None else tuple(want.offset)
            if want.shape is not None:
                shape = tuple(want.shape)
            else:
                shape = tuple(size - o for size, o in zip(record.shape, offset, strict=False))
            if not inside((offset, shape), record.shape):
                raise CheckpointError(
                    f"{self.path}: {want.group}/{want.name}: slice at {list(offset)} of shape {list(shape)} "
                    f"does not lie in a tensor of shape {list(record.shape)}"
                )
            boxes.append((record, f"{self.path}: {want.group}/{want.name}", (offset, shape)))
        return boxes

    def read(self, group: str, name: str, *, offset: Ints | None = None, shape: Ints | None = None) -> np.ndarray:
        """Reads a slice of a tensor, whatever slices were stored.

        Args:
            group: The tensor's group.
            name: The tensor's name.
            offset: Where the slice begins; without it at the tensor's beginning.
            shape: Shape of the slice; without it to the tensor's end.

        Returns:
            Its bytes: one-dimensional uint8, C order.
        """
        return self.read_many([Want(group=group, name=name, offset=offset, shape=shape)])[0]

    def tokenizer_files(self) -> dict[str, bytes]:
        """Returns the tokenizer's files by name, checked against their hashes; empty when there is no tokenizer."""
        found: dict[str, bytes] = {}
        for name, record in self.manifest.files.items():
            if name.startswith(f"{TOKENIZER}/"):
                with storage("reading", self.path / name):
                    data = files.read_small(self.path / name, record.n_bytes)
                if xxhash.xxh3_128_hexdigest(data) != record.xxh3_128:
                    raise CheckpointError(f"{self.path / name}: its bytes have changed since they were written")
                found[name.removeprefix(f"{TOKENIZER}/")] = data
        return found
