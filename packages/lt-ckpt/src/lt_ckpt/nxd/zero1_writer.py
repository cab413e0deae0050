"""ZeRO-1 optimizer states for NxD, from the moments and master weights of a source in any format.

The inverse of `zero1.py`. The tensors of a tensor-parallel rank's model file are split into equal runs of rows for the
data-parallel ranks, padded with rows of zeros; each rank's file has the moments of its run of every tensor and, if
there are fp32 master weights, those. So a state's files are files of a layout like the model's, with tensors called
`exp_avg/NAME`, `master/NAME`; bytes that no tensor of the source holds (padding, the step) are inserted
(`OptimizerStateWriter`).

Tensors are numbered as in NxD's training programs: those with weight decay first, the norms last; or, if the source's
optimizer had a single group, as in the model. A head tied within one stage is the embedding itself and has no number.

Cost: one object per tensor, kind and rank; the conversion itself is that of `lt_ckpt.conversion`, one pass.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt.conversion import Target
from lt_ckpt.direct_io import CreateFile
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.layout import FileLayout, Layout, TensorLayout, TensorRegion
from lt_ckpt.llama_tensors import HEAD, add_tied_head, stored_shapes
from lt_ckpt.nxd.layout import nxd_layout, rank_path
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.xser import XserWriter
from lt_ckpt.nxd.zero1 import MASTER_WEIGHTS, MASTER_WEIGHTS_KEY, SHAPES_KEY, STATE_KEY, shard_rows
from lt_ckpt.records import TORCH_ADAMW
from lt_ckpt.shards import Ints, intersect
from lt_ckpt.source import Source, TensorGroup
from lt_ckpt.tensor_writers import TensorFileWriter, TensorSpecs, split_at_records
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import TorchWriter
from lt_model import LlamaConfig, config_from_hf

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
    if type(dp) is not int or dp < 1:
        raise CheckpointError(f"dp = {dp!r}: must be a whole number of at least 1")
    if options.layout != "v2":
        raise CheckpointError(f"layout = {options.layout}: has no ZeRO-1 states; choose v2, or leave out the optimizer")
    assert source.config is not None
    model = config_from_hf(dict(source.config), source=f"{source.path}: config")
    groups = {kind: add_tied_head(group, model) for kind, group in _state_groups(source, model).items()}
    settings, step = source.format_info.get("param_groups"), source.format_info.get("step")
    if type(step) is not int or not settings or len(settings) > 2:
        missing = (
            "step"
            if type(step) is not int
            else "settings of the optimizer (lr, betas, ...) for all tensors, or for the norms and for all others"
        )
        raise CheckpointError(f"{source.path}: has no {missing}; an optimizer state cannot be made")
    states: dict[str, _StateFile] = {}
    order = dict.fromkeys(region.name for _, _, region in target.layout)
    layout = nxd_layout(model, replace(options, tag=""))
    for file, (tp_rank, pp_rank) in zip(layout.files, _ranks(options), strict=True):
        numbered = _order_tensors(file, model, options, settings)
        for kinds in (MOMENTS, groups.keys() - set(MOMENTS)):
            names = (f"{kind}/{region.name}" for tensor in numbered for kind in kinds for region in tensor.regions)
            order |= dict.fromkeys(names)
        for dp_rank in range(dp):
            path = rank_path(options, tp_rank, pp_rank, kind="optim", dp_rank=dp_rank)
            states[path] = _build_state_file(numbered, groups, dp, dp_rank, settings, float(step))
    specs, locations = dict(source.weights.specs), dict(source.weights.locations)
    for kind, group in groups.items():
        specs |= {f"{kind}/{name}": spec for name, spec in group.specs.items()}
        locations |= {f"{kind}/{name}": slices for name, slices in group.locations.items()}
    files = tuple(FileLayout(path=path, tensors=state.tensors) for path, state in states.items())
    target_specs = {**target.specs, **{name: specs[name] for name in order if name not in target.specs}}

    def open_writer(
        path: Path, tensors: TensorSpecs, metadata: Mapping[str, str], *, create: CreateFile
    ) -> TensorFileWriter:
        state = states.get(f"{options.tag}/optim/{path.name}" if options.tag else f"optim/{path.name}")
        if state is None or path.parent.name != "optim":
            return target.open_writer(path, tensors, metadata, create=create)
        return OptimizerStateWriter(
            (XserWriter if options.xser else TorchWriter).from_tree(path, state.tree, create=create), state.segments
        )

    return (
        replace(source, groups={"weights": TensorGroup(specs=specs, locations=locations)}),
        replace(
            target,
            layout=Layout(files=(*target.layout.files, *files)),
            specs=target_specs,
            open_writer=open_writer,
            tensor_order=tuple(order),
        ),
    )


def _state_groups(source: Source, model: LlamaConfig) -> dict[str, TensorGroup]:
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


def _ranks(options: NxdOptions) -> list[tuple[int, int]]:
    """Return the ranks in the order of the layout's files."""
    return [(tp_rank, pp_rank) for pp_rank in range(options.pp) for tp_rank in range(options.tp)]


def _order_tensors(
    file: FileLayout, model: LlamaConfig, options: NxdOptions, settings: Sequence[Any]
) -> list[TensorLayout]:
    """Return a rank's tensors in the order of their numbers."""
    head_is_tied = model.tie_word_embeddings and options.pp == 1
    tensors = [tensor for tensor in file.tensors if not (head_is_tied and tensor.key == HEAD)]
    if len(settings) == 1:
        return tensors
    return sorted(tensors, key=lambda tensor: "norm" in tensor.key)


@dataclass(frozen=True, slots=True)
class _StateFile:
    """Optimizer file: its tree, its tensors as in a layout, and its bytes: sizes to come, or known bytes."""

    tree: dict[str, Any]
    tensors: tuple[TensorLayout, ...]
    segments: tuple[int | bytes, ...]


def _build_state_file(
    numbered: Sequence[TensorLayout],
    groups: Mapping[str, TensorGroup],
    dp: int,
    dp_rank: int,
    settings: Sequence[Mapping[str, Any]],
    step: float,
) -> _StateFile:
    tensors: list[TensorLayout] = []
    segments: list[int | bytes] = []

    def spec(kind: str, tensor: TensorLayout) -> TensorSpec:
        dtype = groups[kind].specs[tensor.regions[0].name].dtype
        first, n_rows, stored = shard_rows(tensor.shape[0], dp, dp_rank)
        row = item_bytes(dtype) * int(np.prod(tensor.shape[1:], dtype=np.int64))
        if n_rows:
            tensors.append(_state_rows(tensor, kind, first, n_rows))
            segments.append(n_rows * row)
        segments.append(bytes((stored - n_rows) * row))
        return TensorSpec(dtype, (stored, *tensor.shape[1:]))

    specs: dict[str, dict[str, TensorSpec]] = {
        kind: {} for kind in (*MOMENTS, *([MASTER_WEIGHTS] if MASTER_WEIGHTS in groups else []))
    }
    for tensor in numbered:
        segments.append(encode_step(step))
        for kind in MOMENTS:
            specs[kind][tensor.key] = spec(kind, tensor)
    for tensor in numbered if MASTER_WEIGHTS in groups else ():
        specs[MASTER_WEIGHTS][tensor.key] = spec(MASTER_WEIGHTS, tensor)
    n_decayed = sum("norm" not in tensor.key for tensor in numbered)
    sizes = [n_decayed, len(numbered) - n_decayed] if len(settings) > 1 else [len(numbered)]
    return _StateFile(build_state_tree(numbered, specs, settings, sizes), tuple(tensors), tuple(segments))


def encode_step(step: float) -> bytes:
    """Return the bytes of a tensor's step: the number of optimizer steps it has taken."""
    return struct.pack("<f", step)


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


def slice_rows(tensor: TensorLayout, first: int, n_rows: int) -> TensorLayout:
    """Return rows of a rank's tensor as a tensor."""
    shape = (n_rows, *tensor.shape[1:])
    begin: Ints = (first, *(0,) * (len(shape) - 1))
    regions: list[TensorRegion] = []
    for region in tensor.regions:
        common = intersect((begin, shape), (region.stored_offset, region.shape))
        if common is not None:
            at, size = common
            regions.append(
                TensorRegion(
                    name=region.name,
                    offset=tuple(o + a - p for o, a, p in zip(region.offset, at, region.stored_offset, strict=True)),
                    shape=size,
                    stored_offset=tuple(a - b for a, b in zip(at, begin, strict=True)),
                )
            )
    return TensorLayout(key=tensor.key, shape=shape, regions=tuple(regions))


class OptimizerStateWriter:
    """Tensor file writer that inserts known bytes between those appended.

    Args:
        writer: The underlying writer.
        segments: Its bytes in order: sizes to come, or known bytes.
    """

    def __init__(self, writer: TensorFileWriter, segments: Sequence[int | bytes]) -> None:
        self._writer = writer
        self._segments = list(reversed(segments))
        self._remaining = 0
        try:
            self._write_known_segments()
        except BaseException:
            self.abort()
            raise

    def _write_known_segments(self) -> None:
        """Write known bytes up to the next appended ones."""
        while self._segments and not self._remaining:
            part = self._segments.pop()
            if isinstance(part, bytes):
                self._writer.append(memoryview(part))
            else:
                self._remaining = part

    def append(self, data: memoryview | np.ndarray) -> None:
        """Write the next bytes, in the order of the tensors."""
        for part in split_at_records(data, lambda: self._remaining):
            self._writer.append(part)
            self._remaining -= len(part)
            self._write_known_segments()

    def close(self) -> None:
        """Close the file and flush it to the disk; all bytes must have been written."""
        assert not self._remaining, f"{self._remaining} bytes are missing"
        assert not self._segments, "tensors are missing"
        self._writer.close()

    def abort(self) -> None:
        """Close the unfinished file."""
        self._writer.abort()
