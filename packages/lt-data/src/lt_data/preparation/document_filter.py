"""Document filter between reader and encoder, which counts what it leaves out by position.

The encoder has several batches in flight, while a job must be resumable from the end of the last written batch. So an
exclusion is not counted at once: it is recorded with the number of documents passed before it, and counted when its
batch is written. If duplicates are dropped, documents are filtered in blocks of at most 256 or about a megabyte, so
that looking up their hashes is cheap. Memory: one block, the exclusions of the batches in flight, and 16 to 32 bytes
per distinct document for the hashes.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from lt_data.preparation.counts import DocumentCounts
from lt_data.preparation.deduplication import HASH_DTYPE, DocumentHashSet, hash_ids, hash_text
from lt_data.preparation.record_map import RecordMap
from lt_data.sources.document import Document
from lt_data.sources.reader import DocumentReader
from lt_data.store.manifest import DUPLICATE, EMPTY, DocumentTotals, Selection

_BLOCK_DOCUMENTS = 256
_BLOCK_CHARACTERS = 1 << 20

TOO_FEW_CHARACTERS = "too few characters"
TOO_MANY_CHARACTERS = "too many characters"


@dataclass(frozen=True)
class _Exclusion:
    before: int  # documents passed before this
    reason: str
    text_bytes: int
    records: int  # source records without a document; 0: an excluded document


@dataclass(frozen=True)
class _CheckedDocument:
    document: Document
    reason: str | None  # of its exclusion
    text_bytes: int  # 0 if not needed
    hash: bytes
    skipped: Counter[str]  # records that the reader skipped before it


class DocumentFilter:
    """Iterator over the selected documents, in order.

    Attributes:
        n_read: documents read from the source so far.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        selection: Selection,
        *,
        reader: DocumentReader | None,
        seen_hashes: np.ndarray,
        record_map: RecordMap | None = None,
    ) -> None:
        """Filter documents.

        Args:
            documents: the documents to filter.
            selection: the criteria.
            reader: reader behind `documents`, which counts skipped records, if there is one.
            seen_hashes: hashes of the documents that an earlier process passed (S16).
            record_map: function of the user, applied to each document before the criteria.
        """
        self.n_read = 0
        self._documents = documents
        self._selection = selection
        self._map = record_map
        self._reader = reader
        self._skipped: Counter[str] = Counter()
        self._seen = DocumentHashSet()
        if seen_hashes.size:
            self._seen.add(seen_hashes)
        self._n_passed = 0
        self._n_counted = 0
        self._exclusions: deque[_Exclusion] = deque()
        self._hashes: deque[bytes] = deque()

    def __iter__(self) -> Iterator[Document]:
        if not self._selection.drop_duplicates:
            for document in self._documents:
                checked = self._check(document)
                if self._admit(checked, is_new=True):
                    yield checked.document
        else:
            for block in self._blocks():
                hashes = [checked.hash for checked in block if checked.reason is None]
                is_new = iter(self._seen.add(np.array(hashes, HASH_DTYPE)).tolist())
                for checked in block:
                    if self._admit(checked, is_new=checked.reason is None and next(is_new)):
                        yield checked.document
        self._add_skipped(self._take_skipped())

    def count_batch(self, documents: int, counts: DocumentCounts) -> np.ndarray:
        """Count the exclusions up to the end of a batch.

        Args:
            documents: number of documents in the batch.
            counts: totals to add to.

        Returns:
            The hashes of these documents (S16 [documents]); empty if duplicates are kept.
        """
        self._n_counted += documents
        while self._exclusions and self._exclusions[0].before < self._n_counted:
            self._count(self._exclusions.popleft(), counts)
        return np.array([self._hashes.popleft() for _ in range(documents if self._hashes else 0)], HASH_DTYPE)

    def count_remaining(self, counts: DocumentCounts) -> None:
        """Count the exclusions after the last batch."""
        assert self._n_counted == self._n_passed
        while self._exclusions:
            self._count(self._exclusions.popleft(), counts)

    def _count(self, exclusion: _Exclusion, counts: DocumentCounts) -> None:
        if exclusion.records:
            counts.skipped[exclusion.reason] += exclusion.records
        else:
            counts.read += DocumentTotals(documents=1, text_bytes=exclusion.text_bytes)
            counts.add_left_out(exclusion.reason, text_bytes=exclusion.text_bytes)

    def _blocks(self) -> Iterator[list[_CheckedDocument]]:
        block: list[_CheckedDocument] = []
        size = 0
        for document in self._documents:
            block.append(self._check(document))
            size += len(document.text or "")
            if len(block) >= _BLOCK_DOCUMENTS or size >= _BLOCK_CHARACTERS:
                yield block
                block, size = [], 0
        yield block

    def _check(self, document: Document) -> _CheckedDocument:
        self.n_read += 1
        skipped = self._take_skipped()
        selection = self._selection
        if self._map is not None:
            mapped = self._map.apply(document)
            if isinstance(mapped, str):
                return _CheckedDocument(document, mapped, document.text_bytes, b"", skipped)
            document = mapped
        if document.ids is not None:
            reason = None if len(document.ids) else EMPTY
            needs_hash = selection.drop_duplicates and reason is None
            return _CheckedDocument(
                document, reason, 0, hash_ids(np.asarray(document.ids)) if needs_hash else b"", skipped
            )
        text = document.as_text()
        reason = None
        if not text:
            reason = EMPTY
        elif selection.min_characters is not None and len(text) < selection.min_characters:
            reason = TOO_FEW_CHARACTERS
        elif selection.max_characters is not None and len(text) > selection.max_characters:
            reason = TOO_MANY_CHARACTERS
        if reason is None and not selection.drop_duplicates:
            return _CheckedDocument(document, None, 0, b"", skipped)
        own_hash = b"" if reason else hash_text(document.encode())
        return _CheckedDocument(document, reason, document.text_bytes, own_hash, skipped)

    def _admit(self, checked: _CheckedDocument, *, is_new: bool) -> bool:
        self._add_skipped(checked.skipped)
        if checked.reason is None and is_new:
            self._n_passed += 1
            if self._selection.drop_duplicates:
                self._hashes.append(checked.hash)
            return True
        self._exclusions.append(_Exclusion(self._n_passed, checked.reason or DUPLICATE, checked.text_bytes, 0))
        return False

    def _take_skipped(self) -> Counter[str]:
        if self._reader is None or self._reader.skipped == self._skipped:
            return _NO_RECORDS
        new = self._reader.skipped - self._skipped
        self._skipped = self._reader.skipped.copy()
        return new

    def _add_skipped(self, skipped: Counter[str]) -> None:
        for reason, records in skipped.items():
            self._exclusions.append(_Exclusion(self._n_passed, reason, 0, records))


_NO_RECORDS: Counter[str] = Counter()
