"""What is in a token store and its packs, in numbers: `lt data stats`.

All of it comes from the manifest, the document lengths and the pack indexes; no token is read. Cost: O(documents).
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lt_data.packing import FILE_NAME, PackIndex
from lt_data.store import PACK_FOLDER, TokenStore


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
        current: whether the pack belongs to this store.
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
    current: bool


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A token store in numbers.

    Attributes:
        documents: documents.
        tokens: ids, BOS and EOS included.
        text_bytes: UTF-8 bytes of the text.
        bytes_per_token: text bytes per id, BOS and EOS not counted.
        vocab_size: 1 + the highest id.
        shortest: tokens of the shortest document.
        median: of the document lengths.
        mean: of the document lengths.
        longest: tokens of the longest document.
        lengths: documents by length, in powers of two.
        empty_documents: documents that gave no token and were left out.
        special_strings: literal special strings in the text, with their counts.
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
    special_strings: dict[str, int]
    packs: tuple[PackStats, ...]
    fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return asdict(self)


def stats(store: TokenStore) -> Stats:
    """The numbers of a store and of each pack in it.

    Raises:
        DataError: an index or a pack is broken.
    """
    manifest = store.manifest
    lengths = store.lengths
    text_tokens = store.n_tokens - store.n_documents * (manifest.bos + manifest.eos)
    folders = sorted(path.parent for path in (store.path / PACK_FOLDER).glob(f"*/{FILE_NAME}"))
    return Stats(
        documents=store.n_documents,
        tokens=store.n_tokens,
        text_bytes=manifest.text_bytes,
        bytes_per_token=manifest.text_bytes / text_tokens,
        vocab_size=store.vocab_size,
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        mean=store.n_tokens / store.n_documents,
        longest=int(lengths.max()),
        lengths=_histogram(lengths),
        empty_documents=manifest.empty_documents,
        special_strings=dict(manifest.special_strings),
        packs=tuple(_pack_stats(folder.name, PackIndex.load(folder), store) for folder in folders),
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


def _pack_stats(name: str, pack: PackIndex, store: TokenStore) -> PackStats:
    positions = pack.positions
    filled = int(pack.length.sum(dtype=np.int64))
    slices = np.bincount(pack.document, minlength=store.n_documents)
    current = pack.store_fingerprint == store.manifest.fingerprint
    cut = slices > 1
    return PackStats(
        name=name,
        seq_len=pack.seq_len,
        mode=pack.mode,
        rows=pack.n_rows,
        fill=filled / positions,
        padding=positions - filled,
        valid_tokens=int(pack.valid.sum(dtype=np.int64)),
        cut_documents=int(cut.sum()),
        needlessly_cut=int((cut[: store.n_documents] & (store.lengths <= pack.seq_len)).sum()) if current else 0,
        current=current,
    )
