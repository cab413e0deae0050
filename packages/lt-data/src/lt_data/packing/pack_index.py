"""Pack in memory or mapped from its files: rows as slices of documents.

Documents are packed in groups of 2^24, each by itself and in memory, and the rows of the groups follow one another; so
a pack of any size takes the memory of one group, and its content depends on the documents alone. A group has a few rows
that are not full, of the tens of thousands that it has (docs/benchmarks/data.md).

    pack.json                       the header: the fields of `PackHeader`
    NAME.npy for each of `ARRAYS`   as `np.save` writes it; mapped, not read, when the pack is opened

How many positions of a slice have a label follows from the other arrays (`PackIndex.labels`). The fingerprint is a hash
of format, mode, row length and the store's fingerprint, then of the name, the dtype and the SHA-256 of each array.

Cost: 24 bytes per slice on disk; one pass of the algorithm and about 72 bytes of memory per document of a group.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.packing.algorithms import fill_best_fit, fill_concat
from lt_data.storage import (
    atomic_folder,
    create_file,
    fsync,
    open_regular,
    read_file,
    translate_os_errors,
    write,
    write_file,
)

PackMode = Literal["bfd", "concat"]
PACK_FILE = "pack.json"
FORMAT, VERSION = "lt-data-pack", 2
GROUP_DOCUMENTS = 2**24
"""Documents that are packed together; 1.2 GB of memory."""
ARRAYS = {"row_offsets": "<i8", "document": "<u4", "start": "<i8", "length": "<i4", "valid": "<i4"}
"""Dtype of each array; `document` is `<i8` in a store of more than 2^32 documents."""
_MAX_HEADER_BYTES = 2**16
_HEADER_BYTES = 128


class Lengths(Protocol):
    """Tokens of each document; an array, or what reads a range of them."""

    @property
    def size(self) -> int:
        """Number of documents."""
        ...

    def __getitem__(self, documents: slice, /) -> np.ndarray:
        """Return the lengths of a range (integers [n], all positive)."""
        ...


@dataclass(frozen=True, kw_only=True)
class PackHeader:
    """Fields of `pack.json`."""

    format: str = FORMAT
    version: int = VERSION
    seq_len: int
    mode: PackMode
    rows: int
    slices: int
    max_slices_per_row: int
    store_fingerprint: str
    fingerprint: str

    def __post_init__(self) -> None:
        if (self.format, self.version) != (FORMAT, VERSION):
            raise DataError(f"format {self.format!r}, version {self.version}: this lt-data reads {FORMAT} {VERSION}")
        if self.seq_len < 1 or min(self.rows, self.slices, self.max_slices_per_row) < 0:
            raise DataError(f"seq_len = {self.seq_len}, {self.rows} rows, {self.slices} slices: not counts")


@dataclass(frozen=True, kw_only=True, eq=False)
class PackIndex:
    """Pack: rows as slices of documents. Row r has the slices row_offsets[r] to row_offsets[r + 1].

        >>> index = rows.pack
        >>> index.n_rows == len(rows), int(index.length[: index.row_offsets[1]].sum()) <= index.seq_len
        (True, True)

    Attributes:
        seq_len: tokens in a row.
        mode: packing mode.
        store_fingerprint: fingerprint of the token store that the offsets refer to.
        fingerprint: SHA-256 of the whole pack.
        row_offsets: int64 [n_rows + 1].
        document: index of the slice's document (uint32, or int64 for a store of 2^32 documents) [n_slices].
        start: token offset of the slice in the store (int64) [n_slices].
        length: tokens in the slice (int32) [n_slices].
        valid: positions of the row that have a label (int32) [n_rows].
        max_slices_per_row: maximum over the rows, a bound for the fixed shapes that compilers need.
        folder: folder that it was opened from.
    """

    seq_len: int
    mode: PackMode
    store_fingerprint: str
    fingerprint: str
    row_offsets: np.ndarray = field(repr=False)
    document: np.ndarray = field(repr=False)
    start: np.ndarray = field(repr=False)
    length: np.ndarray = field(repr=False)
    valid: np.ndarray = field(repr=False)
    max_slices_per_row: int
    folder: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the files itself: pickling a map would copy it.
        return (_rebuild, (dict(self.__dict__),)) if self.folder is None else (PackIndex.load, (self.folder,))

    @property
    def n_rows(self) -> int:
        """Rows in the pack."""
        return self.valid.size

    @property
    def n_positions(self) -> int:
        """Positions in all rows, padding included."""
        return self.seq_len * self.n_rows

    def labels(self, slices: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return how many positions of some slices have a label: all, or all but the last (int64).

        In a `concat` pack only the last token of the store has none. In a `bfd` pack the last token of a document has
        none: a slice shorter than a row ends its document, and one that fills a row is alone in it.

        Args:
            slices: indices of the slices.
            rows: row of each.
        """
        length = self.length[slices].astype(np.int64)
        if self.mode == "concat":
            return length - (slices == self.length.size - 1)
        return np.where(length == self.seq_len, self.valid[rows], length - 1)

    @classmethod
    def load(cls, folder: str | Path) -> "PackIndex":
        """Open a pack; its arrays are mapped, not read.

        Raises:
            DataError: no pack, another version, or files that do not match.
        """
        folder = Path(folder)
        header = read_header(folder)
        items = _array_items(header.rows, header.slices)
        return cls(
            seq_len=header.seq_len,
            mode=header.mode,
            max_slices_per_row=header.max_slices_per_row,
            store_fingerprint=header.store_fingerprint,
            fingerprint=header.fingerprint,
            folder=folder,
            **{name: _map_array(folder / f"{name}.npy", name, items[name]) for name in ARRAYS},
        )

    def verify(self) -> None:
        """Recompute fingerprint and largest row from the arrays.

        Raises:
            DataError: one of them differs.
        """
        digests = {name: hashlib.sha256() for name in ARRAYS}
        arrays: dict[str, np.ndarray] = {name: getattr(self, name) for name in ARRAYS}
        for name, array in arrays.items():
            digests[name].update(array.data)
        found = _fingerprint(self.seq_len, self.mode, self.store_fingerprint, arrays["document"].dtype, digests)
        if found != self.fingerprint or _max_slices(self.row_offsets) != self.max_slices_per_row:
            raise DataError(f"pack {self.mode}-{self.seq_len}: its arrays do not match its header; make it again")


def read_header(folder: Path) -> PackHeader:
    """Return the header of a pack.

    Raises:
        DataError: a file system error, no pack, another version, or fields of other types.
    """
    path = folder / PACK_FILE
    with translate_os_errors("read the pack's", path):
        content = read_file(path, max_bytes=_MAX_HEADER_BYTES)
    remedy = "make the pack again"
    return strict_json.parse(PackHeader, strict_json.load_object(content, str(path), remedy), str(path), remedy)


def build_index(
    lengths: np.ndarray,
    *,
    seq_len: int,
    mode: PackMode,
    store_fingerprint: str = "",
    documents_per_group: int = GROUP_DOCUMENTS,
) -> PackIndex:
    """Compute a pack in memory from the lengths of the documents (integers [n], all positive)."""
    groups = [*_iter_groups(lengths, seq_len, mode, documents_per_group)]
    arrays: dict[str, Any] = {name: np.concatenate([group[name] for group in groups]) for name in ARRAYS}
    digests = {name: hashlib.sha256(array.data) for name, array in arrays.items()}
    return PackIndex(
        seq_len=seq_len,
        mode=mode,
        store_fingerprint=store_fingerprint,
        fingerprint=_fingerprint(seq_len, mode, store_fingerprint, arrays["document"].dtype, digests),
        max_slices_per_row=_max_slices(arrays["row_offsets"]),
        **arrays,
    )


def write_pack(
    lengths: Lengths,
    folder: Path,
    *,
    seq_len: int,
    mode: PackMode,
    store_fingerprint: str = "",
    documents_per_group: int = GROUP_DOCUMENTS,
) -> None:
    """Write the pack of documents of these lengths to a folder, atomically; one there is replaced.

    Args:
        lengths: tokens of each document; read by groups.
        folder: path of the folder.
        seq_len: tokens in a row.
        mode: packing mode.
        store_fingerprint: fingerprint of the documents' store.
        documents_per_group: documents that are packed together.

    Raises:
        DataError: a file system error.
    """
    digests = {name: hashlib.sha256() for name in ARRAYS}
    items = dict.fromkeys(ARRAYS, 0)
    most = end = 0
    dtypes = {name: np.dtype(dtype) for name, dtype in ARRAYS.items()} | {"document": _document_dtype(lengths.size)}
    with atomic_folder(folder, overwrite=True) as building, ExitStack() as stack:
        with translate_os_errors("write", building):
            files = {name: stack.enter_context(create_file(building / f"{name}.npy")) for name in ARRAYS}
            for name, file in files.items():
                write(file, _npy_header(dtypes[name].str, 0))
            for group in _iter_groups(lengths, seq_len, mode, documents_per_group):
                ends = group["row_offsets"]
                most, end = max(most, _max_slices(np.append(end, ends))), int(ends[-1])
                for name, array in group.items():
                    write(files[name], array.data)
                    digests[name].update(array.data)
                    items[name] += array.size
            for name, file in files.items():
                file.seek(0)
                write(file, _npy_header(dtypes[name].str, items[name]))
                file.flush()
                fsync(file.fileno())
        header = PackHeader(
            seq_len=seq_len,
            mode=mode,
            rows=items["valid"],
            slices=items["start"],
            max_slices_per_row=most,
            store_fingerprint=store_fingerprint,
            fingerprint=_fingerprint(seq_len, mode, store_fingerprint, dtypes["document"], digests),
        )
        write_file(building / PACK_FILE, (json.dumps(asdict(header), indent=2) + "\n").encode())


def _iter_groups(
    lengths: Lengths, seq_len: int, mode: PackMode, documents_per_group: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the arrays of the rows of each group, to be joined."""
    fill = fill_best_fit if mode == "bfd" else fill_concat
    dtype = _document_dtype(lengths.size)
    first_token = first_slice = 0
    for first in range(0, max(1, lengths.size), documents_per_group):
        part = lengths[first : first + documents_per_group]
        offsets = np.zeros(part.size + 1, np.int64)
        np.cumsum(part, out=offsets[1:])
        slices = fill(offsets, seq_len)
        if mode == "concat" and first + documents_per_group < lengths.size:
            slices.labels[-1:] += 1  # the next group's first token
        valid = np.add.reduceat(slices.labels, slices.row_offsets[:-1], dtype=np.int32)
        slices.start[:] += first_token
        ends = slices.row_offsets + first_slice
        yield {
            "row_offsets": ends[bool(first) :],
            "document": slices.document.astype(dtype, copy=False) + dtype.type(first),
            "start": slices.start,
            "length": slices.length.astype(np.int32, copy=False),
            "valid": valid,
        }
        first_token += int(offsets[-1])
        first_slice = int(ends[-1])


def _document_dtype(n_documents: int) -> np.dtype[Any]:
    return np.dtype("<u4" if n_documents <= 2**32 else "<i8")


def _max_slices(row_offsets: np.ndarray) -> int:
    return int(np.diff(row_offsets).max(initial=0))


def _array_items(rows: int, slices: int) -> dict[str, int]:
    return dict.fromkeys(ARRAYS, slices) | {"row_offsets": rows + 1, "valid": rows}


def _npy_header(dtype: str, n_items: int) -> bytes:
    """Return the header of a one-dimensional array that `np.load` reads, always of `_HEADER_BYTES`."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({n_items},), }}"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", _HEADER_BYTES - 10) + f"{text:<{_HEADER_BYTES - 11}}\n".encode()


def _map_array(path: Path, name: str, n_items: int) -> np.ndarray:
    with translate_os_errors("open", path):
        with open_regular(path, inside=path.parent) as file:
            header, size = file.read(_HEADER_BYTES), file.seek(0, 2)
        for dtype in [ARRAYS[name], *(["<i8"] if name == "document" else [])]:
            if header == _npy_header(dtype, n_items) and size == len(header) + n_items * np.dtype(dtype).itemsize:
                mapped = np.memmap(path, dtype, "r", _HEADER_BYTES, (n_items,)) if n_items else np.zeros(0, dtype)
                return np.asarray(mapped)  # a plain array over the map: slicing np.memmap is several times slower
    raise DataError(f"{path}: not {n_items} numbers of type {ARRAYS[name]}; make the pack again")


def _fingerprint(
    seq_len: int, mode: PackMode, store_fingerprint: str, documents: np.dtype[Any], digests: Mapping[str, Any]
) -> str:
    lines = [f"{FORMAT} {VERSION} {mode} {seq_len} {store_fingerprint}"]
    for name, dtype in (ARRAYS | {"document": documents.str}).items():
        lines.append(f"{name} {dtype} {digests[name].hexdigest()}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def check_mode(mode: str, seq_len: int) -> None:
    """Raise DataError if there is no such mode or row length."""
    if not 1 <= seq_len < 2**31:
        raise DataError(f"seq_len = {seq_len}: from 1 to {2**31 - 1}")
    if mode not in get_args(PackMode):
        raise DataError(f"mode = {mode!r}: one of {', '.join(get_args(PackMode))}")


def _rebuild(values: dict[str, Any]) -> PackIndex:  # for pickle
    return PackIndex(**values)
