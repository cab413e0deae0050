"""A table's column to records: text from strings, ids from lists of whole numbers. Works on pyarrow's arrays.

Both ways in: `parquet.py` reads files, `hub.py` has tables from datasets. Strings that are not UTF-8 and nulls are bad
records of their own and spoil no others.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lt_data.sources.fields import MASK, missing, unmasked
from lt_data.sources.options import ReadOptions
from lt_data.sources.record import Bad, Record

if TYPE_CHECKING:
    import numpy as np

# Rows that are decoded at a time: what is in memory of a file, beside pyarrow's own buffers.
ROWS = 128


def columns_for(names: Sequence[str], options: ReadOptions) -> list[str] | Bad:
    """The columns that have to be read, or what is wrong when the one asked for is not there."""
    name = options.tokens_field or options.text_field
    if name not in names:
        return missing(name, "tokens_field" if options.tokens_field else "text_field", names)
    return [name, MASK] if options.tokens_field and MASK in names else [name]


def column_records(table: Any, options: ReadOptions, first: int) -> Iterator[Record]:
    """The records of some rows.

    Args:
        table: a RecordBatch or Table with the columns of `columns_for`.
        options: which field.
        first: index of its first row in the file.
    """
    if options.tokens_field:
        masks = table.column(MASK) if MASK in table.schema.names else None
        values = _ids(options.tokens_field, table.column(options.tokens_field), masks)
    else:
        values = ((value, 0) for value in _texts(options.text_field, table.column(options.text_field)))
    for following, (value, masked) in enumerate(values, start=first + 1):
        yield Record(following, f":{following}", value, masked)


def _texts(name: str, column: Any) -> Iterator[str | Bad]:
    for i, value in enumerate(_python_values(column)):
        if isinstance(value, str):
            yield value
        elif isinstance(value, UnicodeDecodeError):
            yield Bad("not UTF-8", f"not UTF-8 at byte {value.start} ({value.reason}); write the table again")
        else:
            found = "null" if value is None else str(column[i].type)
            yield Bad("not a string", f"field {name!r} holds {found}, not a string")


def _python_values(column: Any) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_python_value(scalar) for scalar in column]


def _python_value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as exc:
        return exc


def _ids(name: str, column: Any, masks: Any) -> "Iterator[tuple[np.ndarray | Bad, int]]":
    for i in range(len(column)):
        ids = _numbers(column[i])
        if ids is None or (ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 2**31)):
            yield Bad("not a list of ids", f"field {name!r} is not a list of whole numbers from 0 to 2^31 - 1"), 0
            continue
        if masks is None or not masks[i].is_valid:
            yield ids, 0
            continue
        mask = _numbers(masks[i])
        if mask is None or mask.size != ids.size or not ((mask == 0) | (mask == 1)).all():
            yield Bad("bad attention_mask", f"{MASK} is not a list of {ids.size} times 0 or 1"), 0
        else:
            yield unmasked(ids, mask)


def _numbers(scalar: Any) -> "np.ndarray | None":
    """A list of whole numbers without nulls as int64; None for anything else."""
    import numpy as np

    values = getattr(scalar, "values", None) if scalar.is_valid else None
    if values is None or values.null_count:
        return None
    numbers = values.to_numpy(zero_copy_only=False)
    # An empty list may be one of nulls or of anything.
    if not numbers.size:
        return np.zeros(0, np.int64)
    return numbers.astype(np.int64) if numbers.dtype.kind in "iu" else None
