"""What a job has counted up to one point of its documents: values that are added up, written to the journal, and read.

Everything that is read is either in the store or counted here by the reason why it is not; `Manifest.adds_up` compares.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lt_data.store.manifest import Amount


@dataclass(kw_only=True)
class Counts:
    """Running totals.

    Attributes:
        text_bytes: UTF-8 bytes of the documents that go into the store.
        read: all documents, and the ids of those that were encoded.
        left_out: documents that do not go into the store, by reason.
        skipped: records that gave no document, by reason.
        special: literal special strings in the documents that go into the store.
    """

    text_bytes: int = 0
    read: Amount = field(default_factory=Amount)
    left_out: dict[str, Amount] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    special: Counter[str] = field(default_factory=Counter)

    def leave_out(self, reason: str, *, text_bytes: int = 0, tokens: int = 0, documents: int = 1) -> None:
        """Count documents that are not taken; they are not counted as read here."""
        amount = Amount(documents=documents, text_bytes=text_bytes, tokens=tokens)
        self.left_out[reason] = self.left_out.get(reason, Amount()) + amount

    def to_json(self) -> dict[str, Any]:
        """The totals as JSON values."""
        return {
            "text_bytes": self.text_bytes,
            "read": asdict(self.read),
            "left_out": {reason: asdict(amount) for reason, amount in self.left_out.items()},
            "skipped": dict(self.skipped),
            "special": dict(self.special),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Counts":
        """The totals that `to_json` wrote."""
        return cls(
            text_bytes=values["text_bytes"],
            read=Amount(**values["read"]),
            left_out={reason: Amount(**amount) for reason, amount in values["left_out"].items()},
            skipped=Counter(values["skipped"]),
            special=Counter(values["special"]),
        )
