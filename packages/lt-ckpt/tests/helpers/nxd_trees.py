"""NxD's files as torch reads them, with xser references followed, and equality of such trees and of whole sources."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lt_ckpt.source import Source


class Reference:
    """What torch_xla's class is when only torch is there."""


def load(path: Path) -> Any:
    with torch.serialization.safe_globals([(Reference, "torch_xla.utils.serialization.TensorReference")]):
        return _follow(torch.load(path, weights_only=True), path)


def _follow(tree: Any, path: Path) -> Any:
    if isinstance(tree, dict):
        return {key: _follow(value, path) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_follow(value, path) for value in tree]
    if isinstance(tree, Reference):
        return torch.load(f"{path}.tensors/tensor_{vars(tree)['tid']}.pt", weights_only=True)
    return tree


def same(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal trees: types, keys in order, values, dtypes, shapes, bits."""
    assert type(ours) is type(theirs), where
    if isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), where
        for key in theirs:
            same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for i, value in enumerate(theirs):
            same(ours[i], value, f"{where}.{i}")
    elif isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        assert torch.equal(ours, theirs), where
    else:
        assert ours == theirs, where


def everything(source: Source) -> dict[tuple[str, str], tuple[str, bytes]]:
    """Kind and tensor → dtype and bytes."""
    return {
        (kind, name): (group.specs[name].dtype, source.read(name, group=kind).tobytes())
        for kind, group in source.groups.items()
        for name in group.specs
    }
