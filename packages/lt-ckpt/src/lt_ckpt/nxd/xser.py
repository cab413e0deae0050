"""torch_xla's xser files, read and written without torch_xla: every tensor in a file of its own.

`F` is a torch.save file in which each tensor is replaced by a numbered reference; tensor N is in
`F.tensors/tensor_N.pt`, numbers being the order in `F`; `F.info.pt` has each number's dtype and shape (older versions
wrote none). A tensor in `F` itself is read from there: NxD's converter calls such files xser too.

Cost: the headers of all files (`torchfile/tensor_files.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError
from lt_ckpt.laid_out_files import Place
from lt_ckpt.tensorfile import StoredArray, TensorSpec
from lt_ckpt.torchfile.file import CODES, DTYPES, Size, TensorReference, load_pt, map_tree, write_pt
from lt_ckpt.torchfile.tensor_files import TensorFiles

Leaf = StoredArray | TensorReference
"""Tensor in the tree of a file."""


@dataclass(frozen=True, kw_only=True)
class XserFile:
    """Parsed torch.save or xser file.

    Attributes:
        root: The root of the checkpoint.
        file: The file, relative to it.
        tree: Its content, with `StoredArray`s and `TensorReference`s instead of tensors.
        info: Specs of the references by number, from the info file.
        tensor_files: Reader of the tensors' files, shared by the files of a checkpoint.
    """

    root: Path
    file: str
    tree: Any
    info: Mapping[int, TensorSpec]
    tensor_files: TensorFiles

    @classmethod
    def open(cls, root: Path, file: str, tensor_files: TensorFiles) -> Self:
        """Read a file and its info file, but not the tensors' files.

        Raises:
            CheckpointError: It is missing, damaged, or not what torch writes.
        """
        path = root / info_path(file)
        info = _read_info(path) if path.exists() else {}
        tree = load_pt(root / file)
        return cls(root=root, file=file, tree=tree, info=info, tensor_files=tensor_files)

    @property
    def is_missing_tensors(self) -> bool:
        """True if it has no files of single tensors."""
        folder = (self.root / tensor_path(self.file, 0)).parent
        return not folder.is_dir() or not any(folder.iterdir())

    def tensor_spec(self, leaf: Leaf, name: str) -> TensorSpec:
        """Return a tensor's dtype and shape, from the info file if possible."""
        if isinstance(leaf, TensorReference) and leaf.tid in self.info:
            return self.info[leaf.tid]
        return self.locate(leaf, name)[1].spec

    def locate(self, leaf: Leaf, name: str) -> tuple[str, StoredArray]:
        """Locate a tensor of the tree.

        Args:
            leaf: The leaf that represents it.
            name: Its name, for messages.

        Returns:
            Its file, relative to the checkpoint, and its array in it.

        Raises:
            CheckpointError: Its file is missing, damaged, or does not match the info file.
        """
        if isinstance(leaf, StoredArray):
            return self.file, leaf
        if type(leaf.tid) is not int or leaf.tid < 0:
            raise CheckpointError(f"{self.root / self.file}: {name} refers to {leaf.tid!r}, not to a tensor's number")
        path = tensor_path(self.file, leaf.tid)
        array = self.tensor_files.locate(self.root / path, name)
        expected = self.info.get(leaf.tid, array.spec)
        if expected != array.spec:
            raise CheckpointError(
                f"{self.root / path}: holds {array.spec.dtype} {list(array.spec.shape)}, {info_path(self.file)} says "
                f"{expected.dtype} {list(expected.shape)} ({name}); they are from different saves"
            )
        return path, array


def info_path(file: str) -> str:
    """Return the path of the info file of a reference file."""
    return f"{file}.info.pt"


def tensor_path(file: str, tid: int) -> str:
    """Return the path of a tensor's file."""
    return f"{file}.tensors/tensor_{tid}.pt"


def _read_info(path: Path) -> dict[int, TensorSpec]:
    tree = load_pt(path)
    specs: dict[int, TensorSpec] = {}
    for tid, entry in (tree if isinstance(tree, dict) else {None: None}).items():
        fields = entry if isinstance(entry, dict) else {}
        dtype, shape = fields.get("dtype"), fields.get("shape")
        if type(tid) is not int or dtype not in CODES or not isinstance(shape, tuple):
            raise CheckpointError(f"{path}: entry {tid!r} must have a dtype and a shape; the file is damaged")
        specs[tid] = TensorSpec(CODES[dtype], tuple(shape))
    return specs


def lay_out(path: Path, tree: Any, *, xser: bool, tensor_files: TensorFiles) -> Any:
    """Write the file of a tree with `TensorSpec`s instead of tensors, with room for their bytes.

    Args:
        path: The file; with `xser` the tensors go to files of their own.
        tree: The tree.
        xser: Every tensor in a file of its own.
        tensor_files: Writer of those, shared by the files of a checkpoint.

    Returns:
        The tree with a `Place` instead of each tensor.
    """
    files.make_folders(path.parent)
    if not xser:
        write_pt(path, tree)
        return map_tree(load_pt(path), StoredArray, lambda array: (path, array.byte_offset))
    specs: list[TensorSpec] = []
    places: dict[int, Place] = {}
    folder = Path(tensor_path(str(path), 0)).parent
    files.make_folder(folder)

    def refer(spec: TensorSpec) -> TensorReference:
        specs.append(spec)
        return TensorReference(len(specs) - 1)

    references = map_tree(tree, TensorSpec, refer)
    for tid, spec in enumerate(specs):
        places[tid] = tensor_files.lay_out(Path(tensor_path(str(path), tid)), spec)
    info = {
        tid: {"dtype": DTYPES[spec.dtype], "shape": Size(spec.shape), "expert_model_parallel": False}
        for tid, spec in enumerate(specs)
    }
    write_pt(info_path(str(path)), info)
    write_pt(path, references)
    return map_tree(references, TensorReference, lambda reference: places[reference.tid])
