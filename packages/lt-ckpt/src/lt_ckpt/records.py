"""Records of stored tensors and files in rank manifests and the checkpoint manifest.

A tensor is a dtype, a global shape and slices; a slice is a box, the file that holds it, the byte at which it begins
and the hash of its bytes. A file is a size and the hash of its leading bytes: of the header for a tensor file (the
slices' hashes cover the rest), of everything for any other file. `validate_records` checks that every byte of every
file is covered by exactly one hash and that the slices of each tensor hold each element exactly once.

Tensors may also lie in the files of another program's format, NxD's, which holds some of them several times. Such a
file is hashed as a whole, its slices have no hashes of their own, and equal slices are `replicas`.

In JSON every record is an object of its fields. Cost: two hundred bytes per slice.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from lt_ckpt import json_objects
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.file_names import check_name
from lt_ckpt.shards import Ints, find_tiling_error, is_inside
from lt_ckpt.stored_slices import StoredSlice
from lt_ckpt.tensorfile import TensorSpec

NXD_BEGIN_MARKER, NXD_DONE_MARKER = "checkpoint", "done"
"""Markers of an NxD tag. Each holds the text `1`."""


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """Stored tensor: dtype (safetensors code), global shape, slices, and replicas of slices."""

    dtype: str
    shape: Ints
    slices: tuple[StoredSlice, ...]
    replicas: tuple[StoredSlice, ...] = ()

    @property
    def spec(self) -> TensorSpec:
        """Dtype and global shape."""
        return TensorSpec(self.dtype, self.shape)

    def slice_bytes(self, piece: StoredSlice) -> int:
        """Return the bytes of one of its slices."""
        return prod(piece.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Stored file: its size, and the xxh3_128 of its first `hashed_bytes` bytes."""

    n_bytes: int
    hashed_bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class OptimizerRecord:
    """Optimizer whose state a checkpoint holds: its name, and its slots, which are tensor groups."""

    name: str
    slots: tuple[str, ...]


TORCH_ADAMW = OptimizerRecord(name="adamw", slots=("exp_avg", "exp_avg_sq"))
"""AdamW's state by the names of torch, in which NxD and torch.distributed.checkpoint store it."""

TensorRecords = dict[str, dict[str, TensorRecord]]
"""Group → tensor name → record."""

FileRecords = dict[str, FileRecord]
"""File name, relative to the checkpoint folder, → record."""


@dataclass(frozen=True, kw_only=True)
class RankManifest:
    """Manifest of what one rank wrote into a save (part-*.json).

    Attributes:
        rank: The rank.
        save_id: Id of the save.
        files: The files it wrote.
        tensors: The slices in them.
    """

    rank: int
    save_id: str
    files: FileRecords
    tensors: TensorRecords

    @classmethod
    def from_bytes(cls, raw: bytes, source: str) -> "RankManifest":
        """Parse a part-*.json; a `CheckpointError` names the file."""
        obj = json_objects.loads(raw, source)
        with json_objects.translate_format_errors(source):
            return cls(**{**obj, "files": parse_files(obj["files"]), "tensors": parse_tensors(obj["tensors"])})


def parse_files(obj: dict[str, Any]) -> FileRecords:
    """Return the file records of their JSON; a name that leads out of the folder is refused."""
    return {check_name(name, "the manifest"): FileRecord(**fields) for name, fields in obj.items()}


def parse_tensors(obj: dict[str, Any]) -> TensorRecords:
    """Return the tensor records of their JSON."""
    return {
        group: {
            name: TensorRecord(
                dtype=fields["dtype"],
                shape=tuple(fields["shape"]),
                slices=_parse_slices(fields["slices"]),
                replicas=_parse_slices(fields["replicas"]),
            )
            for name, fields in members.items()
        }
        for group, members in obj.items()
    }


def _parse_slices(items: list[dict[str, Any]]) -> tuple[StoredSlice, ...]:
    return tuple(
        StoredSlice(**{**fields, "offset": tuple(fields["offset"]), "shape": tuple(fields["shape"])})
        for fields in items
    )


def merge_rank_manifests(manifests: Iterable[RankManifest]) -> tuple[FileRecords, TensorRecords]:
    """Merge the manifests of all ranks; repeated slices of files hashed as a whole become replicas.

    Raises:
        CheckpointError: Two ranks give a tensor different dtypes or global shapes, or both wrote one file.
    """
    files: FileRecords = {}
    specs: dict[str, dict[str, TensorSpec]] = {}
    slices: dict[tuple[str, str], list[StoredSlice]] = {}
    replicas: dict[tuple[str, str], list[StoredSlice]] = {}
    seen: set[tuple[str, str, Ints, Ints]] = set()
    for manifest in manifests:
        for name, record in manifest.files.items():
            assert name not in files, f"{name}: two ranks wrote it"
            files[name] = record
        for group, members in manifest.tensors.items():
            known = specs.setdefault(group, {})
            for name, record in members.items():
                same = known.setdefault(name, record.spec) == record.spec
                assert same, f"{group}/{name}: rank {manifest.rank} has another dtype or shape than the ones before"
                for piece in record.slices:
                    box = (group, name, piece.offset, piece.shape)
                    repeated = not piece.xxh3_128 and box in seen
                    (replicas if repeated else slices).setdefault((group, name), []).append(piece)
                    seen.add(box)
    return files, {
        group: {
            name: TensorRecord(
                dtype=spec.dtype,
                shape=spec.shape,
                slices=tuple(slices.get((group, name), ())),
                replicas=tuple(replicas.get((group, name), ())),
            )
            for name, spec in members.items()
        }
        for group, members in specs.items()
    }


def validate_records(files: FileRecords, tensors: TensorRecords, source: str) -> None:
    """Check that slices tile tensors exactly and that hashes cover every byte of every file exactly once.

    Raises:
        CheckpointError: Names the tensor or the file.
    """
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for group, members in tensors.items():
        for name, record in members.items():
            where = f"{source}: tensor {group}/{name}"
            _validate_boxes(record, where)
            for piece in (*record.slices, *record.replicas):
                if piece.file not in files:
                    raise CheckpointError(f"{where}: its file {piece.file!r} is not listed")
                is_whole_hashed = files[piece.file].hashed_bytes == files[piece.file].n_bytes
                if is_whole_hashed == bool(piece.xxh3_128) and prod(piece.shape):
                    raise CheckpointError(f"{where}: its slice in {piece.file!r} needs one hash, of it or of the file")
                ranges[piece.file].append((piece.byte_offset, piece.byte_offset + record.slice_bytes(piece)))
    for name, found in ranges.items():
        _validate_bytes(f"{source}: file {name}", files[name], found)


def _validate_boxes(record: TensorRecord, where: str) -> None:
    """Check that a tensor's slices tile it, and that each replica equals one of its slices."""
    boxes = [(piece.offset, piece.shape) for piece in record.slices]
    outside = [box for box in boxes if not is_inside(box, record.shape)]
    error = f"a slice {outside[0]} does not lie in it" if outside else find_tiling_error(record.shape, boxes)
    if error:
        raise CheckpointError(f"{where} of shape {list(record.shape)}: {error}")
    if record.replicas and not {(piece.offset, piece.shape) for piece in record.replicas} <= set(boxes):
        raise CheckpointError(f"{where}: a replica matches none of its slices")


def _validate_bytes(where: str, file: FileRecord, ranges: Iterable[tuple[int, int]]) -> None:
    """Check that no two slices share a byte of a file, and that hashes cover each byte exactly once."""
    is_whole_hashed = file.hashed_bytes == file.n_bytes
    position = 0 if is_whole_hashed else file.hashed_bytes
    for begin, end in sorted(ranges):
        if begin < position or end > file.n_bytes or (begin > position and not is_whole_hashed):
            raise CheckpointError(f"{where}: the bytes from {position} to {begin} do not add up")
        position = end
    if position != file.n_bytes and not is_whole_hashed:
        raise CheckpointError(f"{where}: has {file.n_bytes} bytes, {position} are listed")


def check_optimizer_slots(optimizer: OptimizerRecord | None, tensors: TensorRecords, source: str) -> None:
    """Raise CheckpointError unless every slot of the optimizer is a group of tensors."""
    missing = set(optimizer.slots) - tensors.keys() if optimizer else ()
    if optimizer and missing:
        raise CheckpointError(f"{source}: optimizer {optimizer.name!r}: no tensors of slot {min(missing)!r}")
