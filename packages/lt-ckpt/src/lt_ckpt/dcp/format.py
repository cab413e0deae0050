"""Folders of torch.distributed.checkpoint (DCP), as torchtitan writes them, as source and target.

The naming is detected: Hugging Face's, Meta's or torchtitan's (`meta_llama/names.py`), behind any prefix that all of
the model's keys share (`model.`). Adam's moments are groups of their own, if torch's optimizer state has them:
`optimizer.state.<name>.exp_avg`. Other keys are counted in `format_info`. The chunks of a tensor are read in place,
however the ranks had sharded it: each is a torch.save file inside of a file.

torch reads `.metadata` with `pickle.load`, which runs what it says; here it may name a few classes of torch alone.
Items that are bytes (other pickles) are never opened. Output is written by torch, a tensor at a time, with Hugging
Face's names, so that `dcp.load(model.state_dict(), checkpoint_id=folder)` loads it onto any mesh.
"""

import os
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt.conversion import Target
from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.family_tensors import (
    IGNORED_BUFFERS,
    family_key,
    family_tensors,
    find_family_tensors,
    module_key,
    view_group,
)
from lt_ckpt.file_names import check_name
from lt_ckpt.joined_experts import join_specs, split_group, whole_keys
from lt_ckpt.laid_out_files import CountBytes, ReadBlock, Settle
from lt_ckpt.layout import FileLayout, TensorLayout, slice_rows, stored_specs
from lt_ckpt.llama_tensors import EMBED, HEAD, add_tied_head, param_specs, target_specs, tensor_shapes
from lt_ckpt.meta_llama.names import dialect_key, unpermute_group
from lt_ckpt.model_files import model_files
from lt_ckpt.records import TORCH_ADAMW
from lt_ckpt.shards import Ints, is_inside, split_rows
from lt_ckpt.source import Source, TensorGroup, build_tensor_group, group_of
from lt_ckpt.stored_slices import StoredSlice
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import CODES, DTYPES
from lt_ckpt.torchfile.tensor_files import TensorFiles
from lt_model import ModelConfig, config_from_hf
from lt_model.families import FAMILIES

try:
    import torch
    import torch.distributed.checkpoint.metadata as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
    from torch.distributed.checkpoint.state_dict_saver import save
except ModuleNotFoundError as exc:
    raise CheckpointError(
        "torch.distributed.checkpoint folders are read and written by torch: pip install 'lt-ckpt[torch]'"
    ) from exc

METADATA = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(str(dtype).removeprefix("torch.") for dtype in CODES)),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath"),
}
"""Names that `.metadata` may refer to."""

CHUNK_BYTES = 16 * 2**20
"""Bytes of a tensor that are in memory, and written, at a time."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint of torch does")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """Reader of torch whose `.metadata` cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Read `.metadata`.

        Raises:
            CheckpointError: It refers to code, or is damaged.
        """
        path = Path(self.path) / METADATA
        with translate_os_errors("reading", path), open(path, "rb") as file:
            try:
                found = _MetadataUnpickler(file).load()
            except OSError:
                raise
            except Exception as exc:  # a damaged pickle may raise any
                raise CheckpointError(f"{path}: {exc}; it is damaged, or was not written by torch") from exc
        if not isinstance(found, dcp.Metadata):
            raise CheckpointError(f"{path}: holds a {type(found).__name__}, not the metadata of a checkpoint")
        return found


def _rename(dialect: str, config: ModelConfig) -> Callable[[str], str]:
    return partial(family_key, config=config) if dialect == "hf" else partial(dialect_key, dialect=dialect)


def _find_tensors(
    config: ModelConfig, dialect: str, prefix: str, stored: Collection[str], where: str
) -> tuple[dict[str, TensorLayout], dict[str, Ints]]:
    """Return the model's tensors by their keys without the prefix, and the shapes of ours in them.

    Unknown keys that begin as some of the model's do mean another model.
    """
    rename = _rename(dialect, config)
    known = [HEAD, *family_tensors(config, tensor_shapes(config), rename, "stacked")]
    starts = tuple({re.sub(r"(?<=layers\.).*|[^.]*$", "", key) for key in known})
    keys = [key.removeprefix(prefix) for key in stored if key.startswith(prefix)]
    own = [key for key in keys if key.startswith(starts) and not IGNORED_BUFFERS.search(key)]
    if dialect == "hf":
        return find_family_tensors(config, own, where)
    return find_family_tensors(config, own, where, rename, "stacked")


def open_dcp(path: str | os.PathLike[str], *, config: Mapping[str, Any]) -> Source:
    """Open a checkpoint folder.

    Args:
        path: The folder with `.metadata`.
        config: The model's config.json.

    Raises:
        CheckpointError: `.metadata` refers to code or is damaged, a file is missing or truncated, or the tensors are
            not those of the model.
        lt_model.ModelError: The configuration is of no supported family.
    """
    folder = Path(path)
    model = config_from_hf(dict(config), source=f"{folder}: config")
    metadata = SafeReader(folder).read_metadata()
    tensors = {k: m for k, m in metadata.state_dict_metadata.items() if isinstance(m, dcp.TensorStorageMetadata)}
    dialect, prefix = _detect_naming(model, tensors, str(folder))
    has_our_rows = "titan" in dialect and FAMILIES[model.family].has_torchtitan_names  # not in Meta's order
    if dialect != "hf":
        model.check_features(f"the names of {dialect}", ("qkv_bias", "o_bias") if has_our_rows else None)
    wholes = whole_keys(model, tensors)
    table, shapes = _find_tensors(model, dialect, prefix, wholes, str(folder))
    keys = {"weights": {key: prefix + key for key in table}, **_find_moments(wholes, dialect, model, table)}
    used = {wholes[key] for names in keys.values() for key in names.values()}
    stored = split_group(model, _locate_chunks(folder, metadata, used))
    groups: dict[str, TensorGroup] = {}
    for kind, names in keys.items():
        own = {key: table[key] for key in names}
        group = group_of({key: (stored.specs[name], stored.locations[name]) for key, name in names.items()})
        layout = (FileLayout(path=METADATA, tensors=tuple(own.values())),)
        parts = {region.name for tensor in own.values() for region in tensor.regions}
        wanted = {name: shape for name, shape in shapes.items() if name in parts}
        group = build_tensor_group(layout, {METADATA: view_group(group, own)}, wanted, str(folder))
        if dialect != "hf" and not has_our_rows:
            group = unpermute_group(group, param_specs(model), model.head_width)
        groups[kind] = add_tied_head(group, model)
    others = Counter(key.partition(".")[0] for key in metadata.state_dict_metadata if key not in used)
    return Source(
        format="dcp",
        path=folder,
        root=folder,
        config=dict(config),
        groups=groups,
        optimizer=TORCH_ADAMW if groups.keys() >= set(TORCH_ADAMW.slots) else None,
        format_info={"names": dialect, "prefix": prefix, "others": dict(others)},
    )


def _detect_naming(config: ModelConfig, tensors: Mapping[str, object], where: str) -> tuple[str, str]:
    """Return the dialect of the model's names, `hf` for the family's own, and the prefix in front of them."""
    found: list[tuple[str, str]] = []
    for dialect in ("hf", "meta"):
        embedding = _rename(dialect, config)(EMBED)
        for key in tensors:
            start = key.removesuffix(embedding)
            if start != key and (not start or start.endswith(".")):
                query = start + dialect_key("model.layers.0.self_attn.q_proj.weight", "titan")
                titan = "titan, early" if any(".moe.experts.w1" in name for name in tensors) else "titan"
                found.append((titan if query in tensors else dialect, start))
    if not found:
        raise CheckpointError(f"{where}: contains no embedding of a model under a known name")
    if len(found) > 1:
        several = ", ".join(repr(prefix) for _, prefix in found)
        raise CheckpointError(f"{where}: contains several models, behind {several}; save one of them alone")
    return found[0]


def _find_moments(
    tensors: Mapping[str, object], dialect: str, config: ModelConfig, table: Mapping[str, TensorLayout]
) -> dict[str, dict[str, str]]:
    """Return kind → key of the table → key of its moment, if all that is trained has one."""
    found: dict[str, dict[str, str]] = {}
    untrained = {row.name for row in param_specs(config) if not row.is_trained}
    trained = [key for key, tensor in table.items() if tensor.regions[0].name not in untrained]
    for kind in TORCH_ADAMW.slots:
        end = f"state.{_rename(dialect, config)(EMBED)}.{kind}"
        starts = [key.removesuffix(end) for key in tensors if key.endswith(end)]
        for start in starts if len(starts) == 1 else []:
            keys = {key: f"{start}state.{key}.{kind}" for key in trained}
            if tensors.keys() >= set(keys.values()):
                found[kind] = keys
    return found


def _locate_chunks(folder: Path, metadata: dcp.Metadata, keys: Collection[str]) -> TensorGroup:
    """Return the specs of tensors, and their chunks as slices of them."""
    storage = {(index.fqn, tuple(index.offset or ())): info for index, info in (metadata.storage_data or {}).items()}
    found: dict[str, tuple[TensorSpec, tuple[StoredSlice, ...]]] = {}
    tensor_files = TensorFiles()
    for key in keys:
        stored: Any = metadata.state_dict_metadata[key]
        where, dtype, shape = f"{folder}: {key}", CODES.get(stored.properties.dtype), tuple(stored.size)
        if dtype is None:
            raise CheckpointError(f"{where}: is of {stored.properties.dtype}, which cannot be read")
        slices: list[StoredSlice] = []
        for chunk in stored.chunks:
            offset, size = tuple(chunk.offsets), tuple(chunk.sizes)
            info = storage.get((key, offset))
            if info is None or not is_inside((offset, size), shape):
                raise CheckpointError(f"{where}: {METADATA} does not say where its chunk at {list(offset)} is")
            file = check_name(info.relative_path, folder / METADATA)
            array = tensor_files.locate(folder / file, key, info.offset, info.length)
            if array.spec != TensorSpec(dtype, size):
                told = f"{array.spec.dtype} {list(array.spec.shape)}, {METADATA} says {dtype} {list(size)}"
                raise CheckpointError(f"{folder / file}: {key}: holds {told}")
            slices.append(array.stored_slice(file, offset))
        found[key] = TensorSpec(dtype, shape), tuple(slices)
    return group_of(found)


class _ReadingPlanner(DefaultSavePlanner):
    """Planner of a save in chunks of rows, which are read when they are written.

    torch keeps the last chunk of each tensor until the file is closed, so all chunks are views of one buffer.
    """

    def __init__(
        self, read: ReadBlock, tensors: Mapping[str, TensorLayout], dtypes: Mapping[str, str], count_bytes: CountBytes
    ) -> None:
        super().__init__()
        self._read, self._tensors, self._dtypes, self._count_bytes = read, tensors, dtypes, count_bytes
        self._buffer = np.empty(0, np.uint8)

    def create_local_plan(self) -> SavePlan:
        """Return the plan with an item per chunk."""
        items: list[WriteItem] = []
        for item in super().create_local_plan().items:
            key, whole = item.index.fqn, item.tensor_data
            assert whole is not None, key
            for box in split_rows(tuple(whole.size), CHUNK_BYTES // item_bytes(self._dtypes[key])):
                offset, shape = map(torch.Size, box)
                chunk = replace(whole, chunk=dcp.ChunkStorageMetadata(offset, shape))
                index = dcp.MetadataIndex(key, offset)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=chunk))
        self.plan = SavePlan(items, planner_data=self.plan.planner_data)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return a chunk; it is written before the next one is asked for."""
        key, data = write_item.index.fqn, write_item.tensor_data
        assert data is not None, key
        offset, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        tensor, dtype = self._tensors[key], self._dtypes[key]
        rows = slice_rows(tensor, offset[0], shape[0]) if shape else tensor
        n_bytes = prod(shape) * item_bytes(dtype)
        if self._buffer.size < n_bytes:
            self._buffer = np.empty(n_bytes, np.uint8)
        out = np.ndarray(shape, f"<i{item_bytes(dtype)}", self._buffer)
        for region in rows.regions:
            place = tuple(slice(o, o + n) for o, n in zip(region.stored_offset, region.shape, strict=True))
            out[place] = self._read(region.name, region.box).view(out.dtype)
        self._count_bytes(out.nbytes)
        return torch.from_numpy(out).view(DTYPES[dtype])


def dcp_target(source: Source, *, dtype: str | None = None) -> Target:
    """Return the target for a source with a configuration: whole tensors, with the head of a tied model.

    Args:
        source: What will be converted.
        dtype: Safetensors code to cast to; None: as stored.
    """
    model = source.model
    specs = target_specs(source, tensor_shapes(model), dtype)
    joined = join_specs(model, specs)
    shapes = {name: spec.shape for name, spec in joined.items()}
    layout = family_tensors(model, shapes, partial(module_key, config=model), "pairs")
    stored = stored_specs(layout.values(), joined)

    def fill(folder: Path, read: ReadBlock, count_bytes: CountBytes, settle: Settle) -> None:
        dtypes = {key: spec.dtype for key, spec in stored.items()}
        tensors = {key: torch.empty(s.shape, dtype=DTYPES[s.dtype], device="meta") for key, s in stored.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there
            try:
                save(
                    tensors,
                    storage_writer=FileSystemWriter(folder, per_thread_copy_ahead=0),
                    planner=_ReadingPlanner(read, layout, dtypes, count_bytes),
                    no_dist=True,
                )
            except CheckpointException as exc:
                error = next(iter(exc.failures.values()))[0]
                if isinstance(error, CheckpointError | OSError):
                    raise error from exc
                raise CheckpointError(f"{folder}: torch cannot write it: {error}") from exc

    return Target(specs=specs, fill=fill, aux_files=model_files(source, specs))
