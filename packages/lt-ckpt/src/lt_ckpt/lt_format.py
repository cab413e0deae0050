"""Our own checkpoints as a source and as a target of conversions.

As a source, a checkpoint has its groups (weights, moments), the manifest's model as configuration, and the files that
were saved with it: the tokenizer's and, of a model that came from elsewhere, the rest of its configuration. As a
target, a checkpoint is saved with the protocol of `lt_ckpt.save`, in slices of at most `SLICE_BYTES`, one of which is
in memory; it holds what the source holds, so one converted from a Hugging Face model has weights only.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt import files, json_objects
from lt_ckpt.checked_cast import read_cast
from lt_ckpt.checkpoint import Checkpoint
from lt_ckpt.dtypes import TORCH_NAMES, item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.hf.folder import CONFIG, GENERATION_CONFIG
from lt_ckpt.hf.tokenizer_classes import adapt_tokenizer, special_token_names, token_ids
from lt_ckpt.llama_tensors import HEAD, add_tied_head, cast_dtypes, stored_shapes
from lt_ckpt.manifest import CheckpointMetadata
from lt_ckpt.model_files import with_architecture
from lt_ckpt.parallel import ByteCounter
from lt_ckpt.save import begin_save, commit_save, discard_save, write_rank_files
from lt_ckpt.shards import Box, Shard, split_rows
from lt_ckpt.source import Source, TensorGroup
from lt_ckpt.tensorfile import TensorSpec
from lt_model import ModelConfig, config_to_hf

SLICE_BYTES = 8 * 2**20
CONVERTED_FROM = "converted_from"
"""Key of the layout of a checkpoint that is no run's: the format of what it was converted from."""


def open_lt(checkpoint: Checkpoint) -> Source:
    """Open a checkpoint for conversion.

    Raises:
        CheckpointError: It has no model configuration, or its weights are not those of the model.
        lt_model.ModelError: The manifest's model is of no supported family.
    """
    manifest, path = checkpoint.manifest, checkpoint.path
    if not manifest.model:
        raise CheckpointError(f"{path}: has no model configuration, so it cannot be converted")
    config = ModelConfig.from_dict(manifest.model, source=f"{path}: model")
    groups = {name: _tensor_group(checkpoint, name) for name in checkpoint.groups}
    stored = checkpoint.specs("weights") if "weights" in groups else {}
    shapes = stored_shapes(config, HEAD in stored)
    expected = {name: TensorSpec(stored[name].dtype if name in stored else "F32", shapes[name]) for name in shapes}
    checkpoint.check_specs({"weights": expected})
    groups["weights"] = add_tied_head(groups["weights"], config)
    dtype = max((spec.dtype for spec in stored.values()), key=[s.dtype for s in stored.values()].count)
    hf_config, aux_files = _model_files(checkpoint, config, TORCH_NAMES[dtype])
    return Source(
        format="lt",
        path=path,
        root=path,
        config=hf_config,
        groups=groups,
        aux_files=aux_files,
        optimizer=manifest.optimizer,
        is_verified=checkpoint.is_verified,
        format_info={
            "step": manifest.step,
            "world_size": manifest.world_size,
            "layout": dict(manifest.layout),
            **({"param_groups": settings} if (settings := _param_groups(checkpoint)) else {}),
        },
    )


def _model_files(checkpoint: Checkpoint, model: ModelConfig, dtype: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return config.json and the other files of the model.

    They are those of the model that the run or the conversion began with. Without any, the token ids are the
    tokenizer's. A run's tokenizer is one that AutoTokenizer reads as the run did; that of a conversion is unchanged.
    """
    saved, tokenizer = checkpoint.hf_files(), checkpoint.tokenizer_files()
    if CONFIG in saved:
        where = f"{checkpoint.path}: hf/{CONFIG}"
        config = with_architecture(json_objects.loads(saved.pop(CONFIG), where), model)
        config.pop("dtype", None)
        config["torch_dtype"] = dtype
    else:
        ids = {f"{kind}_token_id": _token_id(f"{kind}_token", tokenizer) for kind in ("bos", "eos", "pad")}
        known = {name: value for name, value in ids.items() if value is not None}
        config = config_to_hf(model, bos_token_id=ids["bos_token_id"], eos_token_id=ids["eos_token_id"], dtype=dtype)
        config |= known
        saved = {GENERATION_CONFIG: json_objects.dumps(known, GENERATION_CONFIG, indent=2), **saved}
    if CONVERTED_FROM not in checkpoint.manifest.layout:
        tokenizer = adapt_tokenizer(tokenizer, config["model_type"])
    return config, {**tokenizer, **saved}


def _param_groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return the optimizer's param groups as torch's AdamW orders them: weight decay first, norms without."""
    manifest = checkpoint.manifest
    stored = manifest.layout.get("param_groups")
    if isinstance(stored, list):
        return stored
    settings = manifest.recipe.get("optimizer")
    if not isinstance(settings, dict) or not {"lr", "weight_decay", "beta1", "beta2", "eps"} <= set(settings):
        return []
    shared = {
        "lr": settings["lr"],
        "betas": [settings["beta1"], settings["beta2"]],
        "eps": settings["eps"],
        "initial_lr": settings["lr"],
    }
    return [{"weight_decay": decay, **shared} for decay in (settings["weight_decay"], 0.0)]


def _tensor_group(checkpoint: Checkpoint, group: str) -> TensorGroup:
    records = checkpoint.manifest.tensors[group]
    return TensorGroup(
        specs={name: record.spec for name, record in records.items()},
        locations={name: record.slices for name, record in records.items()},
        replicas={name: record.replicas for name, record in records.items() if record.replicas},
    )


def _token_id(name: str, files_by_name: Mapping[str, bytes]) -> int | None:
    """Return the id of a special token in the tokenizer's files, e.g. `bos_token`; None without one."""
    string = special_token_names(files_by_name).get(name)
    if string is None:
        return None
    with json_objects.translate_format_errors(f"the tokenizer's {name}"):
        return token_ids(files_by_name)[string]


def hf_model_files(source: Source) -> dict[str, bytes]:
    """Return the configuration files that a checkpoint of a source's model holds."""
    found = {name: data for name, data in source.aux_files.items() if name == GENERATION_CONFIG}
    return found | {CONFIG: json_objects.dumps(dict(source.config), CONFIG, indent=2)}


def save_lt(
    source: Source,
    root: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    allow_overflow: bool = False,
    progress: files.ProgressCallback | None = None,
) -> Path:
    """Save a source as a checkpoint in the folder of checkpoints `root`.

    Its step is the source's, or 0 if unknown.

    Args:
        source: What to save; all its groups.
        root: Folder of checkpoints.
        dtype: Safetensors code to cast the weights to; None: as stored.
        allow_overflow: Let finite values beyond the range of `dtype` become infinite, instead of refusing.
        progress: Called with the bytes written so far and in all.

    Raises:
        CheckpointError: A checkpoint of that step already exists, or the disk fails.
    """
    model = source.model
    step = int(source.format_info.get("step", 0))
    tokenizer = {name: data for name, data in source.aux_files.items() if name != GENERATION_CONFIG}
    shards = _describe_shards(source, model, dtype, allow_overflow=allow_overflow, progress=progress)
    tmp = begin_save(root, step=step, world_size=1)  # removes abandoned saves, so that their space counts as free
    try:
        files.check_free_space(tmp, sum(shard.n_bytes for shard in shards))
        write_rank_files(tmp, rank=0, shards=shards)
        meta = CheckpointMetadata(
            step=step,
            model=model.to_dict(),
            tokenizer_files=tokenizer,
            hf_files=hf_model_files(source),
            layout={CONVERTED_FROM: source.format, **dict(source.format_info)},
            optimizer=source.optimizer,
        )
        return commit_save(tmp, world_size=1, metadata=meta)
    except BaseException:
        if tmp.exists():
            discard_save(tmp)
        raise


def _describe_shards(
    source: Source,
    model: ModelConfig,
    dtype: str | None,
    *,
    allow_overflow: bool,
    progress: files.ProgressCallback | None,
) -> list[Shard]:
    """Return the shards to write, in file order; each is read when it is written."""
    n_bytes = 0

    def read(kind: str, name: str, box: Box, target: str) -> np.ndarray:
        data = read_cast(source, name, box, target, group=kind, allow_overflow=allow_overflow)
        count_bytes(data.nbytes)
        return data.reshape(-1).view(np.uint8)

    shards: list[Shard] = []
    for kind, group in source.groups.items():
        members: list[Shard] = []
        targets = cast_dtypes(group.specs, model, dtype if kind == "weights" else None)
        for name, spec in group.specs.items():
            if name == HEAD and model.tie_word_embeddings:
                continue
            target = targets[name]
            n_bytes += TensorSpec(target, spec.shape).n_bytes
            width = max(item_bytes(target), item_bytes(spec.dtype))
            members += [
                Shard(
                    group=kind,
                    name=name,
                    dtype=target,
                    global_shape=spec.shape,
                    offset=offset,
                    shape=shape,
                    data=partial(read, kind, name, (offset, shape), target),
                )
                for offset, shape in split_rows(spec.shape, SLICE_BYTES // width)
            ]
        shards += sorted(members, key=lambda shard: -item_bytes(shard.dtype))
    count_bytes = ByteCounter(n_bytes, progress)
    return shards
