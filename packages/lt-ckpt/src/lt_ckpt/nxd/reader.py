"""NxD checkpoint reader.

It reads the rank files' headers, infers the options from them, and assembles the model. NxD writes no description
beside the tensors. Degrees follow from the files' names, the attention layer and the stages' layers from keys, the kv
size multiplier from the degrees. The options must then fit the model, and every key of every rank must exist with the
shape of the layout: nothing is left over and nothing is guessed but the assignment of heads to ranks, which is not
visible and as on trn1 (`nxd/layout.py`).

Cost: the headers of all files.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from lt_ckpt.errors import CheckpointError
from lt_ckpt.family_tensors import IGNORED_BUFFERS
from lt_ckpt.layout import Layout
from lt_ckpt.llama_tensors import HEAD, add_tied_head, stored_shapes
from lt_ckpt.nxd.discovery import NxdFiles, find_nxd_files
from lt_ckpt.nxd.layout import layers_per_stage, nxd_layout
from lt_ckpt.nxd.options import NxdOptions, Qkv
from lt_ckpt.nxd.xser import XserFile
from lt_ckpt.source import TensorGroup, build_tensor_group
from lt_ckpt.stored_slices import StoredSlice
from lt_ckpt.tensorfile import StoredArray, TensorSpec
from lt_ckpt.torchfile.file import TensorReference
from lt_ckpt.torchfile.tensor_files import TensorFiles
from lt_model import ModelConfig

_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_ATTENTION: Mapping[str, Qkv] = {
    "qkv_proj.weight_qkv": "gqa_fused",
    "qkv_proj.weight_q": "gqa",
    "qkv_proj.weight": "coalesced",
    "q_proj.weight": "separate",
}


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """Tensors of a rank's model file.

    Attributes:
        file: The file, relative to the checkpoint.
        group: The tensors by key; without locations if their files were not looked at.
        is_xser: Whether tensors have files of their own.
    """

    file: str
    group: TensorGroup
    is_xser: bool

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with tensors in this file."""
        return tuple(sorted({int(match[1]) for key in self.group.specs if (match := _LAYER.match(key))}))


def read_rank_file(root: Path, file: str, tensor_files: TensorFiles, *, locate_tensors: bool) -> RankFile:
    """Read the headers of a rank's model file.

    Args:
        root: The root of the checkpoint.
        file: The file, relative to it.
        tensor_files: Reader of the files of single tensors, shared by the files of a checkpoint.
        locate_tensors: Read those, which a checkpoint with master weights may lack.

    Raises:
        CheckpointError: It is missing, damaged, or not a state dict.
    """
    saved = XserFile.open(root, file, tensor_files)
    tree = saved.tree
    if isinstance(tree, dict) and isinstance(tree.get("model"), dict):
        tree = tree["model"]
    if not isinstance(tree, dict):
        raise CheckpointError(f"{root / file}: holds a {type(tree).__name__}, not a model's tensors by name")
    is_xser = any(isinstance(leaf, TensorReference) for leaf in tree.values())
    if locate_tensors and is_xser and saved.is_missing_tensors:
        raise CheckpointError(
            f"{root / file}: its tensors were not saved (NxD's avoid_saving_lower_precision_weights); take the weights "
            "from the optimizer's master weights (--master-weights)"
        )
    specs: dict[str, TensorSpec] = {}
    locations: dict[str, tuple[StoredSlice, ...]] = {}
    for key, leaf in tree.items():
        if not isinstance(key, str) or not isinstance(leaf, StoredArray | TensorReference):
            raise CheckpointError(f"{root / file}: {key!r} is not a tensor but a {type(leaf).__name__}")
        if IGNORED_BUFFERS.search(key):
            continue
        if locate_tensors:
            path, array = saved.locate(leaf, key)
            specs[key], locations[key] = array.spec, (array.stored_slice(path),)
        else:
            specs[key] = saved.tensor_spec(leaf, key)
    return RankFile(file=file, group=TensorGroup(specs=specs, locations=locations), is_xser=is_xser)


@dataclass(frozen=True, kw_only=True)
class NxdCheckpoint:
    """NxD checkpoint with its inferred options.

    Attributes:
        config: The model.
        files: Its location on disk.
        rank_files: (tp rank, pp rank) → the model file.
        options: Inferred degrees and choices.
        layout: The model files of these options, relative to the checkpoint.
    """

    config: ModelConfig
    files: NxdFiles
    rank_files: Mapping[tuple[int, int], RankFile]
    options: NxdOptions
    layout: Layout


def read_nxd_checkpoint(
    path: str | os.PathLike[str],
    config: ModelConfig,
    *,
    locate_tensors: bool = True,
) -> NxdCheckpoint:
    """Find a checkpoint and infer its options.

    Args:
        path: As for `lt_ckpt.nxd.discovery.find_nxd_files`.
        config: The model.
        locate_tensors: Read the files of single tensors.

    Raises:
        CheckpointError: A file is missing or damaged, or the files do not match the model.
    """
    nxd_files = find_nxd_files(path)
    tensor_files = TensorFiles()
    ranks = {
        rank: read_rank_file(nxd_files.root, nxd_files.model_file(*rank), tensor_files, locate_tensors=locate_tensors)
        for rank in product(range(nxd_files.tp), range(nxd_files.pp))
    }
    inferred = infer_options(config, nxd_files, ranks)
    try:
        layout = nxd_layout(config, replace(inferred, tag="", xser=nxd_files.file_per_rank))
    except CheckpointError as exc:
        raise CheckpointError(f"{nxd_files.root}: {exc}") from exc
    return NxdCheckpoint(config=config, files=nxd_files, rank_files=ranks, options=inferred, layout=layout)


def infer_options(config: ModelConfig, nxd_files: NxdFiles, ranks: Mapping[tuple[int, int], RankFile]) -> NxdOptions:
    """Infer the options of a checkpoint from its files.

    Raises:
        CheckpointError: The files are not those of such a model, or of no valid options.
    """
    stage_files = [ranks[0, stage] for stage in range(nxd_files.pp)]
    layers = tuple(file.layers for file in stage_files)
    present = {layer for stage in layers for layer in stage}
    missing = next((layer for layer in range(config.n_layers) if layer not in present), None)
    if missing is not None or len(present) > config.n_layers:
        what = f"no file has layer {missing}" if missing is not None else f"there is a layer {max(present)}"
        raise CheckpointError(f"{nxd_files.root}: {what}, but the configuration has {config.n_layers} layers")
    first = next(file for file in stage_files if file.layers)
    prefix = f"model.layers.{first.layers[0]}.self_attn."
    key = next((key for key in _ATTENTION if prefix + key in first.group.specs), None)
    if key is None:
        raise CheckpointError(
            f"{nxd_files.root / first.file}: {prefix}* has none of {', '.join(_ATTENTION)}: its attention layer of NxD "
            "is not supported"
        )
    chunks = next(
        (n for n in range(1, len(layers[0]) + 1) if layers_per_stage(config.n_layers, nxd_files.pp, n) == layers), 0
    )
    return NxdOptions(
        tp=nxd_files.tp,
        pp=nxd_files.pp,
        virtual_pp=chunks or 1,
        kv_size_multiplier=max(1, nxd_files.tp // config.n_kv_heads) if "gqa" in _ATTENTION[key] else 1,
        qkv=_ATTENTION[key],
        layout=nxd_files.layout,
        xser=any(file.is_xser for file in ranks.values()),
        tag=nxd_files.tag,
        stage_layers=() if chunks else layers,
    )


def build_model_group(checkpoint: NxdCheckpoint) -> TensorGroup:
    """Assemble the model from the rank files.

    Raises:
        CheckpointError: A key is missing or unknown, or a tensor has another shape or dtype.
    """
    root, config = checkpoint.files.root, checkpoint.config
    groups = {file.file: file.group for file in checkpoint.rank_files.values()}
    shapes = stored_shapes(config, any(HEAD in group.specs for group in groups.values()))
    files = tuple(
        replace(file, tensors=tuple(tensor for tensor in file.tensors if tensor.key != HEAD or HEAD in shapes))
        for file in checkpoint.layout
    )
    return add_tied_head(build_tensor_group(files, groups, shapes, str(root)), config)
