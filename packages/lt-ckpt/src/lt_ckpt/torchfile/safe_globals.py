"""Allow-list of the globals in torch's pickles: tensors, dtypes, sizes, and nothing that executes.

Reading: `TORCH_SAFE_GLOBALS` is what `safe_pickle` allows in a torch.save file. Tensors become `TorchTensor`s
(locations), dtypes `TorchDtype`s, sizes `TorchSize`s, torch_xla's references to tensors in other files
`TensorReference`s. Writing: `to_pickle_node` converts the same values to the nodes of `pickle_writer`.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from lt_ckpt.dtypes import ITEM_BYTES
from lt_ckpt.errors import CheckpointError
from lt_ckpt.shards import Ints
from lt_ckpt.source import StoredArray
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.pickle_writer import Call, Global, PersistentId, PickledObject
from lt_ckpt.torchfile.safe_pickle import Constructor, PickleStub, SafeGlobals
from lt_ckpt.torchfile.strides import MAX_RANK, locate_view

TORCH_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Safetensors code → torch's name of the dtype."""

TORCH_STORAGES = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
}
"""Safetensors code → torch's storage class; newer dtypes have none and use untyped storages."""

TENSOR_REFERENCE = ("torch_xla.utils.serialization", "TensorReference")


@dataclass(frozen=True, slots=True)
class TorchDtype:
    """Torch dtype, by safetensors code."""

    code: str


class TorchSize(tuple[int, ...]):
    """`torch.Size` in a pickle."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Storage:
    """Torch storage: position in the file, elements, and dtype (None: untyped, counted in bytes)."""

    byte_offset: int
    n_items: int
    code: str | None


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """Tensor of a file: a view of a storage.

    Attributes:
        dtype: Safetensors code.
        storage: The storage; its elements are of this dtype.
        offset: First element of the view.
        shape: Shape of the view.
        strides: Elements between neighbors, one number per dimension.
    """

    dtype: str
    storage: Storage
    offset: int
    shape: Ints
    strides: Ints

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape."""
        return TensorSpec(self.dtype, self.shape)

    @property
    def stored_array(self) -> StoredArray:
        """Location of the tensor, as `locate`."""
        return self.locate()

    def locate(self) -> StoredArray:
        """Return its location; raise a CheckpointError outside the storage or for an unreadable view."""
        return locate_view(
            self.dtype, self.storage.byte_offset, self.storage.n_items, self.offset, self.shape, self.strides
        )


@dataclass(slots=True, eq=False)
class TensorReference(PickleStub):
    """Reference to a tensor that torch_xla saved in its own file: number `tid` of the folder."""

    tid: int = -1

    def set_state(self, state: Any) -> None:
        """Set the number."""
        if type(state) is not dict or set(state) != {"tid"} or not is_count(state["tid"]):
            raise CheckpointError("its pickle has a reference to a tensor without a number")
        self.tid = state["tid"]


@dataclass(frozen=True, slots=True)
class StorageKind:
    """Storage class; without a code it is untyped: its elements are counted in bytes."""

    code: str | None


@dataclass(frozen=True, slots=True)
class _ClassName:
    """Class that is only named."""

    name: str


def is_count(value: object) -> TypeGuard[int]:
    """Return True for a non-negative 64-bit integer."""
    return type(value) is int and 0 <= value < 2**63


def is_size(value: object) -> bool:
    """Return True for a valid tensor extent or offset: no tensor has 2 to the 60 elements."""
    return is_count(value) and value < 2**60


def parse_counts(value: object) -> Ints:
    """Return a tuple of counts of a pickle; raise a CheckpointError for anything else."""
    if not isinstance(value, tuple) or len(value) > MAX_RANK or not all(is_size(item) for item in value):
        raise CheckpointError("its pickle has an invalid shape, stride or offset")
    return tuple(value)


def check_argument_count(arguments: tuple[Any, ...], min_count: int, max_count: int, what: str) -> tuple[Any, ...]:
    """Return a call's arguments if their number is valid."""
    if not min_count <= len(arguments) <= max_count:
        raise CheckpointError(f"its pickle gives {len(arguments)} arguments to {what}")
    return arguments


def _rebuild_tensor_v2(arguments: tuple[Any, ...]) -> TorchTensor:
    storage, offset, size, strides, _, _, *rest = check_argument_count(arguments, 6, 7, "_rebuild_tensor_v2")
    if any(rest):
        raise CheckpointError("its pickle has a tensor that is conjugated or negated: save it after .resolve_conj()")
    if type(storage) is not Storage or storage.code is None or not is_count(offset):
        raise CheckpointError("its pickle has a tensor without a storage")
    return TorchTensor(storage.code, storage, offset, parse_counts(size), parse_counts(strides))


def _rebuild_tensor_v3(arguments: tuple[Any, ...]) -> TorchTensor:
    storage, offset, size, strides, requires_grad, hooks, dtype, *rest = check_argument_count(
        arguments, 7, 8, "_rebuild_tensor_v3"
    )
    if type(storage) is not Storage or storage.code is not None or type(dtype) is not TorchDtype:
        raise CheckpointError("its pickle has a tensor without a storage or dtype")
    typed = Storage(storage.byte_offset, storage.n_items // ITEM_BYTES[dtype.code], dtype.code)
    return _rebuild_tensor_v2((typed, offset, size, strides, requires_grad, hooks, *rest))


def _rebuild_parameter(arguments: tuple[Any, ...]) -> TorchTensor:
    tensor = check_argument_count(arguments, 3, 4, "_rebuild_parameter")[0]
    if type(tensor) is not TorchTensor:
        raise CheckpointError("its pickle has a parameter without a tensor")
    return tensor


def _rebuild_from_type(arguments: tuple[Any, ...]) -> TorchTensor:
    function, kind, inner, _ = check_argument_count(arguments, 4, 4, "_rebuild_from_type_v2")
    if type(function) is not Constructor or type(kind) is not _ClassName or type(inner) is not tuple:
        raise CheckpointError("its pickle rebuilds a tensor of an unknown class")
    tensor = function.construct(inner)
    if type(tensor) is not TorchTensor:
        raise CheckpointError("its pickle rebuilds something other than a tensor")
    return tensor


def _make_ordered_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    check_argument_count(arguments, 0, 0, "OrderedDict")
    return {}


def _make_size(arguments: tuple[Any, ...]) -> TorchSize:
    return TorchSize(parse_counts(check_argument_count(arguments, 1, 1, "torch.Size")[0]))


def _encode_latin1(arguments: tuple[Any, ...]) -> bytes:
    """Decode bytes as protocol 2 writes them."""
    text, encoding = check_argument_count(arguments, 2, 2, "_codecs.encode")
    if type(text) is not str or encoding != "latin1":
        raise CheckpointError("its pickle encodes something other than bytes")
    return text.encode("latin-1")


def _make_empty_bytes(arguments: tuple[Any, ...]) -> bytes:
    """Return empty bytes, as protocol 2 writes them."""
    check_argument_count(arguments, 0, 0, "bytes")
    return b""


def _make_tensor_reference(arguments: tuple[Any, ...]) -> TensorReference:
    check_argument_count(arguments, 0, 0, "TensorReference")
    return TensorReference()


TORCH_SAFE_GLOBALS: SafeGlobals = {
    ("collections", "OrderedDict"): Constructor(_make_ordered_dict),
    ("_codecs", "encode"): Constructor(_encode_latin1),
    ("__builtin__", "bytes"): Constructor(_make_empty_bytes),
    ("torch", "Size"): Constructor(_make_size),
    ("torch._utils", "_rebuild_tensor_v2"): Constructor(_rebuild_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Constructor(_rebuild_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): Constructor(_rebuild_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Constructor(_rebuild_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): Constructor(_rebuild_from_type),
    ("torch", "Tensor"): _ClassName("Tensor"),
    ("torch.nn.parameter", "Parameter"): _ClassName("Parameter"),
    ("torch.storage", "UntypedStorage"): StorageKind(None),
    **{("torch", name): StorageKind(code) for code, name in TORCH_STORAGES.items()},
    **{("torch", name): TorchDtype(code) for code, name in TORCH_DTYPES.items()},
    TENSOR_REFERENCE: Constructor(_make_tensor_reference),
}
"""Globals allowed in a torch.save file."""


def make_persistent_load(find: Callable[[str], tuple[int, int]]) -> Callable[[object], Storage]:
    """Make the function that resolves the persistent ids of a file.

    Args:
        find: Returns position and bytes of a storage's record by its key; raises a CheckpointError if there is none.
    """

    def storage(reference: object) -> Storage:
        if type(reference) is not tuple or len(reference) != 5 or reference[0] != "storage":
            raise CheckpointError("its pickle has a persistent id that is not a storage")
        _, kind, key, _, n_items = reference
        if type(kind) is not StorageKind or type(key) is not str or not is_count(n_items):
            raise CheckpointError("its pickle has a persistent id that is not a storage")
        begin, n_bytes = find(key)
        if n_items * (ITEM_BYTES[kind.code] if kind.code else 1) != n_bytes:
            raise CheckpointError(f"its storage {key!r} should have {n_items} elements, its record has {n_bytes} bytes")
        return Storage(begin, n_items, kind.code)

    return storage


def to_pickle_node(value: Any, tensor: Callable[[Any], Any]) -> Any:
    """Convert a tree to nodes of `pickle_writer`.

    Args:
        value: None, numbers, strings, bytes, lists, tuples, dicts, OrderedDicts, and this module's values without
            bytes.
        tensor: Converts a leaf of any other type.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return kind(to_pickle_node(item, tensor) for item in value)
    if kind is dict:
        return {key: to_pickle_node(item, tensor) for key, item in value.items()}
    if kind is OrderedDict:
        return Call(
            Global("collections", "OrderedDict"), (), {key: to_pickle_node(item, tensor) for key, item in value.items()}
        )
    if kind is bytes:
        return Call(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1"))
    if kind is TorchSize:
        return Call(Global("torch", "Size"), (tuple(value),))
    if kind is TorchDtype:
        return Global("torch", TORCH_DTYPES[value.code])
    if kind is TensorReference:
        return PickledObject(Global(*TENSOR_REFERENCE), {"tid": value.tid})
    return tensor(value)


def make_tensor_node(key: str, spec: TensorSpec) -> Call:
    """Return the node of a contiguous tensor that fills the storage `key`, as torch writes it."""
    strides: list[int] = []
    step = 1
    for n in reversed(spec.shape):
        strides.append(step)
        step *= max(n, 1)
    size, hooks = (0, spec.shape, tuple(reversed(strides)), False), Call(Global("collections", "OrderedDict"))
    n_items = spec.n_bytes // ITEM_BYTES[spec.dtype]
    if spec.dtype in TORCH_STORAGES:
        kind = Global("torch", TORCH_STORAGES[spec.dtype])
        storage = PersistentId(("storage", kind, key, "cpu", n_items))
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), (storage, *size, hooks))
    kind = Global("torch.storage", "UntypedStorage")
    storage = PersistentId(("storage", kind, key, "cpu", spec.n_bytes))
    dtype = Global("torch", TORCH_DTYPES[spec.dtype])
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), (storage, *size, hooks, dtype))
