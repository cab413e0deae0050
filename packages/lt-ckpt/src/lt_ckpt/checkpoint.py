"""Checkpoint reader: any slice of any tensor, independent of the sharding that wrote it.

`Checkpoint.open` checks COMMIT against the manifest, the manifest's consistency, and every file's size; it reads no
tensor. `read` reads only the bytes of the stored slices that it needs. Those that it reads as wholes are compared with
their hashes; parts of slices, and files of NxD, must be verified before (see `lt_ckpt.verify`, and `find_latest_valid`,
which verifies before a run resumes).

Cost: open: the manifest and one stat per file; read: the requested bytes and their hashes.
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
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.folders import COMMIT, HF, MANIFEST, TOKENIZER
from lt_ckpt.manifest import MAX_MANIFEST_BYTES, CheckpointManifest, parse_committed
from lt_ckpt.parallel import iter_in_threads
from lt_ckpt.records import TensorRecord
from lt_ckpt.shards import Box, Ints, is_inside
from lt_ckpt.source import check_names
from lt_ckpt.stored_slices import read_box_into
from lt_ckpt.tensorfile import TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadItem:
    """Slice of tensor `group`/`name` to read: `offset` and `shape`; the whole tensor without them."""

    group: str
    name: str
    offset: Ints | None = None
    shape: Ints | None = None


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint folder and check it against COMMIT; no other file is opened."""
    with translate_os_errors("opening the checkpoint", folder):
        if not (folder / COMMIT).is_file():
            what = "no COMMIT in it, so the save was never finished" if folder.is_dir() else "no such folder"
            raise CheckpointError(f"{folder}: not a checkpoint: {what}")
        raw = files.read_bounded(folder / MANIFEST, MAX_MANIFEST_BYTES)
        commit = files.read_bounded(folder / COMMIT, 2**16)
    return parse_committed(raw, commit, str(folder))


def check_specs(
    expected: Mapping[str, Mapping[str, TensorSpec]], actual: Mapping[str, Mapping[str, TensorSpec]], where: str
) -> None:
    """Check that the groups that `expected` names hold exactly these tensors; `where` is the checkpoint, for messages.

    Raises:
        CheckpointError: Names what is missing or unexpected, or the first tensor of another dtype or shape.
    """
    for group, specs in expected.items():
        there = actual.get(group, {})
        check_names(specs, there, f"{where}: {group}")
        for name, spec in specs.items():
            if (found := there[name]) != spec:
                raise CheckpointError(
                    f"{where}: {group}/{name} is {found.dtype} {list(found.shape)} instead of {spec.dtype} "
                    f"{list(spec.shape)}; check the recipe's model, or choose another checkpoint"
                )


class Checkpoint:
    """Committed checkpoint open for reading; made by `open` or `find_latest_valid`.

    Attributes:
        path: Its folder.
        manifest: Its content.
        is_verified: Every byte was compared with its hash (`find_latest_valid`).
    """

    def __init__(self, path: Path, manifest: CheckpointManifest) -> None:
        self.path, self.manifest, self.is_verified = path, manifest, False

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Checkpoint":
        """Open a checkpoint folder.

        Raises:
            CheckpointError: No COMMIT, a manifest that does not match it, or a file that is missing or of another size.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        with translate_os_errors("opening the checkpoint", folder):
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
        """Groups of tensors: `weights`, the slots of the optimizer."""
        return tuple(self.manifest.tensors)

    def names(self, group: str) -> tuple[str, ...]:
        """Return the names of a group's tensors, in the order in which they were saved."""
        return tuple(self._group_records(group))

    def specs(self, group: str) -> dict[str, TensorSpec]:
        """Return dtype and global shape of each tensor of a group."""
        return {name: record.spec for name, record in self._group_records(group).items()}

    def _group_records(self, group: str) -> dict[str, TensorRecord]:
        if group not in self.manifest.tensors:
            raise CheckpointError(f"{self.path}: no group {group!r}; there are {', '.join(self.groups) or 'none'}")
        return self.manifest.tensors[group]

    def _record(self, group: str, name: str) -> TensorRecord:
        members = self._group_records(group)
        if name not in members:
            raise CheckpointError(f"{self.path}: no tensor {name!r} in group {group!r}")
        return members[name]

    def check_specs(self, expected: Mapping[str, Mapping[str, TensorSpec]]) -> None:
        """Check that the named groups hold exactly these tensors, of these dtypes and global shapes.

        Raises:
            CheckpointError: Names what is missing, unexpected or different. Nothing is cast or left out silently.
        """
        check_specs(expected, {g: self.specs(g) for g in expected if g in self.manifest.tensors}, str(self.path))

    def read_many(self, items: Sequence[ReadItem]) -> list[np.ndarray]:
        """Read several slices, one per thread.

        Returns:
            Each item's bytes: one-dimensional uint8, C order.

        Raises:
            CheckpointError: No such tensor, a slice outside of it, or a file that cannot be read.
        """
        found = [(record, prod(box[1]) * item_bytes(record.dtype)) for record, _, box in self._boxes(items)]
        targets = [np.empty(n_bytes, np.uint8) for _, n_bytes in found]
        self.read_into(items, targets)
        return targets

    def read_into(self, items: Sequence[ReadItem], targets: Sequence[np.ndarray]) -> None:
        """Read several slices into existing memory, like `read_many`.

        Args:
            items: The slices.
            targets: For each of them a contiguous one-dimensional uint8 array of as many bytes.

        Raises:
            CheckpointError: As `read_many`.
        """
        boxes = self._boxes(items)

        def read(record: TensorRecord, name: str, box: Box, target: np.ndarray) -> None:
            out = target.view(f"<u{item_bytes(record.dtype)}").reshape(box[1])
            read_box_into(self.path, record.slices, box, out, name)

        list(iter_in_threads(read, [(*found, target) for found, target in zip(boxes, targets, strict=True)]))

    def _boxes(self, items: Sequence[ReadItem]) -> list[tuple[TensorRecord, str, Box]]:
        boxes: list[tuple[TensorRecord, str, Box]] = []
        for item in items:
            record = self._record(item.group, item.name)
            offset = (0,) * len(record.shape) if item.offset is None else tuple(item.offset)
            rest = tuple(size - o for size, o in zip(record.shape, offset, strict=False))
            shape = rest if item.shape is None else tuple(item.shape)
            if not is_inside((offset, shape), record.shape):
                raise CheckpointError(
                    f"{self.path}: {item.group}/{item.name}: slice at {list(offset)} of shape {list(shape)} "
                    f"does not lie in a tensor of shape {list(record.shape)}"
                )
            boxes.append((record, f"{self.path}: {item.group}/{item.name}", (offset, shape)))
        return boxes

    def read(self, group: str, name: str, *, offset: Ints | None = None, shape: Ints | None = None) -> np.ndarray:
        """Read a slice of a tensor, independent of how it was sharded.

        Args:
            group: The tensor's group.
            name: The tensor's name.
            offset: Start of the slice; default: the tensor's first element.
            shape: Shape of the slice; default: up to the tensor's end.

        Returns:
            Its bytes: one-dimensional uint8, C order.
        """
        return self.read_many([ReadItem(group=group, name=name, offset=offset, shape=shape)])[0]

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the tokenizer's files by name, checked against their hashes; empty without a tokenizer."""
        return self._read_subfolder(TOKENIZER)

    def hf_files(self) -> dict[str, bytes]:
        """Return `config.json` and `generation_config.json` as saved with it, checked against their hashes."""
        return self._read_subfolder(HF)

    def _read_subfolder(self, subfolder: str) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name, record in self.manifest.files.items():
            if name.startswith(f"{subfolder}/"):
                with translate_os_errors("reading", self.path / name):
                    data = files.read_bounded(self.path / name, record.n_bytes)
                if xxhash.xxh3_128_hexdigest(data) != record.xxh3_128:
                    raise CheckpointError(f"{self.path / name}: its bytes have changed since they were written")
                found[name.removeprefix(f"{subfolder}/")] = data
        return found
