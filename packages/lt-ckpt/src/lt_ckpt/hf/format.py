"""The Hugging Face format: config.json, safetensors files of whole tensors, and their index.

Input: the folder of any Llama that `lt_model` knows, also with the old rotary buffers that some files carry, which are
left out. Output: what `transformers` loads: files of at most `max_shard_bytes`, an index where there are several, the
tokenizer's files, and generation_config.json. A tied model is written without its head.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_ckpt import strict_json
from lt_ckpt.containers import SafetensorsWriter
from lt_ckpt.convert import Target
from lt_ckpt.dtypes import long_name
from lt_ckpt.errors import CheckpointError
from lt_ckpt.hf.folder import CONFIG, INDEX, SINGLE, HFFolder
from lt_ckpt.layout import FileLayout, Layout, whole
from lt_ckpt.models import DROPPED, HEAD, stored_shapes, target_specs, with_head
from lt_ckpt.source import Held, Source, join
from lt_ckpt.tensorfile import TensorSpec, file_order
from lt_model import LlamaConfig

MAX_SHARD_BYTES = 5 * 10**9


def open_hf(path: str | os.PathLike[str], *, config: Mapping[str, Any] | None = None) -> Source:
    """Opens a folder with config.json and safetensors.

    Raises:
        CheckpointError: A file is missing or damaged, or the tensors are not those of the model.
        lt_model.ModelError: The configuration is no Llama that lt_model knows.
    """
    folder = HFFolder.open(path)
    model = LlamaConfig.from_hf(dict(config or folder.config), source=str(folder.path / CONFIG))
    holders: dict[str, dict[str, Held]] = {}
    for name, (file, begin) in folder.positions().items():
        if not DROPPED.search(name):
            holders.setdefault(file, {})[name] = Held(spec=folder.specs[name], begin=begin)
    shapes = stored_shapes(model, any(HEAD in held for held in holders.values()))
    files = tuple(
        FileLayout(path=file, tensors=tuple(whole(name, shapes[name]) for name in held if name in shapes))
        for file, held in sorted(holders.items())
    )
    group = with_head(join(Layout(files=files), holders, shapes, str(folder.path)), model)
    return Source(
        format="hf",
        path=folder.path,
        root=folder.path,
        config=folder.config if config is None else dict(config),
        groups={"weights": group},
        small=folder.small_files(),
    )


def hf_target(source: Source, *, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES) -> Target:
    """What to write for a source that carries a configuration.

    Args:
        source: What will be converted.
        dtype: Safetensors code to cast to; None: as stored.
        max_shard_bytes: Most bytes of tensors per file.
    """
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes must be at least 1, is {max_shard_bytes}")
    assert source.config is not None
    model = LlamaConfig.from_hf(dict(source.config), source=f"{source.path}: config")
    shapes = stored_shapes(model, not model.tie_word_embeddings)
    specs = target_specs(source, shapes, dtype)
    shards = _shards({name: specs[name] for name in file_order(specs)}, max_shard_bytes)
    kinds: dict[str, int] = {}
    for spec in specs.values():
        kinds[spec.dtype] = kinds.get(spec.dtype, 0) + spec.n_bytes
    config = {**source.config, "torch_dtype": long_name(max(kinds, key=lambda kind: kinds[kind]))}
    config.pop("dtype", None)
    small = {**source.small, CONFIG: strict_json.dumps(config, CONFIG, indent=2)}
    if len(shards) > 1:
        weight_map = {name: file for file, group in shards.items() for name in group}
        index = {"metadata": {"total_size": sum(s.n_bytes for s in specs.values())}, "weight_map": weight_map}
        small[INDEX] = strict_json.dumps(index, INDEX, indent=2)
    files = tuple(
        FileLayout(path=file, tensors=tuple(whole(name, spec.shape) for name, spec in group.items()))
        for file, group in shards.items()
    )
    return Target(
        format="hf",
        check=lambda folder: _check_with_reference_reader(folder, shards),
        layout=Layout(files=files),
        specs=specs,
        opens=SafetensorsWriter,
        metadata={"format": "pt"},
        small=small,
    )


def _check_with_reference_reader(folder: Path, shards: Mapping[str, Mapping[str, TensorSpec]]) -> None:
    """Opens the files that we wrote with the `safetensors` library, which reads their headers, and compares."""
    from safetensors import safe_open

    for file, specs in shards.items():
        with safe_open(folder / file, framework="numpy") as reader:
            slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118 - it has only keys()
            seen = {name: TensorSpec(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        assert seen == dict(specs), f"{file}: safetensors reads other tensors than were written"


def _shards(specs: Mapping[str, TensorSpec], limit: int) -> dict[str, dict[str, TensorSpec]]:
    """Cuts the tensors in order into files of at most `limit` bytes; a longer tensor has a file of its own."""
    groups: list[dict[str, TensorSpec]] = [{}]
    room = limit
    for name, spec in specs.items():
        if groups[-1] and spec.n_bytes > room:
            groups.append({})
            room = limit
        groups[-1][name] = spec
        room -= spec.n_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}
