"""Masks of the documents of a store that are kept, written to the folder of a new manifest.

Cost: one read of the index of each shard that loses documents.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from lt_data.storage import fsync_folder, make_folder_synced, translate_os_errors
from lt_data.store.manifest import ShardFile, StorePart
from lt_data.store.masks import MASK_FOLDER, write_mask
from lt_data.store.token_store import TokenStore


def mask_documents(store: TokenStore, keep: np.ndarray, folder: Path) -> tuple[StorePart, ...]:
    """Return the parts of a store with only some of its documents.

    Args:
        store: the store.
        keep: which of its documents are kept (bool [n_documents]), not all False.
        folder: folder of the new manifest, in which the masks are written.

    Raises:
        DataError: a file system error, or a broken index.
    """
    with translate_os_errors("create", folder / MASK_FOLDER):
        make_folder_synced(folder / MASK_FOLDER)
    parts: list[StorePart] = []
    number = 0
    for part in store.manifest.parts:
        shards = [
            masked
            for place, shard in enumerate(part.shards, start=number)
            if (masked := _mask_shard(store, place, shard, keep, folder)) is not None
        ]
        number += len(part.shards)
        parts.append(replace(part, shards=tuple(shards)))
    with translate_os_errors("write", folder / MASK_FOLDER):
        fsync_folder(folder / MASK_FOLDER)
    return tuple(parts)


def _mask_shard(store: TokenStore, number: int, shard: ShardFile, keep: np.ndarray, folder: Path) -> ShardFile | None:
    """Return a shard with the mask of its documents; None if none of them is kept."""
    first, last = store.document_boundaries[number : number + 2].tolist()
    mine = keep[first:last]
    if not mine.any() or mine.all():
        return shard if mine.any() else None
    before = store.kept_documents(number)
    mask = np.ones(shard.documents, bool) if before is None else np.array(before)
    mask[mask] = mine
    return replace(shard, mask=write_mask(folder, number, mask, store.shard_lengths(number)))
