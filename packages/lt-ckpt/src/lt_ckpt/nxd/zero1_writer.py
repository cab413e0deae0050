"""ZeRO-1 optimizer states for NxD, from the moments and master weights of a source in any format.

The inverse of `zero1.py`. The tensors of a tensor-parallel rank's model file are split into equal runs of rows for the
data-parallel ranks, padded with rows of zeros; each rank's file has the moments of its run of every tensor and, if
there are fp32 master weights, those. So a state's files are files of a layout like the model's, with tensors called
`exp_avg/NAME`, `master/NAME`; room that no tensor of the source fills is the zeros of the padding.

Tensors are numbered as in NxD's training programs: those with weight decay first, norms and biases last; or, if the
source's optimizer had a single group, as in the model. A head tied within one stage is the embedding itself and has no
number.

Cost: one object per tensor, kind and rank; the conversion itself is that of `lt_ckpt.conversion`, one pass.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lt_ckpt.conversion import Target
from lt_ckpt.errors import CheckpointError
from lt_ckpt.laid_out_files import CountBytes, Place, ReadBlock, Settle, pwrite, write_layout
from lt_ckpt.layout import FileLayout, TensorLayout, layout_bytes, slice_rows
from lt_ckpt.llama_tensors import HEAD, MASTER_WEIGHTS, add_tied_head, stored_shapes
from lt_ckpt.nxd.layout import nxd_layout, rank_path
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.xser import lay_out
from lt_ckpt.nxd.zero1 import MASTER_WEIGHTS_KEY, SHAPES_KEY, STATE_KEY, has_decay, shard_rows
from lt_ckpt.records import TORCH_ADAMW
from lt_ckpt.source import Source, TensorGroup
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.tensor_files import TensorFiles
from lt_model import ModelConfig

MOMENTS = TORCH_ADAMW.slots
_STEP = TensorSpec("F32", ())


def add_optimizer_states(source: Source, target: Target, options: NxdOptions, dp: int) -> tuple[Source, Target]:
    """Add the optimizer state to an NxD target.

    Args:
        source: What is converted, with the groups `exp_avg` and `exp_avg_sq`; the master weights are its group `master`
            or, if there is none, weights in fp32.
        target: The model's files.
        options: Degrees and choices of the target.
        dp: Data-parallel ranks.

    Returns:
        Source and target with the tensors of all groups as one.

    Raises:
        CheckpointError: The source has no moments, no step, or no optimizer settings; or the layout version has no such
            states.
    """
    if options.layout != "v2":
        raise CheckpointError(f"layout = {options.layout}: has no ZeRO-1 states; choose v2, or leave out the optimizer")
    model = source.model
    groups = {kind: add_tied_head(group, model) for kind, group in _state_groups(source, model).items()}
    settings, step = source.format_info.get("param_groups"), source.format_info.get("step")
    if type(step) is not int or not settings or len(settings) > 2:
        settings_of = (
            "settings of the optimizer (lr, betas, ...) for all tensors, or for norms with biases and for all others"
        )
        missing = "step" if type(step) is not int else settings_of
        raise CheckpointError(f"{source.path}: has no {missing}; an optimizer state cannot be made")
    specs, locations = dict(source.weights.specs), dict(source.weights.locations)
    for kind, group in groups.items():
        specs |= {f"{kind}/{name}": spec for name, spec in group.specs.items()}
        locations |= {f"{kind}/{name}": slices for name, slices in group.locations.items()}
    numbered_by_path: dict[str, tuple[list[TensorLayout], int]] = {}
    state_files: list[FileLayout] = []
    ranks = [(tp_rank, pp_rank) for pp_rank in range(options.pp) for tp_rank in range(options.tp)]
    for file, (tp_rank, pp_rank) in zip(nxd_layout(model, options), ranks, strict=True):
        numbered = _order_tensors(file, model, options, settings)
        for dp_rank in range(dp):
            path = rank_path(options, tp_rank, pp_rank, kind="optim", dp_rank=dp_rank)
            numbered_by_path[path] = numbered, dp_rank
            rows = ((tensor, shard_rows(tensor.shape[0], dp, dp_rank)[:2]) for tensor in numbered)
            tensors = [_state_rows(tensor, kind, *at) for tensor, at in rows if at[1] for kind in groups]
            state_files.append(FileLayout(path=path, tensors=tuple(tensors)))
    state_layout, tensor_files = tuple(state_files), TensorFiles()
    state_specs = {
        region.name: specs[region.name] for file in state_files for t in file.tensors for region in t.regions
    }

    def lay_out_file(path: Path, file: FileLayout, tensors: Mapping[str, TensorSpec]) -> Mapping[str, Place]:
        numbered, dp_rank = numbered_by_path[file.path]
        stored = {tensor.key: (shard_rows(tensor.shape[0], dp, dp_rank)[2], *tensor.shape[1:]) for tensor in numbered}
        shards = {
            kind: {
                tensor.key: TensorSpec(group.specs[tensor.regions[0].name].dtype, stored[tensor.key])
                for tensor in numbered
            }
            for kind, group in groups.items()
        }
        n_decayed = sum(has_decay(tensor.key) for tensor in numbered)
        sizes = [n_decayed, len(numbered) - n_decayed] if len(settings) > 1 else [len(numbered)]
        tree = build_state_tree(numbered, shards, settings, sizes)
        placed = lay_out_state(path, tree, step, xser=options.xser, tensor_files=tensor_files)
        return {f"{kind}/{numbered[number].key}": place for (kind, number), place in placed.items()}

    fill_state = write_layout(state_layout, state_specs, lay_out_file)

    def fill(folder: Path, read: ReadBlock, count_bytes: CountBytes, settle: Settle) -> None:
        target.fill(folder, read, count_bytes, settle)
        fill_state(folder, read, count_bytes, settle)

    return (
        replace(source, groups={"weights": TensorGroup(specs=specs, locations=locations)}),
        replace(
            target,
            specs={**target.specs, **state_specs},
            n_bytes=target.n_bytes + layout_bytes(state_layout, state_specs),
            fill=fill,
        ),
    )


def _state_groups(source: Source, model: ModelConfig) -> dict[str, TensorGroup]:
    """Return the kinds of state to write."""
    missing = [kind for kind in MOMENTS if kind not in source.groups]
    if missing:
        raise CheckpointError(f"{source.path}: has no {' and no '.join(missing)}; an optimizer state cannot be made")
    found = {kind: source.groups[kind] for kind in MOMENTS}
    if MASTER_WEIGHTS in source.groups:
        found[MASTER_WEIGHTS] = source.groups[MASTER_WEIGHTS]
    elif all(spec.dtype == "F32" for spec in source.weights.specs.values()):
        found[MASTER_WEIGHTS] = source.weights
    for kind, group in found.items():
        for name, shape in stored_shapes(model, head_is_stored=False).items():
            if name not in group.specs or group.specs[name].shape != shape:
                raise CheckpointError(f"{source.path}: {kind} of {name}: is missing or not of shape {list(shape)}")
    return found


def _order_tensors(
    file: FileLayout, model: ModelConfig, options: NxdOptions, settings: Sequence[Any]
) -> list[TensorLayout]:
    """Return a rank's tensors in the order of their numbers."""
    head_is_tied = model.tie_word_embeddings and options.pp == 1
    tensors = [tensor for tensor in file.tensors if not (head_is_tied and tensor.key == HEAD)]
    if len(settings) == 1:
        return tensors
    return sorted(tensors, key=lambda tensor: not has_decay(tensor.key))


def lay_out_state(
    path: Path, tree: Mapping[str, Any], step: int, *, xser: bool, tensor_files: TensorFiles
) -> dict[tuple[str, int], Place]:
    """Lay out an optimizer's file (`xser.lay_out`) and write its steps.

    Returns:
        Kind of state, and number of the tensor → the tensor's place.
    """
    placed = lay_out(path, tree, xser=xser, tensor_files=tensor_files)
    found = {(MASTER_WEIGHTS, number): place for number, place in placed.get(MASTER_WEIGHTS_KEY, {}).items()}
    for number, entry in placed[STATE_KEY if STATE_KEY in placed else "state"].items():
        pwrite(entry.pop("step"), memoryview(struct.pack("<f", step)))
        found |= {(kind, number): place for kind, place in entry.items()}
    return found


def build_state_tree(
    numbered: Sequence[TensorLayout],
    specs: Mapping[str, Mapping[str, TensorSpec]],
    param_group_settings: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    *,
    without_zero1: bool = False,
) -> dict[str, Any]:
    """Return the tree of an optimizer's file, with a `TensorSpec` for each tensor.

    Their order: of each tensor its step and its moments, then of each its master weight.

    Args:
        numbered: The rank's tensors in the order of their numbers.
        specs: Kind → NxD's key → spec in the file.
        param_group_settings: Settings of each param group.
        sizes: Number of tensors of each param group.
        without_zero1: As written by torch's own optimizers, without ZeRO-1.
    """
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    members = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    groups = [{**group, "params": params} for group, params in zip(param_group_settings, members, strict=True)]
    entries = {
        number: {"step": _STEP, **{kind: specs[kind][tensor.key] for kind in specs if kind != MASTER_WEIGHTS}}
        for number, tensor in enumerate(numbered)
    }
    if without_zero1:
        return {"state": entries, "param_groups": groups}
    tree: dict[str, Any] = {
        "state": {},
        "param_groups": groups,
        STATE_KEY: entries,
        SHAPES_KEY: {number: list(tensor.shape) for number, tensor in enumerate(numbered)},
    }
    if MASTER_WEIGHTS in specs:
        tree[MASTER_WEIGHTS_KEY] = {number: specs[MASTER_WEIGHTS][tensor.key] for number, tensor in enumerate(numbered)}
    return tree


def _state_rows(tensor: TensorLayout, kind: str, first: int, n_rows: int) -> TensorLayout:
    """Return rows of a rank's tensor as a tensor of a kind of state."""
    rows = slice_rows(tensor, first, n_rows)
    regions = tuple(replace(region, name=f"{kind}/{region.name}") for region in rows.regions)
    return TensorLayout(key=f"{kind}/{tensor.key}", shape=rows.shape, regions=regions)
