"""ZeRO-1 optimizer states for NxD, made of the moments and masters of a source in any format.

It is `zero.py` the other way round. What a tensor-parallel rank's model file has is cut into equal runs of rows for the
data-parallel ranks, padded with rows of zeros; each rank's file has the moments of its run of every tensor and, where
there are fp32 masters, those. So a state's files are files of a layout like the model's, whose tensors are called
`exp_avg/NAME`, `master/NAME`; what no tensor of the source holds (padding, the step) is put in between (`StateWriter`).

Tensors are numbered as NxD's training programs do it: those with weight decay first, the norms last; or, where the
source's optimizer had a single group, as in the model. A head that is tied within one stage is the embedding itself and
has no number.

Cost: one object per tensor, kind and rank; the conversion itself is that of `lt_ckpt.convert`, one pass.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt.containers import Container, Tensors, portions
from lt_ckpt.convert import Target
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.layout import FileLayout, Layout, Piece, Placed
from lt_ckpt.models import HEAD, stored_shapes, with_head
from lt_ckpt.nxd.layout import nxd_layout, rank_path
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.xser import XserWriter
from lt_ckpt.nxd.zero import MASTER, MASTERS, SHAPES, STATES, shard_rows
from lt_ckpt.shards import Ints, intersect
from lt_ckpt.source import Group, Source
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import TorchWriter
from lt_model import LlamaConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = TensorSpec("F32", ())


def with_states(source: Source, target: Target, options: NxdOptions, dp: int) -> tuple[Source, Target]:
    """Adds the optimizer's state to an NxD target.

    Args:
        source: What is converted, with the groups `exp_avg` and `exp_avg_sq`; the masters are its group `master` or,
            where there is none, weights in fp32.
        target: The model's files.
        options: How they are cut.
        dp: Data-parallel ranks.

    Returns:
        Source and target with the tensors of all groups as one.

    Raises:
        CheckpointError: The source has no moments, no step, or says nothing of the optimizer's settings; or the options
            are of a version without such states.
    """
    if type(dp) is not int or dp < 1:
        raise CheckpointError(f"dp must be a whole number of at least 1, is {dp!r}")
    if options.layout != "v2":
        raise CheckpointError(f"layout {options.layout} has no ZeRO-1 states; choose v2, or leave out the optimizer")
    assert source.config is not None
    model = LlamaConfig.from_hf(dict(source.config), source=f"{source.path}: config")
    groups = {kind: with_head(group, model) for kind, group in _groups(source, model).items()}
    settings, step = source.about.get("param_groups"), source.about.get("step")
    if type(step) is not int or not settings or len(settings) > 2:
        lacking = (
            "step its optimizer is at"
            if type(step) is not int
            else ("settings its optimizer has (lr, betas, ...) for all tensors, or for the norms and for all others")
        )
        raise CheckpointError(f"{source.path}: does not say which {lacking}; an optimizer state cannot be made")
    states: dict[str, _State] = {}
    order = dict.fromkeys(piece.name for _, _, piece in target.layout)
    layout = nxd_layout(model, replace(options, tag=""))
    for file, (tp_rank, pp_rank) in zip(layout.files, _ranks(options), strict=True):
        kept = _numbered(file, model, options, settings)
        for kinds in (MOMENTS, groups.keys() - set(MOMENTS)):
            names = (f"{kind}/{piece.name}" for tensor in kept for kind in kinds for piece in tensor.pieces)
            order |= dict.fromkeys(names)
        for dp_rank in range(dp):
            path = rank_path(options, tp_rank, pp_rank, kind="optim", dp_rank=dp_rank)
            states[path] = _state(kept, groups, dp, dp_rank, settings, float(step))
    specs, places = dict(source.weights.specs), dict(source.weights.places)
    for kind, group in groups.items():
        specs |= {f"{kind}/{name}": spec for name, spec in group.specs.items()}
        places |= {f"{kind}/{name}": found for name, found in group.places.items()}
    files = tuple(FileLayout(path=path, tensors=state.tensors) for path, state in states.items())
    wanted = {**target.specs, **{name: specs[name] for name in order if name not in target.specs}}

    def opens(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> Container:
        state = states.get(f"{options.tag}/optim/{path.name}" if options.tag else f"optim/{path.name}")
        if state is None or path.parent.name != "optim":
            return target.opens(path, tensors, metadata)
        return StateWriter((XserWriter if options.xser else TorchWriter).of_tree(path, state.tree), state.parts)

    return (
        replace(source, groups={"weights": Group(specs=specs, places=places)}),
        replace(
            target, layout=Layout(files=(*target.layout.files, *files)), specs=wanted, opens=opens, order=tuple(order)
        ),
    )


def _groups(source: Source, model: LlamaConfig) -> dict[str, Group]:
    """Returns the kinds of state that are to be written."""
    lacking = [kind for kind in MOMENTS if kind not in source.groups]
    if lacking:
        raise CheckpointError(f"{source.path}: has no {' and no '.join(lacking)}; an optimizer state cannot be made")
    found = {kind: source.groups[kind] for kind in MOMENTS}
    if MASTER in source.groups:
        found[MASTER] = source.groups[MASTER]
    elif all(spec.dtype == "F32" for spec in source.weights.specs.values()):
        found[MASTER] = source.weights
    for kind, group in found.items():
        for name, shape in stored_shapes(model, head_is_stored=False).items():
            if name not in group.specs or group.specs[name].shape != shape:
                raise CheckpointError(f"{source.path}: {kind} of {name}: is missing or not of shape {list(shape)}")
    return found


def _ranks(options: NxdOptions) -> list[tuple[int, int]]:
    """The ranks in the order of the layout's files."""
    return [(tp_rank, pp_rank) for pp_rank in range(options.pp) for tp_rank in range(options.tp)]


def _numbered(file: FileLayout, model: LlamaConfig, options: NxdOptions, settings: Sequence[Any]) -> list[Placed]:
    """Returns a rank's tensors in the order of their numbers."""
    shared = model.tie_word_embeddings and options.pp == 1
    kept = [tensor for tensor in file.tensors if not (shared and tensor.key == HEAD)]
    if len(settings) == 1:
        return kept
    return sorted(kept, key=lambda tensor: "norm" in tensor.key)


@dataclass(frozen=True, slots=True)
class _State:
    """A file: its tree, its tensors as a layout has them, and its bytes: those to come (a number) and known ones."""

    tree: dict[str, Any]
    tensors: tuple[Placed, ...]
    parts: tuple[int | bytes, ...]


def _state(
    kept: Sequence[Placed],
    groups: Mapping[str, Group],
    dp: int,
    dp_rank: int,
    settings: Sequence[Mapping[str, Any]],
    step: float,
) -> _State:
    tensors: list[Placed] = []
    parts: list[int | bytes] = []

    def spec(kind: str, tensor: Placed) -> TensorSpec:
        dtype = groups[kind].specs[tensor.pieces[0].name].dtype
        first, held, stored = shard_rows(tensor.shape[0], dp, dp_rank)
        row = item_bytes(dtype) * int(np.prod(tensor.shape[1:], dtype=np.int64))
        if held:
            tensors.append(_rows(tensor, kind, first, held))
            parts.append(held * row)
        parts.append(bytes((stored - held) * row))
        return TensorSpec(dtype, (stored, *tensor.shape[1:]))

    specs: dict[str, dict[str, TensorSpec]] = {kind: {} for kind in (*MOMENTS, *([MASTER] if MASTER in groups else []))}
    for tensor in kept:
        parts.append(step_bytes(step))
        for kind in MOMENTS:
            specs[kind][tensor.key] = spec(kind, tensor)
    for tensor in kept if MASTER in groups else ():
        specs[MASTER][tensor.key] = spec(MASTER, tensor)
    n_decayed = sum("norm" not in tensor.key for tensor in kept)
    sizes = [n_decayed, len(kept) - n_decayed] if len(settings) > 1 else [len(kept)]
    return _State(state_tree(kept, specs, settings, sizes), tuple(tensors), tuple(parts))


def step_bytes(step: float) -> bytes:
    """The tensor that says how many updates another one has seen."""
    return struct.pack("<f", step)


def state_tree(
    numbered: Sequence[Placed],
    specs: Mapping[str, Mapping[str, TensorSpec]],
    settings: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    *,
    plain: bool = False,
) -> dict[str, Any]:
    """What an optimizer's file holds, with a `TensorSpec` for each tensor.

    Those come in this order: of each tensor its step and its moments, then of each its master.

    Args:
        numbered: The rank's tensors in the order of their numbers.
        specs: Kind → NxD's key → what the file holds of that kind.
        settings: Of each group of parameters.
        sizes: How many tensors each group has.
        plain: As torch's own optimizers write it, without ZeRO-1.
    """
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    members = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    groups = [{**group, "params": params} for group, params in zip(settings, members, strict=True)]
    entries = {
        number: {"step": _STEP, **{kind: specs[kind][tensor.key] for kind in MOMENTS}}
        for number, tensor in enumerate(numbered)
    }
    if plain:
        return {"state": entries, "param_groups": groups}
    tree: dict[str, Any] = {
        "state": {},
        "param_groups": groups,
        STATES: entries,
        SHAPES: {number: list(tensor.shape) for number, tensor in enumerate(numbered)},
    }
    if MASTER in specs:
        tree[MASTERS] = {number: specs[MASTER][tensor.key] for number, tensor in enumerate(numbered)}
    return tree


def _rows(tensor: Placed, kind: str, first: int, held: int) -> Placed:
    """Some rows of a rank's tensor, as a tensor of a kind of state."""
    cut = rows_of(tensor, first, held)
    pieces = tuple(replace(piece, name=f"{kind}/{piece.name}") for piece in cut.pieces)
    return Placed(key=f"{kind}/{tensor.key}", shape=cut.shape, pieces=pieces)


def rows_of(tensor: Placed, first: int, held: int) -> Placed:
    """Some rows of a rank's tensor, as a tensor."""
    shape = (held, *tensor.shape[1:])
    begin: Ints = (first, *(0,) * (len(shape) - 1))
    pieces: list[Piece] = []
    for piece in tensor.pieces:
        common = intersect((begin, shape), (piece.at, piece.shape))
        if common is not None:
            at, size = common
            pieces.append(
                Piece(
                    name=piece.name,
                    offset=tuple(o + a - p for o, a, p in zip(piece.offset, at, piece.at, strict=True)),
                    shape=size,
                    at=tuple(a - b for a, b in zip(at, begin, strict=True)),
                )
            )
    return Placed(key=tensor.key, shape=shape, pieces=tuple(pieces))


class StateWriter:
    """A container into which bytes that are known beforehand are put by itself.

    Args:
        container: What is written.
        parts: Its bytes in order: how many are to come, or those that are known.
    """

    def __init__(self, container: Container, parts: Sequence[int | bytes]) -> None:
        self._container = container
        self._parts = list(reversed(parts))
        self._left = 0
        try:
            self._go_on()
        except BaseException:
            self.abandon()
            raise

    def _go_on(self) -> None:
        """Writes what is known up to the next bytes that are to come."""
        while self._parts and not self._left:
            part = self._parts.pop()
            if isinstance(part, bytes):
                self._container.append(memoryview(part))
            else:
                self._left = part

    def append(self, data: memoryview | np.ndarray) -> None:
        """Take the next bytes, in the order of the tensors."""
        for part in portions(data, lambda: self._left):
            self._container.append(part)
            self._left -= len(part)
            self._go_on()

    def close(self) -> None:
        """Put the file on the disk; all bytes must have come."""
        assert not self._left, f"{self._left} bytes have not come"
        assert not self._parts, "tensors have not come"
        self._container.close()

    def abandon(self) -> None:
        """Let go of the unfinished file."""
        self._container.abandon()
