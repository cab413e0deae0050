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
from lt_data.streaming.stream import Stream
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

    def describe(self) -> str:
        """Return which part of the document it is, in words."""
        has_start, has_end = self.begin == 0, self.end == self.document_tokens
        if has_start and has_end:
            return "whole"
        return "its beginning" if has_start else "its end" if has_end else "from its middle"


@dataclass(frozen=True, kw_only=True)
class InspectedRow:
    """Row of a batch or of a pack.

    Attributes:
        index: index of the row in the global batch.
        position: position in the global sequence.
        epoch: epoch of the pack, or of the mixture's source.
        row: index of the row in that pack.
        rank: data-parallel rank that reads it.
        labels: positions with a label.
        padding: padding positions.
        spans: its document spans, in order.
        origin: name of the mixture's source; "" for a single pack.
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
        return asdict(self)


def inspect_batch(stream: Stream, rows: Sequence[int] | None = None) -> tuple[InspectedRow, ...]:
    """Inspect rows of the next global batch of a stream, on all ranks; the stream is not advanced.

    Args:
        stream: the stream before the batch.
        rows: indices of rows in the batch, from 0; default: all.

    Raises:
        DataError: no such row in the batch, or the store's tokenizer is damaged.
    """
    first, size = stream.state.row, stream.batch_size_at(stream.state.step)
    numbers = stream.global_rows(stream.state, size).tolist()
    ranks = stream.ranks_of_rows(size).tolist()
    epochs = stream.reader.epochs_at(first, size).tolist()
    selected = range(size) if rows is None else rows
    _check_numbers("row", selected, size, "the batch")
    tokenizer = stream.reader.locate(numbers[0])[1].store.tokenizer()  # the same for all sources of a mixture
    found: list[InspectedRow] = []
    for index in selected:
        origin, reader, row = stream.reader.locate(numbers[index])
        place = {"index": index, "position": first + index, "epoch": epochs[index], "origin": origin}
        found.append(_inspect_row(reader.store, reader.pack, row, tokenizer, rank=ranks[index], **place))
    return tuple(found)


def inspect_rows(store: TokenStore, pack: PackIndex, rows: Sequence[int]) -> tuple[InspectedRow, ...]:
    """Inspect rows of a pack; `index` and `position` are the row's index in the pack.

    Raises:
        DataError: no such row in the pack, or the store's tokenizer is damaged.
    """
    _check_numbers("row", rows, pack.n_rows, "the pack")
    tokenizer = store.tokenizer()
    return tuple(_inspect_row(store, pack, row, tokenizer, index=row, position=row, epoch=0, rank=0) for row in rows)


def inspect_document(store: TokenStore, document: int) -> DocumentSpan:
    """Inspect a whole document of a store, without a pack; it has no labels.

    Raises:
        DataError: no such document, or the store's tokenizer is damaged.
    """
    _check_numbers("document", [document], store.n_documents, "the store")
    start, length = store.document_span(document)
    return _inspect_span(store, document, start, length, 0, store.tokenizer())


def _check_numbers(kind: str, numbers: Sequence[int], size: int, whole: str) -> None:
    for number in numbers:
        if not 0 <= number < size:
            raise DataError(f"{kind} {number}: {whole} has the {kind}s 0 to {size - 1}")


def _inspect_row(store: TokenStore, pack: PackIndex, row: int, tokenizer: Tokenizer, **place: Any) -> InspectedRow:
    slices = np.arange(int(pack.row_offsets[row]), int(pack.row_offsets[row + 1]))
    labels = pack.labels(slices, np.full(slices.size, row)).tolist()
    spans = tuple(
        _inspect_span(store, int(pack.document[i]), int(pack.start[i]), int(pack.length[i]), n, tokenizer)
        for i, n in zip(slices.tolist(), labels, strict=True)
    )
    padding = pack.seq_len - int(pack.length[slices].sum())
    return InspectedRow(row=row, labels=int(pack.valid[row]), padding=padding, spans=spans, **place)


def _inspect_span(
    store: TokenStore, document: int, start: int, length: int, labels: int, tokenizer: Tokenizer
) -> DocumentSpan:
    first, document_tokens = store.document_span(document)
    source = store.document_source(document)
    return DocumentSpan(
        document=document,
        source=None if source is None else str(source),
        begin=start - first,
        end=start - first + length,
        document_tokens=document_tokens,
        labels=labels,
        columns=store.document_columns(document),
        text=tokenizer.decode(store.tokens(start, length)),
    )
