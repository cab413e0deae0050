"""Hugging Face format: config.json, safetensors files of a family's tensors, and their index.

Input: the folder of a model of any family that `lt_model` has, pytorch_model.bin too; buffers of old files are ignored.
Output: what `transformers` loads: files of at most `max_shard_bytes`, an index if there are several, the tokenizer's
files, and generation_config.json. A tied model is written without its head.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_ckpt import json_objects
from lt_ckpt.conversion import Target
from lt_ckpt.family_tensors import build_family_group, family_tensors, is_extra_layer
from lt_ckpt.hf.folder import CONFIG, INDEX_FILE, SINGLE_FILE, read_stored_arrays, read_tensor_file
from lt_ckpt.joined_experts import join_specs
from lt_ckpt.laid_out_files import lay_out_safetensors, write_layout
from lt_ckpt.layout import FileLayout, stored_specs
from lt_ckpt.llama_tensors import stored_shapes, target_specs, tensor_shapes
from lt_ckpt.model_files import model_files
from lt_ckpt.source import Source
from lt_ckpt.tensorfile import TensorSpec, file_order
from lt_model import config_from_hf

MAX_SHARD_BYTES = 5 * 10**9


def open_hf(path: str | os.PathLike[str], *, config: Mapping[str, Any]) -> Source:
    """Open a folder of a model, or a file that `torch.save(model.state_dict(), path)` wrote.

    Args:
        path: The folder or the file, whose state dict may also be under "model", "state_dict" or "module".
        config: The model's config.json.

    Raises:
        CheckpointError: A file is missing or damaged, or the tensors are not those of the model.
        lt_model.ModelError: The configuration is of no supported family.
    """
    found = Path(path)
    model = config_from_hf(dict(config), source=f"{found}: {CONFIG}")
    kind, root = ("pt", found.parent) if found.is_file() else ("hf", found)
    stored = {found.name: read_tensor_file(root, found.name)} if kind == "pt" else read_stored_arrays(root)
    groups = {"weights": build_family_group(model, stored, str(found))}
    has_extra = any(is_extra_layer(name, model) for arrays in stored.values() for name in arrays)
    skipped = f"{found}: layers from number {model.n_layers} on, which predict further tokens, are not read"
    notes = (skipped,) if has_extra else ()
    return Source(format=kind, path=found, root=root, config=dict(config), groups=groups, fallbacks=notes)


def hf_target(source: Source, *, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES) -> Target:
    """Return the target for a source with a configuration.

    Args:
        source: What will be converted.
        dtype: Safetensors code to cast to; None: as stored.
        max_shard_bytes: Maximum bytes of tensors per file.
    """
    model = source.model
    specs = target_specs(source, stored_shapes(model, not model.tie_word_embeddings), dtype)
    joined = join_specs(model, specs)
    tensors = family_tensors(model, {name: spec.shape for name, spec in joined.items()})
    stored = stored_specs(tensors.values(), joined)
    shards = _split_into_shards({key: stored[key] for key in file_order(stored)}, max_shard_bytes)
    aux_files = model_files(source, specs)
    if len(shards) > 1:
        weight_map = {key: file for file, group in shards.items() for key in group}
        index = {"metadata": {"total_size": sum(s.n_bytes for s in specs.values())}, "weight_map": weight_map}
        aux_files[INDEX_FILE] = json_objects.dumps(index, INDEX_FILE, indent=2)
    layout = tuple(FileLayout(path=file, tensors=tuple(tensors[key] for key in keys)) for file, keys in shards.items())
    return Target(specs=specs, fill=write_layout(layout, joined, lay_out_safetensors), aux_files=aux_files)


def pt_target(source: Source, name: str, *, dtype: str | None = None) -> Target:
    """Return the target of one file as torch.save writes it, with the head of a tied model.

    Args:
        source: What will be converted.
        name: The file's name.
        dtype: Safetensors code to cast to; None: as stored.
    """
    from lt_ckpt.torchfile.file import lay_out_pt  # needs torch

    specs = target_specs(source, tensor_shapes(source.model), dtype)
    joined = join_specs(source.model, specs)
    tensors = family_tensors(source.model, {name: spec.shape for name, spec in joined.items()})
    layout = (FileLayout(path=name, tensors=tuple(tensors.values())),)
    return Target(specs=specs, fill=write_layout(layout, joined, lay_out_pt), single_file=name)


def _split_into_shards(specs: Mapping[str, TensorSpec], max_bytes: int) -> dict[str, dict[str, TensorSpec]]:
    """Split the tensors in order into files of at most `max_bytes`; a larger tensor gets its own file."""
    groups: list[dict[str, TensorSpec]] = [{}]
    remaining = max_bytes
    for name, spec in specs.items():
        if groups[-1] and spec.n_bytes > remaining:
            groups.append({})
            remaining = max_bytes
        groups[-1][name] = spec
        remaining -= spec.n_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}
