"""Resharding of an NxD ZeRO-1 optimizer state for another number of data-parallel ranks.

Each new file is the tree of the old one with new shards: rows of the tensor-parallel rank's tensors, read from the old
shards that have them, and rows of zeros as padding. All else (param groups, steps, shapes) is equal on all
data-parallel ranks and is copied. Master weights are resharded like the rest. The output has the folder `optim` alone,
like that of NxD's own tool, to be used with the model files, which do not depend on the number of data-parallel ranks.

Cost: every byte is read and written once; memory: a block.
"""

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt import files
from lt_ckpt.atomic_folder import AtomicFolder
from lt_ckpt.byte_counter import ByteCounter
from lt_ckpt.confined_files import resolve_confined
from lt_ckpt.conversion import sync_and_hash
from lt_ckpt.dtypes import cast, item_bytes
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.laid_out_files import BLOCK_BYTES, pwrite
from lt_ckpt.llama_tensors import MASTER_WEIGHTS
from lt_ckpt.nxd.layout import rank_path
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.reader import read_nxd_checkpoint
from lt_ckpt.nxd.xser import XserFile, lay_out
from lt_ckpt.nxd.zero1 import (
    MASTER_WEIGHTS_KEY,
    STATE_KEY,
    RankOptimizerState,
    read_optimizer_states,
    shard_rows,
)
from lt_ckpt.shards import split_rows
from lt_ckpt.source import StoredArray
from lt_ckpt.stored_slices import read_box
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import TensorReference, has_leaf
from lt_ckpt.torchfile.tensor_files import TensorFiles
from lt_model import config_from_hf


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
    for state in states.values():
        check_equal_steps(state)
    n_bytes = sum(_output_bytes(state, dp) for state in states.values())
    count_bytes = ByteCounter(n_bytes, progress)
    with translate_os_errors("writing optimizer states", folder), AtomicFolder(folder) as output:
        files.check_free_space(folder.parent, n_bytes)
        for (tp_rank, pp_rank), file in checkpoint.rank_files.items():
            for dp_rank in range(dp):
                name = rank_path(NxdOptions(), tp_rank, pp_rank, kind="optim", dp_rank=dp_rank)
                _write_shard(states[file.file], dp, dp_rank, output.file_path(name), count_bytes)
        sync_and_hash(output.temp_path)
    return folder


def _files_of(state: RankOptimizerState) -> set[str]:
    return {s.file for group in state.groups.values() for slices in group.locations.values() for s in slices}


def _output_bytes(state: RankOptimizerState, dp: int) -> int:
    """Return the bytes of all new shards of one tensor-parallel rank, without the steps."""
    specs = [spec for group in state.groups.values() for spec in group.specs.values()]
    return sum(
        dp * shard_rows(spec.shape[0], dp, 0)[2] * prod(spec.shape[1:]) * item_bytes(spec.dtype) for spec in specs
    )


def _write_shard(state: RankOptimizerState, dp: int, dp_rank: int, path: Path, count_bytes: ByteCounter) -> None:
    """Write a data-parallel rank's file: the tree of the first one with new rows."""
    first = state.shards[0]
    entries: Mapping[Any, Mapping[str, Any]] = first.tree[STATE_KEY]

    def new_spec(kind: str, number: int) -> TensorSpec:
        spec = state.groups[kind].specs[state.keys[number]]
        return TensorSpec(spec.dtype, (shard_rows(spec.shape[0], dp, dp_rank)[2], *spec.shape[1:]))

    tree = {**first.tree, STATE_KEY: {}, MASTER_WEIGHTS_KEY: {}}
    if has_leaf(tree, StoredArray) or has_leaf(tree, TensorReference):
        raise CheckpointError(f"{first.root / first.file}: has tensors that are neither states nor steps")
    tree[STATE_KEY] = {
        number: {k: _scalar(first, v)[0] if k == "step" else new_spec(k, number) for k, v in entry.items()}
        for number, entry in entries.items()
    }
    if MASTER_WEIGHTS in state.groups:
        tree[MASTER_WEIGHTS_KEY] = {number: new_spec(MASTER_WEIGHTS, number) for number in range(len(state.keys))}
    elif MASTER_WEIGHTS_KEY not in first.tree:
        del tree[MASTER_WEIGHTS_KEY]
    placed = lay_out(path, tree, xser=has_leaf(first.tree, TensorReference), tensor_files=TensorFiles())
    for number, entry in entries.items():
        step, data = _scalar(first, entry.get("step"))
        if isinstance(step, TensorSpec):
            pwrite(placed[STATE_KEY][number]["step"], data.view(np.uint8).data)
    for kind, group in state.groups.items():
        for number, key in enumerate(state.keys):
            spec = group.specs[key]
            is_master = kind == MASTER_WEIGHTS
            file, position = placed[MASTER_WEIGHTS_KEY][number] if is_master else placed[STATE_KEY][number][kind]
            first_row, n_rows, stored = shard_rows(spec.shape[0], dp, dp_rank)
            row_bytes = prod(spec.shape[1:]) * item_bytes(spec.dtype)
            blocks = split_rows((n_rows, *spec.shape[1:]), BLOCK_BYTES // item_bytes(spec.dtype)) if n_rows else []
            for (row, *zeros), shape in blocks:
                box = (first_row + row, *zeros), shape
                data = read_box(first.root, group.locations[key], box, spec.dtype, f"{kind} of {key}")
                pwrite((file, position + row * row_bytes), data.reshape(-1).view(np.uint8).data)
            count_bytes(stored * row_bytes)


def _scalar(saved: XserFile, leaf: Any) -> tuple[Any, np.ndarray]:
    """Return the spec and the value of a step that is a tensor; any other step as it is."""
    if not isinstance(leaf, StoredArray | TensorReference):
        return leaf, np.empty(0, np.uint8)
    file, array = saved.locate(leaf, "a step")
    if array.spec.shape:
        raise CheckpointError(f"{saved.root / file}: a step has shape {list(array.spec.shape)}")
    found = read_box(saved.root, (array.stored_slice(file),), ((), ()), array.spec.dtype, f"{saved.root / file}: step")
    return array.spec, found.reshape(1)


def check_equal_steps(state: RankOptimizerState) -> list[float | None]:
    """Check that all shards have the same steps; otherwise their state would be a mixture.

    Returns:
        The step of each tensor, None where none is kept.

    Raises:
        CheckpointError: Two shards differ, or a step is not a number.
    """
    steps: list[list[float | None]] = []
    for saved in state.shards:
        steps.append([_read_step(saved, index, entry.get("step")) for index, entry in saved.tree[STATE_KEY].items()])
        if steps[-1] != steps[0]:
            raise CheckpointError(
                f"{saved.root / saved.file}: has another step than {state.shards[0].file}; they are from different "
                "saves"
            )
    return steps[0]


def _read_step(saved: XserFile, index: Any, step: Any) -> float | None:
    spec, data = _scalar(saved, step)
    if isinstance(spec, TensorSpec):
        if spec.dtype in ("I64", "I32"):
            return float(data.view(f"<i{data.itemsize}")[0])
        return float(cast(data.view(np.uint8), spec.dtype, "F64").view("<f8")[0])
    if step is not None and type(step) not in (int, float):
        raise CheckpointError(f"{saved.root / saved.file}: the step of tensor {index} is a {type(step).__name__}")
    return None if step is None else float(step)
