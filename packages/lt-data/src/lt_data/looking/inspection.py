"""What the rows of a batch hold: which documents, which tokens of them, and their text.

A stream that stands before a batch tells which rows of the pack that batch has, on all ranks; the pack tells the slices
of each row, and the store the tokens. Nothing is run or changed. The name of a document's source is known where the
manifest's list of files says it without doubt: a store does not keep the names of its documents.

Cost: the row numbers of one batch, and decoding the tokens of the rows asked for.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.packing.packs import PackIndex
from lt_data.store.manifest import Manifest
from lt_data.store.token_store import TokenStore
from lt_data.streaming.buckets import Buckets
from lt_data.streaming.mixture import Mixture
from lt_data.streaming.stream import RowSource, Stream
from lt_data.tokenizing.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of a document that stands in a row.

    Attributes:
        document: number of the document in the store.
        source: where the document came from; None where the store does not know.
        begin: first token of the part, counted in the document.
        end: one past its last token.
        document_tokens: tokens of the whole document.
        labels: positions of the part that have a label.
        text: the tokens decoded, special ones too; a character that the part's border cuts is shown as U+FFFD.
    """

    document: int
    source: str | None
    begin: int
    end: int
    document_tokens: int
    labels: int
    text: str

    @property
    def begins(self) -> bool:
        """Whether the document begins here."""
        return self.begin == 0

    @property
    def ends(self) -> bool:
        """Whether the document ends here."""
        return self.end == self.document_tokens

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {**asdict(self), "begins": self.begins, "ends": self.ends}


@dataclass(frozen=True, kw_only=True)
class InspectedRow:
    """One row of a batch.

    Attributes:
        index: number of the row in the global batch.
        position: in the global sequence; with buckets, that of the row of the longest bucket in whose place it is.
        epoch: pass over the pack, the mixture's source or the bucket that the row belongs to.
        row: number of the row in that pack or bucket.
        rank: data-parallel rank that gets it.
        labels: positions with a label.
        padding: positions without a token.
        pieces: what stands in it, in order.
        origin: name of the mixture's source, or tokens in a row of the bucket; "" for a single pack.
    """

    index: int
    position: int
    epoch: int
    row: int
    rank: int
    labels: int
    padding: int
    pieces: tuple[Piece, ...]
    origin: str = ""

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {**asdict(self), "pieces": [piece.to_dict() for piece in self.pieces]}


def inspect_batch(stream: Stream, rows: Sequence[int] | None = None) -> tuple[InspectedRow, ...]:
    """The rows of the next global batch of a stream, those of all ranks; the stream stays where it is.

    Args:
        stream: stands before the batch, with its batch size and number of ranks.
        rows: numbers of rows in the batch, from 0; all when not given.

    Raises:
        DataError: no such row in the batch, or the store's tokenizer is damaged.
    """
    first, positions = stream.state.row, stream.batch_rows(stream.state.step)
    numbers = stream.global_rows(stream.state, positions)  # of a short bucket more than there are positions
    epochs = stream.reader.epochs_at(first, positions)
    chosen = range(numbers.size) if rows is None else rows
    for index in chosen:
        if not 0 <= index < numbers.size:
            raise DataError(f"row {index}: the batch has the rows 0 to {numbers.size - 1}")
    tokenizer = stream.reader.locate(int(numbers[0]))[0].store.tokenizer()  # one for all sources of a mixture
    sources: dict[int, Sequence[str] | None] = {}  # of each reader
    per_rank = numbers.size // stream.dp_size
    found: list[InspectedRow] = []
    for index in chosen:
        reader, row = stream.reader.locate(int(numbers[index]))
        if id(reader) not in sources:
            sources[id(reader)] = document_sources(reader.store.manifest)
        pieces = _pieces(reader.store, reader.pack, row, tokenizer, sources[id(reader)])
        found.append(
            InspectedRow(
                index=index,
                position=first + index * positions // numbers.size,
                epoch=int(epochs[index]),
                row=row,
                rank=index // per_rank,
                labels=int(reader.valid[row]),
                padding=reader.seq_len - sum(piece.end - piece.begin for piece in pieces),
                pieces=pieces,
                origin=_origin(stream.reader, int(numbers[index])),
            )
        )
    return tuple(found)


def _origin(source: RowSource, row: int) -> str:
    if isinstance(source, Mixture):
        return source.source_names(np.array([row]))[0]
    return str(source.locate(row)[0].seq_len) if isinstance(source, Buckets) else ""


def inspect_rows(store: TokenStore, pack: PackIndex, rows: Sequence[int]) -> tuple[InspectedRow, ...]:
    """Rows of a pack by their numbers in it; `index` and `position` are that number, as no stream has been asked.

    Raises:
        DataError: no such row in the pack, or the store's tokenizer is damaged.
    """
    for row in rows:
        if not 0 <= row < pack.n_rows:
            raise DataError(f"row {row}: the pack has the rows 0 to {pack.n_rows - 1}")
    tokenizer, sources = store.tokenizer(), document_sources(store.manifest)
    kinds = pack.buckets or ((pack.seq_len, pack.n_rows),)
    ends = np.cumsum([n_rows for _, n_rows in kinds])
    found: list[InspectedRow] = []
    for row in rows:
        pieces = _pieces(store, pack, row, tokenizer, sources)
        seq_len = kinds[int(np.searchsorted(ends, row, side="right"))][0]
        found.append(
            InspectedRow(
                index=row,
                position=row,
                epoch=0,
                row=row,
                rank=0,
                labels=int(pack.valid[row]),
                padding=seq_len - sum(piece.end - piece.begin for piece in pieces),
                pieces=pieces,
            )
        )
    return tuple(found)


def _pieces(
    store: TokenStore, pack: PackIndex, row: int, tokenizer: Tokenizer, sources: Sequence[str] | None
) -> tuple[Piece, ...]:
    found: list[Piece] = []
    for i in range(int(pack.row_offsets[row]), int(pack.row_offsets[row + 1])):
        document, start, length = int(pack.document[i]), int(pack.start[i]), int(pack.length[i])
        document_start, document_tokens = store.document_span(document)
        begin = start - document_start
        found.append(
            Piece(
                document=document,
                source=None if sources is None else sources[document],
                begin=begin,
                end=begin + length,
                document_tokens=document_tokens,
                labels=int(pack.labels[i]),
                text=tokenizer.decode(store.tokens(start, length)),
            )
        )
    return tuple(found)


def document_sources(manifest: Manifest) -> tuple[str, ...] | None:
    """The source file of each document, where the manifest leaves no doubt; else None.

    It lists files, not documents. All documents come from one file, or each file that is not empty is one document
    (so none is a `.jsonl`), or nothing can be said: also when the files were too many to be listed.
    """
    files = [file.path for file in manifest.sources.listed if file.bytes]
    if len(files) == 1:
        return tuple(files * manifest.documents)
    if len(files) != manifest.documents or any(path.endswith(".jsonl") for path in files):
        return None
    return tuple(files)
