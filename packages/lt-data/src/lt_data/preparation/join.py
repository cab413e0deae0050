"""Join of token stores without copying: one manifest that names the parts of all.

A store inside the folder of the joined one is named by its path there. Others get a symbolic link, `parts/00000`, with
a relative target: so a manifest names nothing outside its folder, and copying or uploading what it names makes a folder
of its own.

Cost: the manifests are read and the sizes of all shards compared; one manifest is written.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from lt_data.errors import DataError
from lt_data.file_names import to_portable_name
from lt_data.storage import fsync_folder, make_folder_synced, translate_os_errors
from lt_data.store.document_sources import MAX_SOURCE_FILES
from lt_data.store.manifest import MANIFEST_FILE, ColumnInfo, DocumentTotals, StoreManifest, StorePart, write_manifest
from lt_data.store.token_store import TokenStore

LINK_FOLDER = "parts"
SHARED_FIELDS = ("bos", "eos", "dtype", "special_tokens_as", "selection", "map", "shard_tokens")
"""Manifest fields that stores share, besides the tokenizer."""

T = TypeVar("T")


def join(out: str | Path, stores: Sequence[str | Path]) -> StoreManifest:
    """Make a store of the documents of other stores, which stay where they are.

        >>> _ = prepare([{"text": "One more text."}], tokenizer=tokenizer, out="more")
        >>> join("both", ["store", "more"]).documents
        60

    Args:
        out: folder of the joined store: a new one, or one that contains the stores.
        stores: folders of the stores, in the order of their documents.

    Returns:
        Its manifest.

    Raises:
        DataError: a store is missing or damaged, they have different tokenizers or options, or `out` is a store already
            or unwritable.
    """
    out = Path(out)
    if isinstance(stores, str | Path) or not stores:
        raise DataError(f"stores = {stores!r}: give a list of stores")
    if os.path.lexists(out / MANIFEST_FILE):
        raise DataError(f"out = {out}: holds a store already; choose another folder")
    if remote := [store for store in stores if str(store).startswith("s3://")]:
        raise DataError(f"{remote[0]}: only stores in folders can be joined; download it first (lt data download)")
    manifest = combine_stores(out, [TokenStore(store) for store in stores])
    write_manifest(manifest, out / MANIFEST_FILE)
    return manifest


def combine_stores(out: Path, stores: Sequence[TokenStore]) -> StoreManifest:
    """Return the manifest of several stores for the folder `out`, in which links to those elsewhere are made.

    Raises:
        DataError: they do not fit together, or a file system error.
    """
    names = [str(store.path) for store in stores]
    combine_manifests([store.manifest for store in stores], names)  # before anything is written
    with translate_os_errors("create", out):
        make_folder_synced(out)
    return combine_manifests([move_parts(store, name_folder(out, store.folder)) for store in stores], names)


def name_folder(out: Path, folder: Path) -> str:
    """Return the name of a folder in `out`: its path there, or that of a new link to it.

    Raises:
        DataError: a file system error.
    """
    real, root = os.path.realpath(folder), os.path.realpath(out)
    if os.path.commonpath([real, root]) == root:
        return to_portable_name(Path(os.path.relpath(real, root)).as_posix())
    with translate_os_errors("link", out / LINK_FOLDER):
        (out / LINK_FOLDER).mkdir(exist_ok=True)
        names = (f"{LINK_FOLDER}/{number:05d}" for number in range(10**9))
        name = next(name for name in names if not os.path.lexists(out / name))
        os.symlink(os.path.relpath(real, os.path.join(root, LINK_FOLDER)), out / name)
        fsync_folder(out / LINK_FOLDER)
        fsync_folder(out)
    return name


def move_parts(store: TokenStore, folder: str) -> StoreManifest:
    """Return the manifest of a store that lies in `folder` of another store."""
    manifest = store.manifest
    return manifest if folder == "." else replace(manifest, parts=tuple(part.moved(folder) for part in manifest.parts))


def combine_manifests(manifests: Sequence[StoreManifest], names: Sequence[str]) -> StoreManifest:
    """Return the manifest of the parts of several stores in one folder.

    Args:
        manifests: the manifests, whose parts are named in that folder.
        names: name of each store, for messages.

    Raises:
        DataError: stores have another tokenizer or other options than the first; the message names them.
    """
    first = manifests[0]
    if len(manifests) == 1:
        return first
    for manifest, name in zip(manifests, names, strict=True):
        pairs = [
            ("tokenizer", first.tokenizer.sha256, manifest.tokenizer.sha256),
            *((field, getattr(first, field), getattr(manifest, field)) for field in SHARED_FIELDS),
        ]
        if different := [f"{field} ({a} and {b})" for field, a, b in pairs if a != b]:
            raise DataError(
                f"{name} cannot be joined to {names[0]}: {'; '.join(different)}; prepare both alike, or use them as a "
                "mixture"
            )
    if (files := sum(manifest.sources.files for manifest in manifests)) > MAX_SOURCE_FILES:
        raise DataError(f"{files} source files: a joined store has at most {MAX_SOURCE_FILES}; use them as a mixture")
    has_text = all(manifest.text_bytes or not manifest.documents for manifest in manifests)

    def total(amounts: Iterable[DocumentTotals]) -> DocumentTotals:
        amount = sum(amounts, DocumentTotals())
        return amount if has_text else replace(amount, text_bytes=0)

    columns = _combine_columns([manifest.columns for manifest in manifests])
    return replace(
        first,
        parts=tuple(part if columns else _without_columns(part) for manifest in manifests for part in manifest.parts),
        text_bytes=sum(manifest.text_bytes for manifest in manifests) if has_text else 0,
        read=total(manifest.read for manifest in manifests),
        left_out=_by_key([manifest.left_out for manifest in manifests], total),
        skipped=_by_key([manifest.skipped for manifest in manifests], sum),
        special_strings=_by_key([manifest.special_strings for manifest in manifests], sum),
        # equal documents in different stores were not compared
        selection=replace(first.selection, drop_duplicates=False),
        engine=first.engine if all(manifest.engine == first.engine for manifest in manifests) else {},
        columns=columns,
        split=None,
        appended=(),
    )


def _without_columns(part: StorePart) -> StorePart:
    return replace(part, shards=tuple(replace(shard, arrow_sha256="", arrow_bytes=0) for shard in part.shards))


def _combine_columns(columns: Sequence[tuple[ColumnInfo, ...]]) -> tuple[ColumnInfo, ...]:
    """Return the columns of all stores together; none if some have others than the first."""
    if len({tuple((column.name, column.type) for column in each) for each in columns}) > 1:
        return ()
    return tuple(replace(same[0], nulls=sum(column.nulls for column in same)) for same in zip(*columns, strict=True))


def _by_key(mappings: Sequence[Mapping[str, T]], total: Callable[[Iterable[T]], T]) -> dict[str, T]:
    keys = sorted({key for mapping in mappings for key in mapping})
    return {key: total(mapping[key] for mapping in mappings if key in mapping) for key in keys}
