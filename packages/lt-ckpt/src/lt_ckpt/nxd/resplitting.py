"""Cuts a ZeRO-1 optimizer state of NxD for another number of data-parallel ranks.

Each new file is the tree of the old one with new shards: rows of the tensor-parallel rank's tensors, read from the old
shards that have them, and rows of zeros as padding. All else (parameter groups, steps, shapes) is the same on all data-
parallel ranks and is taken over. Master weights are cut like the rest. The output has the folder `optim` alone, as that
of NxD's own tool, to stand beside the model's files, which do not depend on the number of data-parallel ranks.

Cost: every byte is read and written once; memory: a block.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt import files
from lt_ckpt.containers import Container
from lt_ckpt.convert import BLOCK_BYTES
from lt_ckpt.dtypes import cast, item_bytes
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.new_folder import NewFolder
from lt_ckpt.nxd.layout import rank_path
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.read import examine
from lt_ckpt.nxd.xser import Saved, XserWriter
from lt_ckpt.nxd.zero import MASTER, MASTERS, STATES, RankState, read_states, shard_rows
from lt_ckpt.pipeline import Tally
from lt_ckpt.plan import Stored
from lt_ckpt.shards import row_blocks
from lt_ckpt.source import Group, Reader
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import TorchWriter
from lt_ckpt.torchfile.names import TensorReference, TorchTensor
from lt_model import LlamaConfig


@dataclass(frozen=True, slots=True)
class _Part:
    """What a tensor of a new file is made of: rows of a tensor, then rows of zeros."""

    group: Group
    name: str
    first: int
    rows: int
    spec: TensorSpec


def resplit(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dp: int,
    config: Mapping[str, Any],
    options: NxdOptions | None = None,
    progress: files.Progress | None = None,
) -> Path:
    """Writes the ZeRO-1 state of a checkpoint anew for `dp` data-parallel ranks.

    Args:
        path: The checkpoint, as `open_nxd` takes it.
        out: The folder to make; one that is there must be empty.
        dp: The new number of data-parallel ranks.
        config: The content of the model's config.json.
        options: What the checkpoint must be, as for `open_nxd`.
        progress: Told the bytes written so far and in all.

    Returns:
        The folder, with `optim` in it.

    Raises:
        CheckpointError: The state is damaged or incomplete, its shards are of different steps, or the disk fails;
            nothing is left behind.
    """
    if type(dp) is not int or dp < 1:
        raise CheckpointError(f"dp must be a whole number of at least 1, is {dp!r}")
    model = LlamaConfig.from_hf(dict(config), source="config.json")
    examined = examine(path, model, options, locate=False)
    root, folder = examined.found.root, Path(os.path.abspath(out))
    states = read_states(examined)
    with Reader(root) as reader:
        for state in states.values():
            require_equal_steps(state, reader)
        n_bytes = sum(_n_bytes(state, dp) for state in states.values())
        tell = Tally(n_bytes, progress)
        with storage("writing optimizer states", folder):
            if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
                raise CheckpointError(f"{folder}: is there already and not an empty folder; choose another path")
            files.make_folders(folder.parent)
            with NewFolder(folder) as made:
                for (tp_rank, pp_rank), file in examined.ranks.items():
                    for dp_rank in range(dp):
                        name = rank_path(NxdOptions(), tp_rank, pp_rank, kind="optim", dp_rank=dp_rank)
                        _write(states[file.file], dp, dp_rank, made.path(name), reader, tell)
    return folder


def _n_bytes(state: RankState, dp: int) -> int:
    """Bytes of all new shards of one tensor-parallel rank, without the steps."""
    specs = [spec for group in state.groups.values() for spec in group.specs.values()]
    return sum(
        dp * shard_rows(spec.shape[0], dp, 0)[2] * prod(spec.shape[1:]) * item_bytes(spec.dtype) for spec in specs
    )


def _write(state: RankState, dp: int, dp_rank: int, path: Path, reader: Reader, tell: Tally) -> None:
    first = state.shards[0]
    parts: list[_Part] = []
    by_reference = False

    def leaf(value: TorchTensor | TensorReference, trail: tuple[Any, ...]) -> TensorSpec:
        nonlocal by_reference
        by_reference |= isinstance(value, TensorReference)
        parts.append(_part(state, first, value, trail, dp, dp_rank))
        return parts[-1].spec

    tree = _mapped(first.tree, leaf, ())
    opened: Container = (XserWriter if by_reference else TorchWriter).of_tree(path, tree)
    try:
        for part in parts:
            for block in _blocks(part, reader):
                opened.append(block)
                tell(block.nbytes if part.spec.shape else 0)
    except BaseException:
        opened.abandon()
        raise
    opened.close()


def _mapped(tree: Any, leaf: Callable[[Any, tuple[Any, ...]], TensorSpec], trail: tuple[Any, ...]) -> Any:
    """Returns the tree with `leaf` of each tensor and the keys that lead to it."""
    if isinstance(tree, TorchTensor | TensorReference):
        return leaf(tree, trail)
    if isinstance(tree, dict):
        return {key: _mapped(value, leaf, (*trail, key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(value, leaf, (*trail, i)) for i, value in enumerate(tree))
    return tree


def _part(
    state: RankState, saved: Saved, value: TorchTensor | TensorReference, trail: tuple[Any, ...], dp: int, dp_rank: int
) -> _Part:
    """Returns what the tensor at this place of the tree becomes."""
    if trail[0] == STATES and trail[2:] != ("step",):
        kind, index = trail[2], trail[1]
    elif trail[0] == MASTERS:
        kind, index = MASTER, trail[1]
    else:
        return _as_it_is(saved, value, trail)
    group, name = state.groups[kind], state.keys[index]
    spec = group.specs[name]
    first, rows, stored = shard_rows(spec.shape[0], dp, dp_rank)
    return _Part(group, name, first, rows, TensorSpec(spec.dtype, (stored, *spec.shape[1:])))


def _as_it_is(saved: Saved, value: TorchTensor | TensorReference, trail: tuple[Any, ...]) -> _Part:
    """A single number that all ranks have alike: a step."""
    name = ".".join(map(str, trail))
    file, held = saved.locate(value, name)
    if held.spec.shape:
        raise CheckpointError(
            f"{saved.root / file}: {name} has shape {list(held.spec.shape)}; how it is cut over data-parallel ranks is "
            "not known"
        )
    place = Stored(file=file, begin=held.begin, offset=(), shape=())
    return _Part(Group(specs={name: held.spec}, places={name: (place,)}), name, 0, 0, held.spec)


def _blocks(part: _Part, reader: Reader) -> Iterator[np.ndarray]:
    spec = part.spec
    if not spec.shape:
        yield reader.read(part.group, part.name)
        return
    limit = max(1, BLOCK_BYTES // item_bytes(spec.dtype))
    if part.rows:
        for (row, *zeros), shape in row_blocks((part.rows, *spec.shape[1:]), limit):
            yield reader.read(part.group, part.name, ((part.first + row, *zeros), shape))
    for _, shape in row_blocks((spec.shape[0] - part.rows, *spec.shape[1:]), limit):
        yield np.zeros(prod(shape) * item_bytes(spec.dtype), np.uint8)


def require_equal_steps(state: RankState, reader: Reader) -> list[float | None]:
    """Refuses shards of different steps, of which a state made of them would be a mixture.

    Returns:
        The step of each tensor, None where none is kept.

    Raises:
        CheckpointError: Two shards differ, or a step is no number.
    """
    steps: list[list[float | None]] = []
    for saved in state.shards:
        steps.append([_step(saved, index, entry.get("step"), reader) for index, entry in saved.tree[STATES].items()])
        if steps[-1] != steps[0]:
            raise CheckpointError(
                f"{saved.root / saved.file}: is of another step than {state.shards[0].file}; these are shards of two "
                "saves"
            )
    return steps[0]


def _step(saved: Saved, index: Any, step: Any, reader: Reader) -> float | None:
    if isinstance(step, TorchTensor | TensorReference):
        part = _as_it_is(saved, step, (STATES, index, "step"))
        data = reader.read(part.group, part.name)
        if part.spec.dtype in ("I64", "I32"):
            return float(int.from_bytes(data.tobytes(), "little", signed=True))
        return float(cast(data, part.spec.dtype, "F64").view("<f8")[0])
    if step is not None and type(step) not in (int, float):
        raise CheckpointError(f"{saved.root / saved.file}: the step of tensor {index} is a {type(step).__name__}")
    return None if step is None else float(step)
