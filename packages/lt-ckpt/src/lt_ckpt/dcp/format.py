"""Folders of torch.distributed.checkpoint, as torchtitan and FSDP2 programs write them, in and out.

Which names a checkpoint has is found out: Hugging Face's, Meta's or torchtitan's (`meta_names.py`), behind any prefix
that all of the model's keys share (`model.`). Adam's moments are groups of their own, where torch's optimizer state
has them: `optimizer.state.<name>.exp_avg`. What else is in there is counted in `about`. The chunks of a tensor are read
in place, however the ranks had cut it.

Output has Hugging Face's names without a prefix and whole tensors, so `torch.distributed.checkpoint.load` brings it
onto any mesh: `dcp.load(model.state_dict(), checkpoint_id=folder)`.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lt_ckpt import files
from lt_ckpt.convert import Target, require_cast
from lt_ckpt.dcp.files import MAX_FILE_BYTES, METADATA, DcpWriter, locate
from lt_ckpt.dcp.metadata import Chunked, Metadata, parse
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.layout import FileLayout, Layout, whole
from lt_ckpt.meta.names import chunk_in_pairs, is_turned, key_of, placed
from lt_ckpt.models import DROPPED, EMBED, HEAD, shapes_of, table_of, with_head
from lt_ckpt.plan import Stored
from lt_ckpt.shards import intersect
from lt_ckpt.source import Group, Source
from lt_ckpt.tensorfile import TensorSpec
from lt_model import LlamaConfig
from lt_model.params import Parameter

MAX_METADATA_BYTES = 2**30
MOMENTS = ("exp_avg", "exp_avg_sq")
_ROOTS = {
    "hf": ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head."),
    "meta": ("tok_embeddings.", "layers.", "norm.", "output."),
    "titan": ("tok_embeddings.", "layers.", "norm.", "lm_head."),
}
"""What a model's keys begin with, by dialect; one more tensor of this kind makes it another model."""


@dataclass(frozen=True, kw_only=True)
class _Naming:
    """How a checkpoint names the model's tensors: in a dialect, behind a prefix."""

    dialect: str
    prefix: str

    def key(self, name: str) -> str:
        return self.prefix + key_of(name, self.dialect)


def open_dcp(path: str | os.PathLike[str], *, config: Mapping[str, Any], prefix: str | None = None) -> Source:
    """Opens a checkpoint folder.

    Args:
        path: The folder with `.metadata`.
        config: The model as config.json has it.
        prefix: What the names of the model's tensors begin with; by default what stands before the embedding's.

    Raises:
        CheckpointError: `.metadata` asks for code or is damaged, a file is missing or cut short, or the tensors are not
            those of the model.
        lt_model.ModelError: The configuration is no Llama that lt_model knows.
    """
    folder = Path(path)
    model = LlamaConfig.from_hf(dict(config), source=f"{folder}: config")
    metadata = read_metadata(folder)
    naming = _naming(metadata, prefix, str(folder))
    head_is_stored = naming.key(HEAD) in metadata.tensors
    table = table_of(replace(model, tie_word_embeddings=model.tie_word_embeddings and not head_is_stored))
    keys = {"weights": {p.name: naming.key(p.name) for p in table}, **_moments(metadata, naming, table)}
    wanted = {key: _required(metadata, key, p, str(folder)) for names in keys.values() for p, key in _of(table, names)}
    others = [key for key in (*metadata.tensors, *metadata.objects) if key not in wanted]
    for key in others:
        root = key.startswith(tuple(naming.prefix + root for root in _ROOTS[naming.dialect]))
        if root and key in metadata.tensors and not DROPPED.search(key):
            raise CheckpointError(f"{folder}: {key!r} is no tensor of this model")
    chunks = locate(folder, wanted)
    turned = naming.dialect != "hf"
    groups = {
        kind: with_head(_group(table, names, wanted, chunks, model.head_dim if turned else None), model)
        for kind, names in keys.items()
    }
    return Source(
        format="dcp",
        path=folder,
        root=folder,
        config=dict(config),
        groups=groups,
        about={
            "names": naming.dialect,
            "prefix": naming.prefix,
            "others": dict(Counter(key.partition(".")[0] for key in others)),
        },
    )


def read_metadata(folder: Path) -> Metadata:
    """Reads a folder's `.metadata`."""
    with storage("reading", folder / METADATA):
        raw = files.read_small(folder / METADATA, MAX_METADATA_BYTES)
    return parse(raw, str(folder / METADATA))


def _naming(metadata: Metadata, prefix: str | None, where: str) -> _Naming:
    """Finds the dialect of the names, and what stands before them."""
    found: list[_Naming] = []
    for dialect in ("hf", "meta"):
        embedding = key_of(EMBED, dialect)
        for key in metadata.tensors:
            start = key.removesuffix(embedding)
            if start != key and prefix in (None, start) and (not start or start.endswith(".")):
                titan = _Naming(dialect="titan", prefix=start)
                is_titan = titan.key("model.layers.0.self_attn.q_proj.weight") in metadata.tensors
                found.append(titan if is_titan else _Naming(dialect=dialect, prefix=start))
    if not found:
        raise CheckpointError(f"{where}: holds no embedding of a Llama under a name that is known")
    if len(found) > 1:
        several = ", ".join(repr(naming.prefix) for naming in found)
        raise CheckpointError(f"{where}: holds several models, behind {several}; say which one (prefix)")
    return found[0]


def _moments(metadata: Metadata, naming: _Naming, table: tuple[Parameter, ...]) -> dict[str, dict[str, str]]:
    """Returns kind → model tensor → key, for the moments that are there for every tensor of the model."""
    found: dict[str, dict[str, str]] = {}
    for kind in MOMENTS:
        end = f"state.{key_of(EMBED, naming.dialect)}.{kind}"
        starts = [key.removesuffix(end) for key in metadata.tensors if key.endswith(end)]
        for start in starts if len(starts) == 1 else []:
            keys = {p.name: f"{start}state.{key_of(p.name, naming.dialect)}.{kind}" for p in table}
            if metadata.tensors.keys() >= set(keys.values()):
                found[kind] = keys
    return found


def _of(table: tuple[Parameter, ...], names: Mapping[str, str]) -> Iterator[tuple[Parameter, str]]:
    return ((parameter, names[parameter.name]) for parameter in table)


def _required(metadata: Metadata, key: str, parameter: Parameter, where: str) -> Chunked:
    found = metadata.tensors.get(key)
    if found is None:
        raise CheckpointError(f"{where}: {key!r} is missing ({parameter.name})")
    if found.spec.shape != parameter.shape:
        raise CheckpointError(
            f"{where}: {key} has shape {list(found.spec.shape)}, the model asks for {list(parameter.shape)}"
        )
    return found


def _group(
    table: tuple[Parameter, ...],
    names: Mapping[str, str],
    tensors: Mapping[str, Chunked],
    chunks: Mapping[str, tuple[Stored, ...]],
    head_dim: int | None,
) -> Group:
    """Makes a group of stored tensors; with `head_dim`, rows of query and key heads are in Meta's order."""
    specs: dict[str, TensorSpec] = {}
    places: dict[str, tuple[Stored, ...]] = {}
    for parameter, key in _of(table, names):
        specs[parameter.name] = tensors[key].spec
        places[parameter.name] = chunks[key]
        if head_dim is not None and is_turned(parameter):
            places[parameter.name] = tuple(_turned(parameter, chunks[key], specs, head_dim))
    return Group(specs=specs, places=places)


def _turned(
    parameter: Parameter, chunks: tuple[Stored, ...], specs: Mapping[str, TensorSpec], head_dim: int
) -> Iterator[Stored]:
    """Yields the boxes of a matrix of heads in Hugging Face's order that chunks in Meta's order hold."""
    pieces = placed(parameter, ((0, 0), parameter.shape), parameter.name, head_dim).pieces
    half = head_dim // 2
    for chunk in chunks:
        for part in chunk_in_pairs(chunk, parameter.shape[1], item_bytes(specs[parameter.name].dtype)):
            first, last = part.offset[0] // half, (part.offset[0] + part.shape[0] - 1) // half
            for piece in pieces[2 * first : 2 * last + 2]:
                common = intersect((piece.at, piece.shape), (part.offset, part.shape))
                if common is None:
                    continue
                corner, shape = common
                at = part.at or (0, 0)
                yield replace(
                    part,
                    offset=tuple(p + c - a for p, c, a in zip(piece.offset, corner, piece.at, strict=True)),
                    shape=shape,
                    whole=part.whole or part.shape,
                    at=tuple(a + c - o for a, c, o in zip(at, corner, part.offset, strict=True)),
                )


def dcp_target(source: Source, *, dtype: str | None = None, max_file_bytes: int = MAX_FILE_BYTES) -> Target:
    """What to write for a source that carries a configuration: whole tensors, the head of a tied model with them.

    Args:
        source: What will be converted.
        dtype: Safetensors code to cast to; None: as stored.
        max_file_bytes: A new file is begun when one has as many bytes.
    """
    assert source.config is not None
    model = LlamaConfig.from_hf(dict(source.config), source=f"{source.path}: config")
    specs: dict[str, TensorSpec] = {}
    for name, shape in shapes_of(model).items():
        if name not in source.weights.specs:
            raise CheckpointError(f"{source.path}: has no tensor {name}")
        found = source.weights.specs[name].dtype
        require_cast(found, dtype or found)
        specs[name] = TensorSpec(dtype or found, shape)
    tensors = tuple(whole(name, spec.shape) for name, spec in specs.items())
    return Target(
        format="dcp",
        layout=Layout(files=(FileLayout(path="", tensors=tensors),)),
        specs=specs,
        opens=partial(DcpWriter, max_file_bytes=max_file_bytes),
        check=lambda folder: _check(folder, specs),
    )


def _check(folder: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Reads all headers of a finished folder."""
    metadata = read_metadata(folder)
    assert {key: tensor.spec for key, tensor in metadata.tensors.items()} == dict(specs)
    locate(folder, metadata.tensors)
