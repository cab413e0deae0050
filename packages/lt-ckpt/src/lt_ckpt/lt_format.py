"""Our own checkpoints as a source and as a target of conversions.

As a source, a checkpoint has its groups (weights, moments), the model of its manifest as a configuration, and its
tokenizer's files. As a target, a checkpoint is saved with the protocol of `lt_ckpt.save`, in slices of at most
`SLICE_BYTES`, of which `AHEAD` + 1 are in memory; it holds what the source holds, so one made from a Hugging Face model
has weights and nothing else.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt import files, strict_json
from lt_ckpt.checkpoint import Checkpoint
from lt_ckpt.convert import require_cast
from lt_ckpt.dtypes import cast, item_bytes, long_name
from lt_ckpt.errors import CheckpointError
from lt_ckpt.manifest import Meta
from lt_ckpt.models import HEAD, stored_shapes, with_head
from lt_ckpt.pipeline import Tally, in_order
from lt_ckpt.plan import Stored
from lt_ckpt.records import Slice
from lt_ckpt.save import begin, commit, discard, write_part
from lt_ckpt.shards import Shard, row_blocks
from lt_ckpt.source import Group, Reader, Source
from lt_ckpt.tensorfile import TensorSpec
from lt_model import LlamaConfig

GENERATION = "generation_config.json"
SLICE_BYTES = 8 * 2**20

AHEAD = 2
"""Slices that are read ahead, each by a thread."""


def open_lt(checkpoint: Checkpoint) -> Source:
    """Opens a checkpoint for conversion.

    Raises:
        CheckpointError: It names no model, or its weights are not those of the model.
        lt_model.ModelError: The manifest's model is no Llama that lt_model knows.
    """
    manifest, path = checkpoint.manifest, checkpoint.path
    if not manifest.model:
        raise CheckpointError(f"{path}: names no model, so nothing can be made of it")
    config = LlamaConfig.from_dict(manifest.model, source=f"{path}: model")
    groups = {name: _group(checkpoint, name) for name in checkpoint.groups}
    stored = checkpoint.specs("weights") if "weights" in groups else {}
    shapes = stored_shapes(config, HEAD in stored)
    wanted = {name: TensorSpec(stored[name].dtype if name in stored else "F32", shapes[name]) for name in shapes}
    checkpoint.require({"weights": wanted})
    groups["weights"] = with_head(groups["weights"], config)
    tokenizer = checkpoint.tokenizer_files()
    parsed = {name: strict_json.loads(data, name) for name, data in tokenizer.items() if name.endswith(".json")}
    ids = {f"{kind}_token_id": _token_id(f"{kind}_token", parsed) for kind in ("bos", "eos", "pad")}
    generation = {name: value for name, value in ids.items() if value is not None}
    dtype = max((spec.dtype for spec in stored.values()), key=[s.dtype for s in stored.values()].count)
    return Source(
        format="lt",
        path=path,
        root=path,
        config=config.to_hf(bos_token_id=ids["bos_token_id"], eos_token_id=ids["eos_token_id"], dtype=long_name(dtype)),
        groups=groups,
        small={**tokenizer, GENERATION: strict_json.dumps(generation, GENERATION, indent=2)},
        about={
            "step": manifest.step,
            "world": manifest.world,
            "layout": dict(manifest.layout),
            **({"param_groups": settings} if (settings := _param_groups(checkpoint)) else {}),
        },
    )


def _param_groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Returns the optimizer's settings as torch's AdamW has them: those with weight decay first, norms without."""
    manifest = checkpoint.manifest
    kept = manifest.layout.get("param_groups")
    if isinstance(kept, list):
        return kept
    said = manifest.recipe.get("optimizer")
    if not isinstance(said, dict) or not {"lr", "weight_decay", "beta1", "beta2", "eps"} <= set(said):
        return []
    shared = {"lr": said["lr"], "betas": [said["beta1"], said["beta2"]], "eps": said["eps"], "initial_lr": said["lr"]}
    return [{"weight_decay": decay, **shared} for decay in (said["weight_decay"], 0.0)]


def _group(checkpoint: Checkpoint, group: str) -> Group:
    records = checkpoint.manifest.tensors[group]
    return Group(
        specs={name: record.spec for name, record in records.items()},
        places={name: _stored(record.slices) for name, record in records.items()},
        copies={name: _stored(record.copies) for name, record in records.items() if record.copies},
    )


def _stored(slices: Sequence[Slice]) -> tuple[Stored, ...]:
    return tuple(Stored(file=s.file, begin=s.begin, offset=s.offset, shape=s.shape) for s in slices)


def _token_id(name: str, tokenizer: Mapping[str, dict[str, Any]]) -> int | None:
    """Returns the id of a special token that the tokenizer's files name, for example `bos_token`; None without one."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = tokenizer.get(file, {}).get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            break
    else:
        return None
    table = tokenizer.get("tokenizer.json", {})
    added = table.get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    model = table.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    known = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    found = next((token.get("id") for token in tokens if token.get("content") == text), known)
    if type(found) is not int or found < 0:
        raise CheckpointError(f"the tokenizer's {name} is {text!r}, but its vocabulary has no such token")
    return found


def save_lt(
    source: Source,
    root: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    progress: files.Progress | None = None,
) -> Path:
    """Saves a source as a checkpoint in the folder of checkpoints `root`.

    Its step is the source's, or 0 for a source that knows none.

    Args:
        source: What to save; all its groups.
        root: Folder of checkpoints.
        dtype: Safetensors code to cast the weights to; None: as stored.
        progress: Told the bytes written so far and in all.

    Raises:
        CheckpointError: A checkpoint of that step is there already, or the disk fails.
    """
    assert source.config is not None
    model = LlamaConfig.from_hf(dict(source.config), source=f"{source.path}: config")
    step = int(source.about.get("step", 0))
    tokenizer = {name: data for name, data in source.small.items() if name != GENERATION}
    with Reader(source.root) as reader, ThreadPoolExecutor(AHEAD, "lt-ckpt-convert-read") as readers:
        described = _shards(source, model, dtype)
        tell = Tally(sum(shard.n_bytes for shard in described), progress)
        reads = [partial(_read, reader, source.groups[s.group], s, tell) for s in described]
        shards = _read_ahead(described, in_order(readers, reads, ahead=AHEAD))
        tmp = begin(root, step=step, world=1)
        try:
            write_part(tmp, rank=0, shards=shards)
            origin = {"converted_from": source.format, **dict(source.about)}
            meta = Meta(step=step, model=model.to_dict(), tokenizer_files=tokenizer, layout=origin)
            return commit(tmp, world=1, meta=meta)
        except BaseException:
            readers.shutdown(cancel_futures=True)
            if tmp.exists():
                discard(tmp)
            raise


def _shards(source: Source, model: LlamaConfig, dtype: str | None) -> list[Shard]:
    """Describes what is to be written, in the order in which the files hold it; the data comes later."""
    shards: list[Shard] = []
    for kind, group in source.groups.items():
        for name, spec in group.specs.items():
            if name == HEAD and model.tie_word_embeddings:
                continue
            target = dtype if dtype and kind == "weights" else spec.dtype
            require_cast(spec.dtype, target)
            width = max(item_bytes(target), item_bytes(spec.dtype))
            shards += [
                Shard(
                    group=kind,
                    name=name,
                    dtype=target,
                    global_shape=spec.shape,
                    offset=offset,
                    shape=shape,
                    data=lambda: np.empty(0, np.uint8),
                )
                for offset, shape in row_blocks(spec.shape, SLICE_BYTES // width)
            ]
    kinds = list(source.groups)
    return sorted(shards, key=lambda shard: (kinds.index(shard.group), -item_bytes(shard.dtype)))


def _read(reader: Reader, group: Group, shard: Shard, tell: Tally) -> np.ndarray:
    data = cast(reader.read(group, shard.name, (shard.offset, shard.shape)), group.specs[shard.name].dtype, shard.dtype)
    tell(data.nbytes)
    return data


def _read_ahead(shards: Sequence[Shard], data: Iterator[np.ndarray]) -> list[Shard]:
    """Gives the shards their data, which is read in their order, ahead of being asked for."""
    waiting = iter(range(len(shards)))

    def following(index: int) -> np.ndarray:
        assert next(waiting) == index, "asked for in another order than the files'"
        return next(data)

    return [replace(shard, data=partial(following, index)) for index, shard in enumerate(shards)]
