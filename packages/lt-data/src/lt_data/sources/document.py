"""What every source yields: one document, as text or as ids that were made elsewhere."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lt_data.errors import DataError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text, or the ids of one, and where it came from. Exactly one of `text` and `ids` is given.

    Attributes:
        text: the document.
        ids: the document as token ids that were made elsewhere, [tokens] int64.
        source: path of the file, with `:n` for its n-th line, row or record (from 1) where a file holds several.
        file: index of the file in its reader's list.
        record: index within that file of the next record to read: where a walk goes on after this document.
    """

    text: str | None = None
    ids: "np.ndarray | None" = None
    source: str
    file: int = 0
    record: int = 0

    def __post_init__(self) -> None:
        if (self.text is None) == (self.ids is None):
            raise DataError(f"{self.source}: a document is either text or ids, exactly one of them")

    def as_text(self) -> str:
        """The text, where only text will do.

        Raises:
            DataError: the document is ids.
        """
        if self.text is None:
            raise DataError(f"{self.source}: holds ids, and text is needed here; leave tokens_field out")
        return self.text
