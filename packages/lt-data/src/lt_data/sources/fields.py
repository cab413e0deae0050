"""A record with named fields (a JSON value, a row of a dataset) to its text or its ids."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lt_data.sources.options import ReadOptions
from lt_data.sources.record import Bad

if TYPE_CHECKING:
    import numpy as np

MASK = "attention_mask"
TOKENS = ("input_ids", "tokens")  # what others call ids


def value_of(record: Any, options: ReadOptions) -> "tuple[str | np.ndarray | Bad, int]":
    """Take the field that is asked for.

    Args:
        record: what stands in one line or row.
        options: which field.

    Returns:
        The text or the ids ([tokens] int64) or what is wrong, and how many ids the attention mask took away.
    """
    name = options.tokens_field or options.text_field
    option = "tokens_field" if options.tokens_field else "text_field"
    if not isinstance(record, dict):
        return Bad("not a record", f"no field {name!r} (found {_kind(record)}); name the field with {_said(option)}"), 0
    if name not in record:
        return missing(name, option, list(record)), 0
    value = record[name]
    if options.tokens_field:
        return ids_of(name, value, record.get(MASK))
    if not isinstance(value, str):
        return Bad("not a string", f"field {name!r} holds {_kind(value)}, not a string"), 0
    return value, 0


def missing(name: str, option: str, found: Sequence[str]) -> Bad:
    """What to say where a field or column is not there."""
    ids = next((field for field in TOKENS if field in found), None)
    meant = f"; are the ids in {ids!r} meant? Then tokens_field={ids!r} (--tokens-field {ids})"
    hint = meant if ids and option == "text_field" else ""
    names = ", ".join(map(repr, found))
    remedy = f"name the field with {_said(option)}{hint}"
    return Bad(f"no field {name!r}", f"no field {name!r} (found fields {names}); {remedy}")


def _said(option: str) -> str:
    """An option as Python and as the command line name it."""
    return f"{option} (--{option.replace('_', '-')})"


def ids_of(name: str, value: Any, mask: Any = None) -> "tuple[np.ndarray | Bad, int]":
    """Ids as int64, without the positions at either end where the attention mask is 0."""
    import numpy as np

    if not isinstance(value, list) or not all(type(id_) is int and 0 <= id_ < 2**31 for id_ in value):
        return Bad("not a list of ids", f"field {name!r} is not a list of whole numbers from 0 to 2^31 - 1"), 0
    ids = np.array(value, np.int64)
    if mask is None:
        return ids, 0
    if not isinstance(mask, list) or len(mask) != ids.size or not all(bit in (0, 1) for bit in mask):
        return Bad("bad attention_mask", f"{MASK} is not a list of {ids.size} times 0 or 1"), 0
    return unmasked(ids, np.array(mask, np.int64))


def unmasked(ids: "np.ndarray", mask: "np.ndarray") -> "tuple[np.ndarray | Bad, int]":
    """Ids where the mask is 1; the zeros may stand at the ends only, where they mean padding."""
    import numpy as np

    (real,) = np.nonzero(mask)
    if not real.size:
        return ids[:0], ids.size
    first, last = int(real[0]), int(real[-1])
    if last - first + 1 != real.size:
        return Bad("bad attention_mask", f"{MASK} has zeros between ones; only padding at the ends can be left out"), 0
    return ids[first : last + 1], ids.size - real.size


def _kind(value: Any) -> str:
    return type(value).__name__
