"""Packs: which documents stand in which training row. An index over a token store; tokens are never copied.

Two ways to fill rows of `seq_len` tokens:

- `bfd`, best-fit decreasing (lt_data.best_fit) over the whole store. A document longer than a row is cut into full
  rows and a remainder; no document that fits is cut.
- `concat`: the documents joined in order and cut every `seq_len` tokens; the last row is padded.

Neither drops a token. A slice says where its tokens lie in the store and how many of its positions have a label, which
is all of them but one when the slice ends its document (`bfd`) or the store (`concat`); so the number of labels in any
batch is known from the index alone. Cost: 28 bytes per slice on disk, opened without reading.
"""

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from lt_data.best_fit import best_fit
from lt_data.errors import DataError
from lt_data.storage import new_folder, os_errors, write_file
from lt_data.store import PACK_FOLDER, TokenStore

FORMAT = "lt-data-pack"
VERSION = 1
FILE_NAME = "pack.json"
Mode = Literal["bfd", "concat"]
_ARRAYS = ("row_offsets", "document", "start", "length", "labels", "valid")


@dataclass(frozen=True, kw_only=True, eq=False)
class PackIndex:
    """Rows as slices of documents. Row r has the slices row_offsets[r] to row_offsets[r + 1].

    Attributes:
        seq_len: tokens in a row.
        mode: how the rows were filled.
        store_fingerprint: of the token store that the offsets refer to.
        fingerprint: SHA-256 over all of this.
        row_offsets: int64 [n_rows + 1].
        document: document that a slice belongs to (uint32, or int64 for a store of 2^32 documents) [n_slices].
        start: token offset of the slice in the whole store (int64) [n_slices].
        length: tokens in the slice (int32) [n_slices].
        labels: positions of the slice that have a label (int32): `length`, or one less [n_slices].
        valid: positions of the row that have a label (int32) [n_rows].
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

    @property
    def n_rows(self) -> int:
        """Rows in the pack."""
        return self.valid.size

    @property
    def n_slices(self) -> int:
        """Slices in all rows."""
        return self.length.size

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
                write_file(building / f"{name}.npy", buffer.getbuffer())
            write_file(building / FILE_NAME, (json.dumps(self._header(), indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: str | Path) -> "PackIndex":
        """Open a pack; its arrays are mapped, not read.

        Raises:
            DataError: no pack, another version, or a file that does not fit the others.
        """
        folder = Path(folder)
        header = _read_header(folder / FILE_NAME)
        arrays: dict[str, Any] = {}
        for name in _ARRAYS:
            path = folder / f"{name}.npy"
            try:
                with os_errors("open", path):
                    arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
            except DataError:  # is a ValueError too
                raise
            except (ValueError, EOFError) as exc:
                raise DataError(f"{path}: broken ({exc}); make the pack again") from exc
            stated = header["arrays"][name]
            if [*arrays[name].shape] != stated["shape"] or arrays[name].dtype.str != stated["dtype"]:
                raise DataError(f"{path}: not the array that {FILE_NAME} describes; make the pack again")
        return cls(
            seq_len=header["seq_len"],
            mode=header["mode"],
            store_fingerprint=header["store_fingerprint"],
            fingerprint=header["fingerprint"],
            # Plain arrays over the maps: slicing np.memmap itself is several times slower.
            **{name: np.asarray(array) for name, array in arrays.items()},
        )

    def verify(self) -> None:
        """Compute the fingerprint again from the arrays.

        Raises:
            DataError: it is another one.
        """
        if self._compute_fingerprint() != self.fingerprint:
            raise DataError(
                f"pack {self.mode}-{self.seq_len}: its arrays are not those it was made with; make it again"
            )

    def _header(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "seq_len": self.seq_len,
            "mode": self.mode,
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
        return _fingerprint(self.seq_len, self.mode, self.store_fingerprint, arrays)


def pack(
    store: TokenStore, *, seq_len: int, mode: Mode = "bfd", name: str | None = None, overwrite: bool = False
) -> PackIndex:
    """Make the pack of a store, or open it if it was made before.

    Args:
        store: the token store; the pack is written to its folder, under `packs/<name>`.
        seq_len: tokens in a row.
        mode: `bfd` or `concat`.
        name: folder name, `<mode>-<seq_len>` when not given.
        overwrite: make it again even if it is there.

    Raises:
        DataError: bad `seq_len` or `mode`, something else under that name, or the file system refuses.
    """
    _check(seq_len, mode)
    folder = _folder(store, seq_len, mode, name)
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            return _open(folder, store, seq_len, mode)
        _read_header(folder / FILE_NAME)
        known = {FILE_NAME, *(f"{array}.npy" for array in _ARRAYS)}
        if foreign := sorted(entry.name for entry in folder.iterdir() if entry.name not in known):
            raise DataError(f"{folder} holds {', '.join(foreign)} beside the pack: move that away before overwriting")
    index = build_index(store.lengths, seq_len=seq_len, mode=mode, store_fingerprint=store.manifest.fingerprint)
    index.save(folder, replace=True)
    return PackIndex.load(folder)


def open_pack(store: TokenStore, *, seq_len: int, mode: Mode = "bfd", name: str | None = None) -> PackIndex:
    """Open a pack that was made before.

    Raises:
        DataError: it was not made, or for another store; the command that makes it is named.
    """
    _check(seq_len, mode)
    folder = _folder(store, seq_len, mode, name)
    if not folder.exists():
        raise DataError(f"store {store.path} has no pack {folder.name}; make it with: {_command(store, seq_len, mode)}")
    return _open(folder, store, seq_len, mode)


def _open(folder: Path, store: TokenStore, seq_len: int, mode: Mode) -> PackIndex:
    index = PackIndex.load(folder)
    remedy = f"make it again with: {_command(store, seq_len, mode)} --overwrite"
    if index.store_fingerprint != store.manifest.fingerprint:
        raise DataError(f"{folder} belongs to another store; {remedy}")
    if (index.seq_len, index.mode) != (seq_len, mode):
        raise DataError(f"{folder} is {index.mode}-{index.seq_len}, not {mode}-{seq_len}; {remedy}, or name another")
    return index


def _command(store: TokenStore, seq_len: int, mode: Mode) -> str:
    return f"lt data pack {store.path} --seq-len {seq_len} --mode {mode}"


def verify_packs(store: TokenStore) -> int:
    """Check the arrays of every pack in a store, and that it belongs to it; gives back how many there are.

    Raises:
        DataError: one differs.
    """
    folders = sorted(path.parent for path in (store.path / PACK_FOLDER).glob(f"*/{FILE_NAME}"))
    for folder in folders:
        index = PackIndex.load(folder)
        _open(folder, store, index.seq_len, index.mode).verify()
    return len(folders)


def build_index(lengths: np.ndarray, *, seq_len: int, mode: Mode, store_fingerprint: str = "") -> PackIndex:
    """Compute a pack from the lengths of the documents (integers [n], all positive) alone."""
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    document, start, length, labels, row = _FILL[mode](offsets, seq_len)
    n_rows = int(row[-1]) + 1 if row.size else 0
    row_offsets = np.zeros(n_rows + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=n_rows), out=row_offsets[1:])
    arrays = {
        "row_offsets": row_offsets,
        "document": document.astype(np.uint32 if lengths.size <= 2**32 else np.int64),
        "start": start,
        "length": length.astype(np.int32),
        "labels": labels.astype(np.int32),
        "valid": np.add.reduceat(labels, row_offsets[:-1]).astype(np.int32) if n_rows else np.zeros(0, np.int32),
    }
    return PackIndex(
        seq_len=seq_len,
        mode=mode,
        store_fingerprint=store_fingerprint,
        fingerprint=_fingerprint(seq_len, mode, store_fingerprint, arrays),
        **arrays,
    )


_Slices = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # document, start, length, labels, row


def _fill_best_fit(offsets: np.ndarray, seq_len: int) -> _Slices:
    lengths = np.diff(offsets)
    n_pieces = -(-lengths // seq_len)
    document = np.repeat(np.arange(lengths.size), n_pieces)
    piece = counted(n_pieces)
    length = np.minimum(lengths[document] - piece * seq_len, seq_len)
    order, bins = best_fit(length, seq_len)
    by_row = np.argsort(bins, kind="stable")
    slices = order[by_row]
    document, piece, length = document[slices], piece[slices], length[slices]
    is_last = piece == n_pieces[document] - 1
    return document, offsets[document] + piece * seq_len, length, length - is_last, bins[by_row]


def _fill_concat(offsets: np.ndarray, seq_len: int) -> _Slices:
    begin, end = offsets[:-1], offsets[1:]
    first_row = begin // seq_len
    n_slices = (end - 1) // seq_len - first_row + 1
    document = np.repeat(np.arange(begin.size), n_slices)
    row = np.repeat(first_row, n_slices) + counted(n_slices)
    start = np.maximum(begin[document], row * seq_len)
    length = np.minimum(end[document], (row + 1) * seq_len) - start
    labels = length.copy()
    labels[-1:] -= 1  # nothing follows the last token of the store
    return document, start, length, labels, row


def counted(counts: np.ndarray) -> np.ndarray:
    """0, 1, ..., counts[0] - 1, then 0, 1, ..., counts[1] - 1, and so on (int64)."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


_FILL = {"bfd": _fill_best_fit, "concat": _fill_concat}


def _fingerprint(seq_len: int, mode: Mode, store_fingerprint: str, arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(f"{FORMAT} {VERSION} {mode} {seq_len} {store_fingerprint}\n".encode())
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


def _folder(store: TokenStore, seq_len: int, mode: Mode, name: str | None) -> Path:
    name = f"{mode}-{seq_len}" if name is None else name
    if not name or name in (".", "..") or "/" in name:
        raise DataError(f"name={name!r}: one folder name")
    return store.path / PACK_FOLDER / name


def _check(seq_len: int, mode: str) -> None:
    if not 1 <= seq_len < 2**31:
        raise DataError(f"seq_len={seq_len}: from 1 to {2**31 - 1}")
    if mode not in get_args(Mode):
        raise DataError(f"mode={mode!r}: one of {', '.join(get_args(Mode))}")
