"""Parquet files, and Arrow files of `datasets`; the only source module that imports pyarrow.

Only the required columns are read, 128 rows at a time, or fewer if rows may share large values; row groups
before the start are skipped. The checksum of a page, if it has one, is compared before its rows are decoded. pyarrow
does not detect an Arrow stream that was truncated between two batches, so the end mark is checked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from lt_data.errors import DataError
from lt_data.sources.arrow_messages import check_sizes
from lt_data.sources.columns import count_rows_to_decode, count_shared_bytes, iter_records, select_columns
from lt_data.sources.hashing_reader import HashingCounter
from lt_data.sources.options import SourceOptions
from lt_data.sources.parquet_pages import read_pages
from lt_data.sources.record import BadRecord, DamagedFileError, SourceRecord, too_large

_READ_BYTES = 1 << 20
_PAGE_LIMIT = 4  # a page, or a compressed Arrow batch, may be as large as so many of the largest documents
_VALUE_BYTES = 8
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_ARROW_FILE, _ARROW_FILE_HEADER_BYTES = b"ARROW1", 8


def list_row_groups(file: BinaryIO) -> list[tuple[int, int]]:
    """Return the first byte, and the number of rows, of each row group of a parquet file.

    Raises:
        DamagedFileError: its footer is damaged.
    """
    _require_pyarrow("parquet")
    import pyarrow.parquet

    with _translate_errors("parquet"):
        metadata = pyarrow.parquet.ParquetFile(file).metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        return [(min(map(_first_byte, _columns(group)), default=0), group.num_rows) for group in groups]


def _columns(group: Any) -> list[Any]:
    return [group.column(i) for i in range(group.num_columns)]


def _first_byte(column: Any) -> int:
    has_dictionary = column.has_dictionary_page and column.dictionary_page_offset is not None
    return min(column.data_page_offset, column.dictionary_page_offset) if has_dictionary else column.data_page_offset


def read_parquet(
    file: BinaryIO, options: SourceOptions, start: int, counter: HashingCounter, *, groups: range | None = None
) -> Iterator[SourceRecord]:
    """Yield the rows of a parquet file, or of some of its row groups, from row `start` of the file on."""
    _require_pyarrow("parquet")
    import pyarrow.parquet

    with _translate_errors("parquet"):
        parquet = pyarrow.parquet.ParquetFile(
            file, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
        )
        columns = select_columns(parquet.schema_arrow.names, options)
        if isinstance(columns, BadRecord):
            rows = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
            yield from _bad_rows(columns, start, sum(rows[: groups.stop] if groups else rows))
            return
        leaves = _leaf_columns(parquet.schema, columns)
        end = 0
        for group in range(parquet.num_row_groups):
            row, metadata = end, parquet.metadata.row_group(group)
            end += metadata.num_rows
            if groups is not None and group not in groups:
                continue
            pages = read_pages(file, [metadata.column(leaf) for leaf in leaves])
            if not pages.is_checked:
                counter.unchecked = "parquet"
            if end <= start:
                continue
            if max(pages.max_page_bytes, _VALUE_BYTES * pages.max_values) > _PAGE_LIMIT * options.max_document_bytes:
                yield from _bad_rows(too_large(options.max_document_bytes, "page with documents"), max(start, row), end)
                continue
            n_rows = count_rows_to_decode(pages.dictionary_bytes)
            for batch in parquet.iter_batches(n_rows, row_groups=[group], columns=columns, use_threads=False):
                yield from _batch_records(batch, options, row, start)
                row += batch.num_rows
            if row != end:
                raise DamagedFileError(f"damaged parquet file: {end - row} rows missing; write or download it again")


def _leaf_columns(schema: Any, names: list[str]) -> list[int]:
    """Return the indices of the columns of a parquet file that belong to columns of the table."""
    paths = [schema.column(i).path for i in range(len(schema))]
    return [i for i, path in enumerate(paths) if any(path == name or path.startswith(f"{name}.") for name in names)]


def read_arrow(file: BinaryIO, options: SourceOptions, start: int, counter: HashingCounter) -> Iterator[SourceRecord]:
    """Yield the rows of an Arrow stream or file."""
    _require_pyarrow("arrow")
    counter.unchecked = "arrow"
    import pyarrow as pa

    with _translate_errors("arrow"):
        row = 0
        for batch in _read_batches(pa, file, _PAGE_LIMIT * options.max_document_bytes):
            columns = select_columns(batch.schema.names, options)
            if isinstance(columns, BadRecord):
                yield from _bad_rows(columns, max(start, row), row + batch.num_rows)
            elif row + batch.num_rows > start:
                batch = batch.select(columns)
                n_rows = count_rows_to_decode(sum(map(count_shared_bytes, batch.columns)))
                for first in range(0, batch.num_rows, n_rows):
                    yield from _batch_records(batch.slice(first, n_rows), options, row + first, start)
            row += batch.num_rows


def _read_batches(pa: Any, file: BinaryIO, max_batch_bytes: int) -> Iterator[Any]:
    is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
    end = _ARROW_FILE if is_file else _END_OF_STREAM
    size = file.seek(0, 2)
    file.seek(max(0, size - len(end)))
    if file.read() != end:
        kind = "file" if is_file else "stream"
        raise DamagedFileError(f"truncated arrow {kind}: its end mark is missing; write or download it again")
    # A file is a stream between its marks. Its footer, which may name other batches, is not read.
    begin = _ARROW_FILE_HEADER_BYTES if is_file else 0
    check_sizes(file, begin, max_batch_bytes)
    file.seek(begin)
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


def _batch_records(batch: Any, options: SourceOptions, first: int, start: int) -> Iterator[SourceRecord]:
    """Yield the records of a batch that begins at row `first`, from row `start` on."""
    before = max(0, start - first)
    if before < batch.num_rows:
        yield from iter_records(batch.slice(before), options, first + before)


def _bad_rows(bad: BadRecord, start: int, rows: int) -> Iterator[SourceRecord]:
    for row in range(start, rows):
        yield SourceRecord(row + 1, row + 1, bad)


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
    except (pa.ArrowException, UnicodeDecodeError) as exc:  # of the names of columns
        raise DamagedFileError(f"damaged {kind} file: {exc}; write or download it again") from exc
    except OSError as exc:
        if exc.errno is not None:  # an error of the disk, not of pyarrow
            raise
        raise DamagedFileError(f"damaged {kind} file: {exc}; write or download it again") from exc
