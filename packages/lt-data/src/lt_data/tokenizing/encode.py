"""Documents to ids in batches, here or in worker processes, always in the order of the documents.

Each batch holds whole documents and is encoded on its own, so the ids depend neither on the number of workers nor on
where a batch ends; it tells the place in the sources from which the next one is read, so that a job can go on there.
Documents that come as ids pass through, checked against the vocabulary. A worker is a spawned process that holds the
tokenizer and uses one thread; at most a few batches per worker are in flight, so memory stays flat. A long document
is a batch of its own, which several workers encode in pieces (lt_data.tokenizing.pieces). A worker ends with its
parent, also when that is killed.
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

import numpy as np

from lt_data.errors import DataError
from lt_data.sources.document import Document
from lt_data.sources.reader import DocumentReader
from lt_data.tokenizing.encoder import Encoded, Encoder
from lt_data.tokenizing.engines import EngineChoice
from lt_data.tokenizing.tokenizer import Specials, Tokenizer

__all__ = ["Batch", "Encoded", "Encoder", "encode_all"]

_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 1024
_BATCHES_PER_WORKER = 3  # one at work, one waiting, one on its way back
_LONG_BYTES = 1 << 19  # a document from this size on is encoded in pieces
_PIECE_CHARACTERS = 1 << 18

_Piece = tuple[np.ndarray, Mapping[str, int]]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive documents, all of them text or all of them ids.

    Attributes:
        texts: the documents; empty when they are ids.
        ids: the documents as they came; empty when they are text.
        text_bytes: length of the texts in UTF-8; 0 for ids.
        read_bytes: source bytes read up to the end of this batch.
        file: with `record`, where the next document stands: index of the file in the reader's list, ...
        record: ... and index of the next record to read in that file.
    """

    texts: list[str] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    text_bytes: int = 0
    read_bytes: int = 0
    file: int = 0
    record: int = 0

    @property
    def documents(self) -> int:
        """Documents in the batch, empty ones too."""
        return len(self.texts) + len(self.ids)


def encode_all(
    documents: Iterable[Document], encoder: Encoder, workers: int, *, read_bytes: Callable[[], int] | None = None
) -> Generator[tuple[Batch, Encoded]]:
    """Encode documents in order, with `workers` processes when there are several.

    Args:
        documents: texts and ids, in any mixture.
        encoder: what encodes them.
        workers: processes; with 1 this process encodes.
        read_bytes: tells the source bytes read so far; that of `documents` when they are a `DocumentReader`.

    Raises:
        DataError: a document holds what UTF-8 cannot express, or ids that are none of the tokenizer's; its source is
            named. A worker process died.
    """
    if read_bytes is None:
        read_bytes = (lambda: documents.read_bytes) if isinstance(documents, DocumentReader) else (lambda: 0)
    batches = _settled(_batches(documents, encoder, read_bytes), encoder)
    if workers == 1:
        for batch in batches:
            yield batch, _encode_here(batch, encoder)
        return
    first = next(batches, None)  # the engine is settled now, before the workers start
    if first is None:
        return
    policy = (encoder.bos, encoder.eos, encoder.settle([]), encoder.specials)
    executor = ProcessPoolExecutor(
        workers,
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(encoder.tokenizer.files, *policy),
    )
    waiting: deque[tuple[Batch, Callable[[], Encoded]]] = deque()
    try:
        for batch in chain([first], batches):
            waiting.append((batch, _submit(batch, encoder, executor)))
            if len(waiting) >= _BATCHES_PER_WORKER * workers:
                done, result = waiting.popleft()
                yield done, result()
        while waiting:
            done, result = waiting.popleft()
            yield done, result()
    except BrokenProcessPool as exc:
        raise DataError(
            "a worker process ended in the midst of its work; when memory ran out (see dmesg), use fewer workers"
        ) from exc
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _settled(batches: Iterator[Batch], encoder: Encoder) -> Iterator[Batch]:
    """The same batches, after the engine has been chosen by the text of the first ones."""
    if encoder.choice is None:
        read: list[Batch] = []
        size = 0
        if encoder.asked != "hf":
            for batch in batches:
                read.append(batch)
                size += batch.text_bytes
                if size >= encoder.check_bytes:
                    break
        encoder.settle([text for batch in read for text in batch.texts])
        yield from read
    yield from batches


def _encode_here(batch: Batch, encoder: Encoder) -> Encoded:
    if batch.ids:
        return encoder.pass_through(batch.ids)
    if pieces := _pieces(batch, encoder):
        return encoder.join_pieces([encoder.encode_piece(piece) for piece in pieces])
    return encoder.encode(batch.texts)


def _submit(batch: Batch, encoder: Encoder, executor: ProcessPoolExecutor) -> Callable[[], Encoded]:
    """Have a batch encoded by the workers; gives the function that waits for the result."""
    if batch.ids:
        return lambda: encoder.pass_through(batch.ids)
    if pieces := _pieces(batch, encoder):
        futures: list[Future[_Piece]] = [executor.submit(_encode_piece_in_worker, piece) for piece in pieces]
        return lambda: encoder.join_pieces([future.result() for future in futures])
    return executor.submit(_encode_in_worker, batch.texts).result


def _pieces(batch: Batch, encoder: Encoder) -> Sequence[str]:
    """The pieces of a long document; none when the batch is to be encoded as it is."""
    if len(batch.texts) != 1 or batch.text_bytes < _LONG_BYTES or not encoder.cutter.possible:
        return ()
    return encoder.cutter.cut(batch.texts[0], _PIECE_CHARACTERS)


def _batches(documents: Iterable[Document], encoder: Encoder, read_bytes: Callable[[], int]) -> Iterator[Batch]:
    texts: list[str] = []
    ids: list[np.ndarray] = []
    size = text_bytes = file = record = 0

    def batch() -> Batch:
        return Batch(texts=texts, ids=ids, text_bytes=text_bytes, read_bytes=read_bytes(), file=file, record=record)

    for document in documents:
        given = document.ids
        own_bytes = 0 if given is not None else _utf8_bytes(document)
        if (texts and given is not None) or (ids and given is None) or (texts and own_bytes >= _LONG_BYTES):
            # The reader has read past this batch already: its bytes are counted a little early, its place is exact.
            yield batch()
            texts, ids, size, text_bytes = [], [], 0, 0
        if given is not None:
            ids.append(encoder.check_ids(given, document.source))
            size += 4 * ids[-1].size
        else:
            text_bytes += own_bytes
            size = text_bytes
            texts.append(document.as_text())
        file, record = document.file, document.record
        if size >= _BATCH_BYTES or own_bytes >= _LONG_BYTES or len(texts) + len(ids) >= _BATCH_DOCUMENTS:
            yield batch()
            texts, ids, size, text_bytes = [], [], 0, 0
    if texts or ids:
        yield batch()


def _utf8_bytes(document: Document) -> int:
    try:
        text = document.as_text()
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as exc:
        raise DataError(
            f"{document.source}: character {exc.start} is half of a surrogate pair, which is not text; correct it"
        ) from exc


_worker_encoder: Encoder | None = None  # set once in each worker process


def _start_worker(files: Mapping[str, bytes], bos: bool, eos: bool, choice: EngineChoice, specials: Specials) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the work and says so
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _worker_encoder = Encoder(Tokenizer.from_bytes(files), bos=bos, eos=eos, engine=choice, specials=specials)


def _encode_in_worker(texts: list[str]) -> Encoded:
    assert _worker_encoder is not None
    return _worker_encoder.encode(texts)


def _encode_piece_in_worker(text: str) -> _Piece:
    assert _worker_encoder is not None
    return _worker_encoder.encode_piece(text)
