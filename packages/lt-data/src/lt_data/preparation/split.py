"""Split of a token store into two by the hash of each document: held-out documents, and the others.

A document is held out if the first 8 bytes of the SHA-256 of `lt-data split 1`, a zero byte and its ids (u32, without
BOS and EOS), read as a big-endian number, are below the fraction times 2^64. So only its own ids decide: equal
documents are on one side, and none changes sides when others are added, removed or reordered, or shards change.

The store is verified; a second pass selects, and each side is written in a third one. Text bytes are
counted from the ids of a byte-level tokenizer, and unknown (0) if they do not sum to those of the store; special
strings are not counted again. Sources and kept columns stay with their documents. Memory: 13 bytes per document. Cost:
every byte is read three times and hashed three times.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np

from lt_data.errors import DataError
from lt_data.preparation.unit_writer import write_store_files
from lt_data.preparation.units import check_free
from lt_data.progress import NoticeCallback, Progress, no_notice, no_progress
from lt_data.sources.reader import summarize_sources
from lt_data.storage import atomic_folder, translate_os_errors
from lt_data.store.document_columns import count_nulls
from lt_data.store.document_metadata import DocumentMetadata
from lt_data.store.manifest import (
    MANIFEST_FILE,
    SHARD_FOLDER,
    TOKENIZER_FOLDER,
    DocumentTotals,
    StoreManifest,
    StoreSplit,
    read_manifest,
)
from lt_data.store.shards import ShardWriter
from lt_data.store.token_store import TokenStore
from lt_data.tokenizing.files import MODEL_FILE
from lt_data.tokenizing.tokenizer import Tokenizer

_PREFIX = b"lt-data split 1\x00"
_CHUNK_TOKENS = 1 << 22
_Side = Literal["train", "validation"]
_LEFT_OUT = {"train": "held out", "validation": "not held out"}


@dataclass(frozen=True, kw_only=True)
class _Selected:
    held_out: np.ndarray  # bool [documents]
    totals: dict[_Side, DocumentTotals]


def split(
    store: TokenStore,
    *,
    holdout: str | float | Fraction,
    train: str | Path,
    validation: str | Path,
    progress: Progress = no_progress,
    notify: NoticeCallback = no_notice,
) -> tuple[StoreManifest, StoreManifest]:
    """Write the held-out documents of a store and the others into two new stores with the same tokenizer.

    Args:
        store: the store, which is not changed.
        holdout: expected share of documents to hold out: "0.1%" or 0.001.
        train: folder of the store of the other documents.
        validation: folder of the store of the held-out documents.
        progress: called with the bytes read.
        notify: called with notices for the user.

    Returns:
        The manifests of `train` and `validation`.

    Raises:
        DataError: a share that is not between 0 and 1 or that leaves a side empty, a damaged store, a part of a job, or
            a folder that is in use or unwritable.
    """
    share = parse_holdout(holdout)
    manifest = store.manifest
    folders: dict[_Side, Path] = {"validation": Path(validation), "train": Path(train)}
    if len({path.resolve() for path in (*folders.values(), store.path)}) < 3:
        raise DataError(f"train = {train}, validation = {validation}, store = {store.path}: give three folders")
    origins: dict[_Side, StoreSplit] = {
        side: StoreSplit(fingerprint=manifest.fingerprint, holdout=str(share), side=side) for side in folders
    }
    complete = _find_complete(folders, origins)
    for side, path in folders.items():
        if side not in complete:
            check_free(path)
    store.verify()
    selected = _select_documents(store, share, progress)
    if empty := [side for side, totals in selected.totals.items() if not totals.documents]:
        raise DataError(
            f"holdout = {holdout}: of the {manifest.documents} documents of {store.path} none is for {empty[0]}; give "
            f"{'another' if empty[0] == 'train' else 'a larger'} share"
        )
    if manifest.text_bytes and not selected.totals["train"].text_bytes:
        notify("text bytes of the two stores are unknown: those of the ids do not sum to those of the store")
    for side, path in folders.items():
        if side in complete:
            notify(f"{path} is complete already")
        else:
            complete[side] = _write_side(store, selected, origins[side], path)
    return complete["train"], complete["validation"]


def _find_complete(folders: Mapping[_Side, Path], origins: Mapping[_Side, StoreSplit]) -> dict[_Side, StoreManifest]:
    """Return the manifests of the sides that an earlier run of the same split finished."""
    complete: dict[_Side, StoreManifest] = {}
    for side, path in folders.items():
        with translate_os_errors("read", path):
            is_store = (path / MANIFEST_FILE).is_file()
        if is_store and (manifest := read_manifest(path)).split == origins[side]:
            complete[side] = manifest
    return complete


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


def is_held_out(ids: np.ndarray, limit: int) -> bool:
    """Return True if a document is held out.

    Args:
        ids: its ids, without BOS and EOS.
        limit: the share of 2^64, rounded up.
    """
    digest = hashlib.sha256(_PREFIX + np.ascontiguousarray(ids, "<u4").tobytes()).digest()
    return int.from_bytes(digest[:8], "big") < limit


def _select_documents(store: TokenStore, share: Fraction, progress: Progress) -> _Selected:
    manifest = store.manifest
    limit = math.ceil(share * 2**64)
    text_bytes = np.zeros(store.n_documents, np.int64)
    held_out = np.zeros(store.n_documents, bool)
    sizes = _token_bytes(store.tokenizer()) if manifest.text_bytes else None
    first = done = 0
    for number in range(len(manifest.shards)):
        for ids, lengths in _read_chunks(store, number, first):
            ends = np.cumsum(lengths)
            for i, (begin, end) in enumerate(zip((ends - lengths).tolist(), ends.tolist(), strict=True), start=first):
                document = ids[begin + manifest.bos : end - manifest.eos]
                held_out[i] = is_held_out(document, limit)
                if sizes is not None:
                    text_bytes[i] = sizes[document].sum()
            first += lengths.size
            done += ids.nbytes
            progress(done, store.n_tokens * store.dtype.itemsize, "bytes")
    if sizes is None or int(text_bytes.sum()) != manifest.text_bytes:
        text_bytes[:] = 0
    masks: dict[_Side, np.ndarray] = {"train": ~held_out, "validation": held_out}
    totals: dict[_Side, DocumentTotals] = {
        side: DocumentTotals(
            documents=int(mask.sum()),
            text_bytes=int(text_bytes[mask].sum()),
            tokens=int(store.lengths[mask].sum(dtype=np.int64)),
        )
        for side, mask in masks.items()
    }
    return _Selected(held_out=held_out, totals=totals)


def _write_side(
    store: TokenStore,
    selected: _Selected,
    origin: StoreSplit,
    out: Path,
) -> StoreManifest:
    base, side = store.manifest, origin.side
    with atomic_folder(out) as building:
        folder = building / SHARD_FOLDER
        with translate_os_errors("write", building):
            folder.mkdir()
            (building / TOKENIZER_FOLDER).mkdir()
        wanted = selected.held_out if side == "validation" else ~selected.held_out
        first = 0
        with ShardWriter(folder, base.shard_tokens, base.dtype) as writer:
            for number in range(len(base.shards)):
                last = int(store.document_boundaries[number + 1])
                if not wanted[first:last].any():
                    first = last
                    continue
                metadata = DocumentMetadata(
                    sources=store.shard_sources(number) if store.has_sources else None,
                    columns=store.shard_columns(number) if base.columns else None,
                )
                begin = first
                for ids, lengths in _read_chunks(store, number, first):
                    keep = wanted[first : first + lengths.size]
                    kept_ids, kept = ids[np.repeat(keep, lengths)], lengths[keep]
                    details = metadata.slice(first - begin, first - begin + lengths.size).select(keep)
                    writer.append(kept_ids, kept, details)
                    first += lengths.size
            shards = writer.finish()
        totals = selected.totals
        other: _Side = "train" if side == "validation" else "validation"
        manifest = replace(
            base,
            shards=shards,
            columns=count_nulls(base.columns, folder, shards),
            text_bytes=totals[side].text_bytes,
            read=totals[side] + totals[other],
            left_out={_LEFT_OUT[side]: totals[other]},
            skipped={},
            special_strings={},
            sources=summarize_sources(store.source_files, skipped_links=base.sources.skipped_links)
            if store.source_files
            else base.sources,
            merged_from=1,
            split=origin,
            dropped=None,
        )
        write_store_files(building, manifest, store.tokenizer().files, store.source_files)
    return manifest


def _read_chunks(store: TokenStore, number: int, before: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the documents of a shard, after `before` earlier ones, in chunks: ids and their lengths."""
    after = int(store.document_boundaries[number + 1])
    lengths = store.lengths[before:after].astype(np.int64)  # verified, so they sum to the tokens of the shard
    extents, ends = store.extents, np.cumsum(lengths)
    start = int(extents.first_token[np.searchsorted(extents.shard, number)])
    first = begin = 0
    while first < lengths.size:
        last = max(first + 1, int(np.searchsorted(ends, begin + _CHUNK_TOKENS, side="right")))
        end = int(ends[last - 1])
        yield np.ascontiguousarray(store.tokens(start + begin, end - begin)), lengths[first:last]
        first, begin = last, end


def _token_bytes(tokenizer: Tokenizer) -> np.ndarray | None:
    """Return the bytes of text of each id (int64 [vocabulary]) of a byte-level tokenizer; None for others."""
    values = json.loads(tokenizer.files[MODEL_FILE])
    vocabulary = values["model"].get("vocab")
    if (values.get("decoder") or {}).get("type") != "ByteLevel" or not isinstance(vocabulary, dict):
        return None
    sizes = np.zeros(tokenizer.vocab_size, np.int64)
    for token, id_ in vocabulary.items():
        sizes[id_] = len(token)  # one character stands for each byte
    for added in values.get("added_tokens") or ():
        sizes[added["id"]] = len(added["content"].encode())
    return sizes
