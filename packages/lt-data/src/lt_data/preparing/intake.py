"""Documents from the reader to the encoder, with those that are not wanted left out and counted where they stood.

The encoder works on several batches at a time, while a job must be able to go on from the end of the last batch that
was written. So what is left out here is not counted at once: it is noted with the number of documents passed on before
it, and counted when the batch is settled in which it stood. With duplicates dropped, documents are looked at in blocks
of at most 256 or about a megabyte, so that looking up their hashes costs little. Memory: such a block, the notes of the
batches at work, and 16 to 32 bytes per distinct document for the hashes.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from lt_data.errors import DataError
from lt_data.preparing.counts import Counts
from lt_data.preparing.duplicates import HASH, SeenHashes, hash_ids, hash_text
from lt_data.sources.document import Document
from lt_data.sources.reader import DocumentReader
from lt_data.store.manifest import DUPLICATE, EMPTY, Amount, Selection

_BLOCK_DOCUMENTS = 256
_BLOCK_CHARACTERS = 1 << 20

TOO_FEW_CHARACTERS = "too few characters"
TOO_MANY_CHARACTERS = "too many characters"


@dataclass(frozen=True)
class _Note:
    before: int  # documents passed on before this
    reason: str
    text_bytes: int
    records: int  # of the source; 0 for a document


@dataclass(frozen=True)
class _Looked:
    document: Document
    reason: str | None  # why it is not wanted
    text_bytes: int  # 0 where nobody needs it
    hash: bytes
    skipped: Counter[str]  # records left out by the reader before it


class Intake:
    """Wanted documents in order.

    Attributes:
        n_read: documents taken from the source so far.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        selection: Selection,
        *,
        reader: DocumentReader | None,
        seen: np.ndarray,
    ) -> None:
        """Take documents in.

        Args:
            documents: where they come from.
            selection: which are wanted.
            reader: told of records that gave no document, if there is one behind `documents`.
            seen: hashes of the documents that an earlier process passed on (S16).
        """
        self.n_read = 0
        self._documents = documents
        self._selection = selection
        self._reader = reader
        self._skipped: Counter[str] = Counter()
        self._seen = SeenHashes()
        if seen.size:
            self._seen.add(seen)
        self._passed = 0
        self._settled = 0
        self._notes: deque[_Note] = deque()
        self._hashes: deque[bytes] = deque()

    def __iter__(self) -> Iterator[Document]:
        if not self._selection.drop_duplicates:
            for document in self._documents:
                looked = self._look(document)
                if self._wanted(looked, is_new=True):
                    yield document
        else:
            for block in self._blocks():
                hashes = [looked.hash for looked in block if looked.reason is None]
                new = iter(self._seen.add(np.array(hashes, HASH)).tolist())
                for looked in block:
                    if self._wanted(looked, is_new=looked.reason is None and next(new)):
                        yield looked.document
        self._note_skipped(self._newly_skipped())

    def settle(self, documents: int, counts: Counts) -> np.ndarray:
        """Count what was left out up to the end of a batch.

        Args:
            documents: how many documents the batch holds.
            counts: what to add to.

        Returns:
            The hashes of these documents (S16 [documents]); nothing when duplicates are kept.
        """
        self._settled += documents
        while self._notes and self._notes[0].before < self._settled:
            self._count(self._notes.popleft(), counts)
        return np.array([self._hashes.popleft() for _ in range(documents if self._hashes else 0)], HASH)

    def settle_rest(self, counts: Counts) -> None:
        """Count what was left out after the last batch."""
        assert self._settled == self._passed
        while self._notes:
            self._count(self._notes.popleft(), counts)

    def _count(self, note: _Note, counts: Counts) -> None:
        if note.records:
            counts.skipped[note.reason] += note.records
        else:
            counts.read += Amount(documents=1, text_bytes=note.text_bytes)
            counts.leave_out(note.reason, text_bytes=note.text_bytes)

    def _blocks(self) -> Iterator[list[_Looked]]:
        block: list[_Looked] = []
        size = 0
        for document in self._documents:
            block.append(self._look(document))
            size += len(document.text or "")
            if len(block) >= _BLOCK_DOCUMENTS or size >= _BLOCK_CHARACTERS:
                yield block
                block, size = [], 0
        yield block

    def _look(self, document: Document) -> _Looked:
        self.n_read += 1
        skipped = self._newly_skipped()
        selection = self._selection
        if document.ids is not None:
            reason = None if len(document.ids) else EMPTY
            wants_hash = selection.drop_duplicates and reason is None
            return _Looked(document, reason, 0, hash_ids(np.asarray(document.ids)) if wants_hash else b"", skipped)
        text = document.as_text()
        reason = None
        if not text:
            reason = EMPTY
        elif selection.min_characters is not None and len(text) < selection.min_characters:
            reason = TOO_FEW_CHARACTERS
        elif selection.max_characters is not None and len(text) > selection.max_characters:
            reason = TOO_MANY_CHARACTERS
        if reason is None and not selection.drop_duplicates:
            return _Looked(document, None, 0, b"", skipped)
        content = utf8(document)
        return _Looked(document, reason, len(content), b"" if reason else hash_text(content), skipped)

    def _wanted(self, looked: _Looked, *, is_new: bool) -> bool:
        self._note_skipped(looked.skipped)
        if looked.reason is None and is_new:
            self._passed += 1
            if self._selection.drop_duplicates:
                self._hashes.append(looked.hash)
            return True
        self._notes.append(_Note(self._passed, looked.reason or DUPLICATE, looked.text_bytes, 0))
        return False

    def _newly_skipped(self) -> Counter[str]:
        if self._reader is None or self._reader.skipped == self._skipped:
            return _NONE
        new = self._reader.skipped - self._skipped
        self._skipped = self._reader.skipped.copy()
        return new

    def _note_skipped(self, skipped: Counter[str]) -> None:
        for reason, records in skipped.items():
            self._notes.append(_Note(self._passed, reason, 0, records))


_NONE: Counter[str] = Counter()


def utf8(document: Document) -> bytes:
    """The text in UTF-8.

    Raises:
        DataError: it holds what UTF-8 cannot express; its source is named.
    """
    try:
        return document.as_text().encode()
    except UnicodeEncodeError as exc:
        raise DataError(
            f"{document.source}: character {exc.start} is half of a surrogate pair, which is not text; correct it"
        ) from exc
