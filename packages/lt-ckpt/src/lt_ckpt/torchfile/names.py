"""What the names in torch's pickles mean here: tensors, dtypes, sizes, and nothing that runs.

Reading: `table` is what `safe_pickle` may find in a file of `torch.save`. Tensors become `TorchTensor`s (where they
lie), dtypes `TorchDtype`s, sizes `TorchSize`s, torch_xla's references to tensors in other files `TensorReference`s.
Writing: `node` turns the same values into what `pickle_out` writes.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from lt_ckpt.dtypes import ITEM_BYTES
from lt_ckpt.errors import CheckpointError
from lt_ckpt.shards import Ints
from lt_ckpt.source import Held
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.pickle_out import Call, Global, Instance, Persistent
from lt_ckpt.torchfile.safe_pickle import Maker, Stand, Table
from lt_ckpt.torchfile.strides import MAX_RANK, view

DTYPES = {
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

STORAGES = {
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
"""Safetensors code → torch's storage class; the newer dtypes have none and are kept in untyped storages."""

REFERENCE = ("torch_xla.utils.serialization", "TensorReference")


@dataclass(frozen=True, slots=True)
class TorchDtype:
    """A dtype, by safetensors code."""

    code: str


class TorchSize(tuple[int, ...]):
    """A tensor's shape, where a file holds one as a `torch.Size`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage: where it begins in the file, its elements, and their dtype (None: untyped, counted in bytes)."""

    begin: int
    n_items: int
    code: str | None


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor of a file that was read: a view of a storage.

    Attributes:
        dtype: Safetensors code.
        storage: The storage; its elements are of this dtype.
        offset: First element of the view.
        shape: Shape of the view.
        strides: Elements between neighbours, one number per dimension.
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
    def held(self) -> Held:
        """Where it lies."""
        return self.locate()

    def locate(self) -> Held:
        """Returns where it lies; a `CheckpointError` when that is outside of its storage, or no box (`strides.py`)."""
        return view(self.dtype, self.storage.begin, self.storage.n_items, self.offset, self.shape, self.strides)


@dataclass(slots=True, eq=False)
class TensorReference(Stand):
    """A tensor that torch_xla saved in a file of its own: number `tid` of the folder beside."""

    tid: int = -1

    def set_state(self, state: Any) -> None:
        """Take the number."""
        if type(state) is not dict or set(state) != {"tid"} or not is_count(state["tid"]):
            raise CheckpointError("its pickle has a reference to a tensor without a number")
        self.tid = state["tid"]


@dataclass(frozen=True, slots=True)
class StorageKind:
    """A storage class; without a code it is untyped: its elements are counted in bytes."""

    code: str | None


@dataclass(frozen=True, slots=True)
class _Class:
    """A class that is only ever named."""

    name: str


def is_count(value: object) -> TypeGuard[int]:
    """Tells whether this is a number of things."""
    return type(value) is int and 0 <= value < 2**63


def is_size(value: object) -> bool:
    """Tells whether this can be a tensor's extent or an offset in it: no tensor has 2 to the 60 elements."""
    return is_count(value) and value < 2**60


def counts(value: object) -> Ints:
    """Returns a tuple of counts out of a pickle; a `CheckpointError` for anything else."""
    if not isinstance(value, tuple) or len(value) > MAX_RANK or not all(is_size(item) for item in value):
        raise CheckpointError("its pickle has a shape, stride or offset that is none")
    return tuple(value)


def exactly(arguments: tuple[Any, ...], least: int, most: int, what: str) -> tuple[Any, ...]:
    """Returns a call's arguments when their number is right."""
    if not least <= len(arguments) <= most:
        raise CheckpointError(f"its pickle gives {len(arguments)} arguments to {what}")
    return arguments


def _tensor_v2(arguments: tuple[Any, ...]) -> TorchTensor:
    storage, offset, size, strides, _, _, *rest = exactly(arguments, 6, 7, "_rebuild_tensor_v2")
    if any(rest):
        raise CheckpointError("its pickle has a tensor that is conjugated or negated: save it after .resolve_conj()")
    if type(storage) is not Storage or storage.code is None or not is_count(offset):
        raise CheckpointError("its pickle has a tensor without a storage")
    return TorchTensor(storage.code, storage, offset, counts(size), counts(strides))


def _tensor_v3(arguments: tuple[Any, ...]) -> TorchTensor:
    storage, offset, size, strides, requires_grad, hooks, dtype, *rest = exactly(arguments, 7, 8, "_rebuild_tensor_v3")
    if type(storage) is not Storage or storage.code is not None or type(dtype) is not TorchDtype:
        raise CheckpointError("its pickle has a tensor without a storage or dtype")
    typed = Storage(storage.begin, storage.n_items // ITEM_BYTES[dtype.code], dtype.code)
    return _tensor_v2((typed, offset, size, strides, requires_grad, hooks, *rest))


def _parameter(arguments: tuple[Any, ...]) -> TorchTensor:
    tensor = exactly(arguments, 3, 4, "_rebuild_parameter")[0]
    if type(tensor) is not TorchTensor:
        raise CheckpointError("its pickle has a parameter without a tensor")
    return tensor


def _from_type(arguments: tuple[Any, ...]) -> TorchTensor:
    function, kind, inner, _ = exactly(arguments, 4, 4, "_rebuild_from_type_v2")
    if type(function) is not Maker or type(kind) is not _Class or type(inner) is not tuple:
        raise CheckpointError("its pickle rebuilds a tensor of a class that is none")
    tensor = function.make(inner)
    if type(tensor) is not TorchTensor:
        raise CheckpointError("its pickle rebuilds something else than a tensor")
    return tensor


def _ordered_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    exactly(arguments, 0, 0, "OrderedDict")
    return {}


def _size(arguments: tuple[Any, ...]) -> TorchSize:
    return TorchSize(counts(exactly(arguments, 1, 1, "torch.Size")[0]))


def _encoded(arguments: tuple[Any, ...]) -> bytes:
    """How protocol 2 writes bytes."""
    text, encoding = exactly(arguments, 2, 2, "_codecs.encode")
    if type(text) is not str or encoding != "latin1":
        raise CheckpointError("its pickle encodes something else than bytes")
    return text.encode("latin-1")


def _no_bytes(arguments: tuple[Any, ...]) -> bytes:
    """How protocol 2 writes the empty bytes."""
    exactly(arguments, 0, 0, "bytes")
    return b""


def _reference(arguments: tuple[Any, ...]) -> TensorReference:
    exactly(arguments, 0, 0, "TensorReference")
    return TensorReference()


NAMES: Table = {
    ("collections", "OrderedDict"): Maker(_ordered_dict),
    ("_codecs", "encode"): Maker(_encoded),
    ("__builtin__", "bytes"): Maker(_no_bytes),
    ("torch", "Size"): Maker(_size),
    ("torch._utils", "_rebuild_tensor_v2"): Maker(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Maker(_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): Maker(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Maker(_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): Maker(_from_type),
    ("torch", "Tensor"): _Class("Tensor"),
    ("torch.nn.parameter", "Parameter"): _Class("Parameter"),
    ("torch.storage", "UntypedStorage"): StorageKind(None),
    **{("torch", name): StorageKind(code) for code, name in STORAGES.items()},
    **{("torch", name): TorchDtype(code) for code, name in DTYPES.items()},
    REFERENCE: Maker(_reference),
}
"""What a file of `torch.save` may name."""


def storages(find: Callable[[str], tuple[int, int]]) -> Callable[[object], Storage]:
    """Makes the meaning of persistent ids in a file.

    Args:
        find: Returns begin and bytes of the storage's record, by its key; a `CheckpointError` when there is none.
    """

    def storage(reference: object) -> Storage:
        if type(reference) is not tuple or len(reference) != 5 or reference[0] != "storage":
            raise CheckpointError("its pickle has a persistent id that is no storage")
        _, kind, key, _, n_items = reference
        if type(kind) is not StorageKind or type(key) is not str or not is_count(n_items):
            raise CheckpointError("its pickle has a persistent id that is no storage")
        begin, n_bytes = find(key)
        if n_items * (ITEM_BYTES[kind.code] if kind.code else 1) != n_bytes:
            raise CheckpointError(f"its storage {key!r} should have {n_items} elements, its record has {n_bytes} bytes")
        return Storage(begin, n_items, kind.code)

    return storage


def node(value: Any, tensor: Callable[[Any], Any]) -> Any:
    """Returns a tree as `pickle_out` takes it.

    Args:
        value: None, numbers, texts, bytes, lists, tuples, dicts, OrderedDicts, and this module's values without bytes.
        tensor: What to write for a leaf of any other type.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return kind(node(item, tensor) for item in value)
    if kind is dict:
        return {key: node(item, tensor) for key, item in value.items()}
    if kind is OrderedDict:
        return Call(Global("collections", "OrderedDict"), (), {key: node(item, tensor) for key, item in value.items()})
    if kind is bytes:
        return Call(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1"))
    if kind is TorchSize:
        return Call(Global("torch", "Size"), (tuple(value),))
    if kind is TorchDtype:
        return Global("torch", DTYPES[value.code])
    if kind is TensorReference:
        return Instance(Global(*REFERENCE), {"tid": value.tid})
    return tensor(value)


def tensor_node(key: str, spec: TensorSpec) -> Call:
    """Returns what torch writes for a contiguous tensor that fills the storage `key`."""
    strides: list[int] = []
    step = 1
    for n in reversed(spec.shape):
        strides.append(step)
        step *= max(n, 1)
    size, hooks = (0, spec.shape, tuple(reversed(strides)), False), Call(Global("collections", "OrderedDict"))
    n_items = spec.n_bytes // ITEM_BYTES[spec.dtype]
    if spec.dtype in STORAGES:
        kind = Global("torch", STORAGES[spec.dtype])
        storage = Persistent(("storage", kind, key, "cpu", n_items))
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), (storage, *size, hooks))
    kind = Global("torch.storage", "UntypedStorage")
    storage = Persistent(("storage", kind, key, "cpu", spec.n_bytes))
    dtype = Global("torch", DTYPES[spec.dtype])
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), (storage, *size, hooks, dtype))
