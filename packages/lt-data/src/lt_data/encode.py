"""Documents to ids in batches, here or in worker processes, always in the order of the documents.

Each batch holds whole documents and is encoded on its own, so the ids depend neither on the number of workers nor on
where a batch ends; it tells the place in the sources from which the next one is read, so that a job can go on there.
Documents that come as ids pass through, checked against the vocabulary. A worker is a spawned process that holds the
tokenizer and uses one thread; at most a few batches per worker are in flight, so memory stays flat. It ends with its
parent, also when that is killed.
"""

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process
from typing import Any, Literal

import numpy as np

from lt_data.errors import DataError
from lt_data.megatron import UINT16_VOCAB_LIMIT
from lt_data.sources.document import Document
from lt_data.sources.reader import DocumentReader
from lt_data.tokenizer import Tokenizer

_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 1024
_BATCHES_PER_WORKER = 3  # one at work, one waiting, one on its way back
_NOTHING = np.zeros(0, np.uint32)


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


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A batch as ids.

    Attributes:
        tokens: the ids of all documents, one after the other, BOS and EOS included.
        lengths: tokens of each document (int64), 0 for documents without a token, which get no BOS or EOS either.
        special: literal special strings in the text, with their counts.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    special: Mapping[str, int]

    @property
    def empty(self) -> int:
        """Documents without a token."""
        return int(np.count_nonzero(self.lengths == 0))


class Encoder:
    """Encodes batches under a BOS/EOS policy.

    Attributes:
        dtype: of the ids: uint16 when every id and Megatron's reader allow it.

    Raises:
        DataError: BOS or EOS is asked for and the tokenizer has none, or ids do not fit into 31 bits.
    """

    def __init__(self, tokenizer: Tokenizer, *, bos: bool, eos: bool) -> None:
        for name, wanted, id_ in (("bos", bos, tokenizer.bos_id), ("eos", eos, tokenizer.eos_id)):
            if wanted and id_ is None:
                raise DataError(
                    f"{name}=True, but tokenizer {tokenizer.name or ''} names no {name}_token: add it to its "
                    f"tokenizer_config.json, or choose {name}=False (--no-{name})"
                )
        if tokenizer.vocab_size > 2**31:
            raise DataError(f"tokenizer {tokenizer.name}: ids up to {tokenizer.vocab_size - 1} do not fit into 31 bits")
        self.tokenizer = tokenizer
        self.bos = bos
        self.eos = eos
        self.dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size < UINT16_VOCAB_LIMIT else "uint32"
        self._prefix = np.array([tokenizer.bos_id] if bos else [], np.uint32)
        self._suffix = np.array([tokenizer.eos_id] if eos else [], np.uint32)
        self._special = tokenizer.special_strings
        # Most text has none of them: one search for what they all begin with spares the others.
        self._special_prefix = _common_prefix(self._special)

    def encode(self, texts: list[str]) -> Encoded:
        """Encode some documents."""
        return self._join(self.tokenizer.encode_batch(texts), self._count_special(texts))

    def pass_through(self, documents: Sequence[np.ndarray]) -> Encoded:
        """Take documents that are ids of this tokenizer already; what they begin or end with is not added again."""
        return self._join(documents, {})

    def check_ids(self, ids: Any, source: str) -> np.ndarray:
        """The ids of a document as an array, if they are ids of this tokenizer.

        Raises:
            DataError: not a run of whole numbers, or one of them is outside of the vocabulary.
        """
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise DataError(
                f"{source}: ids of shape {array.shape} and type {array.dtype}: a list of whole numbers needed"
            )
        if array.size and not 0 <= (low := int(array.min())) <= (high := int(array.max())) < self.tokenizer.vocab_size:
            bad = low if low < 0 else high
            where = int(np.flatnonzero(array == bad)[0])
            raise DataError(
                f"{source}: id {bad} at position {where} is not in the vocabulary of tokenizer {self.tokenizer.name} "
                f"(0 to {self.tokenizer.vocab_size - 1}): name the tokenizer that made these ids"
            )
        return array.astype(np.uint32, copy=False)

    def _join(self, documents: Sequence[np.ndarray], special: Mapping[str, int]) -> Encoded:
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        for ids in documents:
            if ids.size:
                before = self._prefix if not self.bos or ids[0] != self._prefix[0] else _NOTHING
                after = self._suffix if not self.eos or ids[-1] != self._suffix[0] else _NOTHING
                parts += (before, ids, after)
                lengths.append(before.size + ids.size + after.size)
            else:
                lengths.append(0)
        tokens = np.concatenate(parts) if parts else _NOTHING
        assert not tokens.size or 0 <= int(tokens.min()) <= int(tokens.max()) < self.tokenizer.vocab_size
        return Encoded(
            tokens=tokens.astype(np.dtype(self.dtype).newbyteorder("<")),
            lengths=np.array(lengths, np.int64),
            special=special,
        )

    def _count_special(self, texts: list[str]) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        for text in texts:
            if self._special and self._special_prefix in text:
                counts.update({string: n for string in self._special if (n := text.count(string))})
        return counts


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
    batches = _batches(documents, encoder, read_bytes)
    if workers == 1:
        for batch in batches:
            yield batch, encoder.pass_through(batch.ids) if batch.ids else encoder.encode(batch.texts)
        return
    executor = ProcessPoolExecutor(
        workers,
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(encoder.tokenizer.files, encoder.bos, encoder.eos),
    )
    waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
    try:
        for batch in batches:
            if batch.ids:
                future: Future[Encoded] = Future()
                future.set_result(encoder.pass_through(batch.ids))
            else:
                future = executor.submit(_encode_in_worker, batch.texts)
            waiting.append((batch, future))
            if len(waiting) >= _BATCHES_PER_WORKER * workers:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    except BrokenProcessPool as exc:
        raise DataError(
            "a worker process ended in the midst of its work; when memory ran out (see dmesg), use fewer workers"
        ) from exc
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _common_prefix(strings: Sequence[str]) -> str:
    first, last = min(strings, default=""), max(strings, default="")
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:shared]


def _batches(documents: Iterable[Document], encoder: Encoder, read_bytes: Callable[[], int]) -> Iterator[Batch]:
    texts: list[str] = []
    ids: list[np.ndarray] = []
    size = text_bytes = file = record = 0

    def batch() -> Batch:
        return Batch(texts=texts, ids=ids, text_bytes=text_bytes, read_bytes=read_bytes(), file=file, record=record)

    for document in documents:
        given = getattr(document, "ids", None)
        if (texts and given is not None) or (ids and given is None):
            # The reader has read past this batch already: its bytes are counted a little early, its place is exact.
            yield batch()
            texts, ids, size, text_bytes = [], [], 0, 0
        if given is not None:
            ids.append(encoder.check_ids(given, document.source))
            size += 4 * ids[-1].size
        else:
            text_bytes += _utf8_bytes(document)
            size = text_bytes
            texts.append(document.as_text())
        file, record = getattr(document, "file", 0), getattr(document, "record", 0)
        if size >= _BATCH_BYTES or len(texts) + len(ids) >= _BATCH_DOCUMENTS:
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


def _start_worker(files: Mapping[str, bytes], bos: bool, eos: bool) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the work and says so
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _worker_encoder = Encoder(Tokenizer.from_bytes(files), bos=bos, eos=eos)


def _encode_in_worker(texts: list[str]) -> Encoded:
    assert _worker_encoder is not None
    return _worker_encoder.encode(texts)
