"""Kept columns of documents, `shards/NAME.arrow`: an Arrow IPC file of one batch, a row per document.

A column has the type that the job declares for it, so that the files depend neither on where shards or parts begin nor
on what is found: `string` (Arrow large_utf8), `int` (int64), `float` (float64) or `bool`. A missing value is null. A
value of a string column that is no string is kept as JSON text; a surrogate without its other half becomes U+FFFD.
The only module of the store that imports pyarrow. Memory: the columns of one shard.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from lt_data.errors import DataError
from lt_data.storage import translate_os_errors
from lt_data.store.manifest import ColumnInfo, ColumnType, ShardFile

_REMEDY = "copy it again or prepare it again"
_SURROGATES = re.compile("[\ud800-\udfff]")
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,)}


def parse_columns(keep: Sequence[str]) -> tuple[ColumnInfo, ...]:
    """Return the columns of names such as "url" (a string) and "score:float".

    Raises:
        DataError: an empty or repeated name, an unknown type, or pyarrow is missing.
    """
    if isinstance(keep, str):
        raise DataError(f"keep = {keep!r}: a single name; pass a list of names")
    columns: list[ColumnInfo] = []
    for item in keep:
        name, colon, kind = item.rpartition(":")
        name, kind = (name, kind) if colon else (item, "string")
        if not name or name in (column.name for column in columns):
            raise DataError(f"keep = {list(keep)}: {item!r} has {'the name of another' if name else 'no name'}")
        if kind not in get_args(ColumnType):
            raise DataError(f"keep = {item!r}: type {kind!r}; choose {', '.join(get_args(ColumnType))}")
        columns.append(ColumnInfo(name=name, type=cast("ColumnType", kind), nulls=0))
    if columns:
        _import_pyarrow()
    return tuple(columns)


def make_row(columns: Sequence[ColumnInfo], fields: Mapping[str, Any] | None, source: str) -> tuple[Any, ...]:
    """Return the values of a document's columns.

    Args:
        columns: the columns.
        fields: fields of its record.
        source: its source, for messages.

    Raises:
        DataError: a value is not of its column's type.
    """
    return tuple(_convert(column, (fields or {}).get(column.name), source) for column in columns)


def _convert(column: ColumnInfo, value: Any, source: str) -> Any:
    if value is None:
        return None
    if column.type == "string":
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_describe)
        except (RecursionError, ValueError) as exc:  # ValueError: a number of thousands of digits, a loop
            raise DataError(f"{source}: field {column.name!r} has no JSON text ({exc}); leave it out") from exc
        return text if text.isascii() else _SURROGATES.sub("\ufffd", text)
    is_of_type = isinstance(value, _TYPES[column.type]) and (column.type == "bool" or not isinstance(value, bool))
    if not is_of_type or (column.type == "int" and not -(2**63) <= value < 2**63):
        is_short = isinstance(value, str | float) or (isinstance(value, int) and value.bit_length() < 256)
        shown = json.dumps(value)[:80] if is_short else type(value).__name__
        raise DataError(
            f"{source}: field {column.name!r} holds {shown}, not {column.type}; keep it as a string (--keep "
            f"{column.name})"
        )
    try:
        return float(value) if column.type == "float" else value
    except OverflowError as exc:
        raise DataError(f"{source}: field {column.name!r} is beyond a float; keep it as a string") from exc


def _describe(value: Any) -> str:
    """Return text for a value of a table that JSON does not have, such as a time."""
    return value.hex() if isinstance(value, bytes) else str(value)


def make_batch(columns: Sequence[ColumnInfo], rows: Sequence[tuple[Any, ...]]) -> Any:
    """Return rows of `make_row` as a pyarrow.RecordBatch."""
    pa = _import_pyarrow()
    schema = _make_schema(pa, columns)
    arrays = [pa.array([row[i] for row in rows], field.type) for i, field in enumerate(schema)]
    return pa.record_batch(arrays, schema=schema)


def encode_columns(batches: Sequence[Any]) -> memoryview:
    """Return the file of a shard's batches, in order."""
    pa = _import_pyarrow()
    schema = batches[0].schema
    # Concatenated, so that no bits of rows before or after a slice are in the last byte of a bitmap.
    arrays = [
        pa.concat_arrays([*(batch.column(i) for batch in batches), pa.array([], schema.field(i).type)])
        for i in range(len(schema))
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    return memoryview(sink.getvalue())


def decode_columns(content: bytes, columns: Sequence[ColumnInfo], *, documents: int, path: str) -> Any:
    """Return the columns of a shard as a pyarrow.RecordBatch.

    Args:
        content: the file.
        columns: columns of the manifest.
        documents: documents of the shard.
        path: its path, for messages.

    Raises:
        DataError: a damaged file, or another number of documents or other columns; or pyarrow is missing.
    """
    pa = _import_pyarrow()
    try:
        reader = pa.ipc.open_file(pa.py_buffer(content))
        if not reader.schema.equals(_make_schema(pa, columns)) or reader.num_record_batches != 1:
            raise DataError(f"{path}: not the columns of the manifest; {_REMEDY}")
        batch = reader.get_batch(0)
        batch.validate(full=True)  # pyarrow would read out of bounds
    except (pa.ArrowException, OSError) as exc:
        raise DataError(f"{path}: not an Arrow file ({exc}); {_REMEDY}") from exc
    if batch.num_rows != documents:
        raise DataError(f"{path}: {batch.num_rows} rows for {documents} documents; {_REMEDY}")
    return batch


def count_nulls(columns: Sequence[ColumnInfo], folder: Path, shards: Sequence[ShardFile]) -> tuple[ColumnInfo, ...]:
    """Return the columns with the number of their nulls in shards that were just written to a folder."""
    nulls = [0] * len(columns)
    for path in (folder / f"{shard.name}.arrow" for shard in shards if columns):
        with translate_os_errors("read", path), _import_pyarrow().memory_map(str(path)) as file:
            batch = _import_pyarrow().ipc.open_file(file).get_batch(0)
            nulls = [nulls[i] + batch.column(i).null_count for i in range(len(columns))]
    return tuple(replace(column, nulls=n) for column, n in zip(columns, nulls, strict=True))


def select_rows(batch: Any, mask: Any) -> Any:
    """Return the rows of a batch for which a mask (bool [rows]) is true."""
    return batch.filter(_import_pyarrow().array(mask))


def _make_schema(pa: Any, columns: Sequence[ColumnInfo]) -> Any:
    types = {"string": pa.large_string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    return pa.schema([(column.name, types[column.type]) for column in columns])


def _import_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as exc:
        raise DataError('kept columns need the pyarrow package: pip install "lt-data[parquet]"') from exc
    return pyarrow
