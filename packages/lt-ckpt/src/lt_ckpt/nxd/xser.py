"""torch_xla's xser files, read and written without torch_xla: every tensor in a file of its own.

`F` is a file of torch.save in which each tensor is replaced by a reference with a number; tensor N lies in
`F.tensors/tensor_N.pt`, numbers being the order in `F`; `F.info.pt` has each number's dtype and shape (older versions
wrote none). A tensor that stands in `F` itself is read from there: NxD's converter calls such files xser too.

Cost of reading: the headers of all files; of writing: one pass, one tensor's file open at a time.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from lt_ckpt import files
from lt_ckpt.containers import Tensors, portions
from lt_ckpt.direct import NewFile
from lt_ckpt.errors import CheckpointError
from lt_ckpt.source import Held
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import Create, TorchWriter, load_pt, write_pt
from lt_ckpt.torchfile.names import TensorReference, TorchDtype, TorchSize, TorchTensor


class Located(NamedTuple):
    """A tensor: the file it lies in, from the root of the checkpoint, and where in it."""

    file: str
    held: Held


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A file of torch.save or xser that was read.

    Attributes:
        root: The root of the checkpoint.
        file: The file, from there.
        tree: What it holds, with `TorchTensor`s and `TensorReference`s in place of tensors.
        info: What the file beside it says about the references, by number.
    """

    root: Path
    file: str
    tree: Any
    info: Mapping[int, TensorSpec] = field(default_factory=dict)

    @classmethod
    def open(cls, root: Path, file: str) -> Self:
        """Reads a file and what lies beside it, but not the tensors' files.

        Raises:
            CheckpointError: It is missing, damaged, or not what torch writes.
        """
        beside = root / info_path(file)
        info = _info(beside) if beside.exists() else {}
        return cls(root=root, file=file, tree=load_pt(root / file), info=info)

    @property
    def lacks_tensors(self) -> bool:
        """Whether there is no file of a single tensor beside it."""
        folder = (self.root / tensor_path(self.file, 0)).parent
        return not folder.is_dir() or not any(folder.iterdir())

    def spec(self, leaf: TorchTensor | TensorReference, name: str) -> TensorSpec:
        """Returns a tensor's dtype and shape, without its file where what is said beside will do."""
        if isinstance(leaf, TensorReference) and leaf.tid in self.info:
            return self.info[leaf.tid]
        return self.locate(leaf, name).held.spec

    def locate(self, leaf: TorchTensor | TensorReference, name: str) -> Located:
        """Finds a tensor of the tree.

        Args:
            leaf: What stands for it.
            name: What it is called there, for messages.

        Raises:
            CheckpointError: Its file is missing, damaged, or holds another tensor than is said beside.
        """
        if isinstance(leaf, TorchTensor):
            return Located(self.file, leaf.held)
        path = tensor_path(self.file, leaf.tid)
        tensor = load_pt(self.root / path)
        if not isinstance(tensor, TorchTensor):
            raise CheckpointError(f"{self.root / path}: must hold a tensor ({name}), holds a {type(tensor).__name__}")
        said = self.info.get(leaf.tid, tensor.spec)
        if said != tensor.spec:
            raise CheckpointError(
                f"{self.root / path}: holds {tensor.spec.dtype} {list(tensor.spec.shape)}, {info_path(self.file)} says "
                f"{said.dtype} {list(said.shape)} ({name}); one of the two is of another save"
            )
        return Located(path, tensor.held)


def info_path(file: str) -> str:
    """Path of the file that describes the tensors of a reference file."""
    return f"{file}.info.pt"


def tensor_path(file: str, tid: int) -> str:
    """Path of a tensor's file."""
    return f"{file}.tensors/tensor_{tid}.pt"


def _info(path: Path) -> dict[int, TensorSpec]:
    tree = load_pt(path)
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: must hold a dictionary, holds a {type(tree).__name__}")
    specs: dict[int, TensorSpec] = {}
    for tid, entry in tree.items():
        dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        if type(tid) is not int or not isinstance(dtype, TorchDtype) or not isinstance(shape, TorchSize):
            raise CheckpointError(f"{path}: entry {tid!r} must have a dtype and a shape; the file is damaged")
        if entry.get("expert_model_parallel"):
            raise CheckpointError(f"{path}: tensor {tid} is cut by experts; only Llama is known, which has none")
        specs[tid] = TensorSpec(dtype.code, tuple(shape))
    return specs


class XserWriter:
    """A new xser file as a container: tensor after tensor goes to a file of its own; `path` itself comes last.

    Args:
        path: The file of references to make; what belongs to it lies beside.
        tensors: Key → dtype and shape, in file order.
        metadata: Text to keep in a record of `path` that torch does not look at.

    Attributes:
        begins: Where in its own file the bytes of each tensor begin whose turn has come.
    """

    def __init__(self, path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
        self._begin(path, dict(tensors), metadata)

    @classmethod
    def of_tree(
        cls, path: Path, tree: Any, metadata: Mapping[str, str] | None = None, *, create: Create = NewFile
    ) -> Self:
        """Makes a file of any tree with `TensorSpec`s in place of tensors, whose bytes will come in order."""
        made = cls.__new__(cls)
        made._begin(path, tree, metadata or {}, create)
        return made

    def _begin(self, path: Path, tree: Any, metadata: Mapping[str, str], create: Create = NewFile) -> None:
        self._path, self._metadata, self._create = path, metadata, create
        self.begins: list[int] = []
        self._specs: list[TensorSpec] = []
        self._tree = self._by_reference(tree)
        self._writer: TorchWriter | None = None
        self._left = self._next = 0
        files.make_folder(Path(tensor_path(str(path), 0)).parent)
        self._begin_next()

    def _by_reference(self, tree: Any) -> Any:
        if isinstance(tree, TensorSpec):
            self._specs.append(tree)
            return TensorReference(len(self._specs) - 1)
        if isinstance(tree, dict):
            return {key: self._by_reference(value) for key, value in tree.items()}
        if type(tree) in (list, tuple):
            return type(tree)(self._by_reference(value) for value in tree)
        return tree

    def _begin_next(self) -> None:
        """Begins the file of the next tensor that has bytes."""
        while self._next < len(self._specs) and not self._left:
            spec = self._specs[self._next]
            path = Path(tensor_path(str(self._path), self._next))
            self._writer = TorchWriter.of_tree(path, spec, create=self._create)
            self.begins += self._writer.records.begins
            self._left = spec.n_bytes
            self._next += 1
            if not self._left:
                self._end()

    def _end(self) -> None:
        """Puts the open tensor's file on the disk."""
        writer, self._writer = self._writer, None
        assert writer is not None
        writer.close()

    def append(self, data: memoryview | np.ndarray) -> None:
        """Take the next bytes, in the order of the tensors."""
        for part in portions(data, lambda: self._left):
            assert self._writer is not None
            self._writer.append(part)
            self._left -= len(part)
            if not self._left:
                self._end()
                self._begin_next()

    def close(self) -> None:
        """Write what refers to the tensors, all of whose bytes have come, and put it on the disk."""
        assert not self._left, f"{self._left} bytes of tensor {self._next - 1} have not come"
        files.fsync_folder(Path(tensor_path(str(self._path), 0)).parent)
        info = {
            tid: {"dtype": TorchDtype(spec.dtype), "shape": TorchSize(spec.shape), "expert_model_parallel": False}
            for tid, spec in enumerate(self._specs)
        }
        write_pt(info_path(str(self._path)), info, create=self._create)
        write_pt(self._path, self._tree, self._metadata, create=self._create)

    def abandon(self) -> None:
        """Close the descriptor that is open; what was written stays."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.abandon()
            self._writer = None
