"""Reading NxD checkpoints: what the rank files say, the cut that follows from it, and the model put together from it.

NxD writes nothing about itself beside the tensors. Degrees follow from the files' names; the attention layer, the kv
multiplier and the stages' layers from keys and shapes. The cut must then be one that the model admits, and every key of
every rank must be there with the shape that the layout says: nothing is left over and nothing is guessed. Which heads
lie on which rank is the one thing that cannot be seen; trn1's order is taken unless told otherwise.

Cost: the headers of all files.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from lt_ckpt.errors import CheckpointError
from lt_ckpt.layout import FileLayout, Layout, Placed
from lt_ckpt.models import DROPPED, HEAD, stored_shapes, with_head
from lt_ckpt.nxd.grid import Found, find
from lt_ckpt.nxd.layout import nxd_layout, stages
from lt_ckpt.nxd.options import HeadOrder, NxdOptions, Qkv
from lt_ckpt.nxd.xser import Located, Saved
from lt_ckpt.source import Group, Held, join
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.names import TensorReference, TorchTensor
from lt_model import LlamaConfig

_BIAS = re.compile(r"\.bias(_\w+)?$")
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_ATTENTION: Mapping[str, Qkv] = {
    "qkv_proj.weight_qkv": "gqa_fused",
    "qkv_proj.weight_q": "gqa",
    "qkv_proj.weight": "coalesced",
    "q_proj.weight": "separate",
}


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """The tensors of a rank's model file.

    Attributes:
        file: The file, from the root of the checkpoint.
        specs: Key → dtype and shape.
        tensors: Key → where the tensor lies; empty when that was not looked at.
        by_reference: Whether tensors have files of their own.
        dropped: Keys that were left out, because every reader computes them anew.
        beside: What else the file holds beside the model.
    """

    file: str
    specs: Mapping[str, TensorSpec]
    tensors: Mapping[str, Located]
    by_reference: bool
    dropped: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that it has tensors of."""
        return tuple(sorted({int(match[1]) for key in self.specs if (match := _LAYER.match(key))}))


def read_rank(root: Path, file: str, *, locate: bool) -> RankFile:
    """Reads the headers of a rank's model file.

    Args:
        root: The root of the checkpoint.
        file: The file, from there.
        locate: Look into the files of single tensors, which a checkpoint with masters may lack.

    Raises:
        CheckpointError: It is missing, damaged, no state dict, or has biases.
    """
    saved = Saved.open(root, file)
    tree, beside = saved.tree, ()
    if isinstance(tree, dict) and isinstance(tree.get("model"), dict):
        tree, beside = tree["model"], tuple(str(key) for key in tree if key != "model")
    if not isinstance(tree, dict):
        raise CheckpointError(f"{root / file}: holds a {type(tree).__name__}, not a model's tensors by name")
    by_reference = any(isinstance(leaf, TensorReference) for leaf in tree.values())
    if locate and by_reference and saved.lacks_tensors:
        raise CheckpointError(
            f"{root / file}: its tensors were not saved beside it, as with NxD's avoid_saving_lower_precision_weights; "
            "take the weights from the optimizer's masters"
        )
    specs: dict[str, TensorSpec] = {}
    tensors: dict[str, Located] = {}
    dropped: list[str] = []
    for key, leaf in tree.items():
        if not isinstance(key, str) or not isinstance(leaf, TorchTensor | TensorReference):
            raise CheckpointError(f"{root / file}: {key!r} is no tensor but a {type(leaf).__name__}")
        if _BIAS.search(key):
            raise CheckpointError(f"{root / file}: {key}: a model with biases is none that lt_model computes")
        if DROPPED.search(key):
            dropped.append(key)
        elif locate:
            tensors[key] = saved.locate(leaf, key)
            specs[key] = tensors[key].held.spec
        else:
            specs[key] = saved.spec(leaf, key)
    return RankFile(
        file=file,
        specs=specs,
        tensors=tensors,
        by_reference=by_reference,
        dropped=tuple(dropped),
        beside=beside,
    )


def read_ranks(found: Found, *, locate: bool = True) -> dict[tuple[int, int], RankFile]:
    """Reads the headers of all model files: (tp rank, pp rank) → file."""
    ranks = product(range(found.tp), range(found.pp))
    return {rank: read_rank(found.root, found.path(*rank), locate=locate) for rank in ranks}


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A checkpoint whose cut is known.

    Attributes:
        config: The model.
        found: Where it lies.
        ranks: (tp rank, pp rank) → the model file.
        options: How it is cut.
        layout: The files of such a cut, from the root of the checkpoint.
    """

    config: LlamaConfig
    found: Found
    ranks: Mapping[tuple[int, int], RankFile]
    options: NxdOptions
    layout: Layout


def examine(
    path: str | os.PathLike[str],
    config: LlamaConfig,
    options: NxdOptions | None,
    *,
    locate: bool = True,
    head_order: HeadOrder = "trn1",
) -> Examined:
    """Finds a checkpoint and tells how it is cut.

    Args:
        path: As `lt_ckpt.nxd.grid.find` takes it.
        config: The model.
        options: What it must be (see `lt_ckpt.nxd.format.open_nxd`); None: whatever the files say.
        locate: Look into the files of single tensors.
        head_order: Without options: what the files do not show.

    Raises:
        CheckpointError: A file is missing or damaged, or the files are not those of such a model or of such a cut.
    """
    found = find(path, tag=options.tag if options else "")
    ranks = read_ranks(found, locate=locate)
    cut = find_cut(config, found, ranks, options.head_order if options else head_order)
    wanted = replace(options, tag=cut.tag) if options else cut
    for name in ("layout", "tp", "pp", "virtual_pp", "qkv", "kv_multiplier", "xser", "stage_layers"):
        if getattr(cut, name) != getattr(wanted, name):
            raise CheckpointError(
                f"{found.root}: its files are of {name} {getattr(cut, name)!r}, not {getattr(wanted, name)!r}"
            )
    try:
        layout = nxd_layout(config, replace(cut, tag="", xser=found.bare))
    except CheckpointError as exc:
        raise CheckpointError(f"{found.root}: {exc}") from exc
    return Examined(config=config, found=found, ranks=ranks, options=cut, layout=layout)


def find_cut(
    config: LlamaConfig, found: Found, ranks: Mapping[tuple[int, int], RankFile], head_order: HeadOrder
) -> NxdOptions:
    """Tells how a checkpoint is cut.

    Raises:
        CheckpointError: The files are not those of such a model, or of no cut that can be right.
    """
    stage_files = [ranks[0, stage] for stage in range(found.pp)]
    layers = tuple(file.layers for file in stage_files)
    present = {layer for stage in layers for layer in stage}
    absent = next((layer for layer in range(config.n_layers) if layer not in present), None)
    if absent is not None or len(present) > config.n_layers:
        what = f"no file has layer {absent}" if absent is not None else f"there is a layer {max(present)}"
        raise CheckpointError(f"{found.root}: {what}, but the configuration has {config.n_layers} layers")
    first = next(file for file in stage_files if file.layers)
    prefix = f"model.layers.{first.layers[0]}.self_attn."
    key = next((key for key in _ATTENTION if prefix + key in first.specs), None)
    if key is None:
        raise CheckpointError(
            f"{found.root / first.file}: {prefix}* has none of {', '.join(_ATTENTION)}: an attention layer of NxD that "
            "is not known"
        )
    chunks = next((n for n in range(1, len(layers[0]) + 1) if stages(config.n_layers, found.pp, n) == layers), 0)
    return NxdOptions(
        tp=found.tp,
        pp=found.pp,
        virtual_pp=chunks or 1,
        kv_multiplier=_multiplier(config, found, first, prefix, _ATTENTION[key]),
        qkv=_ATTENTION[key],
        layout=found.layout,
        xser=any(file.by_reference for file in ranks.values()),
        tag=found.tag,
        head_order=head_order,
        stage_layers=() if chunks else layers,
    )


def _multiplier(config: LlamaConfig, found: Found, file: RankFile, prefix: str, qkv: Qkv) -> int:
    """Returns how often the kv heads are there, by the rows that a rank has of them."""
    if qkv not in ("gqa", "gqa_fused"):
        return 1
    key = prefix + ("qkv_proj.weight_k" if qkv == "gqa" else "qkv_proj.weight_qkv")
    shape = file.specs[key].shape if key in file.specs else ()
    rows = found.tp * shape[0] if shape else 0
    if qkv == "gqa_fused":
        rows = (rows - config.n_heads * config.head_dim) // 2
    repeats, rest = divmod(rows, config.n_kv_heads * config.head_dim)
    if repeats < 1 or rest:
        raise CheckpointError(
            f"{found.root / file.file}: {key} has shape {list(shape)}, which is no whole number of copies of "
            f"{config.n_kv_heads} kv heads of width {config.head_dim} on {found.tp} ranks; is the configuration the "
            "right one?"
        )
    return repeats


def model_group(examined: Examined) -> Group:
    """Puts the model together from the rank files.

    Raises:
        CheckpointError: A key is missing or unknown, or a tensor has another shape or dtype.
    """
    root, config = examined.found.root, examined.config
    head_is_stored = any(HEAD in file.tensors for file in examined.ranks.values())
    shapes = stored_shapes(config, head_is_stored)
    by_path = {file.file: file for file in examined.ranks.values()}
    files: list[FileLayout] = []
    holders: dict[str, dict[str, Held]] = {}
    for file in examined.layout.files:
        wanted = [tensor for tensor in file.tensors if tensor.key != HEAD or HEAD in shapes]
        located = by_path[file.path].tensors
        _require_keys(root / file.path, wanted, located)
        for path, tensors in _by_file(wanted, located):
            files.append(FileLayout(path=path, tensors=tensors))
            holders[path] = {tensor.key: located[tensor.key].held for tensor in tensors}
    return with_head(join(Layout(files=tuple(files)), holders, shapes, str(root)), config)


def _require_keys(path: Path, wanted: Iterable[Placed], located: Mapping[str, Located]) -> None:
    unlike = sorted({tensor.key for tensor in wanted} ^ set(located))
    if unlike:
        what = "is not expected here" if unlike[0] in located else "is missing"
        raise CheckpointError(f"{path}: {unlike[0]} {what}; is the configuration the right one?")


def _by_file(wanted: Iterable[Placed], located: Mapping[str, Located]) -> Iterator[tuple[str, tuple[Placed, ...]]]:
    """Yields the files that tensors lie in, each with its tensors."""
    groups: dict[str, list[Placed]] = {}
    for tensor in wanted:
        groups.setdefault(located[tensor.key].file, []).append(tensor)
    return ((path, tuple(tensors)) for path, tensors in groups.items())
