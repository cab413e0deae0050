"""Sources: a model's tensors in any format, open for reading.

Each format's reader (`open_source` in `formats.py` selects it) returns a `Source`. A model tensor's locations are
`StoredSlice`s that tile it exactly once; replicas that a format also stores (norms on every rank, repeated key and
value heads) are listed separately, so that verification can compare them.

Cost of reading: the requested bytes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lt_ckpt.dtypes import item_bytes
from lt_ckpt.errors import CheckpointError
from lt_ckpt.hash_list import HashList
from lt_ckpt.layout import Layout
from lt_ckpt.records import OptimizerRecord
from lt_ckpt.shards import Box, Ints, is_inside
from lt_ckpt.stored_slices import StoredSlice, read_box, slice_box
from lt_ckpt.tensorfile import TensorSpec

MAX_NAMED_TENSORS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredArray:
    """Array in a file, according to the file's header.

    Attributes:
        spec: Dtype and shape of the tensor.
        byte_offset: Byte in the file of its first element.
        strides: Elements between neighbors, per dimension; None: it is contiguous.
    """

    spec: TensorSpec
    byte_offset: int
    strides: Ints | None = None

    def stored_slice(self, file: str, offset: Ints | None = None) -> StoredSlice:
        """Return it as the slice of a tensor at an offset; by default the whole tensor."""
        at = (0,) * len(self.spec.shape) if offset is None else offset
        return StoredSlice(
            file=file, byte_offset=self.byte_offset, offset=at, shape=self.spec.shape, strides=self.strides
        )


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
        config: The model as a Hugging Face config.json, or None if the format has none and none was given.
        groups: Kind → tensors. Every source has `weights`.
        aux_files: Tokenizer files and the like, by name.
        format_info: Properties of the format, for reports and manifests (degrees, layout, revision, ...).
        optimizer: The optimizer whose slots are among the groups, or None.
        hash_list: The list of hashes in its folder, or None.
        fallbacks: Sentences for the user about newer checkpoints of the path that are damaged and were not opened.
    """

    format: str
    path: Path
    root: Path
    config: Mapping[str, Any] | None
    groups: Mapping[str, TensorGroup]
    aux_files: Mapping[str, bytes] = field(default_factory=dict)
    format_info: Mapping[str, Any] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None
    hash_list: HashList | None = None
    fallbacks: tuple[str, ...] = ()

    @property
    def weights(self) -> TensorGroup:
        """The group `weights`."""
        return self.groups["weights"]

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
    missing = [name for name in expected if name not in set(found)]
    extra = [name for name in found if name not in set(expected)]
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
        return "the configuration is another model's, or the model is of another family than Llama"
    return "a file was not copied, or the configuration is another model's"


def build_tensor_group(
    layout: Layout, stored_arrays: Mapping[str, Mapping[str, StoredArray]], shapes: Mapping[str, Ints], where: str
) -> TensorGroup:
    """Join a format's layout with the arrays in its files.

    Args:
        layout: The expected tensors.
        stored_arrays: File path, as in the layout → key → array in the file.
        shapes: Model tensor → shape, in model order.
        where: The source, for messages.

    Raises:
        CheckpointError: A key is missing, unknown, or has another shape; or one model tensor has two dtypes.
    """
    for file in layout.files:
        check_names([tensor.key for tensor in file.tensors], stored_arrays[file.path], f"{where}: {file.path}")
    layout.check(shapes)
    dtypes: dict[str, str] = {}
    locations: dict[str, dict[Box, StoredSlice]] = {name: {} for name in shapes}
    replicas: dict[str, list[StoredSlice]] = {}
    for file in layout.files:
        for tensor in file.tensors:
            array = stored_arrays[file.path][tensor.key]
            spec = array.spec
            if spec.shape != tensor.shape:
                raise CheckpointError(
                    f"{where}: {file.path}: {tensor.key} has shape {list(spec.shape)}, expected {list(tensor.shape)}"
                )
            whole = array.stored_slice(file.path)
            for region in tensor.regions:
                dtype = dtypes.setdefault(region.name, spec.dtype)
                if dtype != spec.dtype:
                    raise CheckpointError(
                        f"{where}: {file.path}: {tensor.key} is {spec.dtype}, another part of {region.name} is {dtype}"
                    )
                stored = replace(
                    slice_box(whole, (region.stored_offset, region.shape), item_bytes(dtype)), offset=region.offset
                )
                if locations[region.name].setdefault(region.box, stored) is not stored:
                    replicas.setdefault(region.name, []).append(stored)
    return TensorGroup(
        specs={name: TensorSpec(dtypes[name], shape) for name, shape in shapes.items()},
        locations={name: tuple(slices.values()) for name, slices in locations.items()},
        replicas={name: tuple(slices) for name, slices in replicas.items()},
    )
