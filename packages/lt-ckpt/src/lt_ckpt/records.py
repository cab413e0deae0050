"""What is stored where: the records that a rank's part list and the manifest share, as data and as JSON.

A tensor is a dtype, a global shape and slices; a slice is a box, the file that holds it, the byte at which it begins
and the hash of its bytes. A file is a size and the hash of its leading bytes: of the header for a tensor file (the
slices' hashes answer for the rest), of everything for any other file. `check` makes sure that every byte of every file
is answered for by exactly one hash and that the slices of each tensor hold each element exactly once.

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
from lt_ckpt.shards import GROUP, Ints, covers, inside
from lt_ckpt.tensorfile import TensorSpec

TENSOR_FILE = re.compile(r"[a-z][a-z0-9_]{0,63}-\d{5,9}\.safetensors")
PART_FILE = re.compile(r"part-\d{5,9}\.json")
TOKENIZER_FILE = re.compile(r"tokenizer/[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
MARK_FILE = re.compile(r"save\.json")
HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A stored slice of a tensor.

    Attributes:
        file: Name of the file in the checkpoint folder.
        key: The slice's name in that file: the tensor's name, with `#1`, `#2`, ... appended where a rank holds several
            slices of one tensor.
        begin: Byte in the file at which the slice begins.
        offset: Where the slice begins in the tensor.
        shape: Shape of the slice.
        xxh3_128: Hash of its bytes, as hex.
    """

    file: str
    key: str
    begin: int
    offset: Ints
    shape: Ints
    xxh3_128: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """A tensor: dtype (safetensors code), global shape, and its slices."""

    dtype: str
    shape: Ints
    slices: tuple[Slice, ...]

    @property
    def spec(self) -> TensorSpec:
        """Dtype and global shape."""
        return TensorSpec(self.dtype, self.shape)

    def slice_bytes(self, piece: Slice) -> int:
        """Bytes of one of its slices."""
        return prod(piece.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file: its size, and the xxh3_128 of its first `hashed_bytes` bytes."""

    n_bytes: int
    hashed_bytes: int
    xxh3_128: str


Tensors = dict[str, dict[str, TensorRecord]]
"""Group → tensor name → record."""

Files = dict[str, FileRecord]
"""File name, relative to the checkpoint folder, → record."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank wrote into a save.

    Attributes:
        rank: The rank.
        token: Which save it belongs to.
        files: The files it wrote.
        tensors: The slices in them.
    """

    rank: int
    token: str
    files: Files
    tensors: Tensors

    def to_bytes(self) -> bytes:
        """Returns the part list as a file's content."""
        head = {"format": "lt-checkpoint-part", "version": 1, "rank": self.rank, "token": self.token}
        return strict_json.dumps(
            {**head, "files": files_to_json(self.files), "tensors": tensors_to_json(self.tensors)}, "the part list"
        )

    @classmethod
    def from_bytes(cls, raw: bytes, source: str) -> "Part":
        """Reads a part list; a `CheckpointError` names the file and the field."""
        obj = strict_json.loads(raw, source)
        strict_json.check_version(obj, "lt-checkpoint-part", 1, source)
        return cls(
            rank=strict_json.count(obj, "rank", source),
            token=strict_json.field(obj, "token", str, source),
            files=files_from_json(strict_json.field(obj, "files", dict, source), source),
            tensors=tensors_from_json(strict_json.field(obj, "tensors", dict, source), source),
        )


def files_to_json(files: Files) -> dict[str, Any]:
    """Returns the file records as JSON values."""
    return {
        name: {"bytes": record.n_bytes, "hashed_bytes": record.hashed_bytes, "xxh3_128": record.xxh3_128}
        for name, record in files.items()
    }


def files_from_json(obj: dict[str, Any], source: str) -> Files:
    """Reads file records; a name that could lead out of the folder is refused."""
    found: Files = {}
    for name, entry in obj.items():
        where = f"{source}: file {name!r}"
        if not any(pattern.fullmatch(name) for pattern in (TENSOR_FILE, PART_FILE, TOKENIZER_FILE, MARK_FILE)):
            raise CheckpointError(f"{where}: not a name that a checkpoint's file can have")
        if not isinstance(entry, dict):
            raise CheckpointError(f"{where}: must be an object; the file is damaged")
        record = FileRecord(
            n_bytes=strict_json.count(entry, "bytes", where),
            hashed_bytes=strict_json.count(entry, "hashed_bytes", where),
            xxh3_128=_hash(entry, where),
        )
        if record.hashed_bytes > record.n_bytes:
            raise CheckpointError(f"{where}: hashes more bytes than it has; the file is damaged")
        found[name] = record
    return found


def tensors_to_json(tensors: Tensors) -> dict[str, Any]:
    """Returns the tensor records as JSON values; a slice's key is left out where it is the tensor's name."""
    return {
        group: {
            name: {
                "dtype": record.dtype,
                "shape": list(record.shape),
                "slices": [
                    {
                        "file": piece.file,
                        **({} if piece.key == name else {"key": piece.key}),
                        "begin": piece.begin,
                        "offset": list(piece.offset),
                        "shape": list(piece.shape),
                        "xxh3_128": piece.xxh3_128,
                    }
                    for piece in record.slices
                ],
            }
            for name, record in members.items()
        }
        for group, members in tensors.items()
    }


def tensors_from_json(obj: dict[str, Any], source: str) -> Tensors:
    """Reads tensor records; each slice must lie in its tensor."""
    found: Tensors = {}
    for group in obj:
        if not GROUP.fullmatch(group):
            raise CheckpointError(f"{source}: {group!r} is not a group's name; the file is damaged")
        members = strict_json.field(obj, group, dict, source)
        found[group] = {name: _tensor(members, name, f"{source}: tensor {group}/{name}") for name in members}
    return found


def _tensor(members: dict[str, Any], name: str, where: str) -> TensorRecord:
    entry = strict_json.field(members, name, dict, where)
    dtype, shape = strict_json.field(entry, "dtype", str, where), strict_json.counts(entry, "shape", where)
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where}: dtype {dtype!r} is not known")
    slices: list[Slice] = []
    for item in strict_json.field(entry, "slices", list, where):
        if not isinstance(item, dict):
            raise CheckpointError(f"{where}: a slice must be an object; the file is damaged")
        piece = Slice(
            file=strict_json.field(item, "file", str, where),
            key=strict_json.field(item, "key", str, where) if "key" in item else name,
            begin=strict_json.count(item, "begin", where),
            offset=strict_json.counts(item, "offset", where),
            shape=strict_json.counts(item, "shape", where),
            xxh3_128=_hash(item, where),
        )
        if not inside((piece.offset, piece.shape), shape):
            raise CheckpointError(f"{where}: a slice at {list(piece.offset)} does not lie in it; the file is damaged")
        slices.append(piece)
    return TensorRecord(dtype=dtype, shape=shape, slices=tuple(slices))


def _hash(obj: dict[str, Any], where: str) -> str:
    value = strict_json.field(obj, "xxh3_128", str, where)
    if not HASH.fullmatch(value):
        raise CheckpointError(f"{where}: {value!r} is not a hash; the file is damaged")
    return value


def merge(parts: Iterable[Part]) -> tuple[Files, Tensors]:
    """Joins the parts of all ranks.

    Raises:
        CheckpointError: Two ranks give a tensor different dtypes or global shapes, or both wrote one file.
    """
    files: Files = {}
    specs: dict[str, dict[str, TensorSpec]] = {}
    slices: dict[tuple[str, str], list[Slice]] = {}
    for part in parts:
        for name, record in part.files.items():
            if name in files:
                raise CheckpointError(f"rank {part.rank}: file {name} was also written by another rank")
            files[name] = record
        for group, members in part.tensors.items():
            known = specs.setdefault(group, {})
            for name, record in members.items():
                spec = known.setdefault(name, record.spec)
                if spec != record.spec:
                    raise CheckpointError(
                        f"tensor {group}/{name}: rank {part.rank} says {record.dtype} {list(record.shape)}, "
                        f"a rank before it {spec.dtype} {list(spec.shape)}"
                    )
                slices.setdefault((group, name), []).extend(record.slices)
    return files, {
        group: {
            name: TensorRecord(dtype=spec.dtype, shape=spec.shape, slices=tuple(slices[group, name]))
            for name, spec in members.items()
        }
        for group, members in specs.items()
    }


def check(files: Files, tensors: Tensors, source: str) -> None:
    """Checks that slices tile tensors exactly and that hashes answer for every byte of every file exactly once.

    Raises:
        CheckpointError: Naming the tensor or the file.
    """
    ends: dict[str, list[tuple[int, int]]] = {name: [(0, files[name].hashed_bytes)] for name in files}
    for group, members in tensors.items():
        for name, record in members.items():
            trouble = covers(record.shape, [(piece.offset, piece.shape) for piece in record.slices])
            if trouble:
                raise CheckpointError(f"{source}: tensor {group}/{name} of shape {list(record.shape)}: {trouble}")
            for piece in record.slices:
                if not TENSOR_FILE.fullmatch(piece.file) or piece.file not in files:
                    raise CheckpointError(f"{source}: tensor {group}/{name}: its file {piece.file!r} is not listed")
                ends[piece.file].append((piece.begin, piece.begin + record.slice_bytes(piece)))
    for name, ranges in ends.items():
        position = 0
        for begin, end in sorted(ranges):
            if begin != position:
                raise CheckpointError(f"{source}: file {name}: the bytes from {position} to {begin} do not add up")
            position = end
        if position != files[name].n_bytes:
            raise CheckpointError(f"{source}: file {name}: has {files[name].n_bytes} bytes, {position} are listed")
