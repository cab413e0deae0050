"""Resharding of an NxD ZeRO-1 optimizer state for another number of data-parallel ranks.

Each new file is the tree of the old one with new shards: rows of the tensor-parallel rank's tensors, read from the old
shards that have them, and rows of zeros as padding. All else (param groups, steps, shapes) is equal on all
data-parallel ranks and is copied. Master weights are resharded like the rest. The output has the folder `optim` alone,
like that of NxD's own tool, to be used with the model files, which do not depend on the number of data-parallel ranks.

Every byte that is read is compared with its checksum. Cost: every byte is read and written once; memory: a block.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt import files
from lt_ckpt.atomic_folder import AtomicFolder
from lt_ckpt.confined_files import resolve_confined
from lt_ckpt.conversion import BLOCK_BYTES
from lt_ckpt.copy_plan import StoredSlice
from lt_ckpt.dtypes import cast, item_bytes
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.executors import ByteCounter
from lt_ckpt.nxd.layout import rank_path
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.reader import read_nxd_checkpoint
from lt_ckpt.nxd.xser import XserFile, XserWriter, read_file_checksums
from lt_ckpt.nxd.zero1 import (
    MASTER_WEIGHTS,
    MASTER_WEIGHTS_KEY,
    STATE_KEY,
    RankOptimizerState,
    read_optimizer_states,
    shard_rows,
)
from lt_ckpt.shards import split_rows
from lt_ckpt.source import TensorGroup, TensorReader
from lt_ckpt.tensor_writers import TensorFileWriter
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import TorchWriter
from lt_ckpt.torchfile.safe_globals import TensorReference, TorchTensor
from lt_model import config_from_hf


@dataclass(frozen=True, slots=True)
class _NewShard:
    """Tensor of a new file: rows of a tensor, then rows of zeros."""

    group: TensorGroup
    name: str
    first_row: int
    n_rows: int
    spec: TensorSpec


def reshard_optimizer(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dp: int,
    config: Mapping[str, Any],
    options: NxdOptions | None = None,
    progress: files.ProgressCallback | None = None,
) -> Path:
    """Write the ZeRO-1 state of a checkpoint for `dp` data-parallel ranks.

    Args:
        path: The checkpoint, as for `open_nxd`.
        out: The folder to make; an existing one must be empty.
        dp: The new number of data-parallel ranks.
        config: The content of the model's config.json.
        options: Required options, as for `open_nxd`.
        progress: Called with the bytes written so far and in all.

    Returns:
        The folder, with `optim` in it.

    Raises:
        CheckpointError: The state is damaged or incomplete, its shards have different steps, or the disk fails; nothing
            is left behind.
    """
    if type(dp) is not int or dp < 1:
        raise CheckpointError(f"dp = {dp!r}: must be a whole number of at least 1")
    model = config_from_hf(dict(config), source="config.json")
    checkpoint = read_nxd_checkpoint(path, model, options, locate_tensors=False)
    root, folder = checkpoint.files.root, Path(os.path.abspath(out))
    states = read_optimizer_states(checkpoint)
    for file in sorted({file for state in states.values() for file in _files_of(state)}):
        resolve_confined(root, file)
    with TensorReader(root, partial(read_file_checksums, root)) as reader:
        for state in states.values():
            check_equal_steps(state, reader)
        n_bytes = sum(_output_bytes(state, dp) for state in states.values())
        count_bytes = ByteCounter(n_bytes, progress)
        with translate_os_errors("writing optimizer states", folder), AtomicFolder(folder) as output:
            files.check_free_space(folder.parent, n_bytes)
            for (tp_rank, pp_rank), file in checkpoint.rank_files.items():
                for dp_rank in range(dp):
                    name = rank_path(NxdOptions(), tp_rank, pp_rank, kind="optim", dp_rank=dp_rank)
                    _write_shard(states[file.file], dp, dp_rank, output.file_path(name), reader, count_bytes)
            reader.finish()
    return folder


def _files_of(state: RankOptimizerState) -> set[str]:
    return {s.file for group in state.groups.values() for slices in group.locations.values() for s in slices}


def _output_bytes(state: RankOptimizerState, dp: int) -> int:
    """Return the bytes of all new shards of one tensor-parallel rank, without the steps."""
    specs = [spec for group in state.groups.values() for spec in group.specs.values()]
    return sum(
        dp * shard_rows(spec.shape[0], dp, 0)[2] * prod(spec.shape[1:]) * item_bytes(spec.dtype) for spec in specs
    )


def _write_shard(
    state: RankOptimizerState, dp: int, dp_rank: int, path: Path, reader: TensorReader, count_bytes: ByteCounter
) -> None:
    first = state.shards[0]
    shards: list[_NewShard] = []
    is_xser = False

    def leaf(value: TorchTensor | TensorReference, keys: tuple[Any, ...]) -> TensorSpec:
        nonlocal is_xser
        is_xser |= isinstance(value, TensorReference)
        shards.append(_new_shard(state, first, value, keys, dp, dp_rank))
        return shards[-1].spec

    tree = _map_tensors(first.tree, leaf, ())
    writer: TensorFileWriter = (XserWriter if is_xser else TorchWriter).from_tree(path, tree)
    try:
        for shard in shards:
            for block in _iter_blocks(shard, reader):
                writer.append(block)
                count_bytes(block.nbytes if shard.spec.shape else 0)
    except BaseException:
        writer.abort()
        raise
    writer.close()


def _map_tensors(tree: Any, leaf: Callable[[Any, tuple[Any, ...]], TensorSpec], keys: tuple[Any, ...]) -> Any:
    """Return the tree with each tensor replaced by `leaf` of it and its keys."""
    if isinstance(tree, TorchTensor | TensorReference):
        return leaf(tree, keys)
    if isinstance(tree, dict):
        return {key: _map_tensors(value, leaf, (*keys, key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_map_tensors(value, leaf, (*keys, i)) for i, value in enumerate(tree))
    return tree


def _new_shard(
    state: RankOptimizerState,
    saved: XserFile,
    value: TorchTensor | TensorReference,
    keys: tuple[Any, ...],
    dp: int,
    dp_rank: int,
) -> _NewShard:
    """Return the new shard of the tensor at these keys of the tree."""
    if keys[0] == STATE_KEY and keys[2:] != ("step",):
        kind, index = keys[2], keys[1]
    elif keys[0] == MASTER_WEIGHTS_KEY:
        kind, index = MASTER_WEIGHTS, keys[1]
    else:
        return _copy_scalar(saved, value, keys)
    group, name = state.groups[kind], state.keys[index]
    spec = group.specs[name]
    first, rows, stored = shard_rows(spec.shape[0], dp, dp_rank)
    return _NewShard(group, name, first, rows, TensorSpec(spec.dtype, (stored, *spec.shape[1:])))


def _copy_scalar(saved: XserFile, value: TorchTensor | TensorReference, keys: tuple[Any, ...]) -> _NewShard:
    """Return a scalar that all ranks hold alike: a step."""
    name = ".".join(map(str, keys))
    file, array = saved.locate(value, name)
    if array.spec.shape:
        raise CheckpointError(
            f"{saved.root / file}: {name} has shape {list(array.spec.shape)}; its sharding over data-parallel ranks is "
            "unknown"
        )
    location = StoredSlice(file=file, byte_offset=array.byte_offset, offset=(), shape=())
    return _NewShard(TensorGroup(specs={name: array.spec}, locations={name: (location,)}), name, 0, 0, array.spec)


def _iter_blocks(shard: _NewShard, reader: TensorReader) -> Iterator[np.ndarray]:
    spec = shard.spec
    if not spec.shape:
        yield reader.read(shard.group, shard.name)
        return
    limit = max(1, BLOCK_BYTES // item_bytes(spec.dtype))
    if shard.n_rows:
        for (row, *zeros), shape in split_rows((shard.n_rows, *spec.shape[1:]), limit):
            yield reader.read(shard.group, shard.name, ((shard.first_row + row, *zeros), shape))
    for _, shape in split_rows((spec.shape[0] - shard.n_rows, *spec.shape[1:]), limit):
        yield np.zeros(prod(shape) * item_bytes(spec.dtype), np.uint8)


def check_equal_steps(state: RankOptimizerState, reader: TensorReader) -> list[float | None]:
    """Check that all shards have the same steps; otherwise their state would be a mixture.

    Returns:
        The step of each tensor, None where none is kept.

    Raises:
        CheckpointError: Two shards differ, or a step is not a number.
    """
    steps: list[list[float | None]] = []
    for saved in state.shards:
        steps.append(
            [_read_step(saved, index, entry.get("step"), reader) for index, entry in saved.tree[STATE_KEY].items()]
        )
        if steps[-1] != steps[0]:
            raise CheckpointError(
                f"{saved.root / saved.file}: has another step than {state.shards[0].file}; they are from different "
                "saves"
            )
    return steps[0]


def _read_step(saved: XserFile, index: Any, step: Any, reader: TensorReader) -> float | None:
    if isinstance(step, TorchTensor | TensorReference):
        scalar = _copy_scalar(saved, step, (STATE_KEY, index, "step"))
        data = reader.read(scalar.group, scalar.name)
        if scalar.spec.dtype in ("I64", "I32"):
            return float(int.from_bytes(data.tobytes(), "little", signed=True))
        return float(cast(data, scalar.spec.dtype, "F64").view("<f8")[0])
    if step is not None and type(step) not in (int, float):
        raise CheckpointError(f"{saved.root / saved.file}: the step of tensor {index} is a {type(step).__name__}")
    return None if step is None else float(step)
