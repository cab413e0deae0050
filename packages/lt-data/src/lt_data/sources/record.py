"""Records of a file format: a text, ids or a problem, extracted from a value with named fields.

A reader continues after a `BadRecord`, so that it can be left out. If a file cannot be trusted, `DamagedFileError` is
raised, and none of its records is good. reader.py handles both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lt_data.sources.options import SourceOptions

if TYPE_CHECKING:
    import numpy as np

ATTENTION_MASK = "attention_mask"
TOKEN_FIELDS = ("input_ids", "tokens")  # usual names of ids
_BY_MAP = "a function takes the text out, given by record_map (--map MODULE:FUNCTION)"


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
        number: number of the record from 1, such as its line or row; 0 for a whole file.
        value: its text, its ids ([tokens] int64), or its problem.
        n_masked: ids that were removed because the attention_mask is 0.
        fields: all fields or columns of the record, if they are kept.
    """

    number: int
    value: "str | np.ndarray | BadRecord"
    n_masked: int = 0
    fields: "dict[str, Any] | None" = None


class DamagedFileError(Exception):
    """Error of a file that is left out whole; the message follows the file's name."""


def make_record(record: Any, options: SourceOptions, number: int) -> SourceRecord:
    """Return the record of a JSON value or of a row of a table, or of its `BadRecord`."""
    if isinstance(record, BadRecord):
        return SourceRecord(number, record)
    value, masked = extract_value(record, options)
    fields = record if options.keep_fields and not isinstance(value, BadRecord) else None
    return SourceRecord(number, value, masked, fields)


def extract_value(record: Any, options: SourceOptions) -> "tuple[str | np.ndarray | BadRecord, int]":
    """Extract the text or ids of a record.

    Args:
        record: value of one line or row.
        options: read options, which name the field.

    Returns:
        The text, the ids ([tokens] int64) or a `BadRecord`, and the number of ids that the attention mask removed.
    """
    name = options.field
    if not isinstance(record, dict):
        return BadRecord("not a record", f"holds {type(record).__name__}, not fields such as {name!r}; correct it"), 0
    if name not in record:
        return _missing_field(name, options, record), 0
    value = record[name]
    if value is None:
        return BadRecord("null", f"field {name!r} is null; give it a value"), 0
    if options.tokens_field:
        return _parse_ids(name, value, record.get(ATTENTION_MASK), options.max_document_bytes)
    if not isinstance(value, str):
        if isinstance(value, dict | list):
            kind = "fields of its own" if isinstance(value, dict) else "a list"
            return BadRecord("not a string", f"field {name!r} holds {kind}, not a string; {_BY_MAP}"), 0
        return BadRecord("not a string", f"field {name!r} holds {type(value).__name__}, not a string"), 0
    return check_text(value, options.max_document_bytes), 0


def too_large(limit: int, what: str = "document") -> BadRecord:
    """Return the `BadRecord` of a document above the limit of its size."""
    remedy = "split it, or raise max_document_bytes (--max-document-bytes), at 114 bytes of memory each"
    return BadRecord("too large", f"{what} of more than {limit} bytes; {remedy}")


def decode_utf8(content: bytes) -> str | BadRecord:
    """Decode UTF-8 bytes."""
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        remedy = "convert the file, for example with iconv"
        return BadRecord("not UTF-8", f"not UTF-8 at byte {exc.start} ({exc.reason}); {remedy}")


def check_text(text: str, limit: int) -> str | BadRecord:
    """Return the text, or a `BadRecord` if it is too large or has an unpaired surrogate, which UTF-8 cannot encode."""
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as exc:
        problem = f"character {exc.start} is half of a surrogate pair, which is not text; correct it"
        return BadRecord("half of a surrogate pair", problem)
    return too_large(limit, "text") if size > limit else text


def _missing_field(name: str, options: SourceOptions, record: Mapping[str, Any]) -> BadRecord:
    option, flag = ("tokens_field", "--tokens-field") if options.tokens_field else ("text_field", "--text-field")
    ids = next((field for field in TOKEN_FIELDS if field in record and not options.tokens_field), None)
    hint = f"; for the ids in {ids!r} give tokens_field={ids!r} (--tokens-field {ids})" if ids else ""
    outer = name.partition(".")[0]
    if outer != name and isinstance(record.get(outer), dict | list):
        hint = f"; it lies inside of {outer!r}: {_BY_MAP}"
    names = ", ".join(map(repr, record))
    fields = f"found fields {names}" if names else "the record has no fields"
    message = f"no field {name!r} ({fields}); name the field with {option} ({flag}){hint}"
    return BadRecord(f"no field {name!r}", message)


def _parse_ids(name: str, value: Any, mask: Any, limit: int) -> "tuple[np.ndarray | BadRecord, int]":
    """Parse ids to int64, without the positions at both ends where the attention mask is 0."""
    import numpy as np

    ids = _to_integers(value)
    if ids is None or (ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31):
        return BadRecord("not a list of ids", f"field {name!r} is not a list of whole numbers from 0 to 2^31 - 1"), 0
    if ids.nbytes > limit:
        return too_large(limit, "list of ids"), 0
    if mask is None:
        return ids, 0
    bits = _to_integers(mask)
    if bits is None or bits.size != ids.size or not np.isin(bits, (0, 1)).all():
        return BadRecord("bad attention_mask", f"{ATTENTION_MASK} is not a list of {ids.size} values 0 or 1"), 0
    (real,) = np.nonzero(bits)
    if not real.size:
        return ids[:0], ids.size
    first, last = int(real[0]), int(real[-1])
    if last - first + 1 != real.size:
        problem = f"{ATTENTION_MASK} has zeros between ones; only padding at the ends can be left out"
        return BadRecord("bad attention_mask", problem), 0
    return ids[first : last + 1], ids.size - real.size


def _to_integers(value: Any) -> "np.ndarray | None":
    """Return a list of whole numbers as int64; None for anything else."""
    import numpy as np

    if not isinstance(value, list) or not all(type(item) is int for item in value):
        return None
    try:
        return np.array(value, np.int64)
    except OverflowError:
        return None
