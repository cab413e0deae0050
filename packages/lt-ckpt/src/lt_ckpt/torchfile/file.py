"""Files of torch.save, read and written without torch.

Such a file is a zip archive of stored records (`stored_zip.py`): `data.pkl`, a pickle that refers to tensors and their
storages (`safe_pickle.py`, `safe_globals.py`), and one record of raw bytes per storage. Reading parses the pickle,
after a comparison with its CRC, and the headers, and returns the location of each tensor; its bytes are read later, any
part of them; `read_checksums` returns the CRCs to compare them with. Writing lays out the
pickle from dtypes and shapes alone and then takes the bytes in order (`zip_writer.py`): the file equals that of
torch.save, record for record, and depends on nothing but its contents.

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
from lt_ckpt.direct_io import CreateFile, DirectFileWriter
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.read_verification import StoredChecksum
from lt_ckpt.source import StoredArray
from lt_ckpt.tensor_writers import TensorSpecs, split_at_records
from lt_ckpt.tensorfile import TensorSpec
from lt_ckpt.torchfile.crc import crc32
from lt_ckpt.torchfile.pickle_writer import Call, dumps
from lt_ckpt.torchfile.safe_globals import (
    TORCH_SAFE_GLOBALS,
    TorchTensor,
    make_persistent_load,
    make_tensor_node,
    to_pickle_node,
)
from lt_ckpt.torchfile.safe_pickle import loads
from lt_ckpt.torchfile.stored_zip import ReadBytesAt, StoredZip, read_zip
from lt_ckpt.torchfile.zip_writer import StoredZipWriter, WriteBytes

MAX_PICKLE_BYTES = 2**26
MAX_SHOWN_NAME = 200
ARCHIVE_ROOT = "archive"
STATE_DICT_KEYS = ("model", "state_dict", "model_state_dict", "module")
"""Usual keys of the state dict in files that hold more than it."""

EXTRA_FOLDER = "extra"
"""Folder of an archive for files that are not the pickle's; torch's own name for it."""
MAX_EXTRA_BYTES = 2**28
_METADATA_RECORD = ".data/metadata.json"
_NUMPY_DTYPES = {
    "<f8": "F64",
    "<f4": "F32",
    "<f2": "F16",
    "<i8": "I64",
    "<i4": "I32",
    "<i2": "I16",
    "|i1": "I8",
    "|u1": "U8",
}
_NUMPY_DTYPES |= {"<u8": "U64", "<u4": "U32", "<u2": "U16", "|b1": "BOOL"}


def read_state_dict(
    path: str | os.PathLike[str], *, key: str | None = None, strict: bool = True
) -> dict[str, StoredArray]:
    """Read the state dict of a file.

    Args:
        path: The file.
        key: Key of the state dict in the file's dictionary. None: the file is the state dict, or has it under one of
            `STATE_DICT_KEYS`.
        strict: Refuse non-tensors in the state dict; False: leave them out.

    Returns:
        Name → location of the tensor, in the order of the file.

    Raises:
        CheckpointError: Not a torch.save file, damaged, or without such a state dict.
    """
    tree = load_pt(path)
    if type(tree) is not dict:
        raise CheckpointError(f"{path}: holds a {type(tree).__name__}, not a state dict")
    if key is None and not any(type(value) is TorchTensor for value in tree.values()):
        keys = [name for name in STATE_DICT_KEYS if type(tree.get(name)) is dict]
        if len(keys) != 1:
            found = ", ".join(repr(name) for name, value in tree.items() if type(value) is dict)
            usual = ", ".join(repr(name) for name in STATE_DICT_KEYS)
            raise CheckpointError(
                f"{path}: holds no state dict: there are no tensors at the top, and "
                + (f"several of {usual}" if keys else f"none of {usual}")
                + (f" (its dictionaries: {found})" if found else " (it has no dictionary)")
                + "; save the state dict alone with torch.save"
            )
        key = keys[0]
    if key is not None:
        if type(tree.get(key)) is not dict:
            raise CheckpointError(f"{path}: has no dictionary under {key!r}")
        tree = tree[key]
    arrays: dict[str, StoredArray] = {}
    for name, value in tree.items():
        if type(value) is TorchTensor and type(name) is str:
            arrays[name] = value.stored_array
        elif strict:
            raise CheckpointError(f"{path}: {name!r} is not a tensor but a {type(value).__name__}")
    return arrays


def load_pt(path: str | os.PathLike[str]) -> Any:
    """Read the content of a file, with `TorchTensor`s instead of tensors.

    Returns:
        None, numbers, strings, bytes, lists, tuples, dicts, and the values of `safe_globals`.

    Raises:
        CheckpointError: Not a torch.save file, damaged, or in need of executing code.
    """
    with OpenFile(path) as opened:
        return load_pt_range(opened.read, 0, opened.size, str(path))[0]


def load_pt_range(read: ReadBytesAt, begin: int, end: int, where: str) -> tuple[Any, StoredZip]:
    """Read a torch.save file that lies between two positions of another file."""
    archive = _read_archive(read, begin, end, where)
    record = archive.records["data.pkl"]
    if record.n_bytes > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{where}: its pickle has {record.n_bytes} bytes, more than {MAX_PICKLE_BYTES}")
    data = read(record.byte_offset, record.n_bytes)
    if archive.has_checksums and crc32(data, 0) != record.crc32:
        raise CheckpointError(f"{where}: the bytes of record 'data.pkl' differ from their checksum; it is damaged")

    def find(key: str) -> tuple[int, int]:
        found = archive.records.get(f"data/{key}")
        if found is None:
            raise CheckpointError(f"its storage {key!r} is missing")
        return found.byte_offset, found.n_bytes

    tree = loads(data, TORCH_SAFE_GLOBALS, where, persistent_load=make_persistent_load(find))
    for keys, tensor in iter_tensors(tree):
        try:
            tensor.locate()
        except CheckpointError as exc:
            name = ".".join(map(str, keys))
            shown = name if len(name) <= MAX_SHOWN_NAME else name[:MAX_SHOWN_NAME] + "..."
            raise CheckpointError(f"{where}: {shown or 'the tensor'}: {exc}") from None
    return tree, archive


def iter_tensors(tree: Any, keys: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], TorchTensor]]:
    """Yield the tensors of a tree in order, each with the keys to it.

    They are not joined: a long key would be copied for each tensor.
    """
    if type(tree) is TorchTensor:
        yield keys, tree
    elif type(tree) is dict:
        for key, value in tree.items():
            yield from iter_tensors(value, (*keys, key))
    elif type(tree) in (list, tuple):
        for i, value in enumerate(tree):
            yield from iter_tensors(value, (*keys, i))


def _read_archive(read: ReadBytesAt, begin: int, end: int, where: str) -> StoredZip:
    magic = read(begin, min(8, end - begin))
    if magic[:2] != b"PK":
        if magic[:1] == b"\x80":
            raise CheckpointError(
                f"{where}: a bare pickle, as torch wrote before version 1.6; load it with torch.load(path, "
                "weights_only=True) and save it again with torch.save"
            )
        raise CheckpointError(f"{where}: is not a torch.save file (it begins with {magic!r})")
    archive = read_zip(read, begin, end, where)
    if "data.pkl" not in archive.records or "constants.pkl" in archive.records:
        raise CheckpointError(
            f"{where}: is not from torch.save (a TorchScript or other archive); save its state_dict()"
        )
    order = archive.records.get("byteorder")
    if order is not None and read(order.byte_offset, min(order.n_bytes, 16)) != b"little":
        raise CheckpointError(f"{where}: its numbers are not little-endian; save it again on such a machine")
    return archive


class OpenFile:
    """File open for reading; a context manager."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        with translate_os_errors("reading", path):
            self._descriptor = files.open_for_reading(path)
            self.size = os.fstat(self._descriptor).st_size

    def read(self, position: int, n: int) -> bytes:
        """Return n bytes at a position; raise a CheckpointError if the file ends before."""
        buffer = bytearray(n)
        with translate_os_errors("reading", self._path):
            files.read_exactly(self._descriptor, position, memoryview(buffer), self._path)
        return bytes(buffer)

    def __enter__(self) -> "OpenFile":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with suppress(OSError):  # opened for reading only
            os.close(self._descriptor)


def read_checksums(path: str | os.PathLike[str]) -> tuple[StoredChecksum, ...]:
    """Return the checksums of a file's records; none if its writer left them out."""
    with OpenFile(path) as opened:
        return read_checksums_range(opened.read, 0, opened.size, str(path))


def read_checksums_range(
    read: ReadBytesAt, begin: int, end: int, where: str, name: str = ""
) -> tuple[StoredChecksum, ...]:
    """Return the checksums of a torch.save file between two positions of another, under a name."""
    archive = read_zip(read, begin, end, where)
    return tuple(
        StoredChecksum(
            byte_offset=record.byte_offset,
            n_bytes=record.n_bytes,
            name=f"{name}: record {key!r}" if name else f"record {key!r}",
            expected=record.crc32,
        )
        for key, record in (archive.records.items() if archive.has_checksums else ())
    )


def read_custom_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the text fields in a file written here; none if torch wrote it."""
    with OpenFile(path) as opened:
        record = read_zip(opened.read, 0, opened.size, str(path)).records.get(_METADATA_RECORD)
        if record is None:
            return {}
        raw = opened.read(record.byte_offset, min(record.n_bytes, MAX_PICKLE_BYTES))
    return {name: str(value) for name, value in strict_json.loads(raw, str(path)).items()}


def read_extra_files(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the files in the archive's folder `extra`, by name; none if a program without any wrote it.

    Raises:
        CheckpointError: A file is larger than `MAX_EXTRA_BYTES`, or differs from its checksum.
    """
    found: dict[str, bytes] = {}
    with OpenFile(path) as opened:
        archive = _read_archive(opened.read, 0, opened.size, str(path))
        for name, record in archive.records.items():
            folder, _, file = name.partition("/")
            if folder != EXTRA_FOLDER:
                continue
            if record.n_bytes > MAX_EXTRA_BYTES:
                raise CheckpointError(f"{path}: {name} has {record.n_bytes} bytes, more than {MAX_EXTRA_BYTES}")
            data = opened.read(record.byte_offset, record.n_bytes)
            if archive.has_checksums and crc32(data, 0) != record.crc32:
                raise CheckpointError(f"{path}: the bytes of {name} differ from their checksum; it is damaged")
            found[file] = data
    return found


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """Tensor to write: its spec, and a function that returns its bytes in blocks, called in turn."""

    spec: TensorSpec
    blocks: Callable[[], Iterable[np.ndarray]]


class TorchArchiveWriter:
    """Writer of one torch.save archive to any byte sink.

    Args:
        write: Writes the archive's bytes.
        tree: What to save: plain values, those of `safe_globals`, and for tensors a `TensorSpec`, a `StreamedTensor` or
            an array. Their bytes must be appended in the order of the tree.
        metadata: Text for a record that torch ignores.
        extra_files: Files for the folder `extra`, which torch ignores, by name.

    Attributes:
        tensors: The leaves that represent tensors in the tree, in order.
        byte_offsets: Positions in the archive of the tensors begun so far.
    """

    def __init__(
        self, write: WriteBytes, tree: Any, metadata: Mapping[str, str], extra_files: Mapping[str, bytes] | None = None
    ) -> None:
        self.tensors: list[Any] = []
        self._specs: list[TensorSpec] = []
        pickled = dumps(to_pickle_node(tree, self._add_tensor))
        self.byte_offsets: list[int] = []
        self._zip = StoredZipWriter(write, ARCHIVE_ROOT)
        self._metadata = dict(metadata)
        self._extra_files = dict(extra_files or {})
        self._next = 0
        self._zip.write_record("data.pkl", pickled)
        for name, text in ((".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")):
            self._zip.write_record(name, text)
        self._begin_next()

    def _add_tensor(self, value: Any) -> Call:
        self.tensors.append(value)
        self._specs.append(_tensor_spec(value))
        return make_tensor_node(str(len(self._specs) - 1), self._specs[-1])

    def _begin_next(self) -> None:
        """Begin the record of the next tensor that has bytes."""
        while self._next < len(self._specs):
            n_bytes = self._specs[self._next].n_bytes
            self._zip.begin_record(f"data/{self._next}", n_bytes)
            self.byte_offsets.append(self._zip.position)
            self._next += 1
            if n_bytes:
                return
            self._zip.end_record()

    def append(self, data: memoryview | np.ndarray) -> None:
        """Write the next bytes of the tensors."""
        for part in split_at_records(data, lambda: self._zip.remaining):
            self._zip.append(part)
            if not self._zip.remaining:
                self._zip.end_record()
                self._begin_next()

    @staticmethod
    def count_bytes(tree: Any, metadata: Mapping[str, str], extra_files: Mapping[str, bytes] | None = None) -> int:
        """Return the size of the archive."""
        archive = TorchArchiveWriter(lambda data: None, tree, metadata, extra_files)
        while archive._zip.remaining:
            archive._zip.skip_record()
            archive._zip.end_record()
            archive._begin_next()
        archive.finish()
        return archive._zip.position

    def finish(self) -> None:
        """Write the records after the tensors; all their bytes must have been written."""
        assert not self._zip.remaining, f"{self._zip.remaining} bytes of tensor {self._next - 1} are missing"
        if self._metadata:
            self._zip.write_record(_METADATA_RECORD, strict_json.dumps(self._metadata, "metadata"))
        for name, data in self._extra_files.items():
            self._zip.write_record(f"{EXTRA_FOLDER}/{name}", data)
        self._zip.write_record("version", b"3\n")
        self._zip.write_record(".data/serialization_id", self._zip.serialization_id().encode())
        self._zip.finish()


def _tensor_spec(value: Any) -> TensorSpec:
    if isinstance(value, TensorSpec):
        return value
    if isinstance(value, StreamedTensor):
        return value.spec
    if isinstance(value, np.ndarray) and value.dtype.str in _NUMPY_DTYPES:
        return TensorSpec(_NUMPY_DTYPES[value.dtype.str], value.shape)
    raise TypeError(f"a {type(value).__name__} cannot be written into a torch.save file")


class TorchWriter:
    """Writer of a new torch.save file, as a tensor file writer: an OrderedDict of contiguous tensors.

    Args:
        path: The file to make.
        tensors: Key → dtype and shape, in file order.
        metadata: Text for a record that torch ignores.
        create: Creates the file.
        extra_files: Files for the folder `extra`, which torch ignores, by name.
    """

    def __init__(
        self,
        path: Path,
        tensors: TensorSpecs,
        metadata: Mapping[str, str],
        *,
        create: CreateFile = DirectFileWriter,
        extra_files: Mapping[str, bytes] | None = None,
    ) -> None:
        self._begin(path, OrderedDict(tensors), metadata, create, extra_files)

    @classmethod
    def from_tree(
        cls, path: Path, tree: Any, metadata: Mapping[str, str] | None = None, *, create: CreateFile = DirectFileWriter
    ) -> Self:
        """Create a file of any tree (see `TorchArchiveWriter`); its tensors' bytes come in order."""
        writer = cls.__new__(cls)
        writer._begin(path, tree, metadata or {}, create)
        return writer

    def _begin(
        self,
        path: Path,
        tree: Any,
        metadata: Mapping[str, str],
        create: CreateFile = DirectFileWriter,
        extra_files: Mapping[str, bytes] | None = None,
    ) -> None:
        n_bytes = TorchArchiveWriter.count_bytes(tree, metadata, extra_files)
        self._file = create(path, n_bytes)
        try:
            self.archive = TorchArchiveWriter(self._file.write, tree, metadata, extra_files)
        except BaseException:
            self.abort()
            raise

    def append(self, data: memoryview | np.ndarray) -> None:
        """Write the next bytes."""
        self.archive.append(data)

    def close(self) -> None:
        """Finish the file and flush it to the disk."""
        try:
            self.archive.finish()
            self._file.sync()
        finally:
            self._file.close()

    def abort(self) -> None:
        """Close the unfinished file."""
        with suppress(OSError):
            self._file.close()


def write_pt(
    path: str | os.PathLike[str],
    tree: Any,
    metadata: Mapping[str, str] | None = None,
    *,
    create: CreateFile = DirectFileWriter,
) -> None:
    """Write a new torch.save file and flush it to the disk.

    Args:
        path: The file to make.
        tree: Lists, tuples, dicts and OrderedDicts of None, numbers, strings, bytes, the values of `safe_globals`,
            arrays, and `StreamedTensor`s.
        metadata: Text for a record that torch ignores.
        create: Creates the file, given its size.

    Raises:
        CheckpointError: The file already exists, or the disk fails.
    """
    with translate_os_errors("writing", path):
        writer = TorchWriter.from_tree(Path(path), tree, metadata, create=create)
        try:
            for tensor in writer.archive.tensors:
                for block in tensor.blocks() if isinstance(tensor, StreamedTensor) else [tensor]:
                    writer.append(np.ascontiguousarray(block))
        except BaseException:
            writer.abort()
            raise
        writer.close()
