"""`.metadata` files of torch.distributed.checkpoint, read and written without torch.

The file is a pickle of a few of torch's dataclasses. Reading uses `safe_pickle` with an allow-list in which each of
them is an inert object with a state; the states are validated here, and the result is plain: for each tensor its dtype,
shape and chunks, for each chunk its file, position and length. Writing produces the same pickle as torch, in the form
that every version since 2.4 reads.

Cost: some microseconds per chunk.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from lt_ckpt.errors import CheckpointError
from lt_ckpt.shards import Box, Ints, find_tiling_error, is_inside
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.pickle_writer import Call, DictItems, Global, PickledObject, dumps
from lt_ckpt.torchfile.safe_globals import (
    TORCH_DTYPES,
    TORCH_SAFE_GLOBALS,
    TorchDtype,
    TorchSize,
    check_argument_count,
    is_count,
)
from lt_ckpt.torchfile.safe_pickle import Constructor, PickleStub, loads

MAX_OPCODES = 100_000_000
VERSION = "1.0.0"

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_FILESYSTEM_MODULE = "torch.distributed.checkpoint.filesystem"
_LEGACY_METADATA_MODULE = "torch.distributed._shard.sharded_tensor.metadata"
_GET_LAYOUT = ("torch.serialization", "_get_layout")


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """Box of a tensor, and the bytes of a file that hold it (in any encoding)."""

    box: Box
    file: str
    byte_offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """Tensor and the chunks that tile it."""

    spec: TensorSpec
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """Content of a `.metadata` file.

    Attributes:
        tensors: Key → tensor.
        objects: Keys of non-tensors: separate pickles, which are never read here.
    """

    tensors: Mapping[str, ChunkedTensor]
    objects: tuple[str, ...]


class _MetadataObject(PickleStub):
    """Object of one of torch's dataclasses: its class's name and its state."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None

    def set_state(self, state: Any) -> None:
        if self.state is not None or type(state) not in (dict, tuple):
            raise CheckpointError(f"a {self.kind} has an invalid state")
        self.state = state

    def children(self) -> Iterable[object]:
        return [self.state]


def _object_constructor(name: str) -> Constructor:
    def make(arguments: tuple[Any, ...]) -> _MetadataObject:
        check_argument_count(arguments, 0, 0, name)
        return _MetadataObject(name)

    return Constructor(make)


def _parse_layout(arguments: tuple[Any, ...]) -> str:
    if arguments != ("torch.strided",):
        raise CheckpointError("a tensor is sparse; only dense ones are supported")
    return "strided"


def _ignore_path(arguments: tuple[Any, ...]) -> None:
    """Ignore the path where the checkpoint was saved."""
    check_argument_count(arguments, 0, 4096, "a path")


def _ignore_memory_format(arguments: tuple[Any, ...]) -> None:
    """Ignore the memory format, which is deprecated in torch and irrelevant for storage."""
    check_argument_count(arguments, 1, 1, "a memory format")


_CLASS_NAMES = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
_PATH_CLASSES = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
METADATA_SAFE_GLOBALS = {
    **{
        key: value
        for key, value in TORCH_SAFE_GLOBALS.items()
        if isinstance(value, TorchDtype) or key[1] in ("Size", "OrderedDict")
    },
    **{
        (_METADATA_MODULE, name): _object_constructor(name)
        for name in (*_CLASS_NAMES, "TensorProperties", "StorageMeta")
    },
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"): Constructor(_ignore_memory_format),
    (_LEGACY_METADATA_MODULE, "TensorProperties"): _object_constructor("TensorProperties"),
    (_LEGACY_METADATA_MODULE, "MEM_FORMAT_ENCODING"): Constructor(_ignore_memory_format),
    (_FILESYSTEM_MODULE, "_StorageInfo"): _object_constructor("_StorageInfo"),
    _GET_LAYOUT: Constructor(_parse_layout),
    **{(module, name): Constructor(_ignore_path) for module in ("pathlib", "pathlib._local") for name in _PATH_CLASSES},
}
"""Globals allowed in a `.metadata` file."""


def parse_metadata(data: bytes, where: str) -> DcpMetadata:
    """Parse the content of a `.metadata` file.

    Raises:
        CheckpointError: It refers to code, is damaged, or the chunks of a tensor do not tile it.
    """
    root = loads(data, METADATA_SAFE_GLOBALS, where, max_opcodes=MAX_OPCODES)
    state = _object_state(root, "Metadata", where)
    items = _require_type(state.get("state_dict_metadata"), dict, where)
    infos = _parse_storage_infos(_require_type(state.get("storage_data"), dict, where), where)
    tensors: dict[str, ChunkedTensor] = {}
    objects: list[str] = []
    for key, item in items.items():
        if type(key) is not str:
            raise CheckpointError(f"{where}: has a key of type {type(key).__name__}; the file is damaged")
        if isinstance(item, _MetadataObject) and item.kind == "BytesStorageMetadata":
            objects.append(key)
        else:
            tensors[key] = _parse_tensor(
                key, _object_state(item, "TensorStorageMetadata", where), infos, f"{where}: {key}"
            )
    return DcpMetadata(tensors, tuple(objects))


def _require_type(value: Any, kind: type[Any], where: str) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"{where}: has a {type(value).__name__} instead of a {kind.__name__}; it is damaged")
    return value


def _object_state(value: Any, kind: str, where: str) -> dict[str, Any]:
    if not isinstance(value, _MetadataObject) or value.kind != kind:
        raise CheckpointError(f"{where}: has a {type(value).__name__} instead of a {kind}; the file is damaged")
    return _require_type(value.state, dict, where)


StorageInfos = dict[tuple[str, Ints | None], tuple[str, int, int]]
"""(key, offset) → file, position, bytes."""


def _parse_storage_infos(data: dict[Any, Any], where: str) -> StorageInfos:
    infos: StorageInfos = {}
    for index, info in data.items():
        index_state = _object_state(index, "MetadataIndex", where)
        state = _object_state(info, "_StorageInfo", where)
        key, offset = index_state.get("fqn"), index_state.get("offset")
        file, begin, n_bytes = state.get("relative_path"), state.get("offset"), state.get("length")
        if type(key) is not str or not (offset is None or isinstance(offset, TorchSize)):
            raise CheckpointError(f"{where}: has an index without a key; the file is damaged")
        if type(file) is not str or PurePosixPath(file).name != file or file in ("", "..") or not file.isprintable():
            raise CheckpointError(f"{where}: {key} lies in {file!r}, which is not a file of this folder")
        if not (is_count(begin) and is_count(n_bytes)):
            raise CheckpointError(f"{where}: {key} has an invalid position; the file is damaged")
        if state.get("transform_descriptors"):
            raise CheckpointError(f"{where}: {key} is stored with an extension (e.g. compressed); save it without one")
        chunk_id = (key, None if offset is None else tuple(offset))
        if chunk_id in infos:
            raise CheckpointError(f"{where}: {key} has two positions for one chunk; the file is damaged")
        infos[chunk_id] = file, begin, n_bytes
    return infos


def _parse_tensor(key: str, state: dict[str, Any], infos: StorageInfos, where: str) -> ChunkedTensor:
    properties = state.get("properties")
    if not isinstance(properties, _MetadataObject) or properties.kind != "TensorProperties":
        raise CheckpointError(f"{where}: has no properties; the file is damaged")
    dtype = properties.state[0] if type(properties.state) is tuple and properties.state else None
    if not isinstance(dtype, TorchDtype):
        raise CheckpointError(f"{where}: has no dtype; the file is damaged")
    size = _require_type(state.get("size"), TorchSize, where)
    chunks: list[DcpChunk] = []
    for item in _require_type(state.get("chunks"), list, where):
        chunk = _object_state(item, "ChunkStorageMetadata", where)
        offset, shape = (tuple(_require_type(chunk.get(name), TorchSize, where)) for name in ("offsets", "sizes"))
        if not is_inside((offset, shape), tuple(size)):
            raise CheckpointError(f"{where}: its chunk at {list(offset)} of {list(shape)} does not lie in {list(size)}")
        info = infos.get((key, offset)) or (infos.get((key, None)) if len(state["chunks"]) == 1 else None)
        if 0 in shape:
            continue
        if info is None:
            raise CheckpointError(f"{where}: its chunk at {list(offset)} has no position; the checkpoint is incomplete")
        chunks.append(DcpChunk((offset, shape), *info))
    spec = TensorSpec(dtype.code, tuple(size))
    error = find_tiling_error(spec.shape, [chunk.box for chunk in chunks])
    if error and spec.n_bytes:
        raise CheckpointError(f"{where}: {error}")
    return ChunkedTensor(spec, tuple(chunks))


def dump_metadata(tensors: Mapping[str, ChunkedTensor]) -> bytes:
    """Return the content of a `.metadata` file."""

    def make_object(name: str, **state: Any) -> PickledObject:
        return PickledObject(Global(_METADATA_MODULE, name), state or None)

    def size(numbers: Ints) -> Call:
        return Call(Global("torch", "Size"), (numbers,))

    layout = Call(Global(*_GET_LAYOUT), ("torch.strided",))
    memory_format = Call(Global(_METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    items: dict[str, PickledObject] = {}
    storage_infos: list[tuple[PickledObject, PickledObject]] = []
    for key, tensor in tensors.items():
        # The five fields that all versions have; strides came later and are irrelevant for storage.
        properties = (Global("torch", TORCH_DTYPES[tensor.spec.dtype]), layout, False, memory_format, False)
        chunks = [
            make_object("ChunkStorageMetadata", offsets=size(c.box[0]), sizes=size(c.box[1])) for c in tensor.chunks
        ]
        items[key] = make_object(
            "TensorStorageMetadata",
            properties=PickledObject(Global(_METADATA_MODULE, "TensorProperties"), properties),
            size=size(tensor.spec.shape),
            chunks=chunks,
        )
        for i, chunk in enumerate(tensor.chunks):
            index = make_object("MetadataIndex", fqn=key, index=i, offset=size(chunk.box[0]))
            place = {"relative_path": chunk.file, "offset": chunk.byte_offset, "length": chunk.n_bytes}
            storage_infos.append((index, PickledObject(Global(_FILESYSTEM_MODULE, "_StorageInfo"), place)))
    root = make_object(
        "Metadata",
        state_dict_metadata=items,
        planner_data={key: (key,) for key in tensors},
        storage_data=DictItems(tuple(storage_infos)),
        storage_meta=make_object("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]),
        version=VERSION,
    )
    return dumps(root)
