"""Hugging Face format: config.json, safetensors files of whole tensors, and their index.

Input: the folder of any Llama that `lt_model` supports, pytorch_model.bin too; rotary buffers of old files are ignored.
Output: what `transformers` loads: files of at most `max_shard_bytes`, an index if there are several, the tokenizer's
files, and generation_config.json. A tied model is written without its head.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_ckpt import json_objects
from lt_ckpt.conversion import Target
from lt_ckpt.hf.folder import CONFIG, INDEX_FILE, SINGLE_FILE, read_stored_arrays
from lt_ckpt.laid_out_files import lay_out_safetensors, write_layout
from lt_ckpt.layout import whole_file
from lt_ckpt.llama_tensors import HEAD, IGNORED_BUFFERS, add_tied_head, check_named_as_ours, stored_shapes, target_specs
from lt_ckpt.model_files import model_files
from lt_ckpt.source import Source, build_tensor_group, check_names, group_of_arrays
from lt_ckpt.tensorfile import TensorSpec, file_order
from lt_model import config_from_hf

MAX_SHARD_BYTES = 5 * 10**9


def open_hf(path: str | os.PathLike[str], *, config: Mapping[str, Any]) -> Source:
    """Open a folder with config.json and safetensors.

    Raises:
        CheckpointError: A file is missing or damaged, or the tensors are not those of the model.
        lt_model.ModelError: The configuration is of no supported family.
    """
    folder = Path(path)
    model = config_from_hf(dict(config), source=f"{folder}: {CONFIG}")
    check_named_as_ours(model)
    stored = {
        file: {name: array for name, array in arrays.items() if not IGNORED_BUFFERS.search(name)}
        for file, arrays in read_stored_arrays(folder).items()
    }
    shapes = stored_shapes(model, any(HEAD in arrays for arrays in stored.values()))
    check_names(shapes, [name for arrays in stored.values() for name in arrays], str(folder))
    layout = tuple(whole_file(file, {name: shapes[name] for name in arrays}) for file, arrays in sorted(stored.items()))
    groups = {file: group_of_arrays(file, arrays) for file, arrays in stored.items()}
    group = add_tied_head(build_tensor_group(layout, groups, shapes, str(folder)), model)
    return Source(format="hf", path=folder, root=folder, config=dict(config), groups={"weights": group})


def hf_target(source: Source, *, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES) -> Target:
    """Return the target for a source with a configuration.

    Args:
        source: What will be converted.
        dtype: Safetensors code to cast to; None: as stored.
        max_shard_bytes: Maximum bytes of tensors per file.
    """
    model = source.model
    check_named_as_ours(model)
    shapes = stored_shapes(model, not model.tie_word_embeddings)
    specs = target_specs(source, shapes, dtype)
    shards = _split_into_shards({name: specs[name] for name in file_order(specs)}, max_shard_bytes)
    aux_files = model_files(source, specs)
    if len(shards) > 1:
        weight_map = {name: file for file, group in shards.items() for name in group}
        index = {"metadata": {"total_size": sum(s.n_bytes for s in specs.values())}, "weight_map": weight_map}
        aux_files[INDEX_FILE] = json_objects.dumps(index, INDEX_FILE, indent=2)
    layout = tuple(whole_file(file, {name: shapes[name] for name in group}) for file, group in shards.items())
    return Target(
        specs=specs,
        fill=write_layout(layout, specs, lay_out_safetensors),
        aux_files=aux_files,
    )


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
