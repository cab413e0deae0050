"""Document of a source: text or ids."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lt_data.errors import DataError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class Document:
    """Document: its text or its ids (exactly one of them), and its source.

        >>> Document(text="A text.").source
        'a document in memory'

    Attributes:
        text: the document as text.
        ids: the document as token ids, [tokens] int64.
        source: path of the file, with `:n` for its n-th line or `#n` for its n-th row (from 1) if it holds several; any
            name for a document in memory.
        file_index: index of the file in its reader's list.
        record_number: number of the line, row or record in that file, from 1; 0 if the file is one document.
        fields: all fields or columns of its record, if the reader keeps them.
    """

    text: str | None = None
    ids: "np.ndarray | None" = None
    source: str = "a document in memory"
    file_index: int = 0
    record_number: int = 0
    fields: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.ids is None):
            raise DataError(f"{self.source}: a document has either text or ids")

    @cached_property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the text, counted once; 0 for ids.

        Raises:
            DataError: it has an unpaired surrogate.
        """
        if self.text is None:
            return 0
        return len(self.text) if self.text.isascii() else len(self.encode())

    def encode(self) -> bytes:
        """Return the text in UTF-8.

        Raises:
            DataError: it has an unpaired surrogate, or the document is ids.
        """
        try:
            content = self.as_text().encode()
        except UnicodeEncodeError as exc:
            raise DataError(
                f"{self.source}: character {exc.start} is half of a surrogate pair, which is not text; correct it"
            ) from exc
        self.__dict__["text_bytes"] = len(content)  # so that nobody encodes it again to count
        return content

    def as_text(self) -> str:
        """Return the text.

        Raises:
            DataError: the document is ids.
        """
        if self.text is None:
            raise DataError(f"{self.source}: holds ids, but text is required; leave tokens_field out")
        return self.text
