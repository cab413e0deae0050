"""Packs: which documents stand in which training row. An index over a token store; tokens are never copied.

Three ways to fill rows (lt_data.packing.filling), none of which drops a token:

- `bfd`, best-fit decreasing over the whole store: no document that fits a row is cut.
- `concat`: the documents joined in order and cut every `seq_len` tokens.
- `buckets`: rows of `seq_len` tokens, of half of it, and so on, each of one document.

A slice says where its tokens lie in the store and how many of its positions have a label, which is all of them but one
when the slice ends its document (`concat`: the store); so the number of labels in any batch is known from the index
alone. Cost: 28 bytes per slice on disk, opened without reading.
"""

import hashlib
import io
import json
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from lt_data.errors import DataError
from lt_data.packing.filling import fill_best_fit, fill_buckets, fill_concat
from lt_data.packing.npy import open_array
from lt_data.storage import new_folder, os_errors, write_file
from lt_data.store.manifest import PACK_FOLDER
from lt_data.store.token_store import TokenStore

FORMAT = "lt-data-pack"
VERSION = 1
FILE_NAME = "pack.json"
Mode = Literal["bfd", "concat", "buckets"]
SHORTEST = 256  # tokens in the shortest rows of buckets, unless asked otherwise
_ARRAYS = ("row_offsets", "document", "start", "length", "labels", "valid")


@dataclass(frozen=True, kw_only=True, eq=False)
class PackIndex:
    """Rows as slices of documents. Row r has the slices row_offsets[r] to row_offsets[r + 1].

    Attributes:
        seq_len: tokens in a row; with buckets, in the longest.
        mode: how the rows were filled.
        store_fingerprint: of the token store that the offsets refer to.
        fingerprint: SHA-256 over all of this.
        row_offsets: int64 [n_rows + 1].
        document: document that a slice belongs to (uint32, or int64 for a store of 2^32 documents) [n_slices].
        start: token offset of the slice in the whole store (int64) [n_slices].
        length: tokens in the slice (int32) [n_slices].
        labels: positions of the slice that have a label (int32): `length`, or one less [n_slices].
        valid: positions of the row that have a label (int32) [n_rows].
        buckets: with buckets, the lengths of rows and how many rows there are of each, in the order of the rows.
        folder: where it was opened.
    """

    seq_len: int
    mode: Mode
    store_fingerprint: str
    fingerprint: str
    row_offsets: np.ndarray
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    labels: np.ndarray
    valid: np.ndarray
    buckets: tuple[tuple[int, int], ...] | None = None
    folder: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the files itself; a map would be copied.
        if self.folder is not None:
            return (PackIndex.load, (self.folder,))
        return (_made_again, (dict(self.__dict__),))

    @property
    def n_rows(self) -> int:
        """Rows in the pack."""
        return self.valid.size

    @property
    def n_slices(self) -> int:
        """Slices in all rows."""
        return int(self.row_offsets[-1] - self.row_offsets[0])

    @property
    def positions(self) -> int:
        """Positions in all rows, with a token or padding."""
        return sum(length * rows for length, rows in self.buckets or ((self.seq_len, self.n_rows),))

    def bucket(self, length: int) -> "PackIndex":
        """Only the rows of one length, as a pack of its own; a view.

        Raises:
            DataError: there is no such bucket.
        """
        first = 0
        for found, rows in self.buckets or ():
            if found == length:
                last = first + rows
                row_offsets, valid = self.row_offsets[first : last + 1], self.valid[first:last]
                buckets = ((length, rows),)
                return replace(self, seq_len=length, row_offsets=row_offsets, valid=valid, buckets=buckets, folder=None)
            first += rows
        raise DataError(f"bucket {length}: the pack has {[found for found, _ in self.buckets or ()]}")

    def save(self, folder: str | Path, *, replace: bool = False) -> None:
        """Write the index into a new folder, which appears complete or not at all.

        Args:
            folder: where; with `replace` it may be a pack, which is then replaced.
            replace: see `folder`.

        Raises:
            DataError: the file system refuses.
        """
        with new_folder(Path(folder), replace=replace) as building:
            for name in _ARRAYS:
                buffer = io.BytesIO()
                np.save(buffer, getattr(self, name), allow_pickle=False)
                with buffer.getbuffer() as content:
                    write_file(building / f"{name}.npy", content)
            write_file(building / FILE_NAME, (json.dumps(self._header(), indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: str | Path) -> "PackIndex":
        """Open a pack; its arrays are mapped, not read.

        Raises:
            DataError: no pack, another version, or a file that does not fit the others.
        """
        folder = Path(folder)
        header = _read_header(folder / FILE_NAME)
        try:
            stated = {
                name: (str(header["arrays"][name]["dtype"]), [*map(int, header["arrays"][name]["shape"])])
                for name in _ARRAYS
            }
            fields = {name: header[name] for name in ("seq_len", "mode", "store_fingerprint", "fingerprint")}
        except (KeyError, TypeError, ValueError) as exc:
            raise DataError(f"{folder / FILE_NAME}: broken ({exc}); make the pack again") from exc
        arrays: dict[str, Any] = {
            name: open_array(folder / f"{name}.npy", dtype, shape) for name, (dtype, shape) in stated.items()
        }
        return cls(
            buckets=_read_buckets(header, folder / FILE_NAME),
            folder=folder,
            **fields,
            **arrays,
        )

    def verify(self) -> None:
        """Compute the fingerprint again from the arrays, and compare the description with them.

        Raises:
            DataError: it is another one.
        """
        if self._compute_fingerprint() != self.fingerprint:
            raise DataError(
                f"pack {self.mode}-{self.seq_len}: its arrays are not those it was made with; make it again"
            )
        if self.folder is not None and _read_header(self.folder / FILE_NAME) != json.loads(json.dumps(self._header())):
            raise DataError(f"{self.folder / FILE_NAME}: does not describe the arrays beside it; make the pack again")

    def _header(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "seq_len": self.seq_len,
            "mode": self.mode,
            **({} if self.buckets is None else {"buckets": [list(bucket) for bucket in self.buckets]}),
            "rows": self.n_rows,
            "slices": self.n_slices,
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
    mode: Mode = "bfd",
    shortest: int | None = None,
    name: str | None = None,
    overwrite: bool = False,
) -> PackIndex:
    """Make the pack of a store, or open it if it was made before.

    Args:
        store: the token store; the pack is written to its folder, under `packs/<name>`.
        seq_len: tokens in a row; with `buckets`, in the longest.
        mode: `bfd`, `concat` or `buckets`.
        shortest: only with `buckets`: tokens in the shortest rows, `seq_len` divided by a power of two; 256 if not
            given.
        name: folder name; when not given `<mode>-<seq_len>`, with buckets `buckets-<seq_len>-<shortest>`.
        overwrite: make it again even if it is there.

    Raises:
        DataError: bad `seq_len`, `mode` or `shortest`, something else under that name, or the file system refuses.
    """
    lengths = _row_lengths(seq_len, mode, shortest)
    folder = _folder(store, lengths, mode, name)
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            return _open(folder, store, lengths, mode)
        _read_header(folder / FILE_NAME)
        known = {FILE_NAME, *(f"{array}.npy" for array in _ARRAYS)}
        if foreign := sorted(entry.name for entry in folder.iterdir() if entry.name not in known):
            raise DataError(f"{folder} holds {', '.join(foreign)} beside the pack: move that away before overwriting")
    fingerprint = store.manifest.fingerprint
    index = build_index(store.lengths, seq_len=seq_len, mode=mode, shortest=shortest, store_fingerprint=fingerprint)
    index.save(folder, replace=True)
    return PackIndex.load(folder)


def open_pack(
    store: TokenStore, *, seq_len: int, mode: Mode = "bfd", shortest: int | None = None, name: str | None = None
) -> PackIndex:
    """Open a pack that was made before; the arguments are those of `pack`.

    Raises:
        DataError: it was not made, or for another store; the command that makes it is named.
    """
    lengths = _row_lengths(seq_len, mode, shortest)
    folder = _folder(store, lengths, mode, name)
    if not folder.exists():
        raise DataError(f"store {store.path} has no pack {folder.name}; make it with: {_command(store, lengths, mode)}")
    return _open(folder, store, lengths, mode)


def _open(folder: Path, store: TokenStore, lengths: list[int], mode: Mode) -> PackIndex:
    index = PackIndex.load(folder)
    remedy = f"make it again with: {_command(store, lengths, mode)} --overwrite"
    if index.store_fingerprint != store.manifest.fingerprint:
        raise DataError(f"{folder} belongs to another store; {remedy}")
    found, wanted = _name(_lengths_of(index), index.mode), _name(lengths, mode)
    if found != wanted:
        raise DataError(f"{folder} is {found}, not {wanted}; {remedy}, or name another")
    return index


def _command(store: TokenStore, lengths: list[int], mode: Mode) -> str:
    shortest = f" --shortest {lengths[-1]}" if mode == "buckets" else ""
    return f"lt data pack {store.path} --seq-len {lengths[0]} --mode {mode}{shortest}"


def _name(lengths: list[int], mode: Mode) -> str:
    return f"{mode}-{lengths[0]}" + (f"-{lengths[-1]}" if mode == "buckets" else "")


def _lengths_of(index: PackIndex) -> list[int]:
    return [index.seq_len] if index.buckets is None else [length for length, _ in index.buckets]


def verify_packs(store: TokenStore) -> int:
    """Check the arrays of every pack in a store, and that it belongs to it; gives back how many there are.

    Raises:
        DataError: one differs.
    """
    store.bring(PACK_FOLDER)
    folders = sorted(path.parent for path in (store.path / PACK_FOLDER).glob(f"*/{FILE_NAME}"))
    for folder in folders:
        index = PackIndex.load(folder)
        _open(folder, store, _lengths_of(index), index.mode).verify()
    return len(folders)


def build_index(
    lengths: np.ndarray, *, seq_len: int, mode: Mode, shortest: int | None = None, store_fingerprint: str = ""
) -> PackIndex:
    """Compute a pack from the lengths of the documents (integers [n], all positive) alone."""
    row_lengths = _row_lengths(seq_len, mode, shortest)
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
        "valid": _sums(labels, row_offsets),
    }
    return PackIndex(
        seq_len=seq_len,
        mode=mode,
        store_fingerprint=store_fingerprint,
        fingerprint=_fingerprint(seq_len, mode, store_fingerprint, arrays, buckets),
        buckets=buckets,
        **arrays,
    )


def _sums(labels: np.ndarray, row_offsets: np.ndarray) -> np.ndarray:
    """Labels in each row (int32)."""
    n_rows = row_offsets.size - 1
    # The rows of one slice that come first, of long documents, need no sum. No row is empty, so they are where slice i
    # begins row i.
    alone = bisect_left(range(1, n_rows + 1), True, key=lambda row: bool(row_offsets[row] > row))
    sums = np.empty(n_rows, np.int32)
    sums[:alone] = labels[:alone]
    total = np.cumsum(labels[alone:], dtype=np.int64)
    sums[alone:] = np.diff(total[row_offsets[alone + 1 :] - (alone + 1)], prepend=0)
    return sums


def _made_again(values: dict[str, Any]) -> PackIndex:  # for pickle
    return PackIndex(**values)


def _fingerprint(
    seq_len: int,
    mode: Mode,
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


def _read_header(path: Path) -> dict[str, Any]:
    with os_errors("read the pack's", path):
        content = path.read_bytes()
    try:
        header = json.loads(content)
    except ValueError as exc:
        raise DataError(f"{path}: not JSON ({exc}); make the pack again") from exc
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DataError(f"{path}: not the description of a pack")
    if header.get("version") != VERSION:
        raise DataError(f"{path}: version {header.get('version')!r}; this program reads {VERSION}: update lt-data")
    return cast(dict[str, Any], header)


def _read_buckets(header: dict[str, Any], path: Path) -> tuple[tuple[int, int], ...] | None:
    if header["mode"] != "buckets":
        return None
    try:
        buckets = tuple((int(length), int(rows)) for length, rows in header["buckets"])
        n_rows = int(header["rows"])
    except (KeyError, TypeError, ValueError) as exc:
        raise DataError(f"{path}: broken list of buckets ({exc!r}); make the pack again") from exc
    if sum(rows for _, rows in buckets) != n_rows:
        raise DataError(f"{path}: its buckets do not hold its {n_rows} rows; make the pack again")
    return buckets


def _folder(store: TokenStore, lengths: list[int], mode: Mode, name: str | None) -> Path:
    name = _name(lengths, mode) if name is None else name
    if not name or name in (".", "..") or "/" in name:
        raise DataError(f"name={name!r}: one folder name")
    store.bring(f"{PACK_FOLDER}/{name}")
    return store.path / PACK_FOLDER / name


def _row_lengths(seq_len: int, mode: str, shortest: int | None) -> list[int]:
    """The lengths that rows of a pack have, longest first."""
    if not 1 <= seq_len < 2**31:
        raise DataError(f"seq_len={seq_len}: from 1 to {2**31 - 1}")
    if mode not in get_args(Mode):
        raise DataError(f"mode={mode!r}: one of {', '.join(get_args(Mode))}")
    if mode != "buckets":
        if shortest is not None:
            raise DataError(f"shortest={shortest}: only buckets have shorter rows; leave it out with mode={mode!r}")
        return [seq_len]
    least = SHORTEST if shortest is None else shortest
    lengths = [seq_len]
    while lengths[-1] > least and lengths[-1] % 2 == 0:
        lengths.append(lengths[-1] // 2)
    if lengths[-1] != least:
        raise DataError(f"shortest={least}: give seq_len={seq_len} divided by a power of two: one of {lengths}")
    return lengths
