"""Files of torch.save, read and written without torch.

Such a file is a zip archive of stored records (`stored_zip.py`): `data.pkl`, a pickle that names tensors and their
storages (`safe_pickle.py`, `torch_names.py`), and one record of raw bytes per storage. Reading takes the pickle and the
headers and gives for each tensor where it lies; its bytes are read later, any part of them. Writing lays the pickle out
from dtypes and shapes alone and then takes the bytes in order (`zip_out.py`): the file is the one that torch.save would
have written, record for record, and depends on nothing but its contents.

Cost of reading: the pickle and one small read per storage; of writing: one pass. Memory: the pickle, a line per record.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from lt_ckpt import files, strict_json
from lt_ckpt.containers import Tensors, portions
from lt_ckpt.direct import NewFile
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.source import Held
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.names import NAMES, TorchTensor, node, storages, tensor_node
from lt_ckpt.torchfile.pickle_out import Call, dumps
from lt_ckpt.torchfile.safe_pickle import loads
from lt_ckpt.torchfile.stored_zip import ReadPart, StoredZip, crc32_of, read_zip
from lt_ckpt.torchfile.zip_out import Write, ZipOut

Create = Callable[[Path, int], NewFile]
"""Makes a new file of so many bytes."""

MAX_PICKLE_BYTES = 2**26
ROOT = "archive"
USUAL_KEYS = ("model", "state_dict", "model_state_dict", "module")
"""Where programs put the state dict when they save more than that."""

_METADATA = ".data/metadata.json"
_NUMPY = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8", "|u1": "U8"}
_NUMPY |= {"<u8": "U64", "<u4": "U32", "<u2": "U16", "|b1": "BOOL"}


def read_pt(path: str | os.PathLike[str], *, key: str | None = None, strict: bool = True) -> dict[str, Held]:
    """Reads the state dict of a file.

    Args:
        path: The file.
        key: Where in the file's dictionary the state dict is. None: the file is the state dict, or has it under one of
            `USUAL_KEYS`.
        strict: Refuse values in the state dict that are no tensors; False: leave them out.

    Returns:
        Name → where the tensor lies, in the order of the file.

    Raises:
        CheckpointError: The file is not what torch.save writes, is damaged, or has no such state dict.
    """
    tree = load_pt(path)
    if type(tree) is not dict:
        raise CheckpointError(f"{path}: holds a {type(tree).__name__}, not a state dict")
    if key is None and not any(type(value) is TorchTensor for value in tree.values()):
        keys = [name for name in USUAL_KEYS if type(tree.get(name)) is dict]
        if len(keys) != 1:
            found = ", ".join(repr(name) for name, value in tree.items() if type(value) is dict)
            raise CheckpointError(
                f"{path}: has no tensors at the top; name the key of the state dict (one of: {found})"
            )
        key = keys[0]
    if key is not None:
        if type(tree.get(key)) is not dict:
            raise CheckpointError(f"{path}: has no dictionary under {key!r}")
        tree = tree[key]
    held: dict[str, Held] = {}
    for name, value in tree.items():
        if type(value) is TorchTensor and type(name) is str:
            held[name] = value.held
        elif strict:
            raise CheckpointError(f"{path}: {name!r} is no tensor but a {type(value).__name__}")
    return held


def load_pt(path: str | os.PathLike[str]) -> Any:
    """Reads what a file holds, with `TorchTensor`s in place of tensors.

    Returns:
        None, numbers, texts, bytes, lists, tuples, dicts, and the values of `torch_names`.

    Raises:
        CheckpointError: The file is not what torch.save writes, is damaged, or needs code to be executed.
    """
    with OpenFile(path) as opened:
        return read_tree(opened.read, 0, opened.size, str(path))[0]


def read_tree(read: ReadPart, begin: int, end: int, where: str) -> tuple[Any, StoredZip]:
    """As `load_pt`, for a file of torch.save that lies between two positions of another one."""
    archive = _archive(read, begin, end, where)
    record = archive.records["data.pkl"]
    if record.n_bytes > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{where}: its pickle has {record.n_bytes} bytes, more than {MAX_PICKLE_BYTES}")
    data = read(record.begin, record.n_bytes)

    def find(key: str) -> tuple[int, int]:
        found = archive.records.get(f"data/{key}")
        if found is None:
            raise CheckpointError(f"its storage {key!r} is missing")
        return found.begin, found.n_bytes

    tree = loads(data, NAMES, where, persistent=storages(find))
    for name, tensor in tensors_of(tree):
        try:
            tensor.locate()
        except CheckpointError as exc:
            raise CheckpointError(f"{where}: {name}: {exc}") from None
    return tree, archive


def tensors_of(tree: Any, name: str = "") -> Iterator[tuple[str, TorchTensor]]:
    """Yields the tensors of a tree in order, each with the keys that lead to it, joined by dots."""
    if type(tree) is TorchTensor:
        yield name or "the tensor", tree
    elif type(tree) is dict:
        for key, value in tree.items():
            yield from tensors_of(value, f"{name}.{key}" if name else str(key))
    elif type(tree) in (list, tuple):
        for i, value in enumerate(tree):
            yield from tensors_of(value, f"{name}.{i}" if name else str(i))


def _archive(read: ReadPart, begin: int, end: int, where: str) -> StoredZip:
    magic = read(begin, min(8, end - begin))
    if magic[:2] != b"PK":
        if magic[:1] == b"\x80":
            raise CheckpointError(
                f"{where}: a bare pickle, as torch wrote before version 1.6; load it with torch.load(path, "
                "weights_only=True) and save it again with torch.save"
            )
        raise CheckpointError(f"{where}: is no file of torch.save (it begins with {magic!r})")
    archive = read_zip(read, begin, end, where)
    if "data.pkl" not in archive.records or "constants.pkl" in archive.records:
        raise CheckpointError(
            f"{where}: is not from torch.save (a TorchScript or other archive); save its state_dict()"
        )
    order = archive.records.get("byteorder")
    if order is not None and read(order.begin, min(order.n_bytes, 16)) != b"little":
        raise CheckpointError(f"{where}: its numbers are not little-endian; save it again on such a machine")
    return archive


class OpenFile:
    """A file, open for reading; a context."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        with storage("reading", path):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self._descriptor).st_size

    def read(self, position: int, n: int) -> bytes:
        """Returns n bytes at a position; a `CheckpointError` when the file ends before."""
        buffer = bytearray(n)
        with storage("reading", self._path):
            files.read_exactly(self._descriptor, position, memoryview(buffer), self._path)
        return bytes(buffer)

    def __enter__(self) -> "OpenFile":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with suppress(OSError):  # it was only read
            os.close(self._descriptor)


def check_crc(path: str | os.PathLike[str], *, progress: files.Progress | None = None) -> None:
    """Reads all of a file and compares its records with their checksums, which torch.load does not do.

    Raises:
        CheckpointError: A record differs, or the file cannot be read.
    """
    with OpenFile(path) as opened:
        check_records(opened.read, 0, opened.size, str(path), progress or (lambda done, total, unit: None))


def check_records(read: ReadPart, begin: int, end: int, where: str, progress: files.Progress) -> None:
    """As `check_crc`, for a file of torch.save that lies between two positions of another one."""
    archive = read_zip(read, begin, end, where)
    done, total = 0, sum(record.n_bytes for record in archive.records.values())
    for name, record in archive.records.items():
        if crc32_of(read, record, files.BLOCK_BYTES) != record.crc32:
            raise CheckpointError(f"{where}: the bytes of record {name!r} differ from their checksum; it is damaged")
        done += record.n_bytes
        progress(done, total, "bytes")


def metadata_of(path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the text fields that a file of ours carries; none where torch wrote it."""
    with OpenFile(path) as opened:
        record = read_zip(opened.read, 0, opened.size, str(path)).records.get(_METADATA)
        if record is None:
            return {}
        raw = opened.read(record.begin, min(record.n_bytes, MAX_PICKLE_BYTES))
    return {name: str(value) for name, value in strict_json.loads(raw, str(path)).items()}


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written: what it is, and a function that gives its bytes in blocks, called when its turn comes."""

    spec: TensorSpec
    blocks: Callable[[], Iterable[np.ndarray]]


class TorchRecords:
    """The archive of one torch.save, written to any place that takes bytes.

    Args:
        write: Takes the archive's bytes.
        tree: What to save: plain values, those of `torch_names`, and for tensors a `TensorSpec`, a `NewTensor` or an
            array. Their bytes must come (`append`) in the order of the tree.
        metadata: Text to keep in a record that torch does not look at.

    Attributes:
        tensors: What stands for tensors in the tree, in order.
        begins: Where in the archive the bytes of those begin whose turn has come.
    """

    def __init__(self, write: Write, tree: Any, metadata: Mapping[str, str]) -> None:
        self.tensors: list[Any] = []
        self._specs: list[TensorSpec] = []
        pickled = dumps(node(tree, self._tensor))
        self.begins: list[int] = []
        self._zip = ZipOut(write, ROOT)
        self._metadata = dict(metadata)
        self._next = 0
        self._zip.record("data.pkl", pickled)
        for name, text in ((".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")):
            self._zip.record(name, text)
        self._begin_next()

    def _tensor(self, value: Any) -> Call:
        self.tensors.append(value)
        self._specs.append(_spec_of(value))
        return tensor_node(str(len(self._specs) - 1), self._specs[-1])

    def _begin_next(self) -> None:
        """Begins the record of the next tensor that has bytes."""
        while self._next < len(self._specs):
            n_bytes = self._specs[self._next].n_bytes
            self._zip.begin(f"data/{self._next}", n_bytes)
            self.begins.append(self._zip.position)
            self._next += 1
            if n_bytes:
                return
            self._zip.end()

    def append(self, data: memoryview | np.ndarray) -> None:
        """Takes the next bytes of the tensors."""
        for part in portions(data, lambda: self._zip.left):
            self._zip.append(part)
            if not self._zip.left:
                self._zip.end()
                self._begin_next()

    @staticmethod
    def n_bytes(tree: Any, metadata: Mapping[str, str]) -> int:
        """Returns the bytes of the archive that these make."""
        records = TorchRecords(lambda data: None, tree, metadata)
        while records._zip.left:
            records._zip.skip()
            records._zip.end()
            records._begin_next()
        records.finish()
        return records._zip.position

    def finish(self) -> None:
        """Writes what follows the tensors; all their bytes must have come."""
        assert not self._zip.left, f"{self._zip.left} bytes of tensor {self._next - 1} have not come"
        if self._metadata:
            self._zip.record(_METADATA, strict_json.dumps(self._metadata, "metadata"))
        self._zip.record("version", b"3\n")
        self._zip.record(".data/serialization_id", self._zip.checksum().encode())
        self._zip.finish()


def _spec_of(value: Any) -> TensorSpec:
    if isinstance(value, TensorSpec):
        return value
    if isinstance(value, NewTensor):
        return value.spec
    if isinstance(value, np.ndarray) and value.dtype.str in _NUMPY:
        return TensorSpec(_NUMPY[value.dtype.str], value.shape)
    raise TypeError(f"a {type(value).__name__} cannot be written into a file of torch")


class TorchWriter:
    """A new file of torch.save, as a container: an OrderedDict of contiguous tensors.

    Args:
        path: The file to make.
        tensors: Key → dtype and shape, in file order.
        metadata: Text to keep in a record that torch does not look at.
    """

    def __init__(self, path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
        self._begin(path, OrderedDict(tensors), metadata)

    @classmethod
    def of_tree(
        cls, path: Path, tree: Any, metadata: Mapping[str, str] | None = None, *, create: Create = NewFile
    ) -> Self:
        """Makes a file of any tree (see `TorchRecords`), whose tensors' bytes will come in order."""
        made = cls.__new__(cls)
        made._begin(path, tree, metadata or {}, create)
        return made

    def _begin(self, path: Path, tree: Any, metadata: Mapping[str, str], create: Create = NewFile) -> None:
        n_bytes = TorchRecords.n_bytes(tree, metadata)
        self._file = create(path, n_bytes)
        try:
            self.records = TorchRecords(self._file.write, tree, metadata)
        except BaseException:
            self.abandon()
            raise

    def append(self, data: memoryview | np.ndarray) -> None:
        """Take the next bytes."""
        self.records.append(data)

    def close(self) -> None:
        """Finish the file and put it on the disk."""
        try:
            self.records.finish()
            self._file.sync()
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Let go of the file."""
        with suppress(OSError):
            self._file.close()


def write_pt(
    path: str | os.PathLike[str],
    tree: Any,
    metadata: Mapping[str, str] | None = None,
    *,
    create: Create = NewFile,
) -> None:
    """Writes a new file of torch.save and puts it on the disk.

    Args:
        path: The file to make.
        tree: Lists, tuples, dicts and OrderedDicts of None, numbers, texts, bytes, the values of `torch_names`, arrays,
            and `NewTensor`s.
        metadata: Text to keep in a record that torch does not look at.
        create: Makes the file, of so many bytes.

    Raises:
        CheckpointError: The file is there already, or the disk fails.
    """
    with storage("writing", path):
        writer = TorchWriter.of_tree(Path(path), tree, metadata, create=create)
        try:
            for tensor in writer.records.tensors:
                for block in tensor.blocks() if isinstance(tensor, NewTensor) else [tensor]:
                    writer.append(np.ascontiguousarray(block))
        except BaseException:
            writer.abandon()
            raise
        writer.close()
