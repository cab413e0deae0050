"""Statistics of a token store and its packs: `lt data stats`.

They come from the manifest, the document lengths and the pack indexes, without reading tokens. Exact duplicates are
counted on request, which reads all tokens and needs 40 bytes per document. Cost of the rest: O(documents).

Rows are never dropped: rows that do not fill a batch at the end of an epoch begin the next one, so an epoch has a whole
number of steps only if the batch size divides the rows.
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.packing.pack_index import PackIndex
from lt_data.packing.packs import list_packs
from lt_data.progress import Progress, no_progress
from lt_data.store.manifest import StoreManifest
from lt_data.store.token_store import TokenStore


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """Histogram bin: number of documents of `min_tokens` to `max_tokens` tokens, and their tokens."""

    min_tokens: int
    max_tokens: int
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class EpochSteps:
    """Steps of one epoch: rows = steps x global_batch_size + remainder."""

    rows: int
    global_batch_size: int
    dp_size: int
    steps: int
    remainder: int


@dataclass(frozen=True, kw_only=True)
class PackStats:
    """Statistics of a pack.

    Attributes:
        name: its folder.
        seq_len: tokens in a row.
        mode: packing mode.
        rows: number of rows.
        padding: padding positions.
        valid_tokens: positions with a label.
        truncated_documents: documents that are split over several rows.
        needlessly_truncated_documents: those of them that would fit into one row.
        fill_rate: fraction of the positions with a token.
        truncation_rate: fraction of the documents that are split over several rows.
        needless_truncation_rate: fraction of the documents that are split and would fit into one row.
        is_current: whether the pack belongs to this store.
        epoch: steps of an epoch, if a batch size was given.
    """

    name: str
    seq_len: int
    mode: str
    rows: int
    padding: int
    valid_tokens: int
    truncated_documents: int
    needlessly_truncated_documents: int
    fill_rate: float
    truncation_rate: float
    needless_truncation_rate: float
    is_current: bool
    epoch: EpochSteps | None = None


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """Statistics of a token store.

    Attributes:
        manifest: its manifest, with what was left out, sources, columns, map and split.
        documents: number of documents.
        tokens: number of ids, BOS and EOS included.
        bytes_per_token: text bytes per id, without BOS and EOS; 0 if the documents were given as ids.
        vocab_size: 1 + the highest id.
        min_length: tokens of the shortest document.
        median_length: median of the document lengths.
        mean_length: mean of the document lengths.
        max_length: tokens of the longest document.
        length_histogram: documents by length, in powers of two.
        duplicates: documents that repeat an earlier one, and their tokens; None unless requested.
        packs: statistics of the packs, by name.
    """

    manifest: StoreManifest
    documents: int
    tokens: int
    bytes_per_token: float
    vocab_size: int
    min_length: int
    median_length: float
    mean_length: float
    max_length: int
    length_histogram: tuple[LengthBin, ...]
    duplicates: tuple[int, int] | None
    packs: tuple[PackStats, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        manifest = self.manifest.to_dict()
        for name in ("format", "version", "shards", "checksum"):
            manifest.pop(name, None)
        return {**asdict(self), "manifest": manifest}


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
        global_batch_size: rows in a step over all ranks, to count the steps of an epoch.
        dp_size: data-parallel ranks.
        progress: called with the bytes read for duplicates.

    Raises:
        DataError: the store is empty, an index or a pack is broken, or the batch cannot be divided.
    """
    manifest, lengths = store.manifest, store.lengths
    if not lengths.size:
        raise DataError(f"{store.path}: the store has no documents")
    text_tokens = store.n_tokens - store.n_documents * (manifest.bos + manifest.eos)
    return StoreStats(
        manifest=manifest,
        documents=store.n_documents,
        tokens=store.n_tokens,
        bytes_per_token=manifest.text_bytes / text_tokens if text_tokens else 0.0,
        vocab_size=store.vocab_size,
        min_length=int(lengths.min()),
        median_length=float(np.median(lengths)),
        mean_length=store.n_tokens / store.n_documents,
        max_length=int(lengths.max()),
        length_histogram=_histogram(lengths),
        duplicates=count_duplicates(store, progress) if duplicates else None,
        packs=tuple(
            _pack_stats(folder.name, PackIndex.load(folder), store, global_batch_size, dp_size)
            for folder in list_packs(store)
        ),
    )


def steps_per_epoch(rows: int, global_batch_size: int, dp_size: int = 1) -> EpochSteps:
    """Return the steps of an epoch over some rows.

    Raises:
        DataError: the batch cannot be divided over the ranks.
    """
    if global_batch_size < 1 or dp_size < 1 or global_batch_size % dp_size:
        raise DataError(
            f"global_batch_size = {global_batch_size}: must be a positive multiple of dp_size = {dp_size}, so that all "
            "ranks have the same number of rows"
        )
    steps, remainder = divmod(rows, global_batch_size)
    return EpochSteps(rows=rows, global_batch_size=global_batch_size, dp_size=dp_size, steps=steps, remainder=remainder)


def _histogram(lengths: np.ndarray) -> tuple[LengthBin, ...]:
    bits = np.frexp(lengths)[1] - 1  # floor(log2), exact for every int32
    documents = np.bincount(bits).tolist()
    tokens = np.bincount(bits, weights=lengths).astype(np.int64).tolist()  # float64: exact below 2^53
    return tuple(
        LengthBin(min_tokens=2**bit, max_tokens=2 ** (bit + 1) - 1, documents=documents[bit], tokens=tokens[bit])
        for bit in range(int(bits.min()), len(documents))
    )


def count_duplicates(store: TokenStore, progress: Progress = no_progress) -> tuple[int, int]:
    """Return the number of documents with the same ids as an earlier one, and their tokens."""
    lengths, offsets = store.lengths, store.offsets
    hashes = np.empty(lengths.size, "S16")
    for i, length in enumerate(lengths.tolist()):
        ids = np.ascontiguousarray(store.tokens(int(offsets[i]), length))
        hashes[i] = hashlib.sha256(ids.data).digest()[:16]
        if i % 2**16 == 0:
            progress(int(offsets[i]) * store.dtype.itemsize, store.n_tokens * store.dtype.itemsize, "bytes")
    _, first = np.unique(hashes, return_index=True)
    return lengths.size - first.size, store.n_tokens - int(lengths[first].sum(dtype=np.int64))


def _pack_stats(
    name: str, pack: PackIndex, store: TokenStore, global_batch_size: int | None, dp_size: int
) -> PackStats:
    padding = pack.n_positions - int(pack.length.sum(dtype=np.int64))
    slices = np.bincount(pack.document, minlength=store.n_documents)
    is_current = pack.store_fingerprint == store.manifest.fingerprint
    truncated = slices > 1
    needlessly = int((truncated & (store.lengths <= pack.seq_len)).sum()) if is_current else 0
    return PackStats(
        name=name,
        seq_len=pack.seq_len,
        mode=pack.mode,
        rows=pack.n_rows,
        padding=padding,
        valid_tokens=int(pack.valid.sum(dtype=np.int64)),
        truncated_documents=int(truncated.sum()),
        needlessly_truncated_documents=needlessly,
        fill_rate=1 - padding / pack.n_positions,
        truncation_rate=int(truncated.sum()) / slices.size,
        needless_truncation_rate=needlessly / slices.size,
        is_current=is_current,
        epoch=None if global_batch_size is None else steps_per_epoch(pack.n_rows, global_batch_size, dp_size),
    )
