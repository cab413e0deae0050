"""ZeRO-1 optimizer states of NxD: the shards of all data-parallel ranks, assembled.

Each rank of the data-, tensor- and pipeline-parallel grid has a file with its shard of the moments of every tensor of
its tensor-parallel rank and stage and, as an option, of the fp32 master weights. A tensor is padded with rows of zeros
to a multiple of the data-parallel degree and split into that many equal runs of rows. Tensors are numbered in the
optimizer's order, those with weight decay first; the tensor of each number follows from the shapes.

First the rows of a tensor-parallel rank's tensors are assembled (`RankOptimizerState`), then, by the regions of those,
the model's own: the boxes of the two shardings are intersected. Cost: the headers of all files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt.dtypes import cast, item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.layout import Layout, TensorLayout, TensorRegion
from lt_ckpt.llama_tensors import HEAD, MASTER_WEIGHTS, add_tied_head, stored_shapes
from lt_ckpt.nxd.discovery import NxdFiles, has_optimizer_files, optimizer_dp_degree
from lt_ckpt.nxd.layout import rank_path
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.reader import NxdCheckpoint
from lt_ckpt.nxd.xser import Leaf, XserFile
from lt_ckpt.shards import GROUP_NAME, Box, Ints, find_tiling_error, intersect
from lt_ckpt.source import StoredArray, TensorGroup
from lt_ckpt.stored_slices import StoredSlice, read_box, slice_box
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import TensorReference
from lt_ckpt.torchfile.tensor_files import TensorFiles
from lt_model import ModelConfig

MASTER_WEIGHTS_KEY, STATE_KEY, SHAPES_KEY = "sharded_master_weights", "base_state", "shape_info"


@dataclass(frozen=True, kw_only=True)
class RankOptimizerState:
    """Optimizer state of one tensor-parallel rank and stage.

    Attributes:
        shards: The file of each data-parallel rank.
        keys: NxD's keys in the optimizer's order.
        groups: `exp_avg`, `exp_avg_sq`, `master`, ... → the rank's tensors by NxD's keys, whole.
    """

    shards: tuple[XserFile, ...]
    keys: tuple[str, ...]
    groups: Mapping[str, TensorGroup]


def shard_rows(rows: int, dp: int, dp_rank: int) -> tuple[int, int, int]:
    """Return a shard's first row, its rows of the tensor, and its rows with padding."""
    stored = -(-rows // dp)
    first = min(dp_rank * stored, rows)
    return first, min(stored, rows - first), stored


def has_zero1_state(nxd_files: NxdFiles) -> bool:
    """Return True if a checkpoint has optimizer states of ZeRO-1, not of torch's own optimizers.

    Raises:
        CheckpointError: A rank's file is missing or damaged.
    """
    if not has_optimizer_files(nxd_files):
        return False
    optimizer_dp_degree(nxd_files)
    tree = XserFile.open(nxd_files.root, rank_path(NxdOptions(), 0, 0, kind="optim")).tree
    return not (isinstance(tree, dict) and "param_groups" in tree and STATE_KEY not in tree and SHAPES_KEY not in tree)


def read_optimizer_states(checkpoint: NxdCheckpoint) -> dict[str, RankOptimizerState]:
    """Read the headers of all optimizer files: path of the model file → the state of that rank.

    Raises:
        CheckpointError: A file is missing, damaged, not of ZeRO-1, or not of this model.
    """
    nxd_files, config = checkpoint.files, checkpoint.config
    dp = optimizer_dp_degree(nxd_files)
    tensors = {file.path: file.tensors for file in checkpoint.layout.files}
    shared = config.tie_word_embeddings and nxd_files.pp == 1
    states: dict[str, RankOptimizerState] = {}
    for (tp_rank, pp_rank), file in checkpoint.rank_files.items():
        shards = [rank_path(NxdOptions(), tp_rank, pp_rank, kind="optim", dp_rank=dp_rank) for dp_rank in range(dp)]
        states[file.file] = read_rank_optimizer_state(
            nxd_files.root, shards, tensors[file.file], allow_tied_head=shared
        )
    return states


def read_rank_optimizer_state(
    root: Path, files: list[str], tensors: tuple[TensorLayout, ...], *, allow_tied_head: bool
) -> RankOptimizerState:
    """Read the headers of the shards of one tensor-parallel rank and stage.

    Args:
        root: The root of the checkpoint.
        files: Each data-parallel rank's file, relative to it.
        tensors: Tensors of the rank's model file.
        allow_tied_head: The head may be the embedding itself, without a number of its own.

    Raises:
        CheckpointError: A file is missing, damaged, not of ZeRO-1, or not of these tensors.
    """
    tensor_files = TensorFiles()
    shards = tuple(XserFile.open(root, file, tensor_files) for file in files)
    shapes = {tensor.key: tensor.shape for tensor in tensors}
    trees = [(saved, state_entries(saved.tree, root / saved.file)) for saved in shards]
    keys = _infer_key_order(shards[0].tree, shapes, root / shards[0].file, allow_tied_head)
    for saved, entries in trees:
        path = root / saved.file
        if _infer_key_order(saved.tree, shapes, path, allow_tied_head) != keys or set(entries) != set(trees[0][1]):
            raise CheckpointError(f"{path}: has other tensors or kinds of state than {shards[0].file}")
        incomplete = next((kind for kind, leaves in entries.items() if sorted(leaves) != list(range(len(keys)))), None)
        if incomplete:
            raise CheckpointError(f"{path}: has {incomplete} for only some of its {len(keys)} tensors")
    groups: dict[str, TensorGroup] = {}
    for kind in trees[0][1]:
        specs: dict[str, TensorSpec] = {}
        locations: dict[str, tuple[StoredSlice, ...]] = {}
        for index, key in enumerate(keys):
            leaves = [(saved, entries[kind][index]) for saved, entries in trees]
            specs[key], locations[key] = _locate_rows(leaves, shapes[key], f"{kind} of {key}")
        groups[kind] = TensorGroup(specs=specs, locations=locations)
    return RankOptimizerState(shards=shards, keys=keys, groups=groups)


def _locate_rows(
    leaves: list[tuple[XserFile, Leaf]], shape: Ints, name: str
) -> tuple[TensorSpec, tuple[StoredSlice, ...]]:
    """Return a tensor-parallel rank's tensor: dtype and shape, and its rows' locations in the shards."""
    locations: list[StoredSlice] = []
    dtype, zeros = "", (0,) * (len(shape) - 1)
    for dp_rank, (saved, leaf) in enumerate(leaves):
        file, array = saved.locate(leaf, name)
        first, n_rows, stored = shard_rows(shape[0], len(leaves), dp_rank)
        if array.spec.shape != (stored, *shape[1:]):
            raise CheckpointError(
                f"{saved.root / file}: {name} has shape {list(array.spec.shape)}, shard {dp_rank} of {len(leaves)} of "
                f"{list(shape)} has {[stored, *shape[1:]]}"
            )
        dtype = dtype or array.spec.dtype
        if array.spec.dtype != dtype:
            raise CheckpointError(f"{saved.root / file}: {name} is {array.spec.dtype}, in another shard {dtype}")
        if n_rows:
            rows: Box = (first, *zeros), (n_rows, *shape[1:])
            locations.append(slice_box(array.stored_slice(file, rows[0]), rows, item_bytes(dtype)))
    return TensorSpec(dtype, shape), tuple(locations)


def state_entries(tree: Any, path: Path) -> dict[str, dict[int, Leaf]]:
    """Return kind of state → number of the tensor → its leaf, of one file; steps are left out."""
    if not isinstance(tree, dict) or not isinstance(tree.get(STATE_KEY), dict):
        raise CheckpointError(f"{path}: is not an NxD ZeRO-1 optimizer state ({STATE_KEY!r} is missing)")
    entries: dict[str, dict[int, Any]] = {}
    for index, state in tree[STATE_KEY].items():
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: {STATE_KEY} of tensor {index!r} is not a dictionary; the file is damaged")
        for kind, leaf in state.items():
            if kind != "step":
                entries.setdefault(kind, {})[index] = leaf
    master_weights = tree.get(MASTER_WEIGHTS_KEY)
    if isinstance(master_weights, dict):
        entries[MASTER_WEIGHTS] = master_weights
    for kind, leaves in entries.items():
        if not isinstance(kind, str) or not GROUP_NAME.fullmatch(kind):
            raise CheckpointError(f"{path}: has a state {kind!r}, which is not a valid group name")
        for index, leaf in leaves.items():
            if type(index) is not int or not isinstance(leaf, StoredArray | TensorReference):
                raise CheckpointError(f"{path}: {kind} of tensor {index!r} is a {type(leaf).__name__}, not a tensor")
    return entries


def _infer_key_order(tree: Any, shapes: Mapping[str, Ints], path: Path, allow_tied_head: bool) -> tuple[str, ...]:
    """Return NxD's keys in the order of the optimizer's numbers."""
    groups, shapes_by_number = tree.get("param_groups"), tree.get(SHAPES_KEY)
    if not isinstance(groups, list) or not isinstance(shapes_by_number, dict):
        raise CheckpointError(f"{path}: has no param_groups and {SHAPES_KEY}; it is not an NxD ZeRO-1 optimizer state")
    members = [group.get("params") if isinstance(group, dict) else None for group in groups]
    numbers = [number for member in members if isinstance(member, list) for number in member]
    if (
        numbers != list(range(len(shapes_by_number)))
        or set(shapes_by_number) != set(numbers)
        or set(tree[STATE_KEY]) != set(numbers)
    ):
        raise CheckpointError(f"{path}: param_groups, {STATE_KEY} and {SHAPES_KEY} number the tensors differently")
    expected = [
        tuple(shapes_by_number[number]) if isinstance(shapes_by_number[number], list | tuple) else ()
        for number in numbers
    ]
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
        yield (*(key for key in subset if "norm" not in key), *(key for key in subset if "norm" in key))
        yield tuple(subset)


def project_slice(stored: StoredSlice, region: TensorRegion, item: int) -> StoredSlice | None:
    """Return the part of a slice of a stored tensor that lies in a region, as a slice of the region's model tensor."""
    common = intersect((stored.offset, stored.shape), (region.stored_offset, region.shape))
    if common is None:
        return None
    offset = tuple(o + b - a for o, b, a in zip(region.offset, common[0], region.stored_offset, strict=True))
    return replace(slice_box(stored, common, item), offset=offset)


def build_model_groups(
    config: ModelConfig, layout: Layout, states: Mapping[str, RankOptimizerState], where: str
) -> dict[str, TensorGroup]:
    """Assemble the optimizer state of the model.

    Args:
        config: The model.
        layout: Its files.
        states: Path of a model file → the state of that rank.
        where: The checkpoint, for messages.

    Raises:
        CheckpointError: Ranks have different kinds of state, or one tensor has two dtypes or lacks elements.
    """
    kinds = {frozenset(state.groups) for state in states.values()}
    if len(kinds) > 1:
        raise CheckpointError(f"{where}: only some ranks have {sorted(map(sorted, kinds))[0]}")
    head_is_stored = any(HEAD in state.keys for state in states.values())
    shapes = stored_shapes(config, head_is_stored)
    return {kind: _build_model_group(config, layout, states, shapes, kind, where) for kind in sorted(*kinds)}


def _build_model_group(
    config: ModelConfig,
    layout: Layout,
    states: Mapping[str, RankOptimizerState],
    shapes: Mapping[str, Ints],
    kind: str,
    where: str,
) -> TensorGroup:
    dtypes: dict[str, str] = {}
    locations: dict[str, dict[Box, StoredSlice]] = {name: {} for name in shapes}
    replicas: dict[str, list[StoredSlice]] = {}
    for file, tensor, region in layout:
        group = states[file.path].groups[kind]
        if tensor.key not in group.specs:
            continue
        spec = group.specs[tensor.key]
        if dtypes.setdefault(region.name, spec.dtype) != spec.dtype:
            raise CheckpointError(f"{where}: {kind} of {region.name} has two dtypes on two ranks")
        for stored in group.locations[tensor.key]:
            part = project_slice(stored, region, item_bytes(spec.dtype))
            if part is not None and locations[region.name].setdefault((part.offset, part.shape), part) is not part:
                replicas.setdefault(region.name, []).append(part)
    for name, slices in locations.items():
        error = find_tiling_error(shapes[name], sorted(slices))
        if error:
            raise CheckpointError(f"{where}: {kind} of {name}: {error}")
    group = TensorGroup(
        specs={name: TensorSpec(dtypes[name], shape) for name, shape in shapes.items()},
        locations={name: tuple(slices.values()) for name, slices in locations.items()},
        replicas={name: tuple(slices) for name, slices in replicas.items()},
    )
    return add_tied_head(group, config)


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
