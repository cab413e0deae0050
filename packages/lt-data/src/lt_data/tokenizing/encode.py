"""Encoding of documents in batches, in this process or in worker processes, in order.

Each batch holds whole documents and is encoded independently, so the ids depend neither on the number of workers nor on
the batch boundaries; it records the source position of the next document, so that a job can resume there. Documents
given as ids pass through, checked against the vocabulary. A worker is a spawned process with the tokenizer and one
thread; at most a few batches per worker are in flight, which bounds the memory. A long document is a batch of its own,
which several workers encode in pieces (lt_data.tokenizing.text_splitter). A worker exits with its parent, even if that
is killed.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import connection, get_context, parent_process
from typing import Any

import numpy as np

from lt_data.errors import DataError
from lt_data.sources.document import Document
from lt_data.sources.hashing_reader import HashedPrefix
from lt_data.sources.reader import DocumentReader
from lt_data.store.document_columns import make_row
from lt_data.store.document_sources import SOURCE_DTYPE, encode_source
from lt_data.store.manifest import ColumnInfo
from lt_data.tokenizing.encoder import EncodedBatch, Encoder
from lt_data.tokenizing.engine_selection import EngineChoice
from lt_data.tokenizing.tokenizer import SpecialTokensAs, Tokenizer

__all__ = ["EncodedBatch", "Encoder", "EncoderBatch", "encode_documents"]

_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 1024
_BATCHES_PER_WORKER = 3  # one running, one queued, one returning
_LONG_BYTES = 1 << 19  # a document from this size on is encoded in pieces
_PIECE_CHARACTERS = 1 << 18

_EncodedPiece = tuple[np.ndarray, Mapping[str, int]]


@dataclass(frozen=True, kw_only=True)
class EncoderBatch:
    """Consecutive documents, either all texts or all ids.

    Attributes:
        texts: the documents as texts; empty if they are ids.
        ids: the documents as ids; empty if they are texts.
        text_sizes: UTF-8 bytes of each text.
        read_bytes: source bytes read up to the end of this batch.
        file_index: source position of the next document: index of the file in the reader's list, ...
        next_record: ... and index of the next record in that file.
        read_prefix: hash of what was read of that file.
        sources: source of each document (u64; lt_data.store.document_sources); None without a reader.
        rows: kept columns of each document (lt_data.store.document_columns).
    """

    texts: list[str] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    text_sizes: list[int] = field(default_factory=list)
    read_bytes: int = 0
    file_index: int = 0
    next_record: int = 0
    read_prefix: HashedPrefix | None = None
    sources: np.ndarray | None = None
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the texts; 0 for ids."""
        return sum(self.text_sizes)

    @property
    def documents(self) -> int:
        """Documents in the batch, including empty ones."""
        return len(self.texts) + len(self.ids)


def encode_documents(
    documents: Iterable[Document],
    encoder: Encoder,
    workers: int,
    *,
    reader: DocumentReader | None = None,
    columns: Sequence[ColumnInfo] = (),
) -> Generator[tuple[EncoderBatch, EncodedBatch]]:
    """Encode documents in order; yield each batch with its ids.

    Args:
        documents: texts and ids, in any order.
        encoder: the encoder.
        workers: worker processes; with 1 this process encodes.
        reader: reader behind the documents; default: the documents, if they are a `DocumentReader`.
        columns: columns to keep of their fields.

    Raises:
        DataError: a document has an unpaired surrogate or ids outside the vocabulary (the message names its source), or
            a worker process died.
    """
    if reader is None and isinstance(documents, DocumentReader):
        reader = documents
    batches = _batches_after_engine_selection(_iter_batches(documents, encoder, reader, columns), encoder)
    if workers == 1:
        for batch in batches:
            yield batch, _encode_in_process(batch, encoder)
        return
    first = next(batches, None)  # selects the engine before the workers start
    if first is None:
        return
    policy = (encoder.bos, encoder.eos, encoder.select_engine([]), encoder.special_tokens_as)
    executor = ProcessPoolExecutor(
        workers,
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(encoder.tokenizer.files, *policy),
    )
    in_flight: deque[tuple[EncoderBatch, Callable[[], EncodedBatch]]] = deque()
    try:
        for batch in chain([first], batches):
            in_flight.append((batch, _submit(batch, encoder, executor)))
            if len(in_flight) >= _BATCHES_PER_WORKER * workers:
                done, result = in_flight.popleft()
                yield done, result()
        while in_flight:
            done, result = in_flight.popleft()
            yield done, result()
    except BrokenProcessPool as exc:
        raise DataError("a worker process died; if memory ran out (see dmesg), use fewer workers") from exc
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _batches_after_engine_selection(batches: Iterator[EncoderBatch], encoder: Encoder) -> Iterator[EncoderBatch]:
    """Yield the batches after selecting the engine by the text of the first ones."""
    if encoder.engine_choice is None:
        read: list[EncoderBatch] = []
        size = 0
        if encoder.requested_engine != "hf":
            for batch in batches:
                read.append(batch)
                size += batch.text_bytes
                if size >= encoder.check_bytes:
                    break
        encoder.select_engine([text for batch in read for text in batch.texts])
        yield from read
    yield from batches


def _encode_in_process(batch: EncoderBatch, encoder: Encoder) -> EncodedBatch:
    if batch.ids:
        return encoder.wrap_ids(batch.ids)
    if pieces := _split_long_document(batch, encoder):
        return encoder.join_pieces([encoder.encode_piece(piece) for piece in pieces])
    return encoder.encode(batch.texts)


def _submit(batch: EncoderBatch, encoder: Encoder, executor: ProcessPoolExecutor) -> Callable[[], EncodedBatch]:
    """Submit a batch to the workers; return a function that waits for the result."""
    if batch.ids:
        return lambda: encoder.wrap_ids(batch.ids)
    if pieces := _split_long_document(batch, encoder):
        futures: list[Future[_EncodedPiece]] = [executor.submit(_encode_piece_in_worker, piece) for piece in pieces]
        return lambda: encoder.join_pieces([future.result() for future in futures])
    return executor.submit(_encode_in_worker, batch.texts).result


def _split_long_document(batch: EncoderBatch, encoder: Encoder) -> Sequence[str]:
    """Return the pieces of a long document; empty if the batch is to be encoded whole."""
    if len(batch.texts) != 1 or batch.text_bytes < _LONG_BYTES or not encoder.splitter.can_split:
        return ()
    return encoder.splitter.split(batch.texts[0], _PIECE_CHARACTERS)


def _iter_batches(
    documents: Iterable[Document], encoder: Encoder, reader: DocumentReader | None, columns: Sequence[ColumnInfo]
) -> Iterator[EncoderBatch]:
    texts: list[str] = []
    ids: list[np.ndarray] = []
    sources: list[int] = []
    rows: list[tuple[Any, ...]] = []
    text_sizes: list[int] = []
    size = file = record = 0

    def batch() -> EncoderBatch:
        return EncoderBatch(
            texts=texts,
            ids=ids,
            text_sizes=text_sizes,
            read_bytes=reader.read_bytes if reader else 0,
            file_index=file,
            next_record=record,
            read_prefix=reader.hashed_prefix(file) if reader else None,
            sources=np.array(sources, SOURCE_DTYPE) if reader else None,
            rows=rows,
        )

    for document in documents:
        is_ids = document.ids is not None
        own_bytes = document.text_bytes
        if (texts and is_ids) or (ids and not is_ids) or (texts and own_bytes >= _LONG_BYTES):
            # The reader is past this batch already: its bytes are counted a little early, its position is exact.
            yield batch()
            texts, ids, sources, rows, text_sizes, size = [], [], [], [], [], 0
        if is_ids:
            ids.append(encoder.check_ids(document.ids, document.source))
            size += 4 * ids[-1].size
        else:
            text_sizes.append(own_bytes)
            size += own_bytes
            texts.append(document.as_text())
        file, record = document.file_index, document.next_record
        if reader:
            sources.append(encode_source(file, document.record_number))
        if columns:
            rows.append(make_row(columns, document.fields, document.source))
        if size >= _BATCH_BYTES or own_bytes >= _LONG_BYTES or len(texts) + len(ids) >= _BATCH_DOCUMENTS:
            yield batch()
            texts, ids, sources, rows, text_sizes, size = [], [], [], [], [], 0
    if texts or ids:
        yield batch()


_worker_encoder: Encoder | None = None  # set once in each worker process


def _start_worker(
    files: Mapping[str, bytes], bos: bool, eos: bool, choice: EngineChoice, special_tokens_as: SpecialTokensAs
) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    _worker_encoder = Encoder(
        Tokenizer.from_bytes(files), bos=bos, eos=eos, engine=choice, special_tokens_as=special_tokens_as
    )


def _encode_in_worker(texts: list[str]) -> EncodedBatch:
    assert _worker_encoder is not None
    return _worker_encoder.encode(texts)


def _encode_piece_in_worker(text: str) -> _EncodedPiece:
    assert _worker_encoder is not None
    return _worker_encoder.encode_piece(text)
