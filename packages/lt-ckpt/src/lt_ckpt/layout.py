"""Layouts: the boxes of model tensors that make up the tensors of a format's files.

Model tensors have one name, one shape and one order here: those of `lt_model.param_specs`, which are Hugging Face's.
Formats store them whole, sharded, replicated, reordered by heads, or joined; all of this is boxes. A stored tensor
consists of regions, each a box of one model tensor at an offset of the stored one. A format is described by a function
that returns such a layout; reading (where does this box lie?), writing (what comes next in this file?) and checking (is
anything missing or stored twice?) follow from it.

Pure: no file is accessed. Cost: O(regions).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lt_ckpt.errors import CheckpointError
from lt_ckpt.shards import Box, Ints, intersect
from lt_ckpt.tensorfile import TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRegion:
    """Box of a model tensor in a stored tensor.

    Attributes:
        name: The model tensor.
        offset: Offset of the box in the model tensor.
        shape: Shape of the box, the same in both.
        stored_offset: Offset of the box in the stored tensor.
    """

    name: str
    offset: Ints
    shape: Ints
    stored_offset: Ints

    @property
    def box(self) -> Box:
        """The box in the model tensor."""
        return self.offset, self.shape


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """Tensor of a file.

    Attributes:
        key: Its name.
        shape: Its shape, with as many dimensions as the model tensors of its regions.
        regions: The boxes of which it consists.
        file_shape: Its shape in the file, if that is another one of the same elements; ().
    """

    key: str
    shape: Ints
    regions: tuple[TensorRegion, ...]
    file_shape: Ints = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """File of a format: its path in the folder, with "/", and its tensors in file order."""

    path: str
    tensors: tuple[TensorLayout, ...]


Layout = tuple[FileLayout, ...]
"""All files of a format for one model."""


def stored_specs(tensors: Iterable[TensorLayout], specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return key → dtype and shape of stored tensors, given the model tensors' specs.

    Raises:
        CheckpointError: Model tensors of two dtypes are to be stored as one.
    """
    found: dict[str, TensorSpec] = {}
    for tensor in tensors:
        dtypes = {specs[region.name].dtype for region in tensor.regions}
        if len(dtypes) > 1:
            raise CheckpointError(f"{tensor.key}: its parts are {' and '.join(sorted(dtypes))}; cast them (--dtype)")
        found[tensor.key] = TensorSpec(dtypes.pop(), tensor.file_shape or tensor.shape)
    return found


def layout_bytes(layout: Layout, specs: Mapping[str, TensorSpec]) -> int:
    """Return the bytes of all stored tensors, given the model tensors' specs."""
    return sum(spec.n_bytes for file in layout for spec in stored_specs(file.tensors, specs).values())


def whole_tensor(name: str, shape: Ints, key: str = "") -> TensorLayout:
    """Return the layout of a model tensor stored whole, under its own name or another key."""
    zeros = (0,) * len(shape)
    return TensorLayout(
        key=key or name, shape=shape, regions=(TensorRegion(name=name, offset=zeros, shape=shape, stored_offset=zeros),)
    )


def stack_rows(key: str, boxes: list[tuple[str, Box]]) -> TensorLayout:
    """Return the layout of boxes of model tensors stacked along dim 0."""
    regions: list[TensorRegion] = []
    rows = 0
    row_shape = boxes[0][1][1][1:]
    for name, (offset, shape) in boxes:
        assert shape[1:] == row_shape, f"{key}: {name} has other rows than those above"
        regions.append(
            TensorRegion(name=name, offset=offset, shape=shape, stored_offset=(rows, *(0,) * len(row_shape)))
        )
        rows += shape[0]
    return TensorLayout(key=key, shape=(rows, *row_shape), regions=tuple(regions))


def slice_rows(tensor: TensorLayout, first: int, n_rows: int) -> TensorLayout:
    """Return rows of a rank's tensor as a tensor."""
    shape = (n_rows, *tensor.shape[1:])
    begin: Ints = (first, *(0,) * (len(shape) - 1))
    regions: list[TensorRegion] = []
    for region in tensor.regions:
        common = intersect((begin, shape), (region.stored_offset, region.shape))
        if common is not None:
            at, size = common
            regions.append(
                TensorRegion(
                    name=region.name,
                    offset=tuple(o + a - p for o, a, p in zip(region.offset, at, region.stored_offset, strict=True)),
                    shape=size,
                    stored_offset=tuple(a - b for a, b in zip(at, begin, strict=True)),
                )
            )
    return TensorLayout(key=tensor.key, shape=shape, regions=tuple(regions))


def shard_box(shape: Ints, dim: int, index: int, count: int, name: str) -> Box:
    """Return the `index`-th of `count` equal parts of a tensor along `dim`.

    Raises:
        CheckpointError: The tensor is not divisible.
    """
    if shape[dim] % count:
        raise CheckpointError(f"{name}: dim {dim} of shape {list(shape)} does not divide into {count} equal parts")
    size = shape[dim] // count
    offset = tuple(index * size if d == dim else 0 for d in range(len(shape)))
    return offset, tuple(size if d == dim else n for d, n in enumerate(shape))
