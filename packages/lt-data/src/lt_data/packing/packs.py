"""Packs: training rows as an index over a token store; tokens are never copied.

Two modes (lt_data.packing.algorithms), neither of which drops a token:

- `bfd`, best-fit decreasing: no document that fits a row is cut.
- `concat`: the documents concatenated in order and cut every `seq_len` tokens.

A pack is the folder `<mode>-<seq_len>` in the store's folder of packs (lt_data.packing.pack_index).
"""

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.packing.pack_index import ARRAYS, PACK_FILE, PackIndex, PackMode, check_mode, read_header, write_pack
from lt_data.storage import check_inside, make_folder_synced, translate_os_errors
from lt_data.store.generations import list_generations
from lt_data.store.token_store import TokenStore


@dataclass(frozen=True)
class StoreLengths:
    """Lengths of a store's documents, read by ranges.

    Attributes:
        store: the store.
    """

    store: TokenStore

    @property
    def size(self) -> int:
        """Number of documents."""
        return self.store.n_documents

    def __getitem__(self, documents: slice, /) -> np.ndarray:
        """Return the lengths of a range (int32)."""
        first, last, _ = documents.indices(self.size)
        return self.store.read_lengths(first, last)


def pack(store: TokenStore, *, seq_len: int, mode: PackMode = "bfd", overwrite: bool = False) -> PackIndex:
    """Make the pack of a store, or open it if it exists.

        >>> pack(store, seq_len=128, mode="concat").n_rows == -(-store.n_tokens // 128)
        True

    Args:
        store: the token store; the pack is written to its `pack_folder`.
        seq_len: tokens in a row.
        mode: `bfd` or `concat`.
        overwrite: make it again if it exists.

    Raises:
        DataError: bad `seq_len` or `mode`, other files in its folder, no position with a label, or a file system error.
    """
    check_mode(mode, seq_len)
    folder = store.pack_folder(f"{mode}-{seq_len}")
    if store.packs is None:
        check_inside(folder, folder.parent.parent)
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            return _open_checked(folder, store, seq_len, mode)
        read_header(folder)
        known = {PACK_FILE, *(f"{array}.npy" for array in ARRAYS)}
        if foreign := sorted(entry.name for entry in folder.iterdir() if entry.name not in known):
            raise DataError(f"{folder} holds {', '.join(foreign)} beside the pack: move them away before overwriting")
    try:
        with translate_os_errors("create", folder.parent):
            make_folder_synced(folder.parent)
            if not os.access(folder.parent, os.W_OK):  # before hours of work
                raise PermissionError(errno.EACCES, "not writable")
        fingerprint = store.manifest.fingerprint
        write_pack(StoreLengths(store), folder, seq_len=seq_len, mode=mode, store_fingerprint=fingerprint)
    except DataError as exc:
        if store.packs is not None or not isinstance(exc.__cause__, OSError):
            raise
        raise DataError(f"{exc}; or give another folder for packs (--packs, in a recipe data.packs)") from exc
    return _open_checked(folder, store, seq_len, mode)


def open_pack(store: TokenStore, *, seq_len: int, mode: PackMode = "bfd") -> PackIndex:
    """Open an existing pack; the arguments are those of `pack`.

        >>> open_pack(store, seq_len=64).mode
        'bfd'

    Raises:
        DataError: no such pack, or it belongs to another store; the message names the command that makes it. Or none of
            its positions has a label.
    """
    check_mode(mode, seq_len)
    folder = store.pack_folder(f"{mode}-{seq_len}")
    if not folder.exists():
        place = "" if store.packs is None else f" in {store.packs}"
        older = list_generations(store.folder)[:-1]
        hint = f" (older generations of it: {older[0]} ...)" if older else ""
        raise DataError(
            f"store {store.path} has no pack {folder.name}{place}{hint}; make it with: "
            f"{_pack_command(store, seq_len, mode)}"
        )
    return _open_checked(folder, store, seq_len, mode)


def _open_checked(folder: Path, store: TokenStore, seq_len: int, mode: PackMode) -> PackIndex:
    index = PackIndex.load(folder)
    remedy = f"make it again with: {_pack_command(store, seq_len, mode)} --overwrite"
    if index.store_fingerprint != store.manifest.fingerprint:
        raise DataError(f"{folder} belongs to another store; {remedy}")
    if (index.seq_len, index.mode) != (seq_len, mode):
        raise DataError(f"{folder} is {index.mode}-{index.seq_len}, not {mode}-{seq_len}; {remedy}")
    if index.n_rows and not index.valid.any():  # reads up to the first row with a label
        raise DataError(
            f"{folder}: no position has a label, since no document of {store.path} has two tokens; there is nothing to "
            "train on: prepare longer texts"
        )
    return index


def _pack_command(store: TokenStore, seq_len: int, mode: PackMode) -> str:
    packs = "" if store.packs is None else f" --packs {store.packs}"
    return f"lt data pack {store.path} --seq-len {seq_len} --mode {mode}{packs}"


def list_packs(store: TokenStore) -> list[Path]:
    """Return the folders of the packs of a store, by name; a killed run may have left others."""
    try:
        paths = list(store.pack_folder().iterdir())
    except (FileNotFoundError, NotADirectoryError):  # one that may not be read is not one without packs
        return []
    return sorted(path for path in paths if re.fullmatch(r"(bfd|concat)-\d+", path.name))


def verify_packs(store: TokenStore) -> int:
    """Check every pack in a store: its arrays, and that it belongs to the store; return their number.

    Raises:
        DataError: one differs.
    """
    folders = list_packs(store)
    for folder in folders:
        header = read_header(folder)
        _open_checked(folder, store, header.seq_len, header.mode).verify()
    return len(folders)
