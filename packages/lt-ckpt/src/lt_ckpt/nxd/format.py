"""Checkpoints of neuronx-distributed (NxD) as a source and as a target of conversions.

No Neuron package is needed, nor torch: files of torch.save are read and written as what they are. As a target, a tag
gets its markers last; without a tag the output is that of NxD's own converter. `nxd_layout.py` says what lies where,
`nxd_read.py` how that is found out.
"""

import os
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from lt_ckpt.convert import Target
from lt_ckpt.errors import CheckpointError
from lt_ckpt.models import shapes_of, target_specs
from lt_ckpt.nxd.layout import nxd_layout
from lt_ckpt.nxd.options import HeadOrder, NxdOptions
from lt_ckpt.nxd.read import examine, model_group
from lt_ckpt.nxd.resplitting import require_equal_steps
from lt_ckpt.nxd.xser import XserWriter
from lt_ckpt.nxd.zero import MASTER, RankState, model_groups, read_states
from lt_ckpt.records import BEGUN, DONE
from lt_ckpt.source import Group, Reader, Source
from lt_ckpt.torchfile.file import TorchWriter
from lt_model import LlamaConfig


def open_nxd(
    path: str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None,
    options: NxdOptions | None = None,
    optimizer: bool = False,
    masters: bool = False,
    head_order: HeadOrder = "trn1",
) -> Source:
    """Opens an NxD checkpoint.

    Args:
        path: The folder of the tags, of one tag, `model` itself, or of version 1.
        config: The content of the model's config.json; NxD's folders have none.
        options: What the checkpoint must be: its tag, if given, is the one to open, its head order is believed, and all
            else must be as the files say. None: whatever the files say, in the head order of trn1.
        optimizer: Open the ZeRO-1 state too: the groups `exp_avg`, `exp_avg_sq` and, if saved, `master`; its step is
            then that of the source.
        masters: Take the weights from the fp32 masters of the ZeRO-1 state, not from the model files.
        head_order: Without options: the head order of the GQA layer, which the files do not show.

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
    examined = examine(path, model, options, locate=not masters, head_order=head_order)
    found, cut, files = examined.found, examined.options, examined.ranks.values()
    about = {
        **{name: getattr(cut, name) for name in ("layout", "tag", "tp", "pp", "virtual_pp", "qkv")},
        **{name: getattr(cut, name) for name in ("kv_multiplier", "head_order", "xser")},
    }
    special = {
        "stage_layers": [list(layers) for layers in cut.stage_layers],
        "passed_over": list(found.passed_over),
        "dropped": sorted({key for file in files for key in file.dropped}),
        "beside": sorted({key for file in files for key in file.beside}),
    }
    about |= {name: value for name, value in special.items() if value}
    groups: dict[str, Group] = {}
    if optimizer or masters:
        states = read_states(examined)
        about["dp"] = len(next(iter(states.values())).shards)
        groups = model_groups(model, examined.layout, states, str(found.root))
        if optimizer:
            about |= _step(states.values(), found.root)
            if settings := _settings(states.values()):
                about["param_groups"] = settings
    if masters and MASTER not in groups:
        raise CheckpointError(
            f"{found.root}: its optimizer has no master weights (saved without use_master_weights_in_ckpt)"
        )
    weights = groups.pop(MASTER) if masters else model_group(examined)
    return Source(
        format="nxd",
        path=found.root,
        root=found.root,
        config=dict(config),
        groups={"weights": weights, **(groups if optimizer else {})},
        about=about,
    )


def _settings(states: Iterable[RankState]) -> list[dict[str, Any]]:
    """Returns the settings of the optimizer's groups that are numbers, texts, or lists of numbers.

    Nothing where the groups are neither one nor two, all other tensors and then the norms, or where ranks have others:
    which group a tensor was in would be lost.
    """

    def plain(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return all(type(item) in (int, float) and isfinite(item) for item in value)
        return value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value))

    found: list[dict[str, Any]] | None = None
    for state in states:
        for saved in state.shards:
            groups = saved.tree["param_groups"]
            norms = [{"norm" in state.keys[number] for number in group["params"]} for group in groups]
            own = [{key: value for key, value in group.items() if key != "params" and plain(value)} for group in groups]
            if (len(groups) > 1 and norms != [{False}, {True}]) or found not in (None, own):
                return []
            found = own
    return found or []


def _step(states: Iterable[RankState], root: Path) -> dict[str, int]:
    """Returns the step of the optimizer, where it keeps one.

    Raises:
        CheckpointError: Not all tensors of all ranks are of one step.
    """
    with Reader(root) as reader:
        steps = {step for state in states for step in require_equal_steps(state, reader)}
    if len(steps) > 1:
        raise CheckpointError(f"{root}: its optimizer's tensors are of the steps {sorted(map(str, steps))}")
    step = next(iter(steps), None)
    if step is None:
        return {}
    if not 0 <= step < 2**53 or step != int(step):
        raise CheckpointError(f"{root}: its optimizer is of step {step:g}, which is none")
    return {"step": int(step)}


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
    return Target(
        format="nxd",
        layout=layout,
        specs=target_specs(source, shapes_of(model), dtype),
        opens=XserWriter if options.xser else TorchWriter,
        last={f"{options.tag}/{marker}": b"1" for marker in (BEGUN, DONE)} if options.tag else {},
    )
