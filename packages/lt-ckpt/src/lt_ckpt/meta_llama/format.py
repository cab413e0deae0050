"""Meta's Llama folders as a source: `consolidated.NN.pth` and params.json, of Llama 1 to 3.

File i of n holds the i-th part of every matrix: rows of column-parallel matrices (into heads or the hidden layer), of
the vocabulary (since Llama 3; columns of the embedding before) and of the head; columns of row-parallel ones; whole
norms. Query and key rows are in Meta's order (`names.py`). Such folders are only read.

params.json is incomplete (no hidden layer's width, vocabulary size or context, nor the factor of scaled rotary
frequencies), so the model's Hugging Face configuration is needed, and must agree with it.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lt_ckpt import files, json_objects
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.layout import FileLayout, Layout, shard_box, stack_rows
from lt_ckpt.llama_tensors import param_specs
from lt_ckpt.meta_llama.names import dialect_key, unpermute_group
from lt_ckpt.shards import Box
from lt_ckpt.source import Source, build_tensor_group, group_of_arrays
from lt_ckpt.torchfile.file import read_state_dict
from lt_model import ModelConfig, config_from_hf
from lt_model.params import ParamSpec

PARAMS = "params.json"
FILE_TEMPLATE = "consolidated.{:02d}.pth"
_IGNORED_BUFFERS = re.compile(r"(^|\.)rope\.freqs$")


def meta_layout(config: ModelConfig, n_files: int, *, embedding_dim: int = 0) -> Layout:
    """Return the layout of a model's files.

    Args:
        config: The model; its head is always stored.
        n_files: Number of files.
        embedding_dim: The dimension along which the embedding is sharded: 0 since Llama 3, 1 before.

    Raises:
        CheckpointError: The model cannot be sharded so.
    """
    table = param_specs(replace(config, tie_word_embeddings=False))
    if config.n_kv_heads % n_files:
        raise CheckpointError(f"{config.n_kv_heads} key/value heads cannot be split into {n_files} files")

    def box(parameter: ParamSpec, index: int) -> Box:
        dim = embedding_dim if parameter.kind == "embed_tokens" else parameter.tp_dim
        if dim is None:
            return (0,) * len(parameter.shape), parameter.shape
        return shard_box(parameter.shape, dim, index, n_files, parameter.name)

    return tuple(
        FileLayout(
            path=FILE_TEMPLATE.format(i),
            tensors=tuple(stack_rows(dialect_key(p.name, "meta"), [(p.name, box(p, i))]) for p in table),
        )
        for i in range(n_files)
    )


def open_meta(path: str | os.PathLike[str], *, config: Mapping[str, Any]) -> Source:
    """Open a folder with `consolidated.*.pth` and params.json.

    Args:
        path: The folder.
        config: The model's Hugging Face config.json.

    Raises:
        CheckpointError: A file is missing or damaged, or the tensors are not those of the model.
        lt_model.ModelError: The model is of no supported family.
    """
    folder = Path(path)
    with translate_os_errors("reading", folder):
        found = sorted(entry for entry in os.listdir(folder) if re.fullmatch(r"consolidated\.\d+\.pth", entry))
    names = [FILE_TEMPLATE.format(i) for i in range(len(found))]
    if not found or found != names:
        raise CheckpointError(f"{folder}: must hold {FILE_TEMPLATE.format(0)} and so on without a gap, holds {found}")
    arrays_by_file = {
        name: {key: array for key, array in read_state_dict(folder / name).items() if not _IGNORED_BUFFERS.search(key)}
        for name in names
    }
    with translate_os_errors("reading", folder / PARAMS):
        params = json_objects.loads(files.read_bounded(folder / PARAMS, 2**20), str(folder / PARAMS))
    first = arrays_by_file[names[0]]
    if (key := dialect_key("model.embed_tokens.weight", "meta")) not in first:
        raise CheckpointError(f"{names[0]}: {key!r} is missing; is it one of Meta's Llama files?")
    embedding = first[key].spec.shape
    by_columns = len(embedding) == 2 and embedding[1] != params.get("dim")
    hf = dict(config)
    _check_config(config_from_hf(hf, source=f"{folder}: config"), params, folder)
    model = replace(config_from_hf(hf, source=f"{folder}: config"), tie_word_embeddings=False)
    model.check_features("the format meta")
    shapes = {parameter.name: parameter.shape for parameter in param_specs(model)}
    layout = meta_layout(model, len(names), embedding_dim=1 if by_columns else 0)
    groups = {name: group_of_arrays(name, arrays) for name, arrays in arrays_by_file.items()}
    group = build_tensor_group(layout, groups, shapes, str(folder))
    return Source(
        format="meta",
        path=folder,
        root=folder,
        config=hf,
        groups={"weights": unpermute_group(group, param_specs(model), model.head_width)},
        format_info={"files": len(names), "embedding_cut": "columns" if by_columns else "rows"},
    )


def _check_config(model: ModelConfig, params: dict[str, Any], folder: Path) -> None:
    """Refuse a configuration that contradicts params.json, which neither tensors nor results would show."""
    fields = ("n_layers", "n_heads", "n_kv_heads", "norm_eps", "rope_theta")
    said = {field: params.get(field) for field in fields} | {"hidden_size": params.get("dim")}
    said |= {"use_scaled_rope": bool(params.get("use_scaled_rope"))}
    found = {**model.to_dict(), "use_scaled_rope": model.rope_scaling is not None}
    for field, value in said.items():
        if value is not None and value != found[field]:
            raise CheckpointError(
                f"{folder / PARAMS}: {field} is {value}, the configuration says {found[field]}; is it this model's?"
            )
