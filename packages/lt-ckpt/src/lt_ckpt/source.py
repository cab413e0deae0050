"""Sources: a model's tensors in any format, open for reading.

Each format's reader (`open_source` in `formats.py` selects it) returns a `Source`. A model tensor's locations are
`StoredSlice`s that tile it exactly once; replicas that a format also stores (norms on every rank, repeated key and
value heads) are listed separately, so that verification can compare them.

Cost of reading: the requested bytes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.hash_list import HashList
from lt_ckpt.layout import Layout
from lt_ckpt.records import OptimizerRecord
from lt_ckpt.shards import Box, Ints, find_tiling_error, intersect, is_inside
from lt_ckpt.stored_slices import StoredSlice, read_box, slice_box
from lt_ckpt.tensorfile import StoredArray, TensorSpec
from lt_model import ModelConfig, config_from_hf

MAX_NAMED_TENSORS = 4


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Tensors of one kind: `weights`, the slots of an optimizer, ...

    Attributes:
        specs: Model tensor → dtype and whole shape, in model order.
        locations: Model tensor → its stored slices, each element exactly once.
        replicas: Model tensor → further stored slices, which must equal those boxes of it.
    """

    specs: Mapping[str, TensorSpec]
    locations: Mapping[str, tuple[StoredSlice, ...]]
    replicas: Mapping[str, tuple[StoredSlice, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Model in some format, open for reading.

    Attributes:
        format: `hf`, `nxd`, `lt`, `dcp`, `pt` or `meta`.
        path: The opened path; the files of `StoredSlice` are relative to `root`.
        root: Folder of the files.
        config: The model as a Hugging Face config.json.
        groups: Kind → tensors. Every source has `weights`.
        aux_files: Tokenizer files and the like, by name.
        format_info: Properties of the format, for reports and manifests (degrees, layout, revision, ...).
        optimizer: The optimizer whose slots are among the groups, or None.
        hash_list: The list of hashes in its folder, or None.
        is_verified: Every byte of it was compared with its hash when it was opened.
        fallbacks: Sentences for the user about what was not opened: newer checkpoints of the path that are damaged,
            and layers that the model has not.
    """

    format: str
    path: Path
    root: Path
    config: Mapping[str, Any]
    groups: Mapping[str, TensorGroup]
    aux_files: Mapping[str, bytes] = field(default_factory=dict)
    format_info: Mapping[str, Any] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None
    hash_list: HashList | None = None
    is_verified: bool = False
    fallbacks: tuple[str, ...] = ()

    @property
    def model(self) -> ModelConfig:
        """The configuration as that of a model."""
        return config_from_hf(dict(self.config), source=f"{self.path}: config")

    @property
    def weights(self) -> TensorGroup:
        """The group `weights`."""
        return self.groups["weights"]

    def files(self) -> set[str]:
        """Return the files with its tensors, relative to `root`."""
        return {s.file for g in self.groups.values() for slices in g.locations.values() for s in slices}

    def read(self, name: str, box: Box | None = None, *, group: str = "weights") -> np.ndarray:
        """Read a box of a tensor; by default all of it.

        Returns:
            Its bytes: one-dimensional uint8, C order.

        Raises:
            CheckpointError: No such tensor, a box outside of it, or a file that cannot be read.
        """
        found = self.groups[group]
        if name not in found.specs:
            raise CheckpointError(f"{self.path}: {name}: no such tensor")
        return self.read_slices(found.locations[name], found.specs[name], box, name)

    def read_slices(self, slices: tuple[StoredSlice, ...], spec: TensorSpec, box: Box | None, name: str) -> np.ndarray:
        """Read like `read`, from given slices of the tensor, for example replicas."""
        wanted = box or ((0,) * len(spec.shape), spec.shape)
        if not is_inside(wanted, spec.shape):
            raise CheckpointError(f"{self.path}: {name}: the box {list(wanted)} does not lie in {list(spec.shape)}")
        found = read_box(self.root, slices, wanted, spec.dtype, f"{self.path}: {name}")
        return found.reshape(-1).view(np.uint8)


def check_names(expected: Collection[str], found: Collection[str], where: str) -> None:
    """Check that the tensors found are those of the model.

    Raises:
        CheckpointError: Names those that are missing, those that are extra, and the likely cause.
    """
    known, stored = set(expected), set(found)
    missing = [name for name in expected if name not in stored]
    extra = [name for name in found if name not in known]
    if not missing and not extra:
        return
    parts = [
        f"{title} {', '.join(names[:MAX_NAMED_TENSORS])}{', ...' if len(names) > MAX_NAMED_TENSORS else ''}"
        for title, names in ((f"{len(missing)} missing:", missing), (f"{len(extra)} not expected:", extra))
        if names
    ]
    raise CheckpointError(f"{where}: {'; '.join(parts)}; {_likely_cause(missing, extra)}")


def _likely_cause(missing: list[str], extra: list[str]) -> str:
    first = extra[0] if extra else ""
    if first.endswith(("_blocks", "_scales", "_scale_inv")):
        return "the weights are quantized, which is not read: let transformers dequantize them to bf16 files"
    prefix = next((first.removesuffix(name) for name in missing if first and first.endswith(name)), "")
    if prefix:
        hint = " (of a compiled model)" if "_orig_mod." in prefix else ""
        return f"the names begin with {prefix!r}{hint}: save the state dict without that prefix"
    lacking = next((name.removesuffix(first) for name in missing if first and name.endswith(first)), "")
    if lacking:
        return f"the names lack {lacking!r}: save the state dict of the whole model"
    if missing == ["lm_head.weight"] and not extra:
        return "if the head is the embedding, set tie_word_embeddings to true in the configuration"
    if extra:
        return "the configuration is another model's, or of another family"
    return "a file was not copied, or the configuration is another model's"


def group_of(tensors: Mapping[str, tuple[TensorSpec, tuple[StoredSlice, ...]]]) -> TensorGroup:
    """Return tensors with their locations as a group."""
    specs = {name: spec for name, (spec, _) in tensors.items()}
    return TensorGroup(specs=specs, locations={name: slices for name, (_, slices) in tensors.items()})


def group_of_arrays(file: str, arrays: Mapping[str, StoredArray]) -> TensorGroup:
    """Return the arrays of a file as tensors by its keys."""
    return group_of({key: (array.spec, (array.stored_slice(file),)) for key, array in arrays.items()})


def build_tensor_group(
    layout: Layout, stored: Mapping[str, TensorGroup], shapes: Mapping[str, Ints], where: str
) -> TensorGroup:
    """Join a format's layout with the tensors in its files.

    Args:
        layout: The expected tensors.
        stored: File, as in the layout → the tensors of it by their keys, and where their bytes are.
        shapes: Model tensor → shape, in model order.
        where: The source, for messages.

    Raises:
        CheckpointError: A key is missing, unknown, or has another shape; one model tensor has two dtypes, or is not
            stored completely.
    """
    dtypes: dict[str, str] = {}
    locations: dict[str, dict[Box, StoredSlice]] = {name: {} for name in shapes}
    replicas: dict[str, list[StoredSlice]] = {}
    for file in layout:
        found = stored[file.path]
        check_names([tensor.key for tensor in file.tensors], found.specs, f"{where}: {file.path}")
        for tensor in file.tensors:
            spec = found.specs[tensor.key]
            if spec.shape != tensor.shape:
                raise CheckpointError(
                    f"{where}: {file.path}: {tensor.key} has shape {list(spec.shape)}, expected {list(tensor.shape)}"
                )
            for region, whole in product(tensor.regions, found.locations[tensor.key]):
                dtype = dtypes.setdefault(region.name, spec.dtype)
                if dtype != spec.dtype:
                    raise CheckpointError(
                        f"{where}: {file.path}: {tensor.key} is {spec.dtype}, another part of {region.name} is {dtype}"
                    )
                common = intersect(whole.box, (region.stored_offset, region.shape))
                if common is not None:
                    offset = zip(region.offset, common[0], region.stored_offset, strict=True)
                    part = slice_box(whole, common, item_bytes(dtype))
                    part = replace(part, offset=tuple(o + b - a for o, b, a in offset))
                    if locations[region.name].setdefault(part.box, part) is not part:
                        replicas.setdefault(region.name, []).append(part)
    for name, shape in shapes.items():
        if error := find_tiling_error(shape, sorted(locations[name])):
            raise CheckpointError(f"{where}: {name}: {error}")
    return TensorGroup(
        specs={name: TensorSpec(dtypes[name], shape) for name, shape in shapes.items()},
        locations={name: tuple(slices.values()) for name, slices in locations.items()},
        replicas={name: tuple(slices) for name, slices in replicas.items()},
    )
