"""ZeRO-1 optimizer states of NxD: the shards of all data-parallel ranks, put together.

Each rank of the data-, tensor- and pipeline-parallel grid has a file with its shard of the moments of every tensor that
its tensor-parallel rank and stage hold and, if that was asked for, of the fp32 master weights. A tensor is padded with
rows of zeros to a multiple of the data-parallel degree and cut into as many equal runs of rows. Tensors are numbered in
the optimizer's order, the decayed ones first; which number is which tensor follows from the shapes.

First the rows of a tensor-parallel rank's tensors are put together (`RankState`), then, by the pieces that those are
made of, the model's own: the boxes of the two cuts are intersected.
Cost: the headers of all files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_ckpt.errors import CheckpointError
from lt_ckpt.layout import Layout, Piece, Placed
from lt_ckpt.models import HEAD, stored_shapes, with_head
from lt_ckpt.nxd.grid import find_optimizer
from lt_ckpt.nxd.layout import rank_path
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.read import Examined
from lt_ckpt.nxd.xser import Saved
from lt_ckpt.plan import Stored
from lt_ckpt.shards import GROUP, Box, Ints, covers, intersect
from lt_ckpt.source import Group
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.names import TensorReference, TorchTensor
from lt_model import LlamaConfig

MASTER = "master"
"""Group of the fp32 master weights."""

MASTERS, STATES, SHAPES = "sharded_master_weights", "base_state", "shape_info"


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The optimizer's state of one tensor-parallel rank and stage.

    Attributes:
        shards: The file of each data-parallel rank.
        keys: NxD's keys in the optimizer's order.
        groups: `exp_avg`, `exp_avg_sq`, `master`, ... → the rank's tensors by NxD's keys, whole.
    """

    shards: tuple[Saved, ...]
    keys: tuple[str, ...]
    groups: Mapping[str, Group]


def shard_rows(rows: int, dp: int, dp_rank: int) -> tuple[int, int, int]:
    """Returns the first row of a shard, how many rows of the tensor it has, and how many with the padding."""
    stored = -(-rows // dp)
    first = min(dp_rank * stored, rows)
    return first, min(stored, rows - first), stored


def read_states(examined: Examined) -> dict[str, RankState]:
    """Reads the headers of all optimizer files: path of the model file → the state of that rank.

    Raises:
        CheckpointError: A file is missing, damaged, not of ZeRO-1, or not of this model.
    """
    found, config = examined.found, examined.config
    dp = find_optimizer(found)
    tensors = {file.path: file.tensors for file in examined.layout.files}
    shared = config.tie_word_embeddings and found.pp == 1
    states: dict[str, RankState] = {}
    for (tp_rank, pp_rank), file in examined.ranks.items():
        shards = [rank_path(NxdOptions(), tp_rank, pp_rank, kind="optim", dp_rank=dp_rank) for dp_rank in range(dp)]
        states[file.file] = read_rank_state(found.root, shards, tensors[file.file], head_may_be_shared=shared)
    return states


def read_rank_state(
    root: Path, files: list[str], tensors: tuple[Placed, ...], *, head_may_be_shared: bool
) -> RankState:
    """Reads the headers of the shards of one tensor-parallel rank and stage.

    Args:
        root: The root of the checkpoint.
        files: Each data-parallel rank's file, from there.
        tensors: What the rank's model file has.
        head_may_be_shared: The head may be the embedding itself, and then has no number of its own.

    Raises:
        CheckpointError: A file is missing, damaged, not of ZeRO-1, or not of these tensors.
    """
    shards = tuple(Saved.open(root, file) for file in files)
    shapes = {tensor.key: tensor.shape for tensor in tensors}
    trees = [(saved, state_entries(saved.tree, root / saved.file)) for saved in shards]
    keys = _keys(shards[0].tree, shapes, root / shards[0].file, head_may_be_shared)
    for saved, entries in trees:
        path = root / saved.file
        if _keys(saved.tree, shapes, path, head_may_be_shared) != keys or set(entries) != set(trees[0][1]):
            raise CheckpointError(f"{path}: has other tensors or kinds of state than {shards[0].file}")
        lacking = next((kind for kind, leaves in entries.items() if sorted(leaves) != list(range(len(keys)))), None)
        if lacking:
            raise CheckpointError(f"{path}: has {lacking} of some of its {len(keys)} tensors only")
    groups: dict[str, Group] = {}
    for kind in trees[0][1]:
        specs: dict[str, TensorSpec] = {}
        places: dict[str, tuple[Stored, ...]] = {}
        for index, key in enumerate(keys):
            leaves = [(saved, entries[kind][index]) for saved, entries in trees]
            specs[key], places[key] = _from_shards(leaves, shapes[key], f"{kind} of {key}")
        groups[kind] = Group(specs=specs, places=places)
    return RankState(shards=shards, keys=keys, groups=groups)


def _from_shards(
    leaves: list[tuple[Saved, TorchTensor | TensorReference]], shape: Ints, name: str
) -> tuple[TensorSpec, tuple[Stored, ...]]:
    """Returns dtype and shape of a tensor of a tensor-parallel rank, and where its rows lie in the shards."""
    places: list[Stored] = []
    dtype, zeros = "", (0,) * (len(shape) - 1)
    for dp_rank, (saved, leaf) in enumerate(leaves):
        file, found = saved.locate(leaf, name)
        first, held, stored = shard_rows(shape[0], len(leaves), dp_rank)
        if found.spec.shape != (stored, *shape[1:]):
            raise CheckpointError(
                f"{saved.root / file}: {name} has shape {list(found.spec.shape)}, shard {dp_rank} of {len(leaves)} of "
                f"{list(shape)} has {[stored, *shape[1:]]}"
            )
        dtype = dtype or found.spec.dtype
        if found.spec.dtype != dtype:
            raise CheckpointError(f"{saved.root / file}: {name} is {found.spec.dtype}, in another shard {dtype}")
        if held:
            place = Stored(
                file=file,
                begin=found.begin,
                offset=(first, *zeros),
                shape=(held, *shape[1:]),
                whole=found.whole or found.spec.shape,
                at=found.at or (0, *zeros),
                transposed=found.transposed,
            )
            places.append(place)
    return TensorSpec(dtype, shape), tuple(places)


def state_entries(tree: Any, path: Path) -> dict[str, dict[int, TorchTensor | TensorReference]]:
    """Returns kind of state → number of the tensor → what stands for it, of one file; steps are left out."""
    if not isinstance(tree, dict) or not isinstance(tree.get(STATES), dict):
        raise CheckpointError(f"{path}: is not of a ZeRO-1 optimizer of NxD ({STATES!r} is missing)")
    entries: dict[str, dict[int, Any]] = {}
    for index, state in tree[STATES].items():
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: {STATES} of tensor {index!r} is no dictionary; the file is damaged")
        for kind, leaf in state.items():
            if kind != "step":
                entries.setdefault(kind, {})[index] = leaf
    masters = tree.get(MASTERS)
    if isinstance(masters, dict):
        entries[MASTER] = masters
    for kind, leaves in entries.items():
        if not isinstance(kind, str) or not GROUP.fullmatch(kind):
            raise CheckpointError(f"{path}: has a state {kind!r}, which is no name that can be kept")
        for index, leaf in leaves.items():
            if type(index) is not int or not isinstance(leaf, TorchTensor | TensorReference):
                raise CheckpointError(f"{path}: {kind} of tensor {index!r} is a {type(leaf).__name__}, not a tensor")
    return entries


def _keys(tree: Any, shapes: Mapping[str, Ints], path: Path, head_may_be_shared: bool) -> tuple[str, ...]:
    """Returns NxD's keys in the order of the optimizer's numbers."""
    groups, said = tree.get("param_groups"), tree.get(SHAPES)
    if not isinstance(groups, list) or not isinstance(said, dict):
        raise CheckpointError(f"{path}: has no param_groups and {SHAPES}; it is not of a ZeRO-1 optimizer of NxD")
    members = [group.get("params") if isinstance(group, dict) else None for group in groups]
    numbers = [number for member in members if isinstance(member, list) for number in member]
    if numbers != list(range(len(said))) or set(said) != set(numbers) or set(tree[STATES]) != set(numbers):
        raise CheckpointError(f"{path}: param_groups, {STATES} and {SHAPES} number the tensors differently")
    found = [tuple(said[number]) if isinstance(said[number], list | tuple) else () for number in numbers]
    for order in _orders(list(shapes), head_may_be_shared):
        if [shapes[key] for key in order] == found:
            return order
    raise CheckpointError(
        f"{path}: the shapes of its {len(found)} tensors are not those of the model's in an order that is known: those "
        "with weight decay first and the norms last, or all as in the model; is the configuration the right one?"
    )


def _orders(keys: list[str], head_may_be_shared: bool) -> Iterator[tuple[str, ...]]:
    """Yields the orders in which training programs hand tensors to the optimizer."""
    shared = [key for key in keys if key != HEAD]
    for some in (keys, shared) if head_may_be_shared else (keys,):
        yield (*(key for key in some if "norm" not in key), *(key for key in some if "norm" in key))
        yield tuple(some)


def through(stored: Stored, piece: Piece) -> Stored | None:
    """Tells what rows of a stored tensor hold of the model tensor that one of its pieces is a box of.

    Args:
        stored: Some of the stored tensor, in a file.
        piece: Some of a model tensor, in the stored tensor.

    Returns:
        Their intersection as a box of the model tensor, or None.
    """
    common = intersect((stored.offset, stored.shape), (piece.at, piece.shape))
    if common is None:
        return None
    begin, shape = common
    at = stored.at or (0,) * len(begin)
    return Stored(
        file=stored.file,
        begin=stored.begin,
        offset=tuple(o + b - a for o, b, a in zip(piece.offset, begin, piece.at, strict=True)),
        shape=shape,
        whole=stored.whole or stored.shape,
        at=tuple(a + b - o for a, b, o in zip(at, begin, stored.offset, strict=True)),
        transposed=stored.transposed,
    )


def model_groups(config: LlamaConfig, layout: Layout, states: Mapping[str, RankState], where: str) -> dict[str, Group]:
    """Puts the optimizer's state of the model together.

    Args:
        config: The model.
        layout: Its files.
        states: Path of a model file → the state of that rank.
        where: The checkpoint, for messages.

    Raises:
        CheckpointError: Ranks have different kinds of state, or one tensor has two dtypes or not all of its elements.
    """
    kinds = {frozenset(state.groups) for state in states.values()}
    if len(kinds) > 1:
        raise CheckpointError(f"{where}: some ranks have {sorted(map(sorted, kinds))[0]}, others have not")
    head_is_stored = any(HEAD in state.keys for state in states.values())
    shapes = stored_shapes(config, head_is_stored)
    return {kind: _model_group(config, layout, states, shapes, kind, where) for kind in sorted(*kinds)}


def _model_group(
    config: LlamaConfig,
    layout: Layout,
    states: Mapping[str, RankState],
    shapes: Mapping[str, Ints],
    kind: str,
    where: str,
) -> Group:
    dtypes: dict[str, str] = {}
    places: dict[str, dict[Box, Stored]] = {name: {} for name in shapes}
    copies: dict[str, list[Stored]] = {}
    for file, tensor, piece in layout:
        group = states[file.path].groups[kind]
        if tensor.key not in group.specs:
            continue
        spec = group.specs[tensor.key]
        if dtypes.setdefault(piece.name, spec.dtype) != spec.dtype:
            raise CheckpointError(f"{where}: {kind} of {piece.name} has two dtypes on two ranks")
        for stored in group.places[tensor.key]:
            part = through(stored, piece)
            if part is not None and places[piece.name].setdefault((part.offset, part.shape), part) is not part:
                copies.setdefault(piece.name, []).append(part)
    for name, found in places.items():
        trouble = covers(shapes[name], sorted(found))
        if trouble:
            raise CheckpointError(f"{where}: {kind} of {name}: {trouble}")
    group = Group(
        specs={name: TensorSpec(dtypes[name], shape) for name, shape in shapes.items()},
        places={name: tuple(found.values()) for name, found in places.items()},
        copies={name: tuple(found) for name, found in copies.items()},
    )
    return with_head(group, config)
