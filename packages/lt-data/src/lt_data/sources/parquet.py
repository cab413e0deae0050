"""Parquet files, and Arrow files as `datasets` saves them: the one module of the sources that imports pyarrow.

Only the columns that are needed are read, a hundred rows at a time; whole row groups before the start are passed over.
An Arrow stream that was cut off at the border of two batches looks like a whole one to pyarrow, so its end is checked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from lt_data.errors import DataError
from lt_data.sources.columns import ROWS, column_records, columns_for
from lt_data.sources.options import ReadOptions
from lt_data.sources.record import Bad, Damaged, Record

_READ_BYTES = 1 << 20
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_ARROW_FILE = b"ARROW1"


def read_parquet(file: BinaryIO, options: ReadOptions, start: int) -> Iterator[Record]:
    """The rows of a parquet file."""
    _need_pyarrow("parquet")
    import pyarrow.parquet

    with _faults("parquet"):
        parquet = pyarrow.parquet.ParquetFile(file, buffer_size=_READ_BYTES, pre_buffer=False)
        columns = columns_for(parquet.schema_arrow.names, options)
        if isinstance(columns, Bad):
            yield from _all_bad(columns, start, parquet.metadata.num_rows)
            return
        rows = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
        group = row = 0
        while group < len(rows) and row + rows[group] <= start:
            row += rows[group]
            group += 1
        groups = list(range(group, len(rows)))
        if not groups:  # pyarrow 18 takes an empty list for a group that is not there
            return
        for batch in parquet.iter_batches(ROWS, row_groups=groups, columns=columns, use_threads=False):
            yield from _from(batch, options, row, start)
            row += batch.num_rows


def read_arrow(file: BinaryIO, options: ReadOptions, start: int) -> Iterator[Record]:
    """The rows of an Arrow stream or file."""
    _need_pyarrow("arrow")
    import pyarrow as pa

    with _faults("arrow"):
        row = 0
        for batch in _batches(pa, file):
            columns = columns_for(batch.schema.names, options)
            if isinstance(columns, Bad):
                yield from _all_bad(columns, max(start, row), row + batch.num_rows)
            elif row + batch.num_rows > start:
                for first in range(0, batch.num_rows, ROWS):
                    yield from _from(batch.select(columns).slice(first, ROWS), options, row + first, start)
            row += batch.num_rows


def _batches(pa: Any, file: BinaryIO) -> Iterator[Any]:
    if file.read(len(_ARROW_FILE)) == _ARROW_FILE:
        reader = pa.ipc.open_file(file)
        for i in range(reader.num_record_batches):
            yield _checked(pa, reader.get_batch(i))
        return
    size = file.seek(0, 2)
    file.seek(max(0, size - len(_END_OF_STREAM)))
    if file.read() != _END_OF_STREAM:
        raise Damaged("the arrow stream is cut off: its end mark is missing; write or fetch it again")
    file.seek(0)
    for batch in pa.ipc.open_stream(file):
        yield _checked(pa, batch)


def _checked(pa: Any, batch: Any) -> Any:
    """The batch, after a look at all of its offsets: pyarrow follows wrong ones out of its memory."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as exc:
        if "UTF8" not in str(exc):  # that is about a row, and is told of the row
            raise
    return batch


def _from(batch: Any, options: ReadOptions, first: int, start: int) -> Iterator[Record]:
    """The records of a batch that begins at row `first`, from row `start` on."""
    before = max(0, start - first)
    if before < batch.num_rows:
        yield from column_records(batch.slice(before), options, first + before)


def _all_bad(bad: Bad, start: int, rows: int) -> Iterator[Record]:
    for row in range(start, rows):
        yield Record(row + 1, f":{row + 1}", bad)


def _need_pyarrow(kind: str) -> None:
    try:
        import pyarrow  # noqa: F401 # pyright: ignore[reportUnusedImport]
    except ImportError as exc:
        raise DataError(f'.{kind} files need the pyarrow package: pip install "lt-data[parquet]"') from exc


@contextmanager
def _faults(kind: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as exc:
        raise Damaged(f"not a whole {kind} file: {exc}; write or fetch it again") from exc
    except OSError as exc:
        if exc.errno is not None:  # the disk's error, not pyarrow's
            raise
        raise Damaged(f"not a whole {kind} file: {exc}; write or fetch it again") from exc
