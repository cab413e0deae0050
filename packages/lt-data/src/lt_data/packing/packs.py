"""Packs: training rows as an index over a token store; tokens are never copied.

Three modes (lt_data.packing.algorithms), none of which drops a token:

- `bfd`, best-fit decreasing over the whole store: no document that fits a row is cut.
- `concat`: the documents concatenated in order and cut every `seq_len` tokens.
- `buckets`: rows of `seq_len` tokens, of half of it, and so on, each of one document.

A store of more than `GROUP_DOCUMENTS` documents is packed in groups (lt_data.packing.groups), by several processes and
in bounded memory; the number of documents per group is in the header, and all else is as in a pack of one group.

A slice holds the offset of its tokens in the store and the number of its positions with a label: all, or one less if
the slice ends its document (`concat`: the store). So the number of labels of any batch follows from the index alone.
Cost: 28 bytes per slice on disk, opened without reading.
"""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lt_data.errors import DataError
from lt_data.packing.groups import GROUP_DOCUMENTS, Lengths, PackMode, document_dtype, iter_groups
from lt_data.packing.pack_header import (
    ARRAYS,
    DTYPES,
    PACK_FILE,
    check_row_lengths,
    make_header,
    read_header,
    start_fingerprint,
)
from lt_data.packing.pack_index import PackIndex, build_index
from lt_data.packing.pack_writer import GroupPacker, StoreLengths, join_blocks, pack_groups
from lt_data.storage import atomic_folder, make_folder_synced, translate_os_errors, write_file
from lt_data.store.joined import list_generations
from lt_data.store.token_store import TokenStore


def pack(
    store: TokenStore,
    *,
    seq_len: int,
    mode: PackMode = "bfd",
    min_seq_len: int | None = None,
    name: str | None = None,
    overwrite: bool = False,
    workers: int = 1,
) -> PackIndex:
    """Make the pack of a store, or open it if it exists.

    Args:
        store: the token store; the pack is written to the folder `<name>` in its `pack_folder`.
        seq_len: tokens in a row; with `buckets`, in the longest.
        mode: `bfd`, `concat` or `buckets`.
        min_seq_len: only with `buckets`: tokens in the shortest rows, `seq_len` divided by a power of two; default 256.
        name: folder name; default `<mode>-<seq_len>`, with buckets `buckets-<seq_len>-<min_seq_len>`.
        overwrite: make it again if it exists.
        workers: worker processes for a store of more than 16.8 million documents, which is packed in groups; the result
            is the same.

    Raises:
        DataError: bad `seq_len`, `mode`, `min_seq_len` or `workers`, other files under that name, a file system error,
            or a worker process died.
    """
    lengths = check_row_lengths(seq_len, mode, min_seq_len)
    if workers < 1:
        raise DataError(f"workers = {workers}: give at least 1")
    folder = _pack_folder(store, lengths, mode, name)
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            return _open_checked(folder, store, lengths, mode)
        read_header(folder / PACK_FILE)
        known = {PACK_FILE, *(f"{array}.npy" for array in ARRAYS)}
        if foreign := sorted(entry.name for entry in folder.iterdir() if entry.name not in known):
            raise DataError(f"{folder} holds {', '.join(foreign)} beside the pack: move them away before overwriting")
    fingerprint = store.manifest.fingerprint
    with _suggest_folder(store):
        with translate_os_errors("create", folder.parent):
            make_folder_synced(folder.parent)
            if not os.access(folder.parent, os.W_OK):  # before hours of work
                raise PermissionError(errno.EACCES, "not writable")
        write_pack(
            StoreLengths(store),
            folder,
            seq_len=seq_len,
            mode=mode,
            min_seq_len=min_seq_len,
            store_fingerprint=fingerprint,
            workers=workers,
        )
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
    lengths = check_row_lengths(seq_len, mode, min_seq_len)
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


def list_pack_folders(store: TokenStore) -> list[Path]:
    """Return the folders of the packs of a store, by name."""
    try:
        paths = list(store.pack_folder().iterdir())
    except (FileNotFoundError, NotADirectoryError):  # one that may not be read is not one without packs
        return []
    return sorted(path for path in paths if path.is_dir())


def list_packs(store: TokenStore) -> list[Path]:
    """Return those of the folders that have the header of a pack."""
    return [folder for folder in list_pack_folders(store) if (folder / PACK_FILE).is_file()]


def verify_packs(store: TokenStore) -> int:
    """Check every pack in a store: its arrays, and that it belongs to the store; return their number.

    Raises:
        DataError: one differs.
    """
    folders = list_packs(store)
    for folder in folders:
        index = PackIndex.load(folder)
        _open_checked(folder, store, _row_lengths_of(index), index.mode).verify()
    return len(folders)


def write_pack(
    lengths: Lengths,
    folder: Path,
    *,
    seq_len: int,
    mode: PackMode,
    min_seq_len: int | None = None,
    store_fingerprint: str = "",
    documents_per_group: int = GROUP_DOCUMENTS,
    workers: int = 1,
) -> None:
    """Write the pack of documents of these lengths to a folder, atomically; one there is replaced.

    Args:
        lengths: tokens of each document; read by groups.
        folder: path of the folder.
        seq_len: tokens in a row; with `buckets`, in the longest.
        mode: `bfd`, `concat` or `buckets`.
        min_seq_len: as of `pack`.
        store_fingerprint: fingerprint of the documents' store.
        documents_per_group: documents that are packed together.
        workers: worker processes, each with a group of its own; the result is the same.

    Raises:
        DataError: bad `seq_len`, `mode` or `min_seq_len`, a file system error, or a worker process died.
    """
    row_lengths = check_row_lengths(seq_len, mode, min_seq_len)
    if lengths.size <= documents_per_group:
        index = build_index(
            lengths[0 : lengths.size],
            seq_len=seq_len,
            mode=mode,
            min_seq_len=min_seq_len,
            store_fingerprint=store_fingerprint,
            documents_per_group=documents_per_group,
        )
        index.save(folder, overwrite=True)
        return
    with atomic_folder(folder, overwrite=True) as building:
        parts = building / "parts"
        with translate_os_errors("create", parts):
            parts.mkdir()
        packer = GroupPacker(folder=parts, mode=mode, row_lengths=row_lengths, n_documents=lengths.size)
        sizes = pack_groups(iter_groups(lengths, documents_per_group), packer, workers)
        counts = [sum(block.n_rows for block in blocks) for blocks in zip(*sizes, strict=True)]
        buckets = tuple(zip(row_lengths, counts, strict=True)) if mode == "buckets" else None
        digest = start_fingerprint(seq_len, mode, store_fingerprint, buckets, documents_per_group)
        dtypes = {name: np.dtype(dtype) for name, dtype in zip(ARRAYS, DTYPES, strict=True)}
        dtypes["document"] = document_dtype(lengths.size)
        items = join_blocks(packer, sizes, building, dtypes, digest)
        with translate_os_errors("remove", parts):
            parts.rmdir()
        header = make_header(
            seq_len=seq_len,
            mode=mode,
            buckets=buckets,
            documents_per_group=documents_per_group,
            max_slices_per_row=max(block.max_slices_per_row for group in sizes for block in group),
            store_fingerprint=store_fingerprint,
            fingerprint=digest.hexdigest(),
            items=items,
            dtypes=dtypes,
        )
        write_file(building / PACK_FILE, (json.dumps(header, indent=2) + "\n").encode())


def _pack_folder(store: TokenStore, lengths: list[int], mode: PackMode, name: str | None) -> Path:
    name = _pack_name(lengths, mode) if name is None else name
    if not name or name in (".", "..") or "/" in name:
        raise DataError(f"name = {name!r}: give a folder name without a path")
    return store.pack_folder(name)
