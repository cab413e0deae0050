"""Inspection of rows: their documents, tokens and text.

The stream gives the rows of the next batch on all ranks, the pack the slices of each row, and the store the tokens and
the source of each document, unless they were given by the caller. Nothing is run or changed.

Cost: the row indices of one batch, and decoding the tokens of the requested rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.packing.pack_index import PackIndex
from lt_data.store.token_store import TokenStore
from lt_data.streaming.buckets import Buckets
from lt_data.streaming.mixture import Mixture
from lt_data.streaming.stream import RowSource, Stream
from lt_data.tokenizing.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class DocumentSpan:
    """Part of a document in a row.

    Attributes:
        document: index of the document in the store.
        source: source of the document, as `path:line` or `path#row`; None if unknown.
        begin: first token of the span, counted in the document.
        end: one past its last token.
        document_tokens: tokens of the whole document.
        labels: positions of the span with a label.
        columns: kept columns of the document, by name.
        text: decoded tokens, including special ones; a character that is split at the span's boundary is U+FFFD.
    """

    document: int
    source: str | None
    begin: int
    end: int
    document_tokens: int
    labels: int
    columns: Mapping[str, Any]
    text: str

    @property
    def has_start(self) -> bool:
        """True if the document begins in this span."""
        return self.begin == 0

    @property
    def has_end(self) -> bool:
        """True if the document ends in this span."""
        return self.end == self.document_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return the span as JSON values."""
        return {**asdict(self), "has_start": self.has_start, "has_end": self.has_end}


@dataclass(frozen=True, kw_only=True)
class InspectedRow:
    """Row of a batch.

    Attributes:
        index: index of the row in the global batch.
        position: position in the global sequence; with buckets, that of the corresponding row of the longest bucket.
        epoch: epoch of the pack, the mixture's source or the bucket.
        row: index of the row in that pack or bucket.
        rank: data-parallel rank that reads it.
        labels: positions with a label.
        padding: padding positions.
        spans: its document spans, in order.
        origin: name of the mixture's source, or tokens in a row of the bucket; "" for a single pack.
    """

    index: int
    position: int
    epoch: int
    row: int
    rank: int
    labels: int
    padding: int
    spans: tuple[DocumentSpan, ...]
    origin: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return {**asdict(self), "spans": [span.to_dict() for span in self.spans]}


def inspect_batch(stream: Stream, rows: Sequence[int] | None = None) -> tuple[InspectedRow, ...]:
    """Inspect rows of the next global batch of a stream, on all ranks; the stream is not advanced.

    Args:
        stream: the stream before the batch.
        rows: indices of rows in the batch, from 0; default: all.

    Raises:
        DataError: no such row in the batch, or the store's tokenizer is damaged.
    """
    first, positions = stream.state.row, stream.batch_size_at(stream.state.step)
    numbers = stream.global_rows(stream.state, positions)  # more than positions for a shorter bucket
    epochs = stream.reader.epochs_at(first, positions)
    selected = range(numbers.size) if rows is None else rows
    for index in selected:
        if not 0 <= index < numbers.size:
            raise DataError(f"row {index}: the batch has the rows 0 to {numbers.size - 1}")
    tokenizer = stream.reader.locate(int(numbers[0]))[0].store.tokenizer()  # the same for all sources of a mixture
    per_rank = numbers.size // stream.dp_size
    inspected: list[InspectedRow] = []
    for index in selected:
        reader, row = stream.reader.locate(int(numbers[index]))
        spans = _document_spans(reader.store, reader.pack, row, tokenizer)
        inspected.append(
            InspectedRow(
                index=index,
                position=first + index * positions // numbers.size,
                epoch=int(epochs[index]),
                row=row,
                rank=index // per_rank,
                labels=int(reader.valid[row]),
                padding=reader.seq_len - sum(span.end - span.begin for span in spans),
                spans=spans,
                origin=_origin(stream.reader, int(numbers[index])),
            )
        )
    return tuple(inspected)


def _origin(source: RowSource, row: int) -> str:
    if isinstance(source, Mixture):
        return source.source_names(np.array([row]))[0]
    return str(source.locate(row)[0].seq_len) if isinstance(source, Buckets) else ""


def inspect_rows(store: TokenStore, pack: PackIndex, rows: Sequence[int]) -> tuple[InspectedRow, ...]:
    """Inspect rows of a pack; `index` and `position` are the row's index in the pack.

    Raises:
        DataError: no such row in the pack, or the store's tokenizer is damaged.
    """
    for row in rows:
        if not 0 <= row < pack.n_rows:
            raise DataError(f"row {row}: the pack has the rows 0 to {pack.n_rows - 1}")
    tokenizer = store.tokenizer()
    kinds = pack.buckets or ((pack.seq_len, pack.n_rows),)
    ends = np.cumsum([n_rows for _, n_rows in kinds])
    inspected: list[InspectedRow] = []
    for row in rows:
        spans = _document_spans(store, pack, row, tokenizer)
        seq_len = kinds[int(np.searchsorted(ends, row, side="right"))][0]
        inspected.append(
            InspectedRow(
                index=row,
                position=row,
                epoch=0,
                row=row,
                rank=0,
                labels=int(pack.valid[row]),
                padding=seq_len - sum(span.end - span.begin for span in spans),
                spans=spans,
            )
        )
    return tuple(inspected)


def inspect_document(store: TokenStore, document: int) -> DocumentSpan:
    """Inspect a whole document of a store, without a pack; it has no labels.

    Raises:
        DataError: no such document, or the store's tokenizer is damaged.
    """
    if not 0 <= document < store.n_documents:
        raise DataError(f"document {document}: the store has the documents 0 to {store.n_documents - 1}")
    begin, length = store.document_span(document)
    return DocumentSpan(
        document=document,
        source=_describe_source(store, document),
        begin=0,
        end=length,
        document_tokens=length,
        labels=0,
        columns=store.document_columns(document),
        text=store.tokenizer().decode(store.tokens(begin, length)),
    )


def _document_spans(store: TokenStore, pack: PackIndex, row: int, tokenizer: Tokenizer) -> tuple[DocumentSpan, ...]:
    spans: list[DocumentSpan] = []
    for i in range(int(pack.row_offsets[row]), int(pack.row_offsets[row + 1])):
        document, start, length = int(pack.document[i]), int(pack.start[i]), int(pack.length[i])
        document_start, document_tokens = store.document_span(document)
        begin = start - document_start
        spans.append(
            DocumentSpan(
                document=document,
                source=_describe_source(store, document),
                begin=begin,
                end=begin + length,
                document_tokens=document_tokens,
                labels=int(pack.labels[i]),
                columns=store.document_columns(document),
                text=tokenizer.decode(store.tokens(start, length)),
            )
        )
    return tuple(spans)


def _describe_source(store: TokenStore, document: int) -> str | None:
    source = store.document_source(document)
    return None if source is None else str(source)
