"""Checkpoints of neuronx-distributed (NxD) as a source and as a target of conversions.

No Neuron package is needed, nor torch: files of torch.save are read and written as what they are. As a target, a tag
gets its markers last; without a tag the output is that of NxD's own converter. `nxd_layout.py` says what lies where,
`nxd_read.py` how that is found out.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lt_ckpt.convert import Target, require_cast
from lt_ckpt.errors import CheckpointError
from lt_ckpt.models import shapes_of
from lt_ckpt.nxd_files import BEGUN, DONE, find
from lt_ckpt.nxd_layout import nxd_layout
from lt_ckpt.nxd_options import NxdOptions
from lt_ckpt.nxd_read import find_cut, model_group, read_ranks
from lt_ckpt.source import Source
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile import TorchWriter
from lt_ckpt.xser import XserWriter
from lt_model import LlamaConfig


def open_nxd(
    path: str | os.PathLike[str], *, config: Mapping[str, Any] | None, options: NxdOptions | None = None
) -> Source:
    """Opens an NxD checkpoint.

    Args:
        path: The folder of the tags, of one tag, `model` itself, or of version 1.
        config: The content of the model's config.json; NxD's folders have none.
        options: What the checkpoint must be: its tag, if given, is the one to open, its head order is believed, and all
            else must be as the files say. None: whatever the files say, in the head order of trn1.

    Raises:
        CheckpointError: A file is missing or damaged, or the files are not those of such a model or of such a cut.
        lt_model.ModelError: The configuration is no Llama that lt_model knows.
    """
    if config is None:
        raise CheckpointError(
            f"{os.fspath(path)}: an NxD checkpoint does not say what the model is; give its Hugging Face "
            "configuration (--config config.json)"
        )
    model = LlamaConfig.from_hf(dict(config), source="config.json")
    found = find(path, tag=options.tag if options else "")
    ranks = read_ranks(found)
    cut = find_cut(model, found, ranks, options.head_order if options else "trn1")
    if options is not None and cut != replace(options, tag=cut.tag):
        name, said, wanted = next(
            (name, getattr(cut, name), getattr(options, name))
            for name in ("layout", "tp", "pp", "virtual_pp", "qkv", "kv_multiplier", "xser", "stage_layers")
            if getattr(cut, name) != getattr(options, name)
        )
        raise CheckpointError(f"{found.root}: its files are of {name} {said!r}, not {wanted!r}")
    files = list(ranks.values())
    return Source(
        format="nxd",
        path=found.root,
        root=found.root,
        config=dict(config),
        groups={"weights": model_group(model, found, ranks, cut)},
        about={
            **{name: getattr(cut, name) for name in ("layout", "tag", "tp", "pp", "virtual_pp", "qkv")},
            **{name: getattr(cut, name) for name in ("kv_multiplier", "head_order", "xser")},
            "stage_layers": [list(layers) for layers in cut.stage_layers],
            "passed_over": list(found.passed_over),
            "dropped": sorted({key for file in files for key in file.dropped}),
            "beside": sorted({key for file in files for key in file.beside}),
        },
    )


def nxd_target(source: Source, options: NxdOptions, *, dtype: str | None = None) -> Target:
    """What to write for a source that carries a configuration.

    Args:
        source: What will be converted.
        options: How it is to be cut.
        dtype: Safetensors code to cast to; None: as stored.

    Raises:
        CheckpointError: The model cannot be cut so, or the source lacks a tensor or cannot be cast.
    """
    assert source.config is not None
    model = LlamaConfig.from_hf(dict(source.config), source=f"{source.path}: config")
    layout = nxd_layout(model, options)
    specs: dict[str, TensorSpec] = {}
    for name, shape in shapes_of(model).items():
        if name not in source.weights.specs:
            raise CheckpointError(f"{source.path}: {name}: the source has no such tensor")
        stored = source.weights.specs[name].dtype
        require_cast(stored, dtype or stored)
        specs[name] = TensorSpec(dtype or stored, shape)
    return Target(
        format="nxd",
        layout=layout,
        specs=specs,
        opens=XserWriter if options.xser else TorchWriter,
        last={f"{options.tag}/{marker}": b"1" for marker in (BEGUN, DONE)} if options.tag else {},
    )
