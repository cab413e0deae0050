"""Meta's own folders as a source: `consolidated.NN.pth` and params.json, of Llama 1 to 3.

File i of n holds the i-th part of every matrix: rows of the matrices that lead into heads or the hidden layer, of the
vocabulary (since Llama 3; columns of the embedding before) and of the head; columns of those that lead back; norms
whole. Query and key rows stand in Meta's order (`meta_names.py`).

params.json does not say everything: the hidden layer's width and the vocabulary are taken from the tensors, and a
model with scaled rotary frequencies needs its Hugging Face configuration, because the factor is not in there.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lt_ckpt import files, strict_json
from lt_ckpt.dtypes import long_name
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.layout import FileLayout, Layout, part
from lt_ckpt.meta.names import in_pairs, is_turned, key_of, placed
from lt_ckpt.models import table_of
from lt_ckpt.shards import Box
from lt_ckpt.source import Held, Source, join
from lt_ckpt.torchfile.file import read_pt
from lt_model import LlamaConfig, ModelError
from lt_model.params import Parameter

PARAMS = "params.json"
FILE = "consolidated.{:02d}.pth"
TOKENIZER = "tokenizer.model"
_DROPPED = re.compile(r"(^|\.)rope\.freqs$")
_MAX_TOKENIZER_BYTES = 2**26
LLAMA3_VOCAB, LLAMA3_CONTEXT, LLAMA2_CONTEXT = 128256, 8192, 4096


def meta_layout(config: LlamaConfig, n_files: int, *, embedding_dim: int = 0) -> Layout:
    """Describes the files of a model.

    Args:
        config: The model; its head is always stored.
        n_files: Number of files.
        embedding_dim: The dimension along which the embedding is cut: 0 since Llama 3, 1 before.

    Raises:
        CheckpointError: It cannot be cut so.
    """
    table = table_of(replace(config, tie_word_embeddings=False))
    if config.n_kv_heads % n_files:
        raise CheckpointError(f"{config.n_kv_heads} key/value heads cannot be cut into {n_files} files")

    def box(parameter: Parameter, index: int) -> Box:
        dim = embedding_dim if parameter.kind == "embed_tokens" else parameter.tp_dim
        if dim is None:
            return (0,) * len(parameter.shape), parameter.shape
        return part(parameter.shape, dim, index, n_files, parameter.name)

    return Layout(
        files=tuple(
            FileLayout(
                path=FILE.format(i),
                tensors=tuple(placed(p, box(p, i), key_of(p.name, "meta"), config.head_dim) for p in table),
            )
            for i in range(n_files)
        )
    )


def open_meta(path: str | os.PathLike[str], *, config: Mapping[str, Any] | None = None) -> Source:
    """Opens a folder with `consolidated.*.pth` and params.json.

    Args:
        path: The folder.
        config: The model as Hugging Face's config.json has it; by default it is made from params.json.

    Raises:
        CheckpointError: A file is missing or damaged, or the tensors are not those of the model.
        lt_model.ModelError: The model is no Llama that lt_model knows.
    """
    folder = Path(path)
    with storage("reading", folder):
        found = sorted(entry for entry in os.listdir(folder) if re.fullmatch(r"consolidated\.\d+\.pth", entry))
    names = [FILE.format(i) for i in range(len(found))]
    if not found or found != names:
        raise CheckpointError(f"{folder}: must hold {FILE.format(0)} and so on without a gap, holds {found}")
    holders = {name: _held(folder / name) for name in names}
    with storage("reading", folder / PARAMS):
        params = strict_json.loads(files.read_small(folder / PARAMS, 2**20), str(folder / PARAMS))
    first = holders[names[0]]
    dim = strict_json.count(params, "dim", str(folder / PARAMS))
    embedding = _shape(first, key_of("model.embed_tokens.weight", "meta"), names[0])
    by_columns = len(embedding) == 2 and embedding[1] != dim
    if config is None:
        hf = _config(params, folder, first, len(names), by_columns)
    else:
        hf = dict(config)
        _check_config(LlamaConfig.from_hf(hf, source=f"{folder}: config"), params, folder)
    model = replace(LlamaConfig.from_hf(hf, source=f"{folder}: config"), tie_word_embeddings=False)
    shapes = {parameter.name: parameter.shape for parameter in table_of(model)}
    turned = {key_of(parameter.name, "meta") for parameter in table_of(model) if is_turned(parameter)}
    for name, held in holders.items():
        for key in turned & set(held):
            held[key] = in_pairs(held[key], f"{folder / name}: {key}")
    layout = meta_layout(model, len(names), embedding_dim=1 if by_columns else 0)
    small = _tokenizer(folder)
    return Source(
        format="meta",
        path=folder,
        root=folder,
        config=hf,
        groups={"weights": join(layout, holders, shapes, str(folder))},
        small=small,
        about={"files": len(names), "embedding_cut": "columns" if by_columns else "rows"},
    )


def _held(path: Path) -> dict[str, Held]:
    return {key: held for key, held in read_pt(path).items() if not _DROPPED.search(key)}


def _shape(held: Mapping[str, Held], key: str, where: str) -> tuple[int, ...]:
    if key not in held:
        raise CheckpointError(f"{where}: {key!r} is missing; is it a Llama of Meta's?")
    return held[key].spec.shape


def _config(
    params: dict[str, Any], folder: Path, held: Mapping[str, Held], n_files: int, by_columns: bool
) -> dict[str, Any]:
    """Makes the Hugging Face configuration of a model from its params.json and the tensors of its first file."""
    where = str(folder / PARAMS)
    if params.get("use_scaled_rope"):
        raise CheckpointError(
            f"{where}: use_scaled_rope is set (Llama 3.1 and later), but the factor is not in the file; give the "
            "model's Hugging Face configuration (--config config.json)"
        )
    n_heads = strict_json.count(params, "n_heads", where)
    embedding = _shape(held, key_of("model.embed_tokens.weight", "meta"), FILE.format(0))
    vocab_size = embedding[0] * (1 if by_columns else n_files)
    hidden_width = _shape(held, key_of("model.layers.0.mlp.gate_proj.weight", "meta"), FILE.format(0))[0]
    known = params.get("vocab_size")
    if known not in (None, -1, vocab_size):
        raise CheckpointError(f"{where}: vocab_size is {known}, the embedding has {vocab_size} rows")
    context = LLAMA3_CONTEXT if vocab_size == LLAMA3_VOCAB else LLAMA2_CONTEXT
    try:
        model = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=strict_json.count(params, "dim", where),
            intermediate_size=hidden_width * n_files,
            n_heads=n_heads,
            n_kv_heads=n_heads if params.get("n_kv_heads") is None else strict_json.count(params, "n_kv_heads", where),
            n_layers=strict_json.count(params, "n_layers", where),
            max_position_embeddings=params.get("max_seq_len", context),
            rope_theta=params.get("rope_theta", 10000.0),
            norm_eps=params.get("norm_eps", 1e-5),
        )
    except ModelError as exc:
        raise CheckpointError(f"{where}: {exc}") from exc
    dtypes = Counter(one.spec.dtype for one in held.values())
    return model.to_hf(dtype=long_name(dtypes.most_common(1)[0][0]))


def _check_config(model: LlamaConfig, params: dict[str, Any], folder: Path) -> None:
    """Refuses a configuration that contradicts params.json; what neither tensors nor results show would go unseen."""
    said = {
        "hidden_size": params.get("dim"),
        "n_layers": params.get("n_layers"),
        "n_heads": params.get("n_heads"),
        "n_kv_heads": params.get("n_kv_heads"),
        "norm_eps": params.get("norm_eps"),
        "rope_theta": params.get("rope_theta"),
    }
    for field, value in said.items():
        if value is not None and value != getattr(model, field):
            raise CheckpointError(
                f"{folder / PARAMS}: {field} is {value}, the configuration says {getattr(model, field)}; "
                "is it this model's?"
            )
    if bool(params.get("use_scaled_rope")) != (model.rope_scaling is not None):
        raise CheckpointError(
            f"{folder / PARAMS}: use_scaled_rope is {bool(params.get('use_scaled_rope'))}, the configuration says "
            f"rope_scaling {model.rope_scaling}; is it this model's?"
        )


def _tokenizer(folder: Path) -> dict[str, bytes]:
    if not (folder / TOKENIZER).is_file():
        return {}
    with storage("reading", folder / TOKENIZER):
        return {TOKENIZER: files.read_small(folder / TOKENIZER, _MAX_TOKENIZER_BYTES)}
