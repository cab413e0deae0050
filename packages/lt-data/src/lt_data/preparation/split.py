"""Split of a token store into two by the hash of each document: held-out documents, and the others.

A document is held out if the first 8 bytes of the SHA-256 of `lt-data split 1`, a zero byte and its ids (u32, without
BOS and EOS), read as a big-endian number, are below the fraction times 2^64. So only its own ids decide: equal
documents are on one side, and none changes sides when others are added, removed or reordered, or shards change.

No ids are copied: both sides name the shards of the store and have masks of their documents (lt_data.store.masks), so
the store stays where it is. The ids are compared with their hashes on the way. Text bytes of the held-out documents are
those of their decoded text; special strings are not counted again.

Cost: one read of all ids, which are hashed twice, and of the tokenizer for the held-out documents; a byte per document.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np

from lt_data.errors import DataError
from lt_data.preparation.join import move_parts, name_folder
from lt_data.preparation.masking import mask_documents
from lt_data.preparation.units import check_free
from lt_data.progress import NoticeCallback, Progress, no_notice, no_progress
from lt_data.storage import atomic_folder
from lt_data.store.manifest import (
    MANIFEST_FILE,
    DocumentTotals,
    StoreManifest,
    StoreSplit,
    read_manifest,
    write_manifest,
)
from lt_data.store.token_store import TokenStore

_PREFIX = b"lt-data split 1\x00"
_LEFT_OUT = {"train": "held out", "validation": "not held out"}


def split(
    store: TokenStore,
    *,
    holdout: str | float | Fraction,
    train: str | Path,
    validation: str | Path,
    progress: Progress = no_progress,
    notify: NoticeCallback = no_notice,
) -> tuple[StoreManifest, StoreManifest]:
    """Make two stores of the held-out documents of a store and of the others, which name its shards.

        >>> train, validation = split(store, holdout="10%", train="train", validation="validation")
        >>> train.documents + validation.documents == len(store)
        True

    Args:
        store: the store, which is not changed, and must stay where it is.
        holdout: expected share of documents to hold out: "0.1%" or 0.001.
        train: folder of the store of the other documents.
        validation: folder of the store of the held-out documents.
        progress: called with the bytes read.
        notify: called with notices for the user.

    Returns:
        The manifests of `train` and `validation`.

    Raises:
        DataError: a share that is not between 0 and 1 or that leaves a side empty, a damaged store, or a folder that is
            in use or unwritable.
    """
    share = parse_holdout(holdout)
    folders: dict[Literal["train", "validation"], Path] = {"validation": Path(validation), "train": Path(train)}
    if store.shard_reader is not None:
        raise DataError(f"{store.path}: a store in S3; download it first (lt data download)")
    if len({path.resolve() for path in (*folders.values(), store.folder)}) < 3:
        raise DataError(f"train = {train}, validation = {validation}, store = {store.path}: give three folders")
    fingerprint = store.manifest.fingerprint
    origins = {side: StoreSplit(fingerprint=fingerprint, holdout=str(share), side=side) for side in folders}
    complete = {side: _find_complete(path, origins[side]) for side, path in folders.items()}
    held_out, text_bytes = _select_documents(store, share, progress)
    masks = {"train": ~held_out, "validation": held_out}
    totals = _count_sides(store, masks, text_bytes)
    if empty := [side for side, amount in totals.items() if not amount.documents]:
        raise DataError(
            f"holdout = {holdout}: of the {len(store)} documents of {store.path} none is for {empty[0]}; give "
            f"{'another' if empty[0] == 'train' else 'a larger'} share"
        )
    manifests: dict[str, StoreManifest] = {}
    for side, path in folders.items():
        if (there := complete[side]) is not None:
            notify(f"{path} is complete already")
            manifests[side] = there
            continue
        with atomic_folder(path) as folder:
            moved = move_parts(store, name_folder(folder, store.folder))
            other = totals["train" if side == "validation" else "validation"]
            manifests[side] = replace(
                moved,
                parts=mask_documents(TokenStore.of_manifest(folder, moved), masks[side], folder),
                text_bytes=totals[side].text_bytes,
                read=totals[side] + other,
                left_out={_LEFT_OUT[side]: other},
                skipped={},
                special_strings={},
                split=origins[side],
                appended=(),
            )
            write_manifest(manifests[side], folder / MANIFEST_FILE)
    return manifests["train"], manifests["validation"]


def _find_complete(path: Path, origin: StoreSplit) -> StoreManifest | None:
    """Return the manifest of a side that an earlier run of the same split made; raise if something else is there."""
    if (path / MANIFEST_FILE).is_file() and (manifest := read_manifest(path)).split == origin:
        return manifest
    check_free(path)
    return None


def parse_holdout(value: str | float | Fraction) -> Fraction:
    """Return a share such as "0.1%" or 0.001 as an exact fraction.

    Raises:
        DataError: not a number between 0 and 1.
    """
    text = str(value).strip()
    try:
        share = Fraction(text.removesuffix("%").strip()) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError) as exc:
        raise DataError(f"holdout = {value!r}: give a share such as 0.1% or 0.001") from exc
    if not 0 < share < 1:
        raise DataError(f"holdout = {value!r}: give a share above 0% and below 100%")
    return share


def _select_documents(store: TokenStore, share: Fraction, progress: Progress) -> tuple[np.ndarray, int]:
    """Return the held-out documents (bool [n_documents]), and the bytes of their text; 0 if unknown."""
    manifest, tokenizer = store.manifest, store.tokenizer()
    limit = math.ceil(share * 2**64)
    held_out = np.zeros(len(store), bool)
    text_bytes = first = 0
    for number, shard in enumerate(manifest.shards):
        ids, lengths = store.read_shard(number), store.shard_lengths(number)
        if hashlib.sha256(np.ascontiguousarray(ids).data).hexdigest() != shard.sha256:
            raise DataError(f"{store.shard_path(number, 'bin')}: SHA-256 differs from the manifest; restore it")
        ends, keep = np.cumsum(lengths, dtype=np.int64), store.kept_documents(number)
        documents = np.arange(lengths.size) if keep is None else np.flatnonzero(keep)
        spans = zip((ends - lengths)[documents].tolist(), ends[documents].tolist(), strict=True)
        for index, (begin, end) in enumerate(spans, start=first):
            document = ids[begin + manifest.bos : end - manifest.eos]
            digest = hashlib.sha256(_PREFIX + document.astype("<u4").tobytes()).digest()
            if int.from_bytes(digest[:8], "big") < limit:
                held_out[index] = True
                if manifest.text_bytes:
                    text_bytes += len(tokenizer.decode(document, skip_special_tokens=True).encode())
        first += documents.size
        progress(int(store.shard_offsets[number + 1]), store.n_tokens, "tokens")
    return held_out, text_bytes


def _count_sides(store: TokenStore, masks: Mapping[str, np.ndarray], text_bytes: int) -> dict[str, DocumentTotals]:
    sizes = {"validation": text_bytes, "train": max(0, store.manifest.text_bytes - text_bytes)}
    return {
        side: DocumentTotals(
            documents=int(np.count_nonzero(mask)),
            text_bytes=sizes[side],
            tokens=int(store.lengths[mask].sum(dtype=np.int64)),
        )
        for side, mask in masks.items()
    }
