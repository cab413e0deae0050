"""Statistics of a token store and its packs: `lt data stats`.

They come from the manifest, the document lengths and the pack indexes, without reading tokens. Exact duplicates are
counted on request, which reads all tokens and needs 16 to 32 bytes per document. Cost of the rest: O(documents).
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lt_data.analysis.steps import EpochSteps, steps_per_epoch
from lt_data.errors import DataError
from lt_data.packing.pack_index import PackIndex
from lt_data.packing.packs import list_packs
from lt_data.preparation.deduplication import HASH_DTYPE, DocumentHashSet
from lt_data.progress import Progress, no_progress
from lt_data.store.manifest import ColumnInfo, RecordMapInfo, StoreSplit
from lt_data.store.token_store import TokenStore

_BLOCK = 2**16  # documents per hash lookup


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """Histogram bin: number of documents of `min_tokens` to `max_tokens` tokens, and their tokens."""

    min_tokens: int
    max_tokens: int
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class PackStats:
    """Statistics of a pack.

    Attributes:
        name: its folder.
        seq_len: tokens in a row.
        mode: packing mode.
        rows: number of rows.
        fill_rate: fraction of the positions with a token.
        padding: padding positions.
        valid_tokens: positions with a label.
        truncated_documents: documents that are split over several rows.
        needlessly_truncated_documents: those of them that would fit into one row.
        padding_rate: fraction of padding positions.
        truncation_rate: fraction of the documents that are split over several rows.
        needless_truncation_rate: fraction of the documents that are split and would fit into one row.
        current: whether the pack belongs to this store.
        steps: steps of an epoch, if a batch size was given; for buckets one entry per row length.
    """

    name: str
    seq_len: int
    mode: str
    rows: int
    fill_rate: float
    padding: int
    valid_tokens: int
    truncated_documents: int
    needlessly_truncated_documents: int
    padding_rate: float
    truncation_rate: float
    needless_truncation_rate: float
    current: bool
    steps: tuple[EpochSteps, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DuplicateStats:
    """Documents that repeat an earlier document of the store, and their tokens."""

    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """Statistics of a token store.

    Attributes:
        documents: number of documents.
        tokens: number of ids, BOS and EOS included.
        text_bytes: UTF-8 bytes of the text.
        bytes_per_token: text bytes per id, without BOS and EOS; 0 if the documents were given as ids.
        vocab_size: 1 + the highest id.
        min_length: tokens of the shortest document.
        median_length: median of the document lengths.
        mean_length: mean of the document lengths.
        max_length: tokens of the longest document.
        length_histogram: documents by length, in powers of two.
        empty_documents: documents without a token, which were left out.
        left_out: documents that were read and left out, by reason.
        skipped: source records without a document, and ids that an attention mask hides, by reason.
        unchecked_sources: source files in which no checksum confirms the content, by format.
        special_strings: counts of literal special strings in the text.
        duplicates: exact duplicates, if requested.
        packs: statistics of the packs, by name.
        columns: the kept columns.
        map: function of the user that was applied to the records, if any.
        split: the store and the side of the split that made this one, if any.
        fingerprint: fingerprint of the store.
    """

    documents: int
    tokens: int
    text_bytes: int
    bytes_per_token: float
    vocab_size: int
    min_length: int
    median_length: float
    mean_length: float
    max_length: int
    length_histogram: tuple[LengthBin, ...]
    empty_documents: int
    left_out: dict[str, int]
    skipped: dict[str, int]
    unchecked_sources: dict[str, int]
    special_strings: dict[str, int]
    duplicates: DuplicateStats | None
    packs: tuple[PackStats, ...]
    columns: tuple[ColumnInfo, ...]
    map: RecordMapInfo | None
    split: StoreSplit | None
    fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        packs = [{**asdict(pack), "steps": [steps.to_dict() for steps in pack.steps]} for pack in self.packs]
        return {**asdict(self), "packs": packs}


def stats(
    store: TokenStore,
    *,
    duplicates: bool = False,
    global_batch_size: int | None = None,
    dp_size: int = 1,
    progress: Progress = no_progress,
) -> StoreStats:
    """Compute the statistics of a store and its packs.

    Args:
        store: the store.
        duplicates: count exact duplicates, which reads all tokens.
        global_batch_size: rows in a step, to count the steps of an epoch.
        dp_size: data-parallel ranks.
        progress: called with the bytes read for duplicates.

    Raises:
        DataError: an index or a pack is broken, or the batch cannot be divided.
    """
    manifest = store.manifest
    lengths = store.lengths
    if not lengths.size:
        raise DataError(f"{store.path}: the store has no documents")
    text_tokens = store.n_tokens - store.n_documents * (manifest.bos + manifest.eos)
    return StoreStats(
        documents=store.n_documents,
        tokens=store.n_tokens,
        text_bytes=manifest.text_bytes,
        bytes_per_token=manifest.text_bytes / text_tokens if text_tokens else 0.0,
        vocab_size=store.vocab_size,
        min_length=int(lengths.min()),
        median_length=float(np.median(lengths)),
        mean_length=store.n_tokens / store.n_documents,
        max_length=int(lengths.max()),
        length_histogram=_histogram(lengths),
        empty_documents=manifest.empty_documents,
        left_out={reason: amount.documents for reason, amount in manifest.left_out.items()},
        skipped=dict(manifest.skipped),
        unchecked_sources=dict(manifest.sources.unchecked),
        special_strings=dict(manifest.special_strings),
        duplicates=count_duplicates(store, progress) if duplicates else None,
        packs=tuple(
            _pack_stats(folder.name, PackIndex.load(folder), store, global_batch_size, dp_size)
            for folder in list_packs(store)
        ),
        columns=manifest.columns,
        map=manifest.map,
        split=manifest.split,
        fingerprint=manifest.fingerprint,
    )


def _histogram(lengths: np.ndarray) -> tuple[LengthBin, ...]:
    bits = np.frexp(lengths)[1] - 1  # floor(log2), exact for every int32
    documents = np.bincount(bits)
    tokens = np.bincount(bits, weights=lengths)  # float64: exact below 2^53
    return tuple(
        LengthBin(
            min_tokens=2**bit, max_tokens=2 ** (bit + 1) - 1, documents=int(documents[bit]), tokens=int(tokens[bit])
        )
        for bit in range(int(bits.min()), documents.size)
    )


def count_duplicates(store: TokenStore, progress: Progress = no_progress) -> DuplicateStats:
    """Count the documents with the same ids as an earlier one."""
    seen = DocumentHashSet()
    lengths, offsets = store.lengths, store.offsets
    documents = tokens = 0
    for first in range(0, lengths.size, _BLOCK):
        last = min(first + _BLOCK, lengths.size)
        hashes = np.zeros(last - first, HASH_DTYPE)
        for i in range(first, last):
            ids = np.ascontiguousarray(store.tokens(int(offsets[i]), int(lengths[i])))
            hashes[i - first] = hashlib.sha256(ids.data).digest()[: HASH_DTYPE.itemsize]
        repeated = ~seen.add(hashes)
        documents += int(repeated.sum())
        tokens += int(lengths[first:last][repeated].sum(dtype=np.int64))
        progress(int(offsets[last]) * store.dtype.itemsize, store.n_tokens * store.dtype.itemsize, "bytes")
    return DuplicateStats(documents=documents, tokens=tokens)


def _pack_stats(
    name: str, pack: PackIndex, store: TokenStore, global_batch_size: int | None, dp_size: int
) -> PackStats:
    positions = pack.n_positions
    filled = int(pack.length.sum(dtype=np.int64))
    slices = np.bincount(pack.document, minlength=store.n_documents)
    current = pack.store_fingerprint == store.manifest.fingerprint
    truncated = slices > 1
    needlessly = int((truncated[: store.n_documents] & (store.lengths <= pack.seq_len)).sum()) if current else 0
    return PackStats(
        name=name,
        seq_len=pack.seq_len,
        mode=pack.mode,
        rows=pack.n_rows,
        fill_rate=filled / positions,
        padding=positions - filled,
        valid_tokens=int(pack.valid.sum(dtype=np.int64)),
        truncated_documents=int(truncated.sum()),
        needlessly_truncated_documents=needlessly,
        padding_rate=(positions - filled) / positions,
        truncation_rate=int(truncated.sum()) / slices.size,
        needless_truncation_rate=needlessly / slices.size,
        current=current,
        steps=()
        if global_batch_size is None
        else steps_per_epoch(pack, global_batch_size=global_batch_size, dp_size=dp_size),
    )
