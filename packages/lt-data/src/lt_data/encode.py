"""Documents to ids in batches, here or in worker processes, always in the order of the documents.

Each batch holds whole documents and is encoded on its own, so the ids depend neither on the number of workers nor on
where a batch ends. A worker is a spawned process that holds the tokenizer and uses one thread; at most a few batches
per worker are in flight, so memory stays flat. It ends with its parent, also when that is killed.
"""

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from typing import Literal

import numpy as np

from lt_data.documents import Document, DocumentReader
from lt_data.errors import DataError
from lt_data.megatron import UINT16_VOCAB_LIMIT
from lt_data.tokenizer import Tokenizer

_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 1024
_BATCHES_PER_WORKER = 3  # one at work, one waiting, one on its way back


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive documents.

    Attributes:
        texts: the documents.
        text_bytes: their length in UTF-8.
        read_bytes: source bytes read up to the end of this batch.
    """

    texts: list[str]
    text_bytes: int
    read_bytes: int


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A batch as ids.

    Attributes:
        tokens: the ids of all documents, one after the other, BOS and EOS included.
        lengths: tokens of each document (int64); documents without a token are left out.
        empty: documents left out.
        special: literal special strings in the text, with their counts.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    empty: int
    special: Mapping[str, int]


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
        encoded = self.tokenizer.encode_batch(texts)
        kept = [ids for ids in encoded if ids.size]
        parts = [part for ids in kept for part in (self._prefix, ids, self._suffix)]
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
        assert not tokens.size or int(tokens.max()) < self.tokenizer.vocab_size
        around = self._prefix.size + self._suffix.size
        return Encoded(
            tokens=tokens.astype(np.dtype(self.dtype).newbyteorder("<")),
            lengths=np.array([ids.size + around for ids in kept], np.int64),
            empty=len(texts) - len(kept),
            special=self._count_special(texts),
        )

    def _count_special(self, texts: list[str]) -> Mapping[str, int]:
        counts: Counter[str] = Counter()
        for text in texts:
            if self._special and self._special_prefix in text:
                counts.update({string: n for string in self._special if (n := text.count(string))})
        return counts


def encode_all(documents: Iterable[Document], encoder: Encoder, workers: int) -> Generator[tuple[Batch, Encoded]]:
    """Encode documents in order, with `workers` processes when there are several.

    Raises:
        DataError: a document holds what UTF-8 cannot express; its source is named.
    """
    batches = _batches(documents)
    if workers == 1:
        for batch in batches:
            yield batch, encoder.encode(batch.texts)
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
            waiting.append((batch, executor.submit(_encode_in_worker, batch.texts)))
            if len(waiting) >= _BATCHES_PER_WORKER * workers:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _common_prefix(strings: Sequence[str]) -> str:
    first, last = min(strings, default=""), max(strings, default="")
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:shared]


def _batches(documents: Iterable[Document]) -> Iterator[Batch]:
    reader = documents if isinstance(documents, DocumentReader) else None
    texts: list[str] = []
    size = 0
    for document in documents:
        try:
            size += len(document.text.encode())
        except UnicodeEncodeError as exc:
            raise DataError(
                f"{document.source}: character {exc.start} is half of a surrogate pair, which is not text; correct it"
            ) from exc
        texts.append(document.text)
        if size >= _BATCH_BYTES or len(texts) >= _BATCH_DOCUMENTS:
            yield Batch(texts=texts, text_bytes=size, read_bytes=reader.read_bytes if reader else 0)
            texts, size = [], 0
    if texts:
        yield Batch(texts=texts, text_bytes=size, read_bytes=reader.read_bytes if reader else 0)


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
