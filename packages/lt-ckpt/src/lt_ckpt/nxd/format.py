"""Checkpoints of neuronx-distributed (NxD) as a source and as a target of conversions.

No Neuron package is needed. As a target, a tag gets its markers last; without a tag the output is that
of NxD's own converter. `layout.py` defines the files' contents, `reader.py` infers the layout of existing files.
"""

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from lt_ckpt.conversion import Target
from lt_ckpt.errors import CheckpointError
from lt_ckpt.laid_out_files import Place, write_layout
from lt_ckpt.layout import FileLayout, layout_bytes
from lt_ckpt.llama_tensors import MASTER_WEIGHTS, target_specs, tensor_shapes
from lt_ckpt.model_files import model_files
from lt_ckpt.nxd.discovery import has_optimizer_files
from lt_ckpt.nxd.layout import LACKS, nxd_layout
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.reader import build_model_group, read_nxd_checkpoint
from lt_ckpt.nxd.xser import lay_out
from lt_ckpt.nxd.zero1 import (
    OptimizerShard,
    build_model_groups,
    has_decay,
    has_zero1_state,
    read_optimizer_shards,
    read_optimizer_step,
)
from lt_ckpt.records import NXD_BEGIN_MARKER, NXD_DONE_MARKER, TORCH_ADAMW
from lt_ckpt.source import Source, TensorGroup
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.tensor_files import TensorFiles
from lt_model import config_from_hf


def open_nxd(
    path: str | os.PathLike[str],
    *,
    config: Mapping[str, Any],
    optimizer: bool | None = False,
    master_weights: bool = False,
) -> Source:
    """Open an NxD checkpoint, with the model's files that a conversion put into its folder.

    Args:
        path: The folder of the tags, of one tag, `model` itself, or of version 1.
        config: The content of the model's config.json; NxD's folders have none.
        optimizer: Also open the ZeRO-1 state: the groups `exp_avg`, `exp_avg_sq` and, if saved, `master`; its step
            becomes that of the source. None: if there is one; an `optim` of torch's own optimizers is only among the
            files to verify.
        master_weights: Take the weights from the fp32 master weights of the ZeRO-1 state, not from the model files.

    Raises:
        CheckpointError: A file is missing or damaged, or the files do not match the model.
        lt_model.ModelError: The configuration is of no supported family.
    """
    model = config_from_hf(dict(config), source="config.json")
    model.check_features("the format nxd", LACKS)
    checkpoint = read_nxd_checkpoint(path, model, locate_tensors=not master_weights)
    nxd_files, inferred = checkpoint.files, checkpoint.options
    names = ("layout", "tag", "tp", "pp", "virtual_pp", "qkv", "kv_size_multiplier", "xser")
    format_info = {name: getattr(inferred, name) for name in names}
    optional_info = {
        "stage_layers": [list(layers) for layers in inferred.stage_layers],
        "skipped_tags": list(nxd_files.skipped_tags),
    }
    format_info |= {name: value for name, value in optional_info.items() if value}
    if optimizer is None:
        optimizer = has_zero1_state(nxd_files)
        if not optimizer and has_optimizer_files(nxd_files):
            format_info["optimizer"] = "not of ZeRO-1, not read"
    groups: dict[str, TensorGroup] = {}
    if optimizer or master_weights:
        shards = read_optimizer_shards(checkpoint)
        format_info["dp"] = len(shards) // len(checkpoint.rank_files)
        groups = build_model_groups(model, shards, str(nxd_files.root))
        if optimizer:
            if (step := read_optimizer_step(shards, nxd_files.root)) is not None:
                format_info["step"] = step
            if settings := _read_param_groups(shards):
                format_info["param_groups"] = settings
    if master_weights and MASTER_WEIGHTS not in groups:
        raise CheckpointError(
            f"{nxd_files.root}: its optimizer has no master weights (saved without use_master_weights_in_ckpt)"
        )
    weights = groups.pop(MASTER_WEIGHTS) if master_weights else build_model_group(checkpoint)
    return Source(
        format="nxd",
        path=nxd_files.root,
        root=nxd_files.root,
        config=dict(config),
        groups={"weights": weights, **(groups if optimizer else {})},
        optimizer=TORCH_ADAMW if optimizer and groups.keys() >= set(TORCH_ADAMW.slots) else None,
        format_info=format_info,
    )


def _read_param_groups(shards: Iterable[OptimizerShard]) -> list[dict[str, Any]]:
    """Return the optimizer's param groups: those settings that are numbers, strings, or lists of numbers.

    Empty if the groups are neither one nor two (all others, then norms and biases), or if ranks differ: the group of a
    tensor would be lost.
    """

    def plain(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return all(type(item) in (int, float) and isfinite(item) for item in value)
        return value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value))

    found: list[dict[str, Any]] | None = None
    for shard in shards:
        groups = shard.saved.tree["param_groups"]
        decays = [{has_decay(shard.keys[number]) for number in group["params"]} for group in groups]
        own = [{key: value for key, value in group.items() if key != "params" and plain(value)} for group in groups]
        if (len(groups) > 1 and decays != [{True}, {False}]) or found not in (None, own):
            return []
        found = own
    return found or []


def nxd_target(source: Source, options: NxdOptions, *, dtype: str | None = None) -> Target:
    """Return the target for a source with a configuration.

    Args:
        source: What will be converted.
        options: Degrees and choices of the output.
        dtype: Safetensors code to cast to; None: as stored.

    Raises:
        CheckpointError: The options do not fit the model, or the source lacks a tensor or cannot be cast.
    """
    model = source.model
    model.check_features("the format nxd", LACKS)
    layout, tensor_files = nxd_layout(model, options), TensorFiles()
    specs = target_specs(source, tensor_shapes(model), dtype)

    def lay_out_file(path: Path, file: FileLayout, tensors: Mapping[str, TensorSpec]) -> Mapping[str, Place]:
        return lay_out(path, OrderedDict(tensors), xser=options.xser, tensor_files=tensor_files)

    return Target(
        specs=specs,
        n_bytes=layout_bytes(layout, specs),
        fill=write_layout(layout, specs, lay_out_file),
        aux_files=model_files(source, specs, folder=options.tag),
        hashed_folder=options.tag,
        marker_files={f"{options.tag}/{marker}": b"1" for marker in (NXD_BEGIN_MARKER, NXD_DONE_MARKER)}
        if options.tag
        else {},
    )
