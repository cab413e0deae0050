"""What is in a token store and its packs, in numbers: `lt data stats`.

All of it comes from the manifest, the document lengths and the pack indexes, and no token is read, but for exact
duplicates, which are looked for when that is asked for: one read of all tokens and 16 to 32 bytes for each document.
Cost of the rest: O(documents).
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.looking.steps import EpochSteps, steps_per_epoch
from lt_data.packing.packs import FILE_NAME, PackIndex
from lt_data.preparing.duplicates import HASH, SeenHashes
from lt_data.progress import Progress, silent
from lt_data.store.manifest import PACK_FOLDER
from lt_data.store.token_store import TokenStore

_BLOCK = 2**16  # documents whose hashes are looked up together


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """Documents of `least` to `most` tokens: how many, and their tokens."""

    least: int
    most: int
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class PackStats:
    """One pack in numbers.

    Attributes:
        name: its folder.
        seq_len: tokens in a row.
        mode: how the rows were filled.
        rows: rows.
        fill: share of the positions that hold a token.
        padding: positions that hold none.
        valid_tokens: positions with a label.
        cut_documents: documents that stand in more than one row.
        needlessly_cut: those of them that would fit into one.
        padding_rate: share of the positions that hold no token.
        truncation_rate: share of the documents that stand in more than one row.
        needless_truncation_rate: share of the documents that do and would fit into one.
        current: whether the pack belongs to this store.
        steps: of an epoch, where a batch was given; of a pack of buckets for each length of rows.
    """

    name: str
    seq_len: int
    mode: str
    rows: int
    fill: float
    padding: int
    valid_tokens: int
    cut_documents: int
    needlessly_cut: int
    padding_rate: float
    truncation_rate: float
    needless_truncation_rate: float
    current: bool
    steps: tuple[EpochSteps, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Documents of which an equal one stands earlier in the store, and their tokens."""

    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A token store in numbers.

    Attributes:
        documents: documents.
        tokens: ids, BOS and EOS included.
        text_bytes: UTF-8 bytes of the text.
        bytes_per_token: text bytes per id, BOS and EOS not counted; 0 where no text is known.
        vocab_size: 1 + the highest id.
        shortest: tokens of the shortest document.
        median: of the document lengths.
        mean: of the document lengths.
        longest: tokens of the longest document.
        lengths: documents by length, in powers of two.
        empty_documents: documents that gave no token and were left out.
        left_out: documents that were read and left out, by reason.
        special_strings: literal special strings in the text, with their counts.
        duplicates: exact ones, where they were asked for.
        packs: by name.
        fingerprint: of the store.
    """

    documents: int
    tokens: int
    text_bytes: int
    bytes_per_token: float
    vocab_size: int
    shortest: int
    median: float
    mean: float
    longest: int
    lengths: tuple[LengthBin, ...]
    empty_documents: int
    left_out: dict[str, int]
    special_strings: dict[str, int]
    duplicates: Duplicates | None
    packs: tuple[PackStats, ...]
    fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        packs = [{**asdict(pack), "steps": [steps.to_dict() for steps in pack.steps]} for pack in self.packs]
        return {**asdict(self), "packs": packs}


def stats(
    store: TokenStore,
    *,
    duplicates: bool = False,
    global_batch: int | None = None,
    dp_size: int = 1,
    progress: Progress = silent,
) -> Stats:
    """The numbers of a store and of each pack in it.

    Args:
        store: the store.
        duplicates: look for documents that are there twice, which reads all tokens.
        global_batch: rows in a step, to count the steps of an epoch.
        dp_size: ranks that share a step's rows.
        progress: told the bytes read for duplicates.

    Raises:
        DataError: an index or a pack is broken, or the batch cannot be divided.
    """
    manifest = store.manifest
    lengths = store.lengths
    if not lengths.size:
        raise DataError(f"{store.path}: the store has no documents")
    text_tokens = store.n_tokens - store.n_documents * (manifest.bos + manifest.eos)
    store.bring(PACK_FOLDER)
    folders = sorted(path.parent for path in (store.path / PACK_FOLDER).glob(f"*/{FILE_NAME}"))
    return Stats(
        documents=store.n_documents,
        tokens=store.n_tokens,
        text_bytes=manifest.text_bytes,
        bytes_per_token=manifest.text_bytes / text_tokens if text_tokens else 0.0,
        vocab_size=store.vocab_size,
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        mean=store.n_tokens / store.n_documents,
        longest=int(lengths.max()),
        lengths=_histogram(lengths),
        empty_documents=manifest.empty_documents,
        left_out={reason: amount.documents for reason, amount in manifest.left_out.items()},
        special_strings=dict(manifest.special_strings),
        duplicates=count_duplicates(store, progress) if duplicates else None,
        packs=tuple(
            _pack_stats(folder.name, PackIndex.load(folder), store, global_batch, dp_size) for folder in folders
        ),
        fingerprint=manifest.fingerprint,
    )


def _histogram(lengths: np.ndarray) -> tuple[LengthBin, ...]:
    bits = np.frexp(lengths)[1] - 1  # floor(log2), exact for every int32
    documents = np.bincount(bits)
    tokens = np.bincount(bits, weights=lengths)  # float64: exact below 2^53
    return tuple(
        LengthBin(least=2**bit, most=2 ** (bit + 1) - 1, documents=int(documents[bit]), tokens=int(tokens[bit]))
        for bit in range(int(bits.min()), documents.size)
    )


def count_duplicates(store: TokenStore, progress: Progress = silent) -> Duplicates:
    """Documents that are there already, id for id; of equal ones the first is not counted."""
    seen = SeenHashes()
    lengths, offsets = store.lengths, store.offsets
    documents = tokens = 0
    for first in range(0, lengths.size, _BLOCK):
        last = min(first + _BLOCK, lengths.size)
        hashes = np.zeros(last - first, HASH)
        for i in range(first, last):
            ids = np.ascontiguousarray(store.tokens(int(offsets[i]), int(lengths[i])))
            hashes[i - first] = hashlib.sha256(ids.data).digest()[: HASH.itemsize]
        again = ~seen.add(hashes)
        documents += int(again.sum())
        tokens += int(lengths[first:last][again].sum(dtype=np.int64))
        progress(int(offsets[last]) * store.dtype.itemsize, store.n_tokens * store.dtype.itemsize, "bytes")
    return Duplicates(documents=documents, tokens=tokens)


def _pack_stats(name: str, pack: PackIndex, store: TokenStore, global_batch: int | None, dp_size: int) -> PackStats:
    positions = pack.positions
    filled = int(pack.length.sum(dtype=np.int64))
    slices = np.bincount(pack.document, minlength=store.n_documents)
    current = pack.store_fingerprint == store.manifest.fingerprint
    cut = slices > 1
    needlessly = int((cut[: store.n_documents] & (store.lengths <= pack.seq_len)).sum()) if current else 0
    return PackStats(
        name=name,
        seq_len=pack.seq_len,
        mode=pack.mode,
        rows=pack.n_rows,
        fill=filled / positions,
        padding=positions - filled,
        valid_tokens=int(pack.valid.sum(dtype=np.int64)),
        cut_documents=int(cut.sum()),
        needlessly_cut=needlessly,
        padding_rate=(positions - filled) / positions,
        truncation_rate=int(cut.sum()) / slices.size,
        needless_truncation_rate=needlessly / slices.size,
        current=current,
        steps=() if global_batch is None else steps_per_epoch(pack, global_batch=global_batch, dp_size=dp_size),
    )
