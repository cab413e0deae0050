"""Extraction of text or ids from a record with named fields (a JSON value, a row of a dataset)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lt_data.sources.options import SourceOptions
from lt_data.sources.record import BadRecord

if TYPE_CHECKING:
    import numpy as np

ATTENTION_MASK = "attention_mask"
TOKEN_FIELDS = ("input_ids", "tokens")  # usual names of ids


def extract_value(record: Any, options: SourceOptions) -> "tuple[str | np.ndarray | BadRecord, int]":
    """Extract the text or ids of a record.

    Args:
        record: value of one line or row.
        options: read options, which name the field.

    Returns:
        The text, the ids ([tokens] int64) or a `BadRecord`, and the number of ids that the attention mask removed.
    """
    name = options.tokens_field or options.text_field
    option = "tokens_field" if options.tokens_field else "text_field"
    if not isinstance(record, dict):
        return BadRecord(
            "not a record",
            f"no field {name!r} (found {_type_name(record)}); name the field with {_format_option(option)}",
        ), 0
    if name not in record:
        return missing_field(name, option, list(record)), 0
    value = record[name]
    if value is None:
        return null_field(name), 0
    if options.tokens_field:
        return parse_ids(name, value, record.get(ATTENTION_MASK))
    if not isinstance(value, str):
        return BadRecord("not a string", f"field {name!r} holds {_type_name(value)}, not a string"), 0
    return value, 0


def missing_field(name: str, option: str, found: Sequence[str]) -> BadRecord:
    """Return the `BadRecord` of a missing field or column."""
    ids = next((field for field in TOKEN_FIELDS if field in found), None)
    suggestion = f"; for the ids in {ids!r} give tokens_field={ids!r} (--tokens-field {ids})"
    hint = suggestion if ids and option == "text_field" else ""
    names = ", ".join(map(repr, found))
    remedy = f"name the field with {_format_option(option)}{hint}"
    return BadRecord(f"no field {name!r}", f"no field {name!r} (found fields {names}); {remedy}")


def null_field(name: str) -> BadRecord:
    """Return the `BadRecord` of a field or column without a value."""
    return BadRecord("null", f"field {name!r} is null; give it a value")


def _format_option(option: str) -> str:
    """Return the name of an option in Python and on the command line."""
    return f"{option} (--{option.replace('_', '-')})"


def parse_ids(name: str, value: Any, mask: Any = None) -> "tuple[np.ndarray | BadRecord, int]":
    """Parse ids to int64, without the positions at both ends where the attention mask is 0."""
    import numpy as np

    if not isinstance(value, list) or not all(type(id_) is int and 0 <= id_ < 2**31 for id_ in value):
        return BadRecord("not a list of ids", f"field {name!r} is not a list of whole numbers from 0 to 2^31 - 1"), 0
    ids = np.array(value, np.int64)
    if mask is None:
        return ids, 0
    if not isinstance(mask, list) or len(mask) != ids.size or not all(bit in (0, 1) for bit in mask):
        return BadRecord("bad attention_mask", f"{ATTENTION_MASK} is not a list of {ids.size} values 0 or 1"), 0
    return strip_padding(ids, np.array(mask, np.int64))


def strip_padding(ids: "np.ndarray", mask: "np.ndarray") -> "tuple[np.ndarray | BadRecord, int]":
    """Return the ids where the mask is 1; zeros are allowed only at the ends, as padding."""
    import numpy as np

    (real,) = np.nonzero(mask)
    if not real.size:
        return ids[:0], ids.size
    first, last = int(real[0]), int(real[-1])
    if last - first + 1 != real.size:
        return BadRecord(
            "bad attention_mask", f"{ATTENTION_MASK} has zeros between ones; only padding at the ends can be left out"
        ), 0
    return ids[first : last + 1], ids.size - real.size


def _type_name(value: Any) -> str:
    return type(value).__name__
