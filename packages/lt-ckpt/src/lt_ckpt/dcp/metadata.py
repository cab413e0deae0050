"""The `.metadata` file of a torch.distributed.checkpoint folder, read and written without torch.

It is a pickle of a few of torch's dataclasses. Reading goes through `safe_pickle` with a table in which each of them
is an inert object with a state; what the states must hold is checked here, and the result is plain: for each tensor
its dtype, shape and chunks, for each chunk its file, position and length. Writing gives the same pickle that torch
writes, in the form that every version since 2.4 reads.

Cost: some microseconds per chunk.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from lt_ckpt.errors import CheckpointError
from lt_ckpt.shards import Box, Ints, covers, inside
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.names import DTYPES, NAMES, TorchDtype, TorchSize, exactly, is_count
from lt_ckpt.torchfile.pickle_out import Call, Global, Instance, Pairs, dumps
from lt_ckpt.torchfile.safe_pickle import Maker, Stand, loads

MAX_OPCODES = 100_000_000
VERSION = "1.0.0"

_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_LAYOUT = ("torch.serialization", "_get_layout")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and the bytes of a file that hold it (in whatever form)."""

    box: Box
    file: str
    begin: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Chunked:
    """A tensor and the chunks that tile it."""

    spec: TensorSpec
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a checkpoint holds.

    Attributes:
        tensors: Key → tensor.
        objects: Keys of what is no tensor: pickles of their own, which nobody here looks into.
    """

    tensors: Mapping[str, Chunked]
    objects: tuple[str, ...]


class _Object(Stand):
    """An object of one of torch's dataclasses: its class's name and its state."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None

    def set_state(self, state: Any) -> None:
        if self.state is not None or type(state) not in (dict, tuple):
            raise CheckpointError(f"a {self.kind} has a state that is none")
        self.state = state

    def children(self) -> Iterable[object]:
        return [self.state]


def _kind(name: str) -> Maker:
    def make(arguments: tuple[Any, ...]) -> _Object:
        exactly(arguments, 0, 0, name)
        return _Object(name)

    return Maker(make)


def _layout(arguments: tuple[Any, ...]) -> str:
    if arguments != ("torch.strided",):
        raise CheckpointError("a tensor is sparse; only dense ones are known")
    return "strided"


def _path(arguments: tuple[Any, ...]) -> None:
    """Where the checkpoint was saved: of no interest."""
    exactly(arguments, 0, 4096, "a path")


def _memory_format(arguments: tuple[Any, ...]) -> None:
    """Deprecated in torch, and without a meaning for what is stored."""
    exactly(arguments, 1, 1, "a memory format")


_KINDS = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
TABLE = {
    **{
        key: value for key, value in NAMES.items() if isinstance(value, TorchDtype) or key[1] in ("Size", "OrderedDict")
    },
    **{(_METADATA, name): _kind(name) for name in (*_KINDS, "TensorProperties", "StorageMeta")},
    (_METADATA, "_MEM_FORMAT_ENCODING"): Maker(_memory_format),
    (_OLD, "TensorProperties"): _kind("TensorProperties"),
    (_OLD, "MEM_FORMAT_ENCODING"): Maker(_memory_format),
    (_FILES, "_StorageInfo"): _kind("_StorageInfo"),
    _LAYOUT: Maker(_layout),
    **{(module, name): Maker(_path) for module in ("pathlib", "pathlib._local") for name in _PATHS},
}
"""What a `.metadata` may name."""


def parse(data: bytes, where: str) -> Metadata:
    """Reads the content of a `.metadata` file.

    Raises:
        CheckpointError: It asks for code, is damaged, or the chunks of a tensor do not tile it.
    """
    root = loads(data, TABLE, where, max_opcodes=MAX_OPCODES)
    state = _state(root, "Metadata", where)
    items = _of_type(state.get("state_dict_metadata"), dict, where)
    infos = _storage_infos(_of_type(state.get("storage_data"), dict, where), where)
    tensors: dict[str, Chunked] = {}
    objects: list[str] = []
    for key, item in items.items():
        if type(key) is not str:
            raise CheckpointError(f"{where}: has a key of type {type(key).__name__}; the file is damaged")
        if isinstance(item, _Object) and item.kind == "BytesStorageMetadata":
            objects.append(key)
        else:
            tensors[key] = _tensor(key, _state(item, "TensorStorageMetadata", where), infos, f"{where}: {key}")
    return Metadata(tensors, tuple(objects))


def _of_type(value: Any, kind: type[Any], where: str) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"{where}: has a {type(value).__name__} in place of a {kind.__name__}; it is damaged")
    return value


def _state(value: Any, kind: str, where: str) -> dict[str, Any]:
    if not isinstance(value, _Object) or value.kind != kind:
        raise CheckpointError(f"{where}: has a {type(value).__name__} in place of a {kind}; the file is damaged")
    return _of_type(value.state, dict, where)


Infos = dict[tuple[str, Ints | None], tuple[str, int, int]]
"""(key, offset) → file, position, bytes."""


def _storage_infos(data: dict[Any, Any], where: str) -> Infos:
    infos: Infos = {}
    for index, info in data.items():
        index_state = _state(index, "MetadataIndex", where)
        state = _state(info, "_StorageInfo", where)
        key, offset = index_state.get("fqn"), index_state.get("offset")
        file, begin, n_bytes = state.get("relative_path"), state.get("offset"), state.get("length")
        if type(key) is not str or not (offset is None or isinstance(offset, TorchSize)):
            raise CheckpointError(f"{where}: has an index without a key; the file is damaged")
        if type(file) is not str or PurePosixPath(file).name != file or file in ("", "..") or not file.isprintable():
            raise CheckpointError(f"{where}: {key} lies in {file!r}, which is no file of this folder")
        if not (is_count(begin) and is_count(n_bytes)):
            raise CheckpointError(f"{where}: {key} has a place that is none; the file is damaged")
        if state.get("transform_descriptors"):
            raise CheckpointError(
                f"{where}: {key} is stored through an extension (compressed or the like); save it without one"
            )
        place = (key, None if offset is None else tuple(offset))
        if place in infos:
            raise CheckpointError(f"{where}: {key} has two places for one chunk; the file is damaged")
        infos[place] = file, begin, n_bytes
    return infos


def _tensor(key: str, state: dict[str, Any], infos: Infos, where: str) -> Chunked:
    properties = state.get("properties")
    if not isinstance(properties, _Object) or properties.kind != "TensorProperties":
        raise CheckpointError(f"{where}: has no properties; the file is damaged")
    dtype = properties.state[0] if type(properties.state) is tuple and properties.state else None
    if not isinstance(dtype, TorchDtype):
        raise CheckpointError(f"{where}: has no dtype; the file is damaged")
    size = _of_type(state.get("size"), TorchSize, where)
    chunks: list[Chunk] = []
    for item in _of_type(state.get("chunks"), list, where):
        chunk = _state(item, "ChunkStorageMetadata", where)
        offset, shape = (tuple(_of_type(chunk.get(name), TorchSize, where)) for name in ("offsets", "sizes"))
        if not inside((offset, shape), tuple(size)):
            raise CheckpointError(f"{where}: its chunk at {list(offset)} of {list(shape)} does not lie in {list(size)}")
        info = infos.get((key, offset)) or (infos.get((key, None)) if len(state["chunks"]) == 1 else None)
        if 0 in shape:
            continue
        if info is None:
            raise CheckpointError(f"{where}: its chunk at {list(offset)} lies nowhere; the checkpoint is incomplete")
        chunks.append(Chunk((offset, shape), *info))
    spec = TensorSpec(dtype.code, tuple(size))
    trouble = covers(spec.shape, [chunk.box for chunk in chunks])
    if trouble and spec.n_bytes:
        raise CheckpointError(f"{where}: {trouble}")
    return Chunked(spec, tuple(chunks))


def dump(tensors: Mapping[str, Chunked]) -> bytes:
    """Returns the content of a `.metadata` file."""

    def of(name: str, **state: Any) -> Instance:
        return Instance(Global(_METADATA, name), state or None)

    def size(numbers: Ints) -> Call:
        return Call(Global("torch", "Size"), (numbers,))

    layout = Call(Global(*_LAYOUT), ("torch.strided",))
    memory_format = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    items: dict[str, Instance] = {}
    places: list[tuple[Instance, Instance]] = []
    for key, tensor in tensors.items():
        # The five fields that all versions know; strides came later and mean nothing for what is stored.
        properties = (Global("torch", DTYPES[tensor.spec.dtype]), layout, False, memory_format, False)
        chunks = [of("ChunkStorageMetadata", offsets=size(c.box[0]), sizes=size(c.box[1])) for c in tensor.chunks]
        items[key] = of(
            "TensorStorageMetadata",
            properties=Instance(Global(_METADATA, "TensorProperties"), properties),
            size=size(tensor.spec.shape),
            chunks=chunks,
        )
        for i, chunk in enumerate(tensor.chunks):
            index = of("MetadataIndex", fqn=key, index=i, offset=size(chunk.box[0]))
            place = {"relative_path": chunk.file, "offset": chunk.begin, "length": chunk.n_bytes}
            places.append((index, Instance(Global(_FILES, "_StorageInfo"), place)))
    root = of(
        "Metadata",
        state_dict_metadata=items,
        planner_data={key: (key,) for key in tensors},
        storage_data=Pairs(tuple(places)),
        storage_meta=of("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]),
        version=VERSION,
    )
    return dumps(root)
