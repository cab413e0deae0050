"""Document filter between reader and encoder, which counts what it leaves out.

Equal documents of one unit are found here by 128 bits of SHA-256, about 100 bytes of memory per distinct document;
those of different units when all are finished (lt_data.preparation.duplicates).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from lt_data.preparation.deduplication import hash_ids, hash_text
from lt_data.preparation.record_map import RecordMap
from lt_data.sources.document import Document
from lt_data.store.manifest import DUPLICATE, EMPTY, DocumentTotals, Selection

TOO_FEW_CHARACTERS = "too few characters"
TOO_MANY_CHARACTERS = "too many characters"


@dataclass
class DocumentCounts:
    """Documents that were read, and those of them that were left out, by reason."""

    read: int = 0
    left_out: dict[str, DocumentTotals] = field(default_factory=lambda: defaultdict(DocumentTotals))


def select_documents(
    documents: Iterable[Document], selection: Selection, counts: DocumentCounts, record_map: RecordMap | None
) -> Iterator[Document]:
    """Yield the documents, mapped, that pass all criteria but those of ids, in order."""
    seen: set[bytes] = set()
    for document in documents:
        counts.read += 1
        mapped = document if record_map is None else record_map.apply(document)
        reason = mapped if isinstance(mapped, str) else _find_reason(mapped, selection, seen)
        if reason is None:
            assert isinstance(mapped, Document)
            yield mapped
        else:
            size = (document if isinstance(mapped, str) else mapped).text_bytes
            counts.left_out[reason] += DocumentTotals(documents=1, text_bytes=size)


def _find_reason(document: Document, selection: Selection, seen: set[bytes]) -> str | None:
    """Return the reason for which a document is left out, or None."""
    if document.ids is not None:
        if not len(document.ids):
            return EMPTY
    else:
        size = len(document.as_text())
        if not size:
            return EMPTY
        if size < (selection.min_characters or 0):
            return TOO_FEW_CHARACTERS
        if size > (selection.max_characters or size):
            return TOO_MANY_CHARACTERS
    if selection.drop_duplicates:
        own = hash_text(document.encode()) if document.ids is None else hash_ids(np.asarray(document.ids))
        if own in seen:
            return DUPLICATE
        seen.add(own)
    return None
