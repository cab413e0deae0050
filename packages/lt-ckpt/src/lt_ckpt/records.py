"""Records of stored tensors and files in rank manifests and the checkpoint manifest, and their JSON.

A tensor is a dtype, a global shape and slices; a slice is a box, the file that holds it, the byte at which it begins
and the hash of its bytes. A file is a size and the hash of its leading bytes: of the header for a tensor file (the
slices' hashes cover the rest), of everything for any other file. `validate_records` checks that every byte of every
file is covered by exactly one hash and that the slices of each tensor hold each element exactly once.

Tensors may also lie in the files of another program's format, NxD's (`NXD_FILE`), which holds some of them several
times. Such a file is hashed as a whole, its slices have no hashes of their own, and equal slices are `replicas`.

Cost: a hundred to two hundred bytes of JSON per slice.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from lt_ckpt import strict_json
from lt_ckpt.dtypes import ITEM_BYTES
from lt_ckpt.errors import CheckpointError
from lt_ckpt.shards import GROUP_NAME, Ints, find_tiling_error, is_inside
from lt_ckpt.tensorfile import TensorSpec

TENSOR_FILE = re.compile(r"[a-z][a-z0-9_]{0,63}-\d{5,9}\.safetensors")
RANK_MANIFEST_FILE = re.compile(r"part-\d{5,9}\.json")
TOKENIZER_FOLDER = re.compile(r"tokenizer(/additional_chat_templates)?")
TOKENIZER_FILE = re.compile(rf"{TOKENIZER_FOLDER.pattern}/[A-Za-z0-9_][A-Za-z0-9_.\-]{{0,127}}")
HF_FILE = re.compile(r"hf/(config|generation_config)\.json")
SAVE_MARKER_FILE = re.compile(r"save\.json")
_NXD_RANK_FILE = r"dp_rank_\d{2,9}_tp_rank_\d{2,9}_pp_rank_\d{2,9}\.pt"
NXD_FILE = re.compile(
    rf"(model|optim)/{_NXD_RANK_FILE}(\.info\.pt|\.tensors/tensor_\d{{1,9}}\.pt)?|scheduler\.pt|user_content\.pt|checkpoint|done"
)
"""Files that NxD's own loader expects in a tag folder."""
NXD_BEGIN_MARKER, NXD_DONE_MARKER = "checkpoint", "done"
"""Markers of an NxD tag. Each holds the text `1`."""
NXD_FOLDER = re.compile(rf"(model|optim)(/{_NXD_RANK_FILE}\.tensors)?")
MANIFEST_FILE_PATTERNS = (TENSOR_FILE, RANK_MANIFEST_FILE, TOKENIZER_FILE, HF_FILE, SAVE_MARKER_FILE, NXD_FILE)
"""Names that a manifest can list."""
HASH_HEX = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceRecord:
    """Stored slice of a tensor.

    Attributes:
        file: Name of the file in the checkpoint folder.
        key: The slice's name in that file: the tensor's name, with `#1`, `#2`, ... appended where a rank holds several
            slices of one tensor.
        byte_offset: Byte in the file at which the slice begins.
        offset: Offset of the slice in the tensor.
        shape: Shape of the slice.
        xxh3_128: Hash of its bytes, as hex; empty in a file that is hashed as a whole.
    """

    file: str
    key: str
    byte_offset: int
    offset: Ints
    shape: Ints
    xxh3_128: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """Stored tensor: dtype (safetensors code), global shape, slices, and replicas of slices."""

    dtype: str
    shape: Ints
    slices: tuple[SliceRecord, ...]
    replicas: tuple[SliceRecord, ...] = ()

    @property
    def spec(self) -> TensorSpec:
        """Dtype and global shape."""
        return TensorSpec(self.dtype, self.shape)

    def slice_bytes(self, piece: SliceRecord) -> int:
        """Return the bytes of one of its slices."""
        return prod(piece.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Stored file: its size, and the xxh3_128 of its first `hashed_bytes` bytes."""

    n_bytes: int
    hashed_bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRecord:
    """Optimizer whose state a checkpoint holds: its name, and its slots, which are tensor groups."""

    name: str
    slots: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"name": self.name, "slots": list(self.slots)}

    @classmethod
    def from_json(cls, obj: dict[str, Any], source: str) -> "OptimizerRecord":
        """Parse and check plain values; a `CheckpointError` names file and field."""
        slots = strict_json.get_field(obj, "slots", list, source)
        if not all(isinstance(slot, str) for slot in slots):
            raise CheckpointError(f"{source}: optimizer.slots must be a list of names; the file is damaged")
        return cls(name=strict_json.get_field(obj, "name", str, source), slots=tuple(slots))


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

    def to_bytes(self) -> bytes:
        """Return the content of the rank's part-*.json."""
        head = {"format": "lt-checkpoint-part", "version": 1, "rank": self.rank, "save_id": self.save_id}
        return strict_json.dumps(
            {**head, "files": files_to_json(self.files), "tensors": tensors_to_json(self.tensors)}, "the rank manifest"
        )

    @classmethod
    def from_bytes(cls, raw: bytes, source: str) -> "RankManifest":
        """Parse a part-*.json; a `CheckpointError` names the file and the field."""
        obj = strict_json.loads(raw, source)
        strict_json.check_format_version(obj, "lt-checkpoint-part", 1, source)
        return cls(
            rank=strict_json.get_count(obj, "rank", source),
            save_id=strict_json.get_field(obj, "save_id", str, source),
            files=files_from_json(strict_json.get_field(obj, "files", dict, source), source),
            tensors=tensors_from_json(strict_json.get_field(obj, "tensors", dict, source), source),
        )


def files_to_json(files: FileRecords) -> dict[str, Any]:
    """Return the file records as JSON values."""
    return {
        name: {"bytes": record.n_bytes, "hashed_bytes": record.hashed_bytes, "xxh3_128": record.xxh3_128}
        for name, record in files.items()
    }


def files_from_json(obj: dict[str, Any], source: str) -> FileRecords:
    """Parse file records; a name that could lead out of the folder is refused."""
    records: FileRecords = {}
    for name, entry in obj.items():
        where = f"{source}: file {name!r}"
        if not any(pattern.fullmatch(name) for pattern in MANIFEST_FILE_PATTERNS):
            raise CheckpointError(f"{where}: not a name that a checkpoint's file can have")
        if not isinstance(entry, dict):
            raise CheckpointError(f"{where}: must be an object; the file is damaged")
        record = FileRecord(
            n_bytes=strict_json.get_count(entry, "bytes", where),
            hashed_bytes=strict_json.get_count(entry, "hashed_bytes", where),
            xxh3_128=_parse_hash(entry, where),
        )
        if record.hashed_bytes > record.n_bytes:
            raise CheckpointError(f"{where}: hashes more bytes than it has; the file is damaged")
        records[name] = record
    return records


def tensors_to_json(tensors: TensorRecords) -> dict[str, Any]:
    """Return the tensor records as JSON values.

    A slice's key is omitted if it is the tensor's name; so are empty hashes and replicas.
    """

    def slices_to_json(slices: Iterable[SliceRecord], name: str) -> list[dict[str, Any]]:
        return [
            {
                "file": piece.file,
                **({} if piece.key == name else {"key": piece.key}),
                "begin": piece.byte_offset,
                "offset": list(piece.offset),
                "shape": list(piece.shape),
                **({"xxh3_128": piece.xxh3_128} if piece.xxh3_128 else {}),
            }
            for piece in slices
        ]

    return {
        group: {
            name: {
                "dtype": record.dtype,
                "shape": list(record.shape),
                "slices": slices_to_json(record.slices, name),
                **({"replicas": slices_to_json(record.replicas, name)} if record.replicas else {}),
            }
            for name, record in members.items()
        }
        for group, members in tensors.items()
    }


def tensors_from_json(obj: dict[str, Any], source: str) -> TensorRecords:
    """Parse tensor records; each slice must lie in its tensor."""
    records: TensorRecords = {}
    for group in obj:
        if not GROUP_NAME.fullmatch(group):
            raise CheckpointError(f"{source}: {group!r} is not a group's name; the file is damaged")
        members = strict_json.get_field(obj, group, dict, source)
        records[group] = {name: _parse_tensor(members, name, f"{source}: tensor {group}/{name}") for name in members}
    return records


def _parse_tensor(members: dict[str, Any], name: str, where: str) -> TensorRecord:
    entry = strict_json.get_field(members, name, dict, where)
    dtype, shape = strict_json.get_field(entry, "dtype", str, where), strict_json.get_counts(entry, "shape", where)
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where}: dtype {dtype!r} is not known")
    slices = _parse_slices(strict_json.get_field(entry, "slices", list, where), name, shape, where)
    replicas = (
        _parse_slices(strict_json.get_field(entry, "replicas", list, where), name, shape, where)
        if "replicas" in entry
        else []
    )
    return TensorRecord(dtype=dtype, shape=shape, slices=tuple(slices), replicas=tuple(replicas))


def _parse_slices(items: list[Any], name: str, shape: Ints, where: str) -> list[SliceRecord]:
    slices: list[SliceRecord] = []
    for item in items:
        if not isinstance(item, dict):
            raise CheckpointError(f"{where}: a slice must be an object; the file is damaged")
        piece = SliceRecord(
            file=strict_json.get_field(item, "file", str, where),
            key=strict_json.get_field(item, "key", str, where) if "key" in item else name,
            byte_offset=strict_json.get_count(item, "begin", where),
            offset=strict_json.get_counts(item, "offset", where),
            shape=strict_json.get_counts(item, "shape", where),
            xxh3_128=_parse_hash(item, where) if "xxh3_128" in item else "",
        )
        if not is_inside((piece.offset, piece.shape), shape):
            raise CheckpointError(f"{where}: a slice at {list(piece.offset)} does not lie in it; the file is damaged")
        slices.append(piece)
    return slices


def _parse_hash(obj: dict[str, Any], where: str) -> str:
    value = strict_json.get_field(obj, "xxh3_128", str, where)
    if not HASH_HEX.fullmatch(value):
        raise CheckpointError(f"{where}: {value!r} is not a hash; the file is damaged")
    return value


def merge_rank_manifests(manifests: Iterable[RankManifest]) -> tuple[FileRecords, TensorRecords]:
    """Merge the manifests of all ranks; repeated slices of NxD files become replicas.

    Raises:
        CheckpointError: Two ranks give a tensor different dtypes or global shapes, or both wrote one file.
    """
    files: FileRecords = {}
    specs: dict[str, dict[str, TensorSpec]] = {}
    slices: dict[tuple[str, str], list[SliceRecord]] = {}
    replicas: dict[tuple[str, str], list[SliceRecord]] = {}
    seen: set[tuple[str, str, Ints, Ints]] = set()
    for manifest in manifests:
        for name, record in manifest.files.items():
            if name in files:
                raise CheckpointError(f"rank {manifest.rank}: file {name} was also written by another rank")
            files[name] = record
        for group, members in manifest.tensors.items():
            known = specs.setdefault(group, {})
            for name, record in members.items():
                spec = known.setdefault(name, record.spec)
                if spec != record.spec:
                    raise CheckpointError(
                        f"tensor {group}/{name}: rank {manifest.rank} says {record.dtype} {list(record.shape)}, "
                        f"a rank before it {spec.dtype} {list(spec.shape)}"
                    )
                own = slices.setdefault((group, name), [])
                for piece in record.slices:
                    box = (group, name, piece.offset, piece.shape)
                    if not NXD_FILE.fullmatch(piece.file):
                        own.append(piece)
                    elif box in seen:
                        replicas.setdefault((group, name), []).append(piece)
                    else:
                        own.append(piece)
                        seen.add(box)
    return files, {
        group: {
            name: TensorRecord(
                dtype=spec.dtype,
                shape=spec.shape,
                slices=tuple(slices[group, name]),
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
    ends: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for group, members in tensors.items():
        for name, record in members.items():
            where = f"{source}: tensor {group}/{name}"
            _validate_boxes(record, where)
            for piece in (*record.slices, *record.replicas):
                is_whole_hashed = NXD_FILE.fullmatch(piece.file) is not None
                if piece.file not in files or not (is_whole_hashed or TENSOR_FILE.fullmatch(piece.file)):
                    raise CheckpointError(f"{where}: its file {piece.file!r} is not listed")
                if is_whole_hashed == bool(piece.xxh3_128):
                    raise CheckpointError(
                        f"{where}: {'a' if is_whole_hashed else 'no'} hash for its slice in {piece.file!r}"
                    )
                ends[piece.file].append((piece.byte_offset, piece.byte_offset + record.slice_bytes(piece)))
    for name, ranges in ends.items():
        _validate_bytes(f"{source}: file {name}", files[name], ranges, whole=NXD_FILE.fullmatch(name) is not None)


def _validate_boxes(record: TensorRecord, where: str) -> None:
    """Check that a tensor's slices tile it, and that each replica equals one of its slices."""
    boxes = [(piece.offset, piece.shape) for piece in record.slices]
    error = find_tiling_error(record.shape, boxes)
    if error:
        raise CheckpointError(f"{where} of shape {list(record.shape)}: {error}")
    if record.replicas and not {(piece.offset, piece.shape) for piece in record.replicas} <= set(boxes):
        raise CheckpointError(f"{where}: a replica matches none of its slices")


def _validate_bytes(where: str, file: FileRecord, ranges: Iterable[tuple[int, int]], *, whole: bool) -> None:
    """Check that no two slices share a byte of a file, and that hashes cover each byte exactly once."""
    if whole and file.hashed_bytes != file.n_bytes:
        raise CheckpointError(f"{where}: {file.hashed_bytes} of its {file.n_bytes} bytes are hashed")
    position = 0 if whole else file.hashed_bytes
    for begin, end in sorted(ranges):
        if begin < position or end > file.n_bytes or (begin > position and not whole):
            raise CheckpointError(f"{where}: the bytes from {position} to {begin} do not add up")
        position = end
    if position != file.n_bytes and not whole:
        raise CheckpointError(f"{where}: has {file.n_bytes} bytes, {position} are listed")


def check_optimizer_slots(optimizer: OptimizerRecord | None, tensors: TensorRecords, source: str) -> None:
    """Raise CheckpointError unless every slot of the optimizer is a group of tensors."""
    missing = set(optimizer.slots) - tensors.keys() if optimizer else ()
    if optimizer and missing:
        raise CheckpointError(f"{source}: optimizer {optimizer.name!r}: no tensors of slot {min(missing)!r}")
