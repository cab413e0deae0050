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
    # A mask that the folder has is never replaced: since shards can be gone, its number may be another shard's now.
    files = (Path(shard.mask.file) for shard in store.manifest.shards if shard.mask)
    first_file = 1 + max((int(file.stem) for file in files if file.parent == Path(MASK_FOLDER)), default=-1)
    parts: list[StorePart] = []
    number = 0
    for part in store.manifest.parts:
        shards = [
            masked
            for place in range(number, number + len(part.shards))
            if (masked := _mask_shard(store, place, keep, folder, first_file + place)) is not None
        ]
        number += len(part.shards)
        parts.append(replace(part, shards=tuple(shards)))
    with translate_os_errors("write", folder / MASK_FOLDER):
        fsync_folder(folder / MASK_FOLDER)
    return tuple(parts)


def _mask_shard(store: TokenStore, number: int, keep: np.ndarray, folder: Path, file_number: int) -> ShardFile | None:
    """Return a shard with the mask of its documents; None if none of them is kept."""
    shard = store.manifest.shards[number]
    first, last = store.document_boundaries[number : number + 2].tolist()
    mine = keep[first:last]
    if not mine.any() or mine.all():
        return shard if mine.any() else None
    before = store.kept_documents(number)
    mask = np.ones(shard.documents, bool) if before is None else np.array(before)
    mask[mask] = mine
    return replace(shard, mask=write_mask(folder, file_number, mask, store.shard_lengths(number)))
