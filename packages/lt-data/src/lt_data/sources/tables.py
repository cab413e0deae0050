"""Parquet files, and Arrow files of `datasets`; the only source module that imports pyarrow.

Rows are decoded 256 at a time, only the columns that are needed. A string that is not UTF-8 is a bad record. Memory: a
page of parquet, a batch of Arrow.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from lt_data.errors import DataError
from lt_data.sources.options import SourceOptions
from lt_data.sources.record import ATTENTION_MASK, BadRecord, DamagedFileError, SourceRecord, make_record

_ROWS = 256
_READ_BYTES = 1 << 20
_ARROW_FILE, _END_OF_STREAM = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"


def list_row_groups(file: BinaryIO) -> list[int]:
    """Return the first byte of each row group of a parquet file.

    Raises:
        DamagedFileError: its footer is damaged.
    """
    with _translate_errors("parquet") as pa:
        metadata = pa.parquet.ParquetFile(file).metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        columns = [[group.column(i) for i in range(group.num_columns)] for group in groups]
        return [min(column.dictionary_page_offset or column.data_page_offset for column in each) for each in columns]


def read_parquet(file: BinaryIO, options: SourceOptions, groups: range | None = None) -> Iterator[SourceRecord]:
    """Yield the rows of a parquet file, or of some of its row groups, numbered in the file."""
    with _translate_errors("parquet") as pa:
        parquet = pa.parquet.ParquetFile(
            file, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
        )
        rows = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
        groups = groups or range(len(rows))
        columns = select_columns(parquet.schema_arrow.names, options)
        number = first = sum(rows[: groups.start])
        batches = parquet.iter_batches(_ROWS, row_groups=list(groups), columns=columns, use_threads=False)
        for batch in batches if groups else ():
            yield from iter_rows(batch, options, number)
            number += batch.num_rows
        if number - first != sum(rows[groups.start : groups.stop]):
            raise DamagedFileError("damaged file (parquet): rows are missing; write or download it again")


def read_arrow(file: BinaryIO, options: SourceOptions) -> Iterator[SourceRecord]:
    """Yield the rows of an Arrow stream or file."""
    with _translate_errors("arrow") as pa:
        number = 0
        for batch in _iter_batches(pa, file):
            batch.validate(full=True)  # pyarrow would read out of bounds
            columns = select_columns(batch.schema.names, options)
            for begin in range(0, batch.num_rows, _ROWS):
                part = batch.slice(begin, _ROWS)
                yield from iter_rows(part.select(columns) if columns else part, options, number)
                number += part.num_rows


def _iter_batches(pa: Any, file: BinaryIO) -> Iterator[Any]:
    is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
    size = file.seek(0, 2)
    file.seek(max(0, size - len(_END_OF_STREAM)))
    is_whole = file.read().endswith(_ARROW_FILE if is_file else _END_OF_STREAM)
    if not is_whole:  # pyarrow takes a stream that was cut between two batches
        raise DamagedFileError("damaged file (arrow): its end mark is missing; write or download it again")
    file.seek(0)
    if is_file:
        reader = pa.ipc.open_file(file)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(file)


def select_columns(names: list[str], options: SourceOptions) -> list[str] | None:
    """Return the columns to read; None for all, also if the requested one is missing.

    Raises:
        DamagedFileError: one of them stands twice.
    """
    keep = options.keep_fields
    columns = names
    if keep is not True and options.field in names:
        wanted = {options.field, *(keep or ()), *([ATTENTION_MASK] if options.tokens_field else [])}
        columns = [name for name in names if name in wanted]
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise DamagedFileError(f"two columns are named {twice[0]!r}; write the table with a name for each")
    return None if columns is names else columns


def iter_rows(batch: Any, options: SourceOptions, first: int) -> Iterator[SourceRecord]:
    """Yield the records of a RecordBatch or Table whose first row is row `first` of the source."""
    try:
        rows = batch.to_pylist()
    except ValueError:  # UnicodeDecodeError, or a time that Python cannot hold
        rows = [_decode_row(batch.slice(i, 1)) for i in range(batch.num_rows)]
    for number, row in enumerate(rows, start=first + 1):
        yield make_record(row, options, number)


def _decode_row(batch: Any) -> Any:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as exc:
        return BadRecord("not UTF-8", f"not UTF-8 at byte {exc.start} ({exc.reason}); write the table again")
    except ValueError as exc:
        return BadRecord("unreadable row", f"a value that Python cannot hold ({exc}); write the table without it")


@contextmanager
def _translate_errors(kind: str) -> Iterator[Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet  # pyright: ignore[reportUnusedImport]
    except ImportError as exc:
        raise DataError(f'.{kind} files need the pyarrow package: pip install "lt-data[parquet]"') from exc
    try:
        yield pa
    except (pa.ArrowException, UnicodeDecodeError, OSError) as exc:  # UnicodeDecodeError: of the names of columns
        if isinstance(exc, OSError) and exc.errno is not None:  # an error of the disk, not of pyarrow
            raise
        raise DamagedFileError(f"damaged file ({kind}): {exc}; write or download it again") from exc
