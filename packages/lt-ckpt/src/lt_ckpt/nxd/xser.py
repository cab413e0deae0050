"""torch_xla's xser files, read and written without torch_xla: every tensor in a file of its own.

`F` is a torch.save file in which each tensor is replaced by a numbered reference; tensor N is in
`F.tensors/tensor_N.pt`, numbers being the order in `F`; `F.info.pt` has each number's dtype and shape (older versions
wrote none). A tensor in `F` itself is read from there: NxD's converter calls such files xser too.

Cost of reading: the headers of all files; of writing: one pass, one tensor's file open at a time.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from lt_ckpt import files
from lt_ckpt.direct_io import CreateFile, DirectFileWriter
from lt_ckpt.errors import CheckpointError
from lt_ckpt.read_verification import StoredChecksum
from lt_ckpt.source import StoredArray
from lt_ckpt.tensor_writers import TensorSpecs, split_at_records
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.file import TorchWriter, load_pt, read_checksums, write_pt
from lt_ckpt.torchfile.safe_globals import TensorReference, TorchDtype, TorchSize, TorchTensor


class TensorLocation(NamedTuple):
    """Location of a tensor: its file, relative to the checkpoint, and its array in it."""

    file: str
    stored_array: StoredArray


@dataclass(frozen=True, kw_only=True)
class XserFile:
    """Parsed torch.save or xser file.

    Attributes:
        root: The root of the checkpoint.
        file: The file, relative to it.
        tree: Its content, with `TorchTensor`s and `TensorReference`s instead of tensors.
        info: Specs of the references by number, from the info file.
    """

    root: Path
    file: str
    tree: Any
    info: Mapping[int, TensorSpec] = field(default_factory=dict)

    @classmethod
    def open(cls, root: Path, file: str) -> Self:
        """Read a file and its info file, but not the tensors' files.

        Raises:
            CheckpointError: It is missing, damaged, or not what torch writes.
        """
        path = root / info_path(file)
        info = _read_info(path) if path.exists() else {}
        return cls(root=root, file=file, tree=load_pt(root / file), info=info)

    @property
    def is_missing_tensors(self) -> bool:
        """True if it has no files of single tensors."""
        folder = (self.root / tensor_path(self.file, 0)).parent
        return not folder.is_dir() or not any(folder.iterdir())

    def tensor_spec(self, leaf: TorchTensor | TensorReference, name: str) -> TensorSpec:
        """Return a tensor's dtype and shape, from the info file if possible."""
        if isinstance(leaf, TensorReference) and leaf.tid in self.info:
            return self.info[leaf.tid]
        return self.locate(leaf, name).stored_array.spec

    def locate(self, leaf: TorchTensor | TensorReference, name: str) -> TensorLocation:
        """Locate a tensor of the tree.

        Args:
            leaf: The leaf that represents it.
            name: Its name, for messages.

        Raises:
            CheckpointError: Its file is missing, damaged, or does not match the info file.
        """
        if isinstance(leaf, TorchTensor):
            return TensorLocation(self.file, leaf.stored_array)
        path = tensor_path(self.file, leaf.tid)
        tensor = load_pt(self.root / path)
        if not isinstance(tensor, TorchTensor):
            raise CheckpointError(f"{self.root / path}: must hold a tensor ({name}), holds a {type(tensor).__name__}")
        expected = self.info.get(leaf.tid, tensor.spec)
        if expected != tensor.spec:
            raise CheckpointError(
                f"{self.root / path}: holds {tensor.spec.dtype} {list(tensor.spec.shape)}, {info_path(self.file)} says "
                f"{expected.dtype} {list(expected.shape)} ({name}); they are from different saves"
            )
        return TensorLocation(path, tensor.stored_array)


def read_file_checksums(root: Path, file: str) -> tuple[StoredChecksum, ...]:
    """Return the checksums of a file of a checkpoint (`FindChecksums`, with the root first)."""
    return read_checksums(root / file)


def info_path(file: str) -> str:
    """Return the path of the info file of a reference file."""
    return f"{file}.info.pt"


def tensor_path(file: str, tid: int) -> str:
    """Return the path of a tensor's file."""
    return f"{file}.tensors/tensor_{tid}.pt"


def _read_info(path: Path) -> dict[int, TensorSpec]:
    tree = load_pt(path)
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: must hold a dictionary, holds a {type(tree).__name__}")
    specs: dict[int, TensorSpec] = {}
    for tid, entry in tree.items():
        dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        if type(tid) is not int or not isinstance(dtype, TorchDtype) or not isinstance(shape, TorchSize):
            raise CheckpointError(f"{path}: entry {tid!r} must have a dtype and a shape; the file is damaged")
        if entry.get("expert_model_parallel"):
            raise CheckpointError(
                f"{path}: tensor {tid} is sharded by experts; only Llama is supported, which has none"
            )
        specs[tid] = TensorSpec(dtype.code, tuple(shape))
    return specs


class XserWriter:
    """Writer of a new xser file: each tensor goes to a file of its own; `path` itself is written last.

    Args:
        path: The file of references to make; its other files are beside it.
        tensors: Key → dtype and shape, in file order.
        metadata: Text for a record of `path` that torch ignores.
        create: Creates the files.

    Attributes:
        byte_offsets: Positions in their own files of the tensors begun so far.
    """

    def __init__(
        self,
        path: Path,
        tensors: TensorSpecs,
        metadata: Mapping[str, str],
        *,
        create: CreateFile = DirectFileWriter,
    ) -> None:
        self._begin(path, dict(tensors), metadata, create)

    @classmethod
    def from_tree(
        cls, path: Path, tree: Any, metadata: Mapping[str, str] | None = None, *, create: CreateFile = DirectFileWriter
    ) -> Self:
        """Create a file of any tree with `TensorSpec`s instead of tensors, whose bytes come in order."""
        writer = cls.__new__(cls)
        writer._begin(path, tree, metadata or {}, create)
        return writer

    def _begin(self, path: Path, tree: Any, metadata: Mapping[str, str], create: CreateFile = DirectFileWriter) -> None:
        self._path, self._metadata, self._create = path, metadata, create
        self.byte_offsets: list[int] = []
        self._specs: list[TensorSpec] = []
        self._tree = self._replace_with_references(tree)
        self._writer: TorchWriter | None = None
        self._remaining = self._next = 0
        files.make_folder(Path(tensor_path(str(path), 0)).parent)
        self._begin_next()

    def _replace_with_references(self, tree: Any) -> Any:
        if isinstance(tree, TensorSpec):
            self._specs.append(tree)
            return TensorReference(len(self._specs) - 1)
        if isinstance(tree, dict):
            return {key: self._replace_with_references(value) for key, value in tree.items()}
        if type(tree) in (list, tuple):
            return type(tree)(self._replace_with_references(value) for value in tree)
        return tree

    def _begin_next(self) -> None:
        """Begin the file of the next tensor that has bytes."""
        while self._next < len(self._specs) and not self._remaining:
            spec = self._specs[self._next]
            path = Path(tensor_path(str(self._path), self._next))
            self._writer = TorchWriter.from_tree(path, spec, create=self._create)
            self.byte_offsets += self._writer.archive.byte_offsets
            self._remaining = spec.n_bytes
            self._next += 1
            if not self._remaining:
                self._close_tensor_file()

    def _close_tensor_file(self) -> None:
        """Finish the open tensor's file."""
        writer, self._writer = self._writer, None
        assert writer is not None
        writer.close()

    def append(self, data: memoryview | np.ndarray) -> None:
        """Write the next bytes, in the order of the tensors."""
        for part in split_at_records(data, lambda: self._remaining):
            assert self._writer is not None
            self._writer.append(part)
            self._remaining -= len(part)
            if not self._remaining:
                self._close_tensor_file()
                self._begin_next()

    def close(self) -> None:
        """Write the file of references, after all tensors' bytes, and flush it to the disk."""
        assert not self._remaining, f"{self._remaining} bytes of tensor {self._next - 1} are missing"
        files.fsync_folder(Path(tensor_path(str(self._path), 0)).parent)
        info = {
            tid: {"dtype": TorchDtype(spec.dtype), "shape": TorchSize(spec.shape), "expert_model_parallel": False}
            for tid, spec in enumerate(self._specs)
        }
        write_pt(info_path(str(self._path)), info, create=self._create)
        write_pt(self._path, self._tree, self._metadata, create=self._create)

    def abort(self) -> None:
        """Close the open file; what was written stays."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.abort()
            self._writer = None
