"""Packs: training rows as an index over a token store; tokens are never copied.

Three modes (lt_data.packing.algorithms), none of which drops a token:

- `bfd`, best-fit decreasing over the whole store: no document that fits a row is cut.
- `concat`: the documents concatenated in order and cut every `seq_len` tokens.
- `buckets`: rows of `seq_len` tokens, of half of it, and so on, each of one document.

A slice holds the offset of its tokens in the store and the number of its positions with a label: all, or one less if
the slice ends its document (`concat`: the store). So the number of labels of any batch follows from the index alone.
Cost: 28 bytes per slice on disk, opened without reading.
"""

import errno
import hashlib
import io
import json
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.packing.algorithms import fill_best_fit, fill_buckets, fill_concat
from lt_data.packing.npy import mmap_npy
from lt_data.storage import atomic_folder, make_folder_synced, read_file, translate_os_errors, write_file
from lt_data.store.joined import list_generations
from lt_data.store.token_store import TokenStore

FORMAT = "lt-data-pack"
VERSION = 1
PACK_FILE = "pack.json"
PackMode = Literal["bfd", "concat", "buckets"]
DEFAULT_MIN_SEQ_LEN = 256  # tokens in the shortest rows of buckets
_MAX_HEADER_BYTES = 2**20
_REMEDY = "make the pack again"
_ARRAYS = ("row_offsets", "document", "start", "length", "labels", "valid")


@dataclass(frozen=True, kw_only=True)
class _ArrayHeader:
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _PackHeader:
    """Fields of `pack.json`, but for format and version."""

    seq_len: int
    mode: PackMode
    buckets: tuple[tuple[int, int], ...] | None = None
    rows: int
    slices: int
    max_slices_per_row: int
    store_fingerprint: str
    fingerprint: str
    arrays: Mapping[str, _ArrayHeader]

    def __post_init__(self) -> None:
        if {*self.arrays} != {*_ARRAYS}:
            raise DataError(f"its arrays are {', '.join(self.arrays)}, not {', '.join(_ARRAYS)}")
        if self.seq_len < 1 or self.max_slices_per_row < 0:
            raise DataError(f"seq_len = {self.seq_len}, max_slices_per_row = {self.max_slices_per_row}: not counts")
        if (self.buckets is None) != (self.mode != "buckets"):
            raise DataError("buckets belong to the mode 'buckets', and to no other")
        if self.buckets is not None and (
            min(map(min, self.buckets), default=0) < 1 or sum(rows for _, rows in self.buckets) != self.rows
        ):
            raise DataError(f"its buckets do not sum to its {self.rows} rows")


@dataclass(frozen=True, kw_only=True, eq=False)
class PackIndex:
    """Pack: rows as slices of documents. Row r has the slices row_offsets[r] to row_offsets[r + 1].

    Attributes:
        seq_len: tokens in a row; with buckets, in the longest.
        mode: packing mode.
        store_fingerprint: fingerprint of the token store that the offsets refer to.
        fingerprint: SHA-256 over the whole pack.
        row_offsets: int64 [n_rows + 1].
        document: index of the slice's document (uint32, or int64 for a store of 2^32 documents) [n_slices].
        start: token offset of the slice in the store (int64) [n_slices].
        length: tokens in the slice (int32) [n_slices].
        labels: positions of the slice that have a label (int32): `length`, or one less [n_slices].
        valid: positions of the row that have a label (int32) [n_rows].
        max_slices_per_row: maximum over the rows, a bound for the fixed shapes that compilers need.
        buckets: with buckets, (length, number of rows) of each, in the order of the rows.
        folder: folder that it was opened from.
    """

    seq_len: int
    mode: PackMode
    store_fingerprint: str
    fingerprint: str
    row_offsets: np.ndarray
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    labels: np.ndarray
    valid: np.ndarray
    max_slices_per_row: int
    buckets: tuple[tuple[int, int], ...] | None = None
    folder: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the files itself: pickling a map would copy it.
        if self.folder is not None:
            return (PackIndex.load, (self.folder,))
        return (_rebuild, (dict(self.__dict__),))

    @property
    def n_rows(self) -> int:
        """Rows in the pack."""
        return self.valid.size

    @property
    def n_slices(self) -> int:
        """Slices in all rows."""
        return int(self.row_offsets[-1] - self.row_offsets[0])

    @property
    def n_positions(self) -> int:
        """Positions in all rows, padding included."""
        return sum(length * rows for length, rows in self.buckets or ((self.seq_len, self.n_rows),))

    def bucket(self, length: int) -> "PackIndex":
        """Return the rows of one length as a pack (a view).

        Raises:
            DataError: there is no such bucket.
        """
        first = 0
        for found, rows in self.buckets or ():
            if found == length:
                last = first + rows
                row_offsets, valid = self.row_offsets[first : last + 1], self.valid[first:last]
                return replace(
                    self,
                    seq_len=length,
                    row_offsets=row_offsets,
                    valid=valid,
                    # longer rows have one slice each
                    max_slices_per_row=self.max_slices_per_row if last == self.n_rows else 1,
                    buckets=((length, rows),),
                    folder=None,
                )
            first += rows
        raise DataError(f"bucket {length}: the pack has {[found for found, _ in self.buckets or ()]}")

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the index to a new folder, atomically.

        Args:
            folder: path of the folder.
            overwrite: replace a pack at `folder`.

        Raises:
            DataError: a file system error.
        """
        with atomic_folder(Path(folder), overwrite=overwrite) as building:
            for name in _ARRAYS:
                buffer = io.BytesIO()
                np.save(buffer, getattr(self, name), allow_pickle=False)
                with buffer.getbuffer() as content:
                    write_file(building / f"{name}.npy", content)
            write_file(building / PACK_FILE, (json.dumps(self._header(), indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: str | Path) -> "PackIndex":
        """Open a pack; its arrays are mapped, not read.

        Raises:
            DataError: no pack, another version, or files that do not match.
        """
        folder = Path(folder)
        header = _read_header(folder / PACK_FILE)
        arrays: dict[str, Any] = {
            name: mmap_npy(folder / f"{name}.npy", array.dtype, array.shape) for name, array in header.arrays.items()
        }
        return cls(
            seq_len=header.seq_len,
            mode=header.mode,
            max_slices_per_row=header.max_slices_per_row,
            store_fingerprint=header.store_fingerprint,
            fingerprint=header.fingerprint,
            buckets=header.buckets,
            folder=folder,
            **arrays,
        )

    def verify(self) -> None:
        """Recompute the fingerprint from the arrays, and compare `pack.json` with them.

        Raises:
            DataError: one of them differs.
        """
        if self._compute_fingerprint() != self.fingerprint:
            raise DataError(f"pack {self.mode}-{self.seq_len}: its arrays do not match its fingerprint; make it again")
        header = replace(self, max_slices_per_row=_max_slices_per_row(self.row_offsets))._header()
        source = str(self.folder and self.folder / PACK_FILE)
        if self.folder is not None and _read_header(self.folder / PACK_FILE) != _parse_header(header, source):
            raise DataError(f"{self.folder / PACK_FILE}: does not match the arrays beside it; make the pack again")

    def _header(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "seq_len": self.seq_len,
            "mode": self.mode,
            **({} if self.buckets is None else {"buckets": [list(bucket) for bucket in self.buckets]}),
            "rows": self.n_rows,
            "slices": self.n_slices,
            "max_slices_per_row": self.max_slices_per_row,
            "store_fingerprint": self.store_fingerprint,
            "fingerprint": self.fingerprint,
            "arrays": {
                name: {"dtype": getattr(self, name).dtype.str, "shape": [*getattr(self, name).shape]}
                for name in _ARRAYS
            },
        }

    def _compute_fingerprint(self) -> str:
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return _fingerprint(self.seq_len, self.mode, self.store_fingerprint, arrays, self.buckets)


def pack(
    store: TokenStore,
    *,
    seq_len: int,
    mode: PackMode = "bfd",
    min_seq_len: int | None = None,
    name: str | None = None,
    overwrite: bool = False,
) -> PackIndex:
    """Make the pack of a store, or open it if it exists.

    Args:
        store: the token store; the pack is written to the folder `<name>` in its `pack_folder`.
        seq_len: tokens in a row; with `buckets`, in the longest.
        mode: `bfd`, `concat` or `buckets`.
        min_seq_len: only with `buckets`: tokens in the shortest rows, `seq_len` divided by a power of two; default 256.
        name: folder name; default `<mode>-<seq_len>`, with buckets `buckets-<seq_len>-<min_seq_len>`.
        overwrite: make it again if it exists.

    Raises:
        DataError: bad `seq_len`, `mode` or `min_seq_len`, other files under that name, or a file system error.
    """
    lengths = _row_lengths(seq_len, mode, min_seq_len)
    folder = _pack_folder(store, lengths, mode, name)
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            return _open_checked(folder, store, lengths, mode)
        _read_header(folder / PACK_FILE)
        known = {PACK_FILE, *(f"{array}.npy" for array in _ARRAYS)}
        if foreign := sorted(entry.name for entry in folder.iterdir() if entry.name not in known):
            raise DataError(f"{folder} holds {', '.join(foreign)} beside the pack: move them away before overwriting")
    fingerprint = store.manifest.fingerprint
    with _suggest_folder(store):
        with translate_os_errors("create", folder.parent):
            make_folder_synced(folder.parent)
            if not os.access(folder.parent, os.W_OK):  # before hours of work
                raise PermissionError(errno.EACCES, "not writable")
        index = build_index(
            store.lengths, seq_len=seq_len, mode=mode, min_seq_len=min_seq_len, store_fingerprint=fingerprint
        )
        index.save(folder, overwrite=True)
    return PackIndex.load(folder)


@contextmanager
def _suggest_folder(store: TokenStore) -> Iterator[None]:
    """Add to a file system error that packs may be elsewhere."""
    try:
        yield
    except DataError as exc:
        if store.packs is not None or not isinstance(exc.__cause__, OSError):
            raise
        raise DataError(f"{exc}; or give another folder for packs (--packs, in a recipe data.packs)") from exc


def open_pack(
    store: TokenStore, *, seq_len: int, mode: PackMode = "bfd", min_seq_len: int | None = None, name: str | None = None
) -> PackIndex:
    """Open an existing pack; the arguments are those of `pack`.

    Raises:
        DataError: no such pack, or it belongs to another store; the message names the command that makes it.
    """
    lengths = _row_lengths(seq_len, mode, min_seq_len)
    folder = _pack_folder(store, lengths, mode, name)
    if not folder.exists():
        place = "" if store.packs is None else f" in {store.packs}"
        older = list_generations(store.path)[:-1] if store.is_joined else []
        hint = f" (older generations of it: {older[0]} ...)" if older else ""
        raise DataError(
            f"store {store.path} has no pack {folder.name}{place}{hint}; make it with: "
            f"{_pack_command(store, lengths, mode)}"
        )
    return _open_checked(folder, store, lengths, mode)


def _open_checked(folder: Path, store: TokenStore, lengths: list[int], mode: PackMode) -> PackIndex:
    index = PackIndex.load(folder)
    remedy = f"make it again with: {_pack_command(store, lengths, mode)} --overwrite"
    if index.store_fingerprint != store.manifest.fingerprint:
        raise DataError(f"{folder} belongs to another store; {remedy}")
    actual, expected = _pack_name(_row_lengths_of(index), index.mode), _pack_name(lengths, mode)
    if actual != expected:
        raise DataError(f"{folder} is {actual}, not {expected}; {remedy}, or give another name")
    return index


def _pack_command(store: TokenStore, lengths: list[int], mode: PackMode) -> str:
    min_seq_len = f" --min-seq-len {lengths[-1]}" if mode == "buckets" else ""
    packs = "" if store.packs is None else f" --packs {store.packs}"
    return f"lt data pack {store.path} --seq-len {lengths[0]} --mode {mode}{min_seq_len}{packs}"


def _pack_name(lengths: list[int], mode: PackMode) -> str:
    return f"{mode}-{lengths[0]}" + (f"-{lengths[-1]}" if mode == "buckets" else "")


def _row_lengths_of(index: PackIndex) -> list[int]:
    return [index.seq_len] if index.buckets is None else [length for length, _ in index.buckets]


def verify_packs(store: TokenStore) -> int:
    """Check every pack in a store: its arrays, and that it belongs to the store; return their number.

    Raises:
        DataError: one differs.
    """
    folders = sorted(path.parent for path in store.pack_folder().glob(f"*/{PACK_FILE}"))
    for folder in folders:
        index = PackIndex.load(folder)
        _open_checked(folder, store, _row_lengths_of(index), index.mode).verify()
    return len(folders)


def build_index(
    lengths: np.ndarray, *, seq_len: int, mode: PackMode, min_seq_len: int | None = None, store_fingerprint: str = ""
) -> PackIndex:
    """Compute a pack from the lengths of the documents (integers [n], all positive)."""
    row_lengths = _row_lengths(seq_len, mode, min_seq_len)
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    buckets: tuple[tuple[int, int], ...] | None = None
    if mode == "buckets":
        filled, counts = fill_buckets(offsets, row_lengths)
        buckets = tuple(zip(row_lengths, counts, strict=True))
    else:
        filled = (fill_best_fit if mode == "bfd" else fill_concat)(offsets, seq_len)
    document, start, length, labels, row_offsets = filled
    arrays = {
        "row_offsets": row_offsets,
        "document": document.astype(np.uint32 if lengths.size <= 2**32 else np.int64, copy=False),
        "start": start,
        "length": length.astype(np.int32, copy=False),
        "labels": labels.astype(np.int32, copy=False),
        "valid": _labels_per_row(labels, row_offsets),
    }
    return PackIndex(
        seq_len=seq_len,
        mode=mode,
        store_fingerprint=store_fingerprint,
        fingerprint=_fingerprint(seq_len, mode, store_fingerprint, arrays, buckets),
        max_slices_per_row=_max_slices_per_row(row_offsets),
        buckets=buckets,
        **arrays,
    )


def _max_slices_per_row(row_offsets: np.ndarray) -> int:
    return int(np.diff(row_offsets).max(initial=0))


def _labels_per_row(labels: np.ndarray, row_offsets: np.ndarray) -> np.ndarray:
    """Return the number of labels of each row (int32)."""
    n_rows = row_offsets.size - 1
    # The first rows have one slice each, of long documents, and need no sum. No row is empty, so these are the rows i
    # that begin with slice i.
    n_single = bisect_left(range(1, n_rows + 1), True, key=lambda row: bool(row_offsets[row] > row))
    sums = np.empty(n_rows, np.int32)
    sums[:n_single] = labels[:n_single]
    total = np.cumsum(labels[n_single:], dtype=np.int64)
    sums[n_single:] = np.diff(total[row_offsets[n_single + 1 :] - (n_single + 1)], prepend=0)
    return sums


def _rebuild(values: dict[str, Any]) -> PackIndex:  # for pickle
    return PackIndex(**values)


def _fingerprint(
    seq_len: int,
    mode: PackMode,
    store_fingerprint: str,
    arrays: dict[str, np.ndarray],
    buckets: tuple[tuple[int, int], ...] | None,
) -> str:
    digest = hashlib.sha256(f"{FORMAT} {VERSION} {mode} {seq_len} {store_fingerprint}\n".encode())
    for length, rows in buckets or ():
        digest.update(f"bucket {length} {rows}\n".encode())
    for name in _ARRAYS:
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.size}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


def _read_header(path: Path) -> _PackHeader:
    with translate_os_errors("read the pack's", path):
        content = read_file(path, max_bytes=_MAX_HEADER_BYTES)
    return _parse_header(strict_json.load_object(content, str(path), _REMEDY), str(path))


def _parse_header(header: Mapping[str, Any], source: str) -> _PackHeader:
    fields = dict(header)
    if fields.pop("format", None) != FORMAT:
        raise DataError(f"{source}: not a pack")
    if (version := fields.pop("version", None)) != VERSION:
        raise DataError(f"{source}: format version {version!r}; this lt-data reads version {VERSION}: update lt-data")
    return strict_json.parse(_PackHeader, json.loads(json.dumps(fields)), source, _REMEDY)


def _pack_folder(store: TokenStore, lengths: list[int], mode: PackMode, name: str | None) -> Path:
    name = _pack_name(lengths, mode) if name is None else name
    if not name or name in (".", "..") or "/" in name:
        raise DataError(f"name = {name!r}: give a folder name without a path")
    return store.pack_folder(name)


def _row_lengths(seq_len: int, mode: str, min_seq_len: int | None) -> list[int]:
    """Return the row lengths of a pack, longest first."""
    if not 1 <= seq_len < 2**31:
        raise DataError(f"seq_len = {seq_len}: from 1 to {2**31 - 1}")
    if mode not in get_args(PackMode):
        raise DataError(f"mode = {mode!r}: one of {', '.join(get_args(PackMode))}")
    if mode != "buckets":
        if min_seq_len is not None:
            raise DataError(f"min_seq_len = {min_seq_len}: requires mode='buckets'; leave it out with mode = {mode!r}")
        return [seq_len]
    shortest = DEFAULT_MIN_SEQ_LEN if min_seq_len is None else min_seq_len
    lengths = [seq_len]
    while lengths[-1] > shortest and lengths[-1] % 2 == 0:
        lengths.append(lengths[-1] // 2)
    if lengths[-1] != shortest:
        raise DataError(
            f"min_seq_len = {shortest}: give seq_len = {seq_len} divided by a power of two: one of {lengths}"
        )
    return lengths
