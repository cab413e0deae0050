"""NxD's files as torch reads them, with xser references followed, and equality of such trees and of whole sources."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lt_ckpt import CheckpointMetadata, Shard, begin_save, commit_save, write_rank_files
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.rank_writer import NxdRankWriter, optimizer_state_keys
from lt_ckpt.source import Source
from lt_model import ModelConfig


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


def save_nxd(root: Path, step: int, *, xser: bool = True) -> Path:
    """One rank saves files of NxD; every number in them is the step."""
    config = ModelConfig(vocab_size=4, hidden_size=4, intermediate_size=4, n_heads=2, n_kv_heads=2, n_layers=1)
    keys = optimizer_state_keys(config, NxdOptions(), 0, 0)
    options, content = NxdOptions(xser=xser), {"step": step}
    part = NxdRankWriter(config=config, options=options, param_group_keys=(keys,), step=step, user_content=content)
    shards = [
        Shard(
            group=group,
            name=tensor.key,
            dtype="F32",
            global_shape=tensor.shape,
            offset=(0,) * len(tensor.shape),
            shape=tensor.shape,
            data=np.full(tensor.shape, step, "<f4").reshape(-1).view(np.uint8),
        )
        for tensor in part.model_tensors()
        for group in ("weights", "exp_avg", "exp_avg_sq", "master")
    ]
    tmp = begin_save(root, step=step, world_size=1)
    write_rank_files(tmp, rank=0, shards=shards, writer=part)
    tokenizer = {"tokenizer.json": b"{}", "additional_chat_templates/tool_use.jinja": b"{{ tools }}"}
    metadata = CheckpointMetadata(step=step, model=config.to_dict(), tokenizer_files=tokenizer)
    return commit_save(tmp, world_size=1, metadata=metadata)
