"""Running totals of a job up to a position in its sources, saved in the journal.

Every document read is either in the store or counted here by reason; `StoreManifest.is_consistent` checks it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lt_data.store.manifest import DocumentTotals


@dataclass(frozen=True, kw_only=True)
class SavedCounts:
    """Totals of a job in its journal; see `DocumentCounts`."""

    text_bytes: int
    read: DocumentTotals
    left_out: Mapping[str, DocumentTotals]
    skipped: Mapping[str, int]
    special_strings: Mapping[str, int]


@dataclass(kw_only=True)
class DocumentCounts:
    """Running totals of a job.

    Attributes:
        text_bytes: UTF-8 bytes of the stored documents.
        read: all documents, and the ids of those that were encoded.
        left_out: documents that are not stored, by reason.
        skipped: records without a document, by reason.
        special_strings: counts of literal special strings in the stored documents.
    """

    text_bytes: int = 0
    read: DocumentTotals = field(default_factory=DocumentTotals)
    left_out: dict[str, DocumentTotals] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    special_strings: Counter[str] = field(default_factory=Counter)

    def add_left_out(self, reason: str, *, text_bytes: int = 0, tokens: int = 0, documents: int = 1) -> None:
        """Count documents that are left out; does not change `read`."""
        amount = DocumentTotals(documents=documents, text_bytes=text_bytes, tokens=tokens)
        self.left_out[reason] = self.left_out.get(reason, DocumentTotals()) + amount

    def to_dict(self) -> dict[str, Any]:
        """Return the totals as JSON values."""
        return {
            "text_bytes": self.text_bytes,
            "read": asdict(self.read),
            "left_out": {reason: asdict(amount) for reason, amount in self.left_out.items()},
            "skipped": dict(self.skipped),
            "special_strings": dict(self.special_strings),
        }

    @classmethod
    def restore(cls, saved: SavedCounts) -> "DocumentCounts":
        """Restore totals from the parsed values of `to_dict`."""
        return cls(
            text_bytes=saved.text_bytes,
            read=saved.read,
            left_out=dict(saved.left_out),
            skipped=Counter(saved.skipped),
            special_strings=Counter(saved.special_strings),
        )
