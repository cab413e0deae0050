"""ZeRO-1 optimizer states of NxD: the shards of all data-parallel ranks, assembled.

Each rank of the data-, tensor- and pipeline-parallel grid has a file with its shard of the moments of every tensor of
its tensor-parallel rank and stage and, as an option, of the fp32 master weights. A tensor is padded with rows of zeros
to a multiple of the data-parallel degree and split into that many equal runs of rows. Tensors are numbered in the
optimizer's order, those with weight decay first; the tensor of each number follows from the shapes.

So a shard is a file of a layout whose tensors are rows of the model file's (`slice_rows`), and the model's tensors are
assembled from it like any other. Cost: the headers of all files.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt.dtypes import cast, item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.json_objects import translate_format_errors
from lt_ckpt.layout import FileLayout, TensorLayout, slice_rows
from lt_ckpt.llama_tensors import HEAD, MASTER_WEIGHTS, add_tied_head, stored_shapes
from lt_ckpt.nxd.discovery import NxdFiles, has_optimizer_files, optimizer_dp_degree
from lt_ckpt.nxd.layout import rank_path
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.reader import NxdCheckpoint
from lt_ckpt.nxd.xser import Leaf, XserFile
from lt_ckpt.shards import GROUP_NAME, Ints
from lt_ckpt.source import TensorGroup, build_tensor_group, group_of
from lt_ckpt.stored_slices import StoredSlice, read_box, slice_box
from lt_ckpt.tensorfile import StoredArray, TensorSpec
from lt_ckpt.torchfile.file import TensorReference
from lt_ckpt.torchfile.tensor_files import TensorFiles
from lt_model import ModelConfig

MASTER_WEIGHTS_KEY, STATE_KEY, SHAPES_KEY = "sharded_master_weights", "base_state", "shape_info"


@dataclass(frozen=True, kw_only=True)
class OptimizerShard:
    """Optimizer state in the file of one rank.

    Attributes:
        saved: The file.
        keys: NxD's keys in the optimizer's order.
        layout: The rows of the rank's tensors that it has.
        groups: `exp_avg`, `exp_avg_sq`, `master`, ... → those rows by NxD's keys, without padding.
    """

    saved: XserFile
    keys: tuple[str, ...]
    layout: FileLayout
    groups: Mapping[str, TensorGroup]


def shard_rows(rows: int, dp: int, dp_rank: int) -> tuple[int, int, int]:
    """Return a shard's first row, its rows of the tensor, and its rows with padding."""
    stored = -(-rows // dp)
    first = min(dp_rank * stored, rows)
    return first, min(stored, rows - first), stored


def has_decay(key: str) -> bool:
    """Return True unless NxD's training programs leave a tensor out of weight decay."""
    return "norm" not in key and "bias" not in key


def has_zero1_state(nxd_files: NxdFiles) -> bool:
    """Return True if a checkpoint has optimizer states of ZeRO-1, not of torch's own optimizers.

    Raises:
        CheckpointError: A rank's file is missing or damaged.
    """
    if not has_optimizer_files(nxd_files):
        return False
    optimizer_dp_degree(nxd_files)
    tree = XserFile.open(nxd_files.root, rank_path(NxdOptions(), 0, 0, kind="optim"), TensorFiles()).tree
    return not (isinstance(tree, dict) and "param_groups" in tree and STATE_KEY not in tree and SHAPES_KEY not in tree)


def read_optimizer_shards(checkpoint: NxdCheckpoint) -> list[OptimizerShard]:
    """Read the headers of all optimizer files.

    Raises:
        CheckpointError: A file is missing, damaged, not of ZeRO-1, or not of this model, or ranks have different kinds
            of state.
    """
    nxd_files, config = checkpoint.files, checkpoint.config
    dp, tensor_files = optimizer_dp_degree(nxd_files), TensorFiles()
    tensors = {file.path: {tensor.key: tensor for tensor in file.tensors} for file in checkpoint.layout}
    tied = config.tie_word_embeddings and nxd_files.pp == 1
    found: list[OptimizerShard] = []
    for (tp_rank, pp_rank), file in checkpoint.rank_files.items():
        for dp_rank in range(dp):
            path = rank_path(NxdOptions(), tp_rank, pp_rank, kind="optim", dp_rank=dp_rank)
            saved = XserFile.open(nxd_files.root, path, tensor_files)
            found.append(_read_shard(saved, tensors[file.file], dp, dp_rank, allow_tied_head=tied))
            if found[-1].groups.keys() != found[0].groups.keys() or found[-1].keys != found[-1 - dp_rank].keys:
                other = found[-1 - dp_rank].saved.file
                raise CheckpointError(f"{nxd_files.root / path}: has other tensors or kinds of state than {other}")
    return found


def _read_shard(
    saved: XserFile, tensors: Mapping[str, TensorLayout], dp: int, dp_rank: int, *, allow_tied_head: bool
) -> OptimizerShard:
    """Read the header of the file of one rank, given the tensors of its model file.

    The head may be the embedding itself, without a number of its own.
    """
    path = saved.root / saved.file
    entries = state_entries(saved.tree, path)
    keys = _infer_key_order(saved.tree, {key: tensor.shape for key, tensor in tensors.items()}, path, allow_tied_head)
    rows = {key: shard_rows(tensors[key].shape[0], dp, dp_rank) for key in keys}
    groups: dict[str, TensorGroup] = {}
    for kind, leaves in entries.items():
        if set(leaves) != set(range(len(keys))):
            raise CheckpointError(f"{path}: has {kind} for only some of its {len(keys)} tensors")
        found: dict[str, tuple[TensorSpec, tuple[StoredSlice, ...]]] = {}
        for index, key in enumerate(keys):
            (_, n_rows, stored), (_, *columns) = rows[key], tensors[key].shape
            file, array = saved.locate(leaves[index], f"{kind} of {key}")
            if array.spec.shape != (stored, *columns):
                raise CheckpointError(
                    f"{saved.root / file}: {kind} of {key} has shape {list(array.spec.shape)}, shard {dp_rank} of {dp} "
                    f"of {list(tensors[key].shape)} has {[stored, *columns]}"
                )
            if n_rows:
                box = (0,) * len(array.spec.shape), (n_rows, *columns)
                piece = slice_box(array.stored_slice(file), box, item_bytes(array.spec.dtype))
                found[key] = TensorSpec(array.spec.dtype, box[1]), (piece,)
        groups[kind] = group_of(found)
    own = tuple(slice_rows(tensors[key], first, n_rows) for key, (first, n_rows, _) in rows.items() if n_rows)
    return OptimizerShard(saved=saved, keys=keys, layout=FileLayout(path=saved.file, tensors=own), groups=groups)


def state_entries(tree: Any, path: Path) -> dict[str, dict[int, Leaf]]:
    """Return kind of state → number of the tensor → its leaf, of one file; steps are left out."""
    if not isinstance(tree, dict) or STATE_KEY not in tree:
        raise CheckpointError(f"{path}: is not an NxD ZeRO-1 optimizer state ({STATE_KEY!r} is missing)")
    entries: dict[str, dict[int, Any]] = {}
    with translate_format_errors(str(path)):
        for index, state in tree[STATE_KEY].items():
            for kind in state.keys() - {"step"}:
                entries.setdefault(kind, {})[index] = state[kind]
        if masters := tree.get(MASTER_WEIGHTS_KEY):
            entries[MASTER_WEIGHTS] = dict(masters)
        for kind, leaves in entries.items():
            if not GROUP_NAME.fullmatch(kind):
                raise CheckpointError(f"{path}: has a state {kind!r}, which is not a valid group name")
            for index, leaf in leaves.items():
                if not isinstance(leaf, StoredArray | TensorReference):
                    raise CheckpointError(
                        f"{path}: {kind} of tensor {index!r} is a {type(leaf).__name__}, not a tensor"
                    )
    return entries


def _infer_key_order(tree: Any, shapes: Mapping[str, Ints], path: Path, allow_tied_head: bool) -> tuple[str, ...]:
    """Return NxD's keys in the order of the optimizer's numbers."""
    with translate_format_errors(str(path)):
        numbers, by_number = [n for group in tree["param_groups"] for n in group["params"]], tree[SHAPES_KEY]
        if numbers != list(range(len(numbers))) or not set(numbers) == set(by_number) == set(tree[STATE_KEY]):
            raise CheckpointError(f"{path}: param_groups, {STATE_KEY} and {SHAPES_KEY} number the tensors differently")
        expected = [tuple(by_number[number]) for number in numbers]
    for order in _candidate_orders(list(shapes), allow_tied_head):
        if [shapes[key] for key in order] == expected:
            return order
    raise CheckpointError(
        f"{path}: the shapes of its {len(expected)} tensors match the model's in no known order: those with weight "
        "decay first and the norms last, or all as in the model; is the configuration the right one?"
    )


def _candidate_orders(keys: list[str], allow_tied_head: bool) -> Iterator[tuple[str, ...]]:
    """Yield the orders in which training programs pass tensors to the optimizer."""
    without_head = [key for key in keys if key != HEAD]
    for subset in (keys, without_head) if allow_tied_head else (keys,):
        yield tuple(sorted(subset, key=lambda key: not has_decay(key)))
        yield tuple(subset)


def build_model_groups(config: ModelConfig, shards: Sequence[OptimizerShard], where: str) -> dict[str, TensorGroup]:
    """Assemble the optimizer state of the model; `where` is the checkpoint, for messages.

    Raises:
        CheckpointError: One tensor has two dtypes or lacks elements.
    """
    shapes = stored_shapes(config, any(HEAD in shard.keys for shard in shards))
    layout = tuple(shard.layout for shard in shards)
    found: dict[str, TensorGroup] = {}
    for kind in sorted(shards[0].groups):
        stored = {shard.layout.path: shard.groups[kind] for shard in shards}
        found[kind] = add_tied_head(build_tensor_group(layout, stored, shapes, f"{where}: {kind}"), config)
    return found


def read_optimizer_step(shards: Iterable[OptimizerShard], root: Path) -> int | None:
    """Return the number of steps of the optimizer, None if it keeps none.

    Raises:
        CheckpointError: Tensors or shards have different steps, so that their state would be a mixture, or one is not a
            number.
    """
    found: dict[float | None, str] = {}
    for saved in (shard.saved for shard in shards):
        for index, entry in saved.tree[STATE_KEY].items():
            found.setdefault(_read_step(saved, index, entry.get("step")), saved.file)
    if len(found) > 1:
        where = ", ".join(f"{step} in {file}" for step, file in found.items())
        raise CheckpointError(f"{root}: its optimizer's tensors have different steps, from different saves: {where}")
    step = next(iter(found), None)
    if step is not None and (not 0 <= step < 2**53 or step != int(step)):
        raise CheckpointError(f"{root}: its optimizer has the invalid step {step:g}")
    return None if step is None else int(step)


def _read_step(saved: XserFile, index: Any, step: Any) -> float | None:
    where = f"{saved.root / saved.file}: the step of tensor {index}"
    if isinstance(step, StoredArray | TensorReference):
        file, array = saved.locate(step, "a step")
        if array.spec.shape:
            raise CheckpointError(f"{where} has shape {list(array.spec.shape)}")
        data = read_box(saved.root, (array.stored_slice(file),), ((), ()), array.spec.dtype, where)
        if array.spec.dtype in ("I64", "I32"):
            return float(data.view(f"<i{data.itemsize}")[()])
        return float(cast(data.reshape(1).view(np.uint8), array.spec.dtype, "F64").view("<f8")[0])
    if step is not None and type(step) not in (int, float):
        raise CheckpointError(f"{where} is a {type(step).__name__}")
    return None if step is None else float(step)
