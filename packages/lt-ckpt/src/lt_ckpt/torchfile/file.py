"""Files of torch.save by torch itself: where their tensors' bytes lie, and files with room for them.

Reading loads a file with `weights_only`, which runs no code of a pickle, under a `FakeTensorMode`, which reads no bytes
of tensors: of each tensor, `StoredArray` says where its elements are. Writing saves empty tensors under `skip_data`,
which leaves room for their bytes; they are then written in any order, at the positions that reading finds. Room that
is never written is zeros.

Both are half private in torch (`_checkpoint_offset`, `skip_data`); a test pins them. Cost: a millisecond a file.
"""

import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from lt_ckpt import files
from lt_ckpt.dtypes import TORCH_NAMES
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.laid_out_files import Place
from lt_ckpt.layout import FileLayout
from lt_ckpt.tensorfile import StoredArray, TensorSpec

try:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
except ModuleNotFoundError as exc:
    raise CheckpointError(
        "files of torch.save (.pt, .pth, .bin, NxD, Meta) are read and written by torch: pip install 'lt-ckpt[torch]'"
    ) from exc

STATE_DICT_KEYS = ("model", "state_dict", "model_state_dict", "module")
"""Usual keys of the state dict in files that hold more than it."""

DTYPES = {code: getattr(torch, name) for code, name in TORCH_NAMES.items()}
Size = torch.Size
CODES = {dtype: code for code, dtype in DTYPES.items()}


class TensorReference:
    """Reference to a tensor that torch_xla saved in its own file: number `tid` of the folder."""

    def __init__(self, tid: int = -1) -> None:
        self.tid = tid


class _OffsetMode(FakeTensorMode):
    """Mode in which torch reads no bytes, and tensors are plain `meta` ones: fake ones cost a millisecond each."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


_UNSAFE = re.compile(r"Unsupported [^\n]+?(?= by default|\. |\n|$)|Trying to [^\n]+?(?=\. |\n|$)")
_REFERENCE = "torch_xla.utils.serialization.TensorReference"


def _pickle_reference(pickler: Any, reference: TensorReference) -> None:
    """Write a reference as torch_xla's pickles have it, without importing torch_xla."""
    module, _, name = _REFERENCE.rpartition(".")
    pickler.write(f"c{module}\n{name}\n".encode() + pickle.EMPTY_TUPLE + pickle.NEWOBJ)
    pickler.save({"tid": reference.tid})
    pickler.write(pickle.BUILD)


class _Pickler(pickle._Pickler):  # the one that is written in Python
    dispatch: ClassVar = {**pickle._Pickler.dispatch, TensorReference: _pickle_reference}


def load_pt(path: str | os.PathLike[str]) -> Any:
    """Read the content of a file, with `StoredArray`s instead of tensors.

    Returns:
        None, numbers, strings, bytes, lists, tuples, dicts, torch's dtypes and sizes, and `TensorReference`s.

    Raises:
        CheckpointError: Not a torch.save file, damaged, or in need of executing code.
    """
    path = Path(path)
    with translate_os_errors("reading", path), os.fdopen(files.open_for_reading(path), "rb") as file:
        return _load(file, str(path))


def load_pt_part(path: Path, begin: int, n_bytes: int) -> Any:
    """Read the content of a torch.save file in a range of another, like `load_pt`; positions count from `begin`."""
    from torch.distributed.checkpoint.utils import _create_file_view

    with translate_os_errors("reading", path), os.fdopen(files.open_for_reading(path), "rb") as file:
        return _load(_create_file_view(file, begin, n_bytes), str(path))


def _load(stream: Any, where: str) -> Any:
    try:
        with torch.serialization.safe_globals([(TensorReference, _REFERENCE)]), _OffsetMode():
            tree = torch.load(stream, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as exc:  # a damaged file may raise any
        found = _UNSAFE.search(str(exc))  # its text goes on with advice to run the pickle all the same
        reason = found[0] if found else str(exc).partition("\n")[0] or type(exc).__name__
        raise CheckpointError(f"{where}: torch cannot read it: {reason}; is it a whole file of torch.save?") from exc
    return map_tree(tree, torch.Tensor, lambda tensor: _locate(tensor, where))


def _locate(tensor: torch.Tensor, where: str) -> StoredArray:
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None) if tensor.layout is torch.strided else None
    if begin is None or tensor.dtype not in CODES or tensor.is_neg():
        raise CheckpointError(
            f"{where}: has a tensor ({tensor.dtype}, {tensor.layout}) that cannot be read in place; load it with "
            "torch.load(path, weights_only=True) and save it again with torch.save"
        )
    spec = TensorSpec(CODES[tensor.dtype], tuple(tensor.shape))
    position = begin + tensor.storage_offset() * tensor.element_size()
    return StoredArray(spec, position, tensor.stride())


def map_tree(tree: Any, kind: type | tuple[type, ...], leaf: Callable[[Any], Any]) -> Any:
    """Return a tree of dicts, lists and tuples with each leaf of a type replaced."""
    if isinstance(tree, kind):
        return leaf(tree)
    if isinstance(tree, dict):
        return type(tree)((key, map_tree(value, kind, leaf)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(map_tree(value, kind, leaf) for value in tree)
    return tree


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
    """Read the state dict of a file: the file itself, or what it has under one of `STATE_DICT_KEYS`.

    Returns:
        Name → location of the tensor, in the order of the file.

    Raises:
        CheckpointError: Not a torch.save file, damaged, or without such a state dict.
    """
    tree = load_pt(path)
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: holds a {type(tree).__name__}, not a state dict")
    if not any(isinstance(value, StoredArray) for value in tree.values()):
        keys = [name for name in STATE_DICT_KEYS if isinstance(tree.get(name), dict)]
        if len(keys) != 1:
            shown = ", ".join(map(repr, list(tree)[:5]))
            raise CheckpointError(f"{path}: holds no state dict (its keys: {shown}); save one alone with torch.save")
        tree = tree[keys[0]]
    arrays = {name: value for name, value in tree.items() if isinstance(value, StoredArray) and isinstance(name, str)}
    other = next((name for name in tree if name not in arrays), None)
    if other is not None:
        raise CheckpointError(f"{path}: {other!r} is not a tensor but a {type(tree[other]).__name__}")
    return arrays


def write_pt(path: str | os.PathLike[str], tree: Any) -> None:
    """Write a new torch.save file.

    Args:
        path: The file to make.
        tree: Lists, tuples and dicts of None, numbers, strings, bytes, numpy arrays, `TensorReference`s and, where
            only room is wanted, `TensorSpec`s.
    """
    full = map_tree(tree, np.ndarray, lambda array: torch.from_numpy(np.ascontiguousarray(array)))
    module = SimpleNamespace(__name__="pickle", Pickler=_Pickler) if has_leaf(tree, TensorReference) else pickle
    with translate_os_errors("writing", path):
        try:
            # Memory that is never touched takes no room.
            full = map_tree(full, TensorSpec, lambda spec: torch.empty(spec.shape, dtype=DTYPES[spec.dtype]))
            with torch.serialization.skip_data() if has_leaf(tree, TensorSpec) else nullcontext():
                torch.save(full, path, pickle_module=module)
        except RuntimeError as exc:  # of torch's own writer and of its memory
            raise CheckpointError(f"{path}: torch cannot write it: {str(exc).partition(chr(10))[0]}") from exc


def lay_out_pt(path: Path, file: FileLayout, tensors: Mapping[str, TensorSpec]) -> dict[str, Place]:
    """Lay out a file with a state dict (`lt_ckpt.laid_out_files.LayOut`)."""
    write_pt(path, OrderedDict(tensors))
    return {key: (path, array.byte_offset) for key, array in load_pt(path).items()}


def has_leaf(tree: Any, kind: type) -> bool:
    """Return True if a tree has a leaf of a type."""
    found: list[Any] = []
    map_tree(tree, kind, found.append)
    return bool(found)
