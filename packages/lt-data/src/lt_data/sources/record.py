"""Records of a file format, and its errors.

A `SourceRecord` holds a value or a `BadRecord`: a reader continues after a bad record, so that it can be left out. If
the rest of a file cannot be read, `DamagedFileError` is raised. reader.py handles both.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class BadRecord:
    """Record that cannot be used.

    Attributes:
        reason: category under which such records are counted.
        message: problem and remedy, to follow the record's location.
    """

    reason: str
    message: str


class SourceRecord(NamedTuple):
    """Record of a file.

    Attributes:
        next_index: index of the next record.
        number: number of the record from 1, such as its line or row; 0 for a whole file.
        value: its text, its ids ([tokens] int64), or its problem.
        n_masked: ids that were removed because the attention_mask is 0.
        fields: all fields or columns of the record, if they are kept.
    """

    next_index: int
    number: int
    value: "str | np.ndarray | BadRecord"
    n_masked: int = 0
    fields: "dict[str, Any] | None" = None


class DamagedFileError(Exception):
    """Error of a file whose rest cannot be read; the message follows the file's name.

    Attributes:
        lost_lines: lines before the damage that were left out, because no checksum confirms them.
        lost_records: those of them that are records.
    """

    lost_lines = 0
    lost_records = 0


class ChangedFileError(Exception):
    """Error of a file that differs from an earlier reading; the message follows the file's name."""


def too_large(limit: int, what: str = "document") -> BadRecord:
    """Return the `BadRecord` of a document above the limit of its size."""
    return BadRecord(
        "too large",
        f"{what} of more than {limit} bytes; raise max_document_bytes (--max-document-bytes)",
    )


def decode_utf8(content: bytes | bytearray) -> str | BadRecord:
    """Decode UTF-8 bytes."""
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        return BadRecord(
            "not UTF-8",
            f"not UTF-8 at byte {exc.start} ({exc.reason}); convert the file, for example with iconv",
        )


def check_surrogates(text: str) -> str | BadRecord:
    """Return the text, or a `BadRecord` if it has an unpaired surrogate, which UTF-8 cannot encode."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as exc:
        return BadRecord(
            "half of a surrogate pair",
            f"character {exc.start} is half of a surrogate pair, which is not text; correct it",
        )
    return text
