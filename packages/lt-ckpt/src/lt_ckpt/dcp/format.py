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
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lt_ckpt.conversion import Target
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.file_names import check_name
from lt_ckpt.laid_out_files import CountBytes, ReadBlock
from lt_ckpt.layout import FileLayout, whole_tensor
from lt_ckpt.llama_tensors import EMBED, HEAD, IGNORED_BUFFERS, add_tied_head, param_specs, target_specs, tensor_shapes
from lt_ckpt.meta_llama.names import dialect_key, unpermute_group
from lt_ckpt.model_files import model_files
from lt_ckpt.records import TORCH_ADAMW
from lt_ckpt.shards import is_inside
from lt_ckpt.source import Source, TensorGroup, build_tensor_group, check_names
from lt_ckpt.stored_slices import StoredSlice
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import CODES, DTYPES
from lt_ckpt.torchfile.tensor_files import TensorFiles
from lt_model import config_from_hf
from lt_model.params import ParamSpec

try:
    import torch
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.state_dict_saver import save
except ModuleNotFoundError as exc:
    raise CheckpointError(
        "torch.distributed.checkpoint folders are read and written by torch: pip install 'lt-ckpt[torch]'"
    ) from exc

METADATA = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": [
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ],
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(str(dtype).removeprefix("torch.") for dtype in CODES)),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath"),
}
"""Names that `.metadata` may refer to."""

_KEY_PREFIXES = {
    "hf": ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head."),
    "meta": ("tok_embeddings.", "layers.", "norm.", "output."),
    "titan": ("tok_embeddings.", "layers.", "norm.", "lm_head."),
}
"""Dialect → prefixes of a model's keys; an unknown tensor with one of them means another model."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint of torch does")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """Reader of torch whose `.metadata` cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
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
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{path}: holds a {type(found).__name__}, not the metadata of a checkpoint")
        return found


class _Naming(NamedTuple):
    """Naming of the model's tensors in a checkpoint: a dialect behind a prefix."""

    dialect: str
    prefix: str

    def key(self, name: str) -> str:
        return self.prefix + dialect_key(name, self.dialect)


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
    model.check_features("the format dcp")
    metadata = SafeReader(folder).read_metadata()
    tensors = {k: m for k, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    naming = _detect_naming(tensors, str(folder))
    head_is_stored = naming.key(HEAD) in tensors
    table = param_specs(replace(model, tie_word_embeddings=model.tie_word_embeddings and not head_is_stored))
    keys = {"weights": {p.name: naming.key(p.name) for p in table}, **_find_moments(tensors, naming, table)}
    used = {key for names in keys.values() for key in names.values()}
    prefixes = tuple(naming.prefix + prefix for prefix in _KEY_PREFIXES[naming.dialect])
    own = [key for key in tensors if key.startswith(prefixes) and not IGNORED_BUFFERS.search(key)]
    check_names(list(keys["weights"].values()), own, str(folder))
    chunks = _ChunkReader(folder, metadata)
    stored = {key: chunks.locate(key, tensors[key]) for key in used}
    groups: dict[str, TensorGroup] = {}
    for kind, names in keys.items():
        layout = FileLayout(path=METADATA, tensors=tuple(whole_tensor(p.name, p.shape, names[p.name]) for p in table))
        found = TensorGroup(
            specs={key: stored[key][0] for key in names.values()},
            locations={key: stored[key][1] for key in names.values()},
        )
        group = build_tensor_group((layout,), {METADATA: found}, {p.name: p.shape for p in table}, str(folder))
        if naming.dialect != "hf":
            group = unpermute_group(group, table, model.head_width)
        groups[kind] = add_tied_head(group, model)
    others = [key for key in metadata.state_dict_metadata if key not in used]
    return Source(
        format="dcp",
        path=folder,
        root=folder,
        config=dict(config),
        groups=groups,
        optimizer=TORCH_ADAMW if groups.keys() >= set(TORCH_ADAMW.slots) else None,
        format_info={
            "names": naming.dialect,
            "prefix": naming.prefix,
            "others": dict(Counter(key.partition(".")[0] for key in others)),
        },
    )


def _detect_naming(tensors: Mapping[str, object], where: str) -> _Naming:
    """Detect the dialect and the prefix of the names."""
    found: list[_Naming] = []
    for dialect in ("hf", "meta"):
        embedding = dialect_key(EMBED, dialect)
        for key in tensors:
            start = key.removesuffix(embedding)
            if start != key and (not start or start.endswith(".")):
                titan = _Naming(dialect="titan", prefix=start)
                is_titan = titan.key("model.layers.0.self_attn.q_proj.weight") in tensors
                found.append(titan if is_titan else _Naming(dialect=dialect, prefix=start))
    if not found:
        raise CheckpointError(f"{where}: contains no embedding of a Llama under a known name")
    if len(found) > 1:
        several = ", ".join(repr(naming.prefix) for naming in found)
        raise CheckpointError(f"{where}: contains several models, behind {several}; save one of them alone")
    return found[0]


def _find_moments(
    tensors: Mapping[str, object], naming: _Naming, table: tuple[ParamSpec, ...]
) -> dict[str, dict[str, str]]:
    """Return kind → model tensor → key of the moments that exist for every tensor of the model."""
    found: dict[str, dict[str, str]] = {}
    for kind in TORCH_ADAMW.slots:
        end = f"state.{dialect_key(EMBED, naming.dialect)}.{kind}"
        starts = [key.removesuffix(end) for key in tensors if key.endswith(end)]
        for start in starts if len(starts) == 1 else []:
            keys = {p.name: f"{start}state.{dialect_key(p.name, naming.dialect)}.{kind}" for p in table}
            if tensors.keys() >= set(keys.values()):
                found[kind] = keys
    return found


class _ChunkReader:
    """Locations of chunks in a checkpoint's files."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder, self._files = folder, TensorFiles()
        storage = metadata.storage_data or {}
        self._storage: dict[tuple[str, tuple[int, ...]], Any] = {
            (index.fqn, tuple(index.offset or ())): info for index, info in storage.items()
        }

    def locate(self, key: str, stored: TensorStorageMetadata) -> tuple[TensorSpec, tuple[StoredSlice, ...]]:
        """Return the spec of a tensor, and its chunks as slices of it."""
        where, dtype, shape = f"{self._folder}: {key}", CODES.get(stored.properties.dtype), tuple(stored.size)
        if dtype is None:
            raise CheckpointError(f"{where}: is of {stored.properties.dtype}, which cannot be read")
        slices: list[StoredSlice] = []
        for chunk in stored.chunks:
            offset, size = tuple(chunk.offsets), tuple(chunk.sizes)
            info = self._storage.get((key, offset))
            if info is None or not is_inside((offset, size), shape):
                raise CheckpointError(f"{where}: {METADATA} does not say where its chunk at {list(offset)} is")
            file = check_name(info.relative_path, self._folder / METADATA)
            array = self._files.locate(self._folder / file, key, info.offset, info.length)
            if array.spec != TensorSpec(dtype, size):
                raise CheckpointError(
                    f"{self._folder / file}: {key}: holds {array.spec.dtype} {list(array.spec.shape)}, {METADATA} says "
                    f"{dtype} {list(size)}"
                )
            slices.append(array.stored_slice(file, offset))
        return TensorSpec(dtype, shape), tuple(slices)


class _ReadingPlanner(DefaultSavePlanner):
    """Planner of a save whose tensors are read one by one, when they are written."""

    def __init__(self, read: ReadBlock, specs: Mapping[str, TensorSpec], count_bytes: CountBytes) -> None:
        super().__init__()
        self._read, self._specs, self._count_bytes = read, specs, count_bytes

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return a tensor."""
        name = write_item.index.fqn
        spec = self._specs[name]
        data = self._read(name, ((0,) * len(spec.shape), spec.shape))
        self._count_bytes(data.nbytes)
        signed = torch.from_numpy(data.view(f"i{data.itemsize}"))
        return signed.view(DTYPES[spec.dtype])


def dcp_target(source: Source, *, dtype: str | None = None) -> Target:
    """Return the target for a source with a configuration: whole tensors, with the head of a tied model.

    Args:
        source: What will be converted.
        dtype: Safetensors code to cast to; None: as stored.
    """
    model = source.model
    model.check_features("the format dcp")
    specs = target_specs(source, tensor_shapes(model), dtype)

    def fill(folder: Path, read: ReadBlock, count_bytes: CountBytes) -> None:
        tensors = {
            name: torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta") for name, spec in specs.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there
            try:
                save(
                    tensors,
                    storage_writer=FileSystemWriter(folder),
                    planner=_ReadingPlanner(read, specs, count_bytes),
                    no_dist=True,
                )
            except CheckpointException as exc:
                error = next(iter(exc.failures.values()))[0]
                if isinstance(error, CheckpointError | OSError):
                    raise error from exc
                raise CheckpointError(f"{folder}: torch cannot write it: {error}") from exc

    return Target(
        specs=specs,
        fill=fill,
        aux_files=model_files(source, specs),
    )
