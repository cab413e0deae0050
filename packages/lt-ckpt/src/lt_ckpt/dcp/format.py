"""Folders of torch.distributed.checkpoint, as torchtitan writes them, as source and target.

The naming is detected: Hugging Face's, Meta's or torchtitan's (`meta_llama/names.py`), behind any prefix that all of
the model's keys share (`model.`). Adam's moments are groups of their own, if torch's optimizer state has them:
`optimizer.state.<name>.exp_avg`. Other keys are counted in `format_info`. The chunks of a tensor are read in place,
however the ranks had sharded it.

Output has Hugging Face's names without a prefix and whole tensors, so `torch.distributed.checkpoint.load` loads it onto
any mesh: `dcp.load(model.state_dict(), checkpoint_id=folder)`.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lt_ckpt import files
from lt_ckpt.conversion import Target, check_castable
from lt_ckpt.copy_plan import StoredSlice
from lt_ckpt.dcp.files import MAX_FILE_BYTES, METADATA, DcpWriter, locate_chunks, read_checksums
from lt_ckpt.dcp.metadata import ChunkedTensor, DcpMetadata, parse_metadata
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.hf.folder import read_aux_files
from lt_ckpt.layout import FileLayout, Layout, whole_tensor
from lt_ckpt.llama_tensors import EMBED, HEAD, IGNORED_BUFFERS, add_tied_head, param_specs, tensor_shapes
from lt_ckpt.meta_llama.names import dialect_key, is_rope_permuted, meta_tensor_layout, split_chunk_into_row_pairs
from lt_ckpt.model_files import model_files
from lt_ckpt.records import TORCH_ADAMW
from lt_ckpt.shards import intersect
from lt_ckpt.source import Source, TensorGroup
from lt_ckpt.tensorfile import TensorSpec
from lt_model import config_from_hf
from lt_model.params import ParamSpec

MAX_METADATA_BYTES = 2**30
_KEY_PREFIXES = {
    "hf": ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head."),
    "meta": ("tok_embeddings.", "layers.", "norm.", "output."),
    "titan": ("tok_embeddings.", "layers.", "norm.", "lm_head."),
}
"""Dialect → prefixes of a model's keys; an unknown tensor with one of them means another model."""


@dataclass(frozen=True, kw_only=True)
class _Naming:
    """Naming of the model's tensors in a checkpoint: a dialect behind a prefix."""

    dialect: str
    prefix: str

    def key(self, name: str) -> str:
        return self.prefix + dialect_key(name, self.dialect)


def open_dcp(path: str | os.PathLike[str], *, config: Mapping[str, Any], prefix: str | None = None) -> Source:
    """Open a checkpoint folder.

    Args:
        path: The folder with `.metadata`.
        config: The model's config.json.
        prefix: Prefix of the model's keys; by default that of the embedding.

    Raises:
        CheckpointError: `.metadata` refers to code or is damaged, a file is missing or truncated, or the tensors are
            not those of the model.
        lt_model.ModelError: The configuration is not a supported Llama.
    """
    folder = Path(path)
    model = config_from_hf(dict(config), source=f"{folder}: config")
    metadata = read_metadata(folder)
    naming = _detect_naming(metadata, prefix, str(folder))
    head_is_stored = naming.key(HEAD) in metadata.tensors
    table = param_specs(replace(model, tie_word_embeddings=model.tie_word_embeddings and not head_is_stored))
    keys = {"weights": {p.name: naming.key(p.name) for p in table}, **_find_moments(metadata, naming, table)}
    wanted = {
        key: _require_tensor(metadata, key, p, str(folder))
        for names in keys.values()
        for p, key in _zip_keys(table, names)
    }
    others = [key for key in (*metadata.tensors, *metadata.objects) if key not in wanted]
    for key in others:
        is_model_key = key.startswith(
            tuple(naming.prefix + is_model_key for is_model_key in _KEY_PREFIXES[naming.dialect])
        )
        if is_model_key and key in metadata.tensors and not IGNORED_BUFFERS.search(key):
            raise CheckpointError(f"{folder}: {key!r} is not a tensor of this model")
    chunks = locate_chunks(folder, wanted)
    is_permuted = naming.dialect != "hf"
    groups = {
        kind: add_tied_head(_build_group(table, names, wanted, chunks, model.head_dim if is_permuted else None), model)
        for kind, names in keys.items()
    }
    return Source(
        format="dcp",
        path=folder,
        root=folder,
        config=dict(config),
        aux_files=read_aux_files(folder),
        groups=groups,
        optimizer=TORCH_ADAMW if groups.keys() >= set(TORCH_ADAMW.slots) else None,
        find_checksums=partial(read_checksums, folder, metadata.tensors),
        other_files=tuple({chunk.file for tensor in metadata.tensors.values() for chunk in tensor.chunks}),
        format_info={
            "names": naming.dialect,
            "prefix": naming.prefix,
            "others": dict(Counter(key.partition(".")[0] for key in others)),
        },
    )


def read_metadata(folder: Path) -> DcpMetadata:
    """Read a folder's `.metadata`."""
    with translate_os_errors("reading", folder / METADATA):
        raw = files.read_bounded(folder / METADATA, MAX_METADATA_BYTES)
    return parse_metadata(raw, str(folder / METADATA))


def _detect_naming(metadata: DcpMetadata, prefix: str | None, where: str) -> _Naming:
    """Detect the dialect and the prefix of the names."""
    found: list[_Naming] = []
    for dialect in ("hf", "meta"):
        embedding = dialect_key(EMBED, dialect)
        for key in metadata.tensors:
            start = key.removesuffix(embedding)
            if start != key and prefix in (None, start) and (not start or start.endswith(".")):
                titan = _Naming(dialect="titan", prefix=start)
                is_titan = titan.key("model.layers.0.self_attn.q_proj.weight") in metadata.tensors
                found.append(titan if is_titan else _Naming(dialect=dialect, prefix=start))
    if not found:
        raise CheckpointError(f"{where}: contains no embedding of a Llama under a known name")
    if len(found) > 1:
        several = ", ".join(repr(naming.prefix) for naming in found)
        raise CheckpointError(f"{where}: contains several models, behind {several}; choose one by its prefix")
    return found[0]


def _find_moments(metadata: DcpMetadata, naming: _Naming, table: tuple[ParamSpec, ...]) -> dict[str, dict[str, str]]:
    """Return kind → model tensor → key of the moments that exist for every tensor of the model."""
    found: dict[str, dict[str, str]] = {}
    for kind in TORCH_ADAMW.slots:
        end = f"state.{dialect_key(EMBED, naming.dialect)}.{kind}"
        starts = [key.removesuffix(end) for key in metadata.tensors if key.endswith(end)]
        for start in starts if len(starts) == 1 else []:
            keys = {p.name: f"{start}state.{dialect_key(p.name, naming.dialect)}.{kind}" for p in table}
            if metadata.tensors.keys() >= set(keys.values()):
                found[kind] = keys
    return found


def _zip_keys(table: tuple[ParamSpec, ...], names: Mapping[str, str]) -> Iterator[tuple[ParamSpec, str]]:
    return ((parameter, names[parameter.name]) for parameter in table)


def _require_tensor(metadata: DcpMetadata, key: str, parameter: ParamSpec, where: str) -> ChunkedTensor:
    found = metadata.tensors.get(key)
    if found is None:
        raise CheckpointError(f"{where}: {key!r} is missing ({parameter.name})")
    if found.spec.shape != parameter.shape:
        raise CheckpointError(f"{where}: {key} has shape {list(found.spec.shape)}, expected {list(parameter.shape)}")
    return found


def _build_group(
    table: tuple[ParamSpec, ...],
    names: Mapping[str, str],
    tensors: Mapping[str, ChunkedTensor],
    chunks: Mapping[str, tuple[StoredSlice, ...]],
    head_dim: int | None,
) -> TensorGroup:
    """Build a group of stored tensors; with `head_dim`, query and key rows are in Meta's order."""
    specs: dict[str, TensorSpec] = {}
    locations: dict[str, tuple[StoredSlice, ...]] = {}
    for parameter, key in _zip_keys(table, names):
        specs[parameter.name] = tensors[key].spec
        locations[parameter.name] = chunks[key]
        if head_dim is not None and is_rope_permuted(parameter):
            locations[parameter.name] = tuple(_unpermute_chunks(parameter, chunks[key], specs, head_dim))
    return TensorGroup(specs=specs, locations=locations)


def _unpermute_chunks(
    parameter: ParamSpec, chunks: tuple[StoredSlice, ...], specs: Mapping[str, TensorSpec], head_dim: int
) -> Iterator[StoredSlice]:
    """Yield the boxes of a head matrix in Hugging Face's order stored in chunks in Meta's order."""
    regions = meta_tensor_layout(parameter, ((0, 0), parameter.shape), parameter.name, head_dim).regions
    half = head_dim // 2
    for chunk in chunks:
        for part in split_chunk_into_row_pairs(chunk, parameter.shape[1], item_bytes(specs[parameter.name].dtype)):
            first, last = part.offset[0] // half, (part.offset[0] + part.shape[0] - 1) // half
            for region in regions[2 * first : 2 * last + 2]:
                common = intersect((region.stored_offset, region.shape), (part.offset, part.shape))
                if common is None:
                    continue
                corner, shape = common
                at = part.array_offset or (0, 0)
                yield replace(
                    part,
                    offset=tuple(
                        p + c - a for p, c, a in zip(region.offset, corner, region.stored_offset, strict=True)
                    ),
                    shape=shape,
                    array_shape=part.array_shape or part.shape,
                    array_offset=tuple(a + c - o for a, c, o in zip(at, corner, part.offset, strict=True)),
                )


def dcp_target(source: Source, *, dtype: str | None = None, max_file_bytes: int = MAX_FILE_BYTES) -> Target:
    """Return the target for a source with a configuration: whole tensors, with the head of a tied model.

    Args:
        source: What will be converted.
        dtype: Safetensors code to cast to; None: as stored.
        max_file_bytes: Start a new file once one has this many bytes.
    """
    assert source.config is not None
    model = config_from_hf(dict(source.config), source=f"{source.path}: config")
    specs: dict[str, TensorSpec] = {}
    for name, shape in tensor_shapes(model).items():
        if name not in source.weights.specs:
            raise CheckpointError(f"{source.path}: has no tensor {name}")
        found = source.weights.specs[name].dtype
        check_castable(found, dtype or found)
        specs[name] = TensorSpec(dtype or found, shape)
    tensors = tuple(whole_tensor(name, spec.shape) for name, spec in specs.items())
    return Target(
        format="dcp",
        layout=Layout(files=(FileLayout(path="", tensors=tensors),)),
        specs=specs,
        aux_files=model_files(source, specs),
        open_writer=partial(DcpWriter, max_file_bytes=max_file_bytes),
        check=lambda folder: _check_headers(folder, specs),
    )


def _check_headers(folder: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Check all headers of a finished folder."""
    metadata = read_metadata(folder)
    assert {key: tensor.spec for key, tensor in metadata.tensors.items()} == dict(specs)
    locate_chunks(folder, metadata.tensors)
