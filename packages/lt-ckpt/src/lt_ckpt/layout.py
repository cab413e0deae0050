"""What the tensors of a format's files are made of.

A model's tensors have one name, one shape and one order here: those of `lt_model.parameters`, which are Hugging Face's.
Formats store them whole, cut, repeated, reordered by heads, or joined; all of this is boxes. A stored tensor is made of
pieces, each a box of one model tensor at a place in the stored one. A format is described by a function that returns
such a layout, and everything else follows from it: reading (where does this box lie?), writing (what comes next in this
file?), checking (is anything missing, or there twice?).

Pure: no file is touched. Cost: O(pieces).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lt_ckpt.errors import CheckpointError
from lt_ckpt.shards import Box, Ints, covers, inside
from lt_ckpt.tensorfile import TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of a model tensor in a stored tensor.

    Attributes:
        name: The model tensor.
        offset: Where the box begins in the model tensor.
        shape: Shape of the box, the same in both.
        at: Where the box begins in the stored tensor.
    """

    name: str
    offset: Ints
    shape: Ints
    at: Ints

    @property
    def box(self) -> Box:
        """The box in the model tensor."""
        return self.offset, self.shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A tensor of a file: its key there, its shape, and what it is made of."""

    key: str
    shape: Ints
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """A file of a format: its path in the folder, with "/", and its tensors in file order."""

    path: str
    tensors: tuple[Placed, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All the files of a format for one model."""

    files: tuple[FileLayout, ...]

    def __iter__(self) -> Iterator[tuple[FileLayout, Placed, Piece]]:
        for file in self.files:
            for tensor in file.tensors:
                for piece in tensor.pieces:
                    yield file, tensor, piece

    def check(self, shapes: Mapping[str, Ints]) -> None:
        """Checks a layout against the model's tensors.

        Every stored tensor is tiled by its pieces; every model tensor is held whole, once or in equal copies: two
        pieces of one model tensor are either the same box or do not overlap.

        Args:
            shapes: Model tensor → shape.

        Raises:
            CheckpointError: With the tensor and the file.
        """
        held: dict[str, set[Box]] = {name: set() for name in shapes}
        for file in self.files:
            for tensor in file.tensors:
                where = f"{file.path}: {tensor.key}"
                for piece in tensor.pieces:
                    if piece.name not in shapes:
                        raise CheckpointError(f"{where}: the model has no tensor {piece.name!r}")
                    if not inside(piece.box, shapes[piece.name]):
                        raise CheckpointError(f"{where}: {list(piece.box)} does not lie in {piece.name}")
                    held[piece.name].add(piece.box)
                trouble = covers(tensor.shape, [(piece.at, piece.shape) for piece in tensor.pieces])
                if trouble:
                    raise CheckpointError(f"{where}: {trouble}")
        for name, boxes in held.items():
            trouble = covers(shapes[name], sorted(boxes))
            if trouble:
                raise CheckpointError(f"{name}: {trouble}")


def whole(name: str, shape: Ints, key: str = "") -> Placed:
    """A model tensor stored as it is, under its own name or another key."""
    zeros = (0,) * len(shape)
    return Placed(key=key or name, shape=shape, pieces=(Piece(name=name, offset=zeros, shape=shape, at=zeros),))


def stacked(key: str, boxes: list[tuple[str, Box]]) -> Placed:
    """Boxes of model tensors, one below the other along dim 0."""
    pieces: list[Piece] = []
    rows = 0
    rest = boxes[0][1][1][1:]
    for name, (offset, shape) in boxes:
        if shape[1:] != rest:
            raise CheckpointError(f"{key}: {name} has rows of {list(shape[1:])}, those above have {list(rest)}")
        pieces.append(Piece(name=name, offset=offset, shape=shape, at=(rows, *(0,) * len(rest))))
        rows += shape[0]
    return Placed(key=key, shape=(rows, *rest), pieces=tuple(pieces))


def part(shape: Ints, dim: int, index: int, count: int, name: str) -> Box:
    """The `index`-th of `count` equal parts of a tensor along `dim`.

    Raises:
        CheckpointError: The tensor cannot be divided so.
    """
    if shape[dim] % count:
        raise CheckpointError(f"{name}: dim {dim} of shape {list(shape)} does not divide into {count} equal parts")
    size = shape[dim] // count
    offset = tuple(index * size if d == dim else 0 for d in range(len(shape)))
    return offset, tuple(size if d == dim else n for d, n in enumerate(shape))


def specs_of(shapes: Mapping[str, Ints], dtype: str) -> dict[str, TensorSpec]:
    """Specs of one dtype."""
    return {name: TensorSpec(dtype, shape) for name, shape in shapes.items()}
