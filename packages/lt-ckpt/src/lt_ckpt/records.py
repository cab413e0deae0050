"""What is stored where: the records that a rank's part list and the manifest share, as data and as JSON.

A tensor is a dtype, a global shape and slices; a slice is a box, the file that holds it, the byte at which it begins
and the hash of its bytes. A file is a size and the hash of its leading bytes: of the header for a tensor file (the
slices' hashes answer for the rest), of everything for any other file. `check` makes sure that every byte of every file
is answered for by exactly one hash and that the slices of each tensor hold each element exactly once.

Tensors may also lie in the files of another program's format, NxD's (`NXD_FILE`), which holds some of them several
times. Such a file is hashed as a whole, its slices have no hashes of their own, and equal slices are `copies`.

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
_RANK = r"dp_rank_\d{2,9}_tp_rank_\d{2,9}_pp_rank_\d{2,9}\.pt"
NXD_FILE = re.compile(
    rf"(model|optim)/{_RANK}(\.info\.pt|\.tensors/tensor_\d{{1,9}}\.pt)?|scheduler\.pt|user_content\.pt|checkpoint|done"
)
"""What NxD's own loader looks for in a folder of its own."""
BEGUN, DONE = "checkpoint", "done"
"""The markers of a tag of NxD's. Each holds the text `1`."""
NXD_FOLDER = re.compile(rf"(model|optim)(/{_RANK}\.tensors)?")
LISTED = (TENSOR_FILE, PART_FILE, TOKENIZER_FILE, MARK_FILE, NXD_FILE)
"""Names that a manifest can list."""
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
        xxh3_128: Hash of its bytes, as hex; empty in a file that is hashed as a whole.
    """

    file: str
    key: str
    begin: int
    offset: Ints
    shape: Ints
    xxh3_128: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """A tensor: dtype (safetensors code), global shape, its slices, and where slices are stored once more."""

    dtype: str
    shape: Ints
    slices: tuple[Slice, ...]
    copies: tuple[Slice, ...] = ()

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
        if not any(pattern.fullmatch(name) for pattern in LISTED):
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
    """Returns the tensor records as JSON values.

    A slice's key is left out where it is the tensor's name, its hash and a tensor's copies where there are none.
    """

    def listed(slices: Iterable[Slice], name: str) -> list[dict[str, Any]]:
        return [
            {
                "file": piece.file,
                **({} if piece.key == name else {"key": piece.key}),
                "begin": piece.begin,
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
                "slices": listed(record.slices, name),
                **({"copies": listed(record.copies, name)} if record.copies else {}),
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
    slices = _slices(strict_json.field(entry, "slices", list, where), name, shape, where)
    copies = _slices(strict_json.field(entry, "copies", list, where), name, shape, where) if "copies" in entry else []
    return TensorRecord(dtype=dtype, shape=shape, slices=tuple(slices), copies=tuple(copies))


def _slices(items: list[Any], name: str, shape: Ints, where: str) -> list[Slice]:
    slices: list[Slice] = []
    for item in items:
        if not isinstance(item, dict):
            raise CheckpointError(f"{where}: a slice must be an object; the file is damaged")
        piece = Slice(
            file=strict_json.field(item, "file", str, where),
            key=strict_json.field(item, "key", str, where) if "key" in item else name,
            begin=strict_json.count(item, "begin", where),
            offset=strict_json.counts(item, "offset", where),
            shape=strict_json.counts(item, "shape", where),
            xxh3_128=_hash(item, where) if "xxh3_128" in item else "",
        )
        if not inside((piece.offset, piece.shape), shape):
            raise CheckpointError(f"{where}: a slice at {list(piece.offset)} does not lie in it; the file is damaged")
        slices.append(piece)
    return slices


def _hash(obj: dict[str, Any], where: str) -> str:
    value = strict_json.field(obj, "xxh3_128", str, where)
    if not HASH.fullmatch(value):
        raise CheckpointError(f"{where}: {value!r} is not a hash; the file is damaged")
    return value


def merge(parts: Iterable[Part]) -> tuple[Files, Tensors]:
    """Joins the parts of all ranks; a slice in a file of NxD that an earlier rank has stored as well is a copy.

    Raises:
        CheckpointError: Two ranks give a tensor different dtypes or global shapes, or both wrote one file.
    """
    files: Files = {}
    specs: dict[str, dict[str, TensorSpec]] = {}
    slices: dict[tuple[str, str], list[Slice]] = {}
    copies: dict[tuple[str, str], list[Slice]] = {}
    seen: set[tuple[str, str, Ints, Ints]] = set()
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
                own = slices.setdefault((group, name), [])
                for piece in record.slices:
                    box = (group, name, piece.offset, piece.shape)
                    if not NXD_FILE.fullmatch(piece.file):
                        own.append(piece)
                    elif box in seen:
                        copies.setdefault((group, name), []).append(piece)
                    else:
                        own.append(piece)
                        seen.add(box)
    return files, {
        group: {
            name: TensorRecord(
                dtype=spec.dtype,
                shape=spec.shape,
                slices=tuple(slices[group, name]),
                copies=tuple(copies.get((group, name), ())),
            )
            for name, spec in members.items()
        }
        for group, members in specs.items()
    }


def check(files: Files, tensors: Tensors, source: str) -> None:
    """Checks that slices tile tensors exactly and that hashes answer for every byte of every file exactly once.

    Raises:
        CheckpointError: Naming the tensor or the file.
    """
    ends: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for group, members in tensors.items():
        for name, record in members.items():
            where = f"{source}: tensor {group}/{name}"
            _check_boxes(record, where)
            for piece in (*record.slices, *record.copies):
                whole = NXD_FILE.fullmatch(piece.file) is not None
                if piece.file not in files or not (whole or TENSOR_FILE.fullmatch(piece.file)):
                    raise CheckpointError(f"{where}: its file {piece.file!r} is not listed")
                if whole == bool(piece.xxh3_128):
                    raise CheckpointError(f"{where}: {'a' if whole else 'no'} hash for its slice in {piece.file!r}")
                ends[piece.file].append((piece.begin, piece.begin + record.slice_bytes(piece)))
    for name, ranges in ends.items():
        _check_bytes(f"{source}: file {name}", files[name], ranges, whole=NXD_FILE.fullmatch(name) is not None)


def _check_boxes(record: TensorRecord, where: str) -> None:
    """Checks that a tensor's slices tile it, and that each copy is one of a slice."""
    boxes = [(piece.offset, piece.shape) for piece in record.slices]
    trouble = covers(record.shape, boxes)
    if trouble:
        raise CheckpointError(f"{where} of shape {list(record.shape)}: {trouble}")
    if record.copies and not {(piece.offset, piece.shape) for piece in record.copies} <= set(boxes):
        raise CheckpointError(f"{where}: a copy is of no slice of it")


def _check_bytes(where: str, file: FileRecord, ranges: Iterable[tuple[int, int]], *, whole: bool) -> None:
    """Checks that no two slices share a byte of a file, and that one hash answers for each of its bytes."""
    if whole and file.hashed_bytes != file.n_bytes:
        raise CheckpointError(f"{where}: {file.hashed_bytes} of its {file.n_bytes} bytes are hashed")
    position = 0 if whole else file.hashed_bytes
    for begin, end in sorted(ranges):
        if begin < position or end > file.n_bytes or (begin > position and not whole):
            raise CheckpointError(f"{where}: the bytes from {position} to {begin} do not add up")
        position = end
    if position != file.n_bytes and not whole:
        raise CheckpointError(f"{where}: has {file.n_bytes} bytes, {position} are listed")
