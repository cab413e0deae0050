"""Parquet files, and Arrow files of `datasets`; the only source module that imports pyarrow.

Only the required columns are read, 128 rows at a time; row groups before the start are skipped. pyarrow does not detect
an Arrow stream that was truncated between two batches, so the end mark is checked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from lt_data.errors import DataError
from lt_data.sources.columns import BATCH_ROWS, iter_records, select_columns
from lt_data.sources.hashing_reader import HashingCounter
from lt_data.sources.options import ReadOptions
from lt_data.sources.record import BadRecord, DamagedFileError, SourceRecord

_READ_BYTES = 1 << 20
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_ARROW_FILE = b"ARROW1"


def read_parquet(file: BinaryIO, options: ReadOptions, start: int, counter: HashingCounter) -> Iterator[SourceRecord]:
    """Yield the rows of a parquet file."""
    _require_pyarrow("parquet")
    import pyarrow.parquet

    with _translate_errors("parquet"):
        parquet = pyarrow.parquet.ParquetFile(file, buffer_size=_READ_BYTES, pre_buffer=False)
        columns = select_columns(parquet.schema_arrow.names, options)
        if isinstance(columns, BadRecord):
            yield from _bad_rows(columns, start, parquet.metadata.num_rows)
            return
        rows = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
        group = row = 0
        while group < len(rows) and row + rows[group] <= start:
            row += rows[group]
            group += 1
        groups = list(range(group, len(rows)))
        if not groups:  # pyarrow 18 raises on an empty list
            return
        for batch in parquet.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False):
            yield from _batch_records(batch, options, row, start)
            row += batch.num_rows


def read_arrow(file: BinaryIO, options: ReadOptions, start: int, counter: HashingCounter) -> Iterator[SourceRecord]:
    """Yield the rows of an Arrow stream or file."""
    _require_pyarrow("arrow")
    counter.unchecked = "arrow"
    import pyarrow as pa

    with _translate_errors("arrow"):
        row = 0
        for batch in _read_batches(pa, file):
            columns = select_columns(batch.schema.names, options)
            if isinstance(columns, BadRecord):
                yield from _bad_rows(columns, max(start, row), row + batch.num_rows)
            elif row + batch.num_rows > start:
                for first in range(0, batch.num_rows, BATCH_ROWS):
                    yield from _batch_records(
                        batch.select(columns).slice(first, BATCH_ROWS), options, row + first, start
                    )
            row += batch.num_rows


def _read_batches(pa: Any, file: BinaryIO) -> Iterator[Any]:
    if file.read(len(_ARROW_FILE)) == _ARROW_FILE:
        reader = pa.ipc.open_file(file)
        for i in range(reader.num_record_batches):
            yield _validate_batch(pa, reader.get_batch(i))
        return
    size = file.seek(0, 2)
    file.seek(max(0, size - len(_END_OF_STREAM)))
    if file.read() != _END_OF_STREAM:
        raise DamagedFileError("truncated arrow stream: its end mark is missing; write or download it again")
    file.seek(0)
    for batch in pa.ipc.open_stream(file):
        yield _validate_batch(pa, batch)


def _validate_batch(pa: Any, batch: Any) -> Any:
    """Validate all offsets of a batch, since pyarrow would read out of bounds, and return it."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as exc:
        if "UTF8" not in str(exc):  # an error of one row, reported with the row
            raise
    return batch


def _batch_records(batch: Any, options: ReadOptions, first: int, start: int) -> Iterator[SourceRecord]:
    """Yield the records of a batch that begins at row `first`, from row `start` on."""
    before = max(0, start - first)
    if before < batch.num_rows:
        yield from iter_records(batch.slice(before), options, first + before)


def _bad_rows(bad: BadRecord, start: int, rows: int) -> Iterator[SourceRecord]:
    for row in range(start, rows):
        yield SourceRecord(row + 1, f":{row + 1}", bad)


def _require_pyarrow(kind: str) -> None:
    try:
        import pyarrow  # noqa: F401 # pyright: ignore[reportUnusedImport]
    except ImportError as exc:
        raise DataError(f'.{kind} files need the pyarrow package: pip install "lt-data[parquet]"') from exc


@contextmanager
def _translate_errors(kind: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as exc:
        raise DamagedFileError(f"damaged {kind} file: {exc}; write or download it again") from exc
    except OSError as exc:
        if exc.errno is not None:  # an error of the disk, not of pyarrow
            raise
        raise DamagedFileError(f"damaged {kind} file: {exc}; write or download it again") from exc
