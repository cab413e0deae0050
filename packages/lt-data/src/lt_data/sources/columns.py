"""Conversion of pyarrow columns to records: text from strings, ids from lists of integers.

Used by `parquet.py` (files) and `hub.py` (datasets). A null or a string that is not UTF-8 is a bad record and does not
affect others.
"""

from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

from lt_data.sources.fields import ATTENTION_MASK, missing_field, null_field, strip_padding
from lt_data.sources.options import SourceOptions
from lt_data.sources.record import BadRecord, SourceRecord, too_large

if TYPE_CHECKING:
    import numpy as np

BATCH_ROWS = 128  # rows decoded at a time: the memory per file, besides pyarrow's buffers
BATCH_BYTES = 1 << 26  # of the values of rows decoded at a time, if each is as large as the values that they share


def select_columns(names: list[str], options: SourceOptions) -> list[str] | BadRecord:
    """Return the columns to read, or a `BadRecord` if the requested one is missing."""
    name = options.tokens_field or options.text_field
    if name not in names:
        return missing_field(name, "tokens_field" if options.tokens_field else "text_field", names)
    columns = [name, ATTENTION_MASK] if options.tokens_field and ATTENTION_MASK in names else [name]
    wanted = {*columns, *_kept_columns(names, options)}
    columns = [column for column in names if column in wanted]
    if twice := [column for column in columns if names.count(column) > 1]:
        return BadRecord("two columns of one name", f"several columns {twice[0]!r}; rename all but one of them")
    return columns


def count_rows_to_decode(shared_bytes: int) -> int:
    """Return the rows to decode at a time where any row may be as large as the values that rows share."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, shared_bytes)))


def count_shared_bytes(column: Any) -> int:
    """Return the bytes of the values of a column that its rows share.

    0 where each row has its own values.
    """
    import pyarrow.types as types

    kind = column.type
    if types.is_struct(kind):
        return sum(count_shared_bytes(column.field(i)) for i in range(kind.num_fields))
    if types.is_dictionary(kind):
        return column.dictionary.get_total_buffer_size()
    return column.get_total_buffer_size() if _shares_values(kind) else 0


def _shares_values(kind: Any) -> bool:
    """Return True if rows of a type may refer to one value."""
    import pyarrow.types as types

    shares = (
        types.is_dictionary,
        types.is_run_end_encoded,
        types.is_string_view,
        types.is_binary_view,
        types.is_list_view,
        types.is_large_list_view,
    )
    return any(of_kind(kind) for of_kind in shares)


def _repeats_values(kind: Any) -> bool:
    """Return True if one row of a type may refer to one value many times: then its size has no bound."""
    import pyarrow.types as types

    inner = [kind.field(i).type for i in range(kind.num_fields)]
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        inner = [kind.value_type]
    is_list = inner and not (types.is_struct(kind) or types.is_dictionary(kind) or types.is_run_end_encoded(kind))
    return any((is_list and _shares_values(part)) or _repeats_values(part) for part in inner)


def iter_records(table: Any, options: SourceOptions, first: int) -> Iterator[SourceRecord]:
    """Yield the records of a table.

    Args:
        table: a RecordBatch or Table with the columns of `select_columns`.
        options: read options, which name the field.
        first: index of its first row in the file.
    """
    if options.tokens_field:
        masks = table.column(ATTENTION_MASK) if ATTENTION_MASK in table.schema.names else None
        values = _iter_ids(options.tokens_field, table.column(options.tokens_field), masks, options.max_document_bytes)
    else:
        texts = _iter_texts(options.text_field, table.column(options.text_field), options.max_document_bytes)
        values = ((value, 0) for value in texts)
    rows = _iter_rows(table, _kept_columns(table.schema.names, options)) if options.keep_fields else repeat(None)
    for number, ((value, masked), fields) in enumerate(zip(values, rows, strict=False), start=first + 1):
        if isinstance(fields, BadRecord) and not isinstance(value, BadRecord):
            value = fields
        yield SourceRecord(number, number, value, masked, None if isinstance(fields, BadRecord) else fields)


def _kept_columns(names: list[str], options: SourceOptions) -> list[str]:
    kept = options.keep_fields
    return [name for name in names if kept is True or (kept and name in kept)]


def _iter_rows(table: Any, names: list[str]) -> Iterator[dict[str, Any] | BadRecord]:
    """Yield the kept columns of each row, or a `BadRecord` if one of them cannot be read."""
    columns = [_kept_values(table.column(name)) for name in names]
    for row in zip(*columns, strict=True) if columns else repeat((), table.num_rows):
        fields = dict(zip(names, row, strict=True))
        bad = next((name for name, value in fields.items() if isinstance(value, ValueError)), None)
        yield fields if bad is None else BadRecord("unreadable column", f"column {bad!r}: {fields[bad]}")


def _kept_values(column: Any) -> list[Any]:
    if _repeats_values(column.type):
        return [ValueError(f"{column.type} may repeat a value without bound; write the column without it")] * len(
            column
        )
    return _python_values(column)


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _is_text(kind.value_type)
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _iter_texts(name: str, column: Any, limit: int) -> Iterator[str | BadRecord]:
    # Values of another type are not decoded: they may be of any size.
    values = _python_values(column) if _is_text(column.type) else (None for _ in range(len(column)))
    for i, value in enumerate(values):
        if isinstance(value, str):
            is_large = 4 * len(value) > limit and len(value.encode()) > limit
            yield too_large(limit, "text") if is_large else value
        elif isinstance(value, UnicodeDecodeError):
            yield BadRecord("not UTF-8", f"not UTF-8 at byte {value.start} ({value.reason}); write the table again")
        elif not column[i].is_valid:
            yield null_field(name)
        else:
            yield BadRecord("not a string", f"field {name!r} holds {column.type}, not a string")


def _python_values(column: Any) -> list[Any]:
    try:
        return column.to_pylist()
    except ValueError:  # UnicodeDecodeError, or a time that Python cannot hold
        return [_python_value(scalar) for scalar in column]


def _python_value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except ValueError as exc:
        return exc


def _iter_ids(name: str, column: Any, masks: Any, limit: int) -> "Iterator[tuple[np.ndarray | BadRecord, int]]":
    for i in range(len(column)):
        if not column[i].is_valid:
            yield null_field(name), 0
            continue
        ids = _to_int64(column[i])
        if ids is None or (ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 2**31)):
            yield BadRecord("not a list of ids", f"field {name!r} is not a list of whole numbers from 0 to 2^31 - 1"), 0
            continue
        if ids.nbytes > limit:
            yield too_large(limit, "list of ids"), 0
            continue
        if masks is None or not masks[i].is_valid:
            yield ids, 0
            continue
        mask = _to_int64(masks[i])
        if mask is None or mask.size != ids.size or not ((mask == 0) | (mask == 1)).all():
            yield BadRecord("bad attention_mask", f"{ATTENTION_MASK} is not a list of {ids.size} values 0 or 1"), 0
        else:
            yield strip_padding(ids, mask)


def _to_int64(scalar: Any) -> "np.ndarray | None":
    """Convert a list of integers without nulls to int64; None for anything else."""
    import numpy as np

    values = getattr(scalar, "values", None) if scalar.is_valid else None
    if values is None or values.null_count:
        return None
    numbers = values.to_numpy(zero_copy_only=False)
    # an empty list may have any type
    if not numbers.size:
        return np.zeros(0, np.int64)
    return numbers.astype(np.int64) if numbers.dtype.kind in "iu" else None
