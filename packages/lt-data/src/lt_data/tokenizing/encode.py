"""Encoding of documents in batches of about one megabyte, in order.

Each batch holds whole documents, either texts or ids, and is encoded independently, so the ids do not depend on the
batch boundaries. Documents given as ids pass through, checked against the vocabulary. Memory: one batch, and 114 bytes
per character of a text, at most 2^19 characters or one document at a time (lt_data.tokenizing.tokenizer).
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.sources.document import Document
from lt_data.sources.reader import DocumentReader
from lt_data.store.document_columns import make_row
from lt_data.store.document_sources import SOURCE_DTYPE, encode_source
from lt_data.store.manifest import ColumnInfo
from lt_data.tokenizing.encoder import EncodedBatch, Encoder
from lt_data.tokenizing.tokenizer import TokenizerFailure

_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 1024


@dataclass(frozen=True, kw_only=True)
class EncoderBatch:
    """Consecutive documents, either all texts or all ids.

    Attributes:
        texts: the documents as texts; empty if they are ids.
        ids: the documents as ids; empty if they are texts.
        text_sizes: UTF-8 bytes of each text.
        names: source of each document, for messages.
        read_bytes: source bytes read up to the end of this batch.
        sources: source of each document (u64; lt_data.store.document_sources); None without a reader.
        rows: kept columns of each document (lt_data.store.document_columns).
    """

    texts: list[str] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    text_sizes: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    read_bytes: int = 0
    sources: np.ndarray | None = None
    rows: list[tuple[Any, ...]] = field(default_factory=list)


def encode_documents(
    documents: Iterable[Document],
    encoder: Encoder,
    *,
    reader: DocumentReader | None = None,
    columns: Sequence[ColumnInfo] = (),
) -> Generator[tuple[EncoderBatch, EncodedBatch]]:
    """Encode documents in order; yield each batch with its ids.

    Args:
        documents: texts and ids, in any order.
        encoder: the encoder.
        reader: reader behind the documents, if there is one.
        columns: columns to keep of their fields.

    Raises:
        DataError: a document has an unpaired surrogate or ids outside the vocabulary, or the tokenizer fails on it; the
            message names its source.
    """
    for group in _group(documents):
        batch = EncoderBatch(
            texts=[document.as_text() for document in group if document.ids is None],
            ids=[encoder.check_ids(document.ids, document.source) for document in group if document.ids is not None],
            text_sizes=[document.text_bytes for document in group if document.ids is None],
            names=[document.source for document in group],
            read_bytes=reader.read_bytes if reader else 0,
            sources=np.array([encode_source(each.file_index, each.record_number) for each in group], SOURCE_DTYPE)
            if reader
            else None,
            rows=[make_row(columns, document.fields, document.source) for document in group] if columns else [],
        )
        yield batch, encoder.wrap_ids(batch.ids) if batch.ids else _encode(batch, encoder)


def _encode(batch: EncoderBatch, encoder: Encoder) -> EncodedBatch:
    try:
        return encoder.encode(batch.texts)
    except TokenizerFailure as exc:
        for name, text in zip(batch.names, batch.texts, strict=True):
            try:
                encoder.encode([text])
            except TokenizerFailure as failure:
                raise DataError(f"{name}: {failure}; leave the document out, or choose another tokenizer") from exc
        raise


def _group(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    size = 0
    for document in documents:
        is_ids = document.ids is not None
        if group and is_ids != (group[0].ids is not None):
            yield group
            group, size = [], 0
        group.append(document)
        size += 4 * len(document.ids) if document.ids is not None else document.text_bytes
        if size >= _BATCH_BYTES or len(group) >= _BATCH_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group
