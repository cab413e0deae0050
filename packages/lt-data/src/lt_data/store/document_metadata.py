"""Metadata of documents that a store may keep beside their ids: sources and columns."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lt_data.store.document_columns import select_rows


@dataclass(frozen=True, kw_only=True)
class DocumentMetadata:
    """Metadata of consecutive documents.

    Attributes:
        sources: source of each document (u64; lt_data.store.document_sources); None if unknown.
        columns: kept columns (pyarrow.RecordBatch; lt_data.store.document_columns); None if there are none.
    """

    sources: np.ndarray | None = None
    columns: Any = None

    def slice(self, first: int, last: int | None = None) -> "DocumentMetadata":
        """Return those of the documents [first, last)."""
        return DocumentMetadata(
            sources=None if self.sources is None else self.sources[first:last],
            columns=None if self.columns is None else self.columns.slice(first, None if last is None else last - first),
        )

    def select(self, mask: np.ndarray) -> "DocumentMetadata":
        """Return those of the documents for which a mask (bool [documents]) is true."""
        return DocumentMetadata(
            sources=None if self.sources is None else self.sources[mask],
            columns=None if self.columns is None else select_rows(self.columns, mask),
        )
