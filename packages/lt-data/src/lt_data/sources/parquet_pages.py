"""Headers of the pages of a parquet column: checksums, sizes, numbers of values.

pyarrow does not show them. They tell whether checksums confirm the content (CRC-32 of a page, which pyarrow compares
before it decodes the page), and bound what a page becomes in memory before it is read. Headers are thrift structs in
the compact protocol; only integers and booleans are kept. Cost: one small read per page, of usually 1 MiB.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from lt_data.sources.record import DamagedFileError

_HEADER_BYTES, _MAX_HEADER_BYTES = 1 << 9, 1 << 24
_MAX_OFFSET = 1 << 60
_MAX_DEPTH = 8
# thrift's numbers of the fields of a PageHeader, and of num_values in the header of a data page within
_TYPE, _UNCOMPRESSED_BYTES, _COMPRESSED_BYTES, _CRC = 1, 2, 3, 4
_N_VALUES = 1
_DICTIONARY_PAGE = 2
_DATA_PAGES = {0: 5, 3: 8}  # type of the page: field with its header
_DAMAGED = "damaged parquet file: {}; write or download it again"


@dataclass(frozen=True, kw_only=True)
class ColumnPages:
    """Pages of columns in one row group.

    Attributes:
        is_checked: whether every page has a checksum.
        max_page_bytes: content of the largest page, without compression.
        max_values: values of the page with the most, also inside of lists.
        dictionary_bytes: content of the largest dictionary: any row may be as large.
    """

    is_checked: bool = True
    max_page_bytes: int = 0
    max_values: int = 0
    dictionary_bytes: int = 0


def read_pages(file: BinaryIO, chunks: Sequence[Any]) -> ColumnPages:
    """Read the page headers of column chunks of one row group.

    Args:
        file: the parquet file.
        chunks: the columns' metadata, as pyarrow's `ColumnChunkMetaData`.

    Raises:
        DamagedFileError: a header is broken, or the pages have other numbers of values than the metadata.
    """
    is_checked, max_page_bytes, max_values, dictionary_bytes = True, 0, 0, 0
    for chunk in chunks:
        starts = [chunk.data_page_offset]
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            starts.append(chunk.dictionary_page_offset)
        at, n_values = min(starts), 0
        end = at + chunk.total_compressed_size
        while at < end and n_values < chunk.num_values:
            header, size = _read_header(file, at)
            kind, page_bytes = _natural(header, _TYPE), _natural(header, _UNCOMPRESSED_BYTES)
            at += size + _natural(header, _COMPRESSED_BYTES)
            is_checked &= _CRC in header
            max_page_bytes = max(max_page_bytes, page_bytes)
            if kind == _DICTIONARY_PAGE:
                dictionary_bytes = max(dictionary_bytes, page_bytes)
            elif kind in _DATA_PAGES:
                inner = header.get(_DATA_PAGES[kind])
                values = _natural(inner if isinstance(inner, dict) else {}, _N_VALUES)
                max_values = max(max_values, values)
                n_values += values
        if n_values != chunk.num_values:
            raise DamagedFileError(_DAMAGED.format(f"pages of {n_values} values instead of {chunk.num_values}"))
    return ColumnPages(
        is_checked=is_checked, max_page_bytes=max_page_bytes, max_values=max_values, dictionary_bytes=dictionary_bytes
    )


def _read_header(file: BinaryIO, at: int) -> tuple[dict[int, Any], int]:
    """Return the fields of the page header at an offset, and its length."""
    size = _HEADER_BYTES if 0 <= at < _MAX_OFFSET else _MAX_HEADER_BYTES + 1
    while size <= _MAX_HEADER_BYTES:
        file.seek(at)
        content = file.read(size)
        reader = _CompactReader(content)
        try:
            fields = reader.read_struct()
        except IndexError:  # the header is longer
            if len(content) < size:
                break
            size *= 8
            continue
        return fields, reader.position
    raise DamagedFileError(_DAMAGED.format(f"no page header at byte {at}"))


def _natural(fields: dict[int, Any], field: int) -> int:
    value = fields.get(field)
    if type(value) is not int or value < 0:
        raise DamagedFileError(_DAMAGED.format("a page header without its numbers"))
    return value


class _CompactReader:
    """Reader of thrift's compact protocol; reading past the end raises IndexError."""

    def __init__(self, content: bytes) -> None:
        self.position = 0
        self._content = content

    def read_struct(self, depth: int = 0) -> dict[int, Any]:
        """Read fields up to the end of a struct; binary values, lists and maps are skipped."""
        fields: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            delta, kind = head >> 4, head & 15
            field = field + delta if delta else self._zigzag()
            fields[field] = self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 7:
            return self._skip(8)
        if kind == 8:
            return self._skip(self._varint())
        if kind in (9, 10):
            head = self._byte()
            n = head >> 4 if head >> 4 != 15 else self._varint()
            for _ in range(n):
                # a boolean in a list is a byte
                self._value(3 if head & 15 in (1, 2) else head & 15, depth)
            return None
        if kind == 12 and depth < _MAX_DEPTH:
            return self.read_struct(depth + 1)
        raise DamagedFileError(_DAMAGED.format("a page header of unknown form"))

    def _byte(self) -> int:
        value = self._content[self.position]
        self.position += 1
        return value

    def _skip(self, size: int) -> None:
        self.position += size
        if self.position > len(self._content):
            raise IndexError

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise DamagedFileError(_DAMAGED.format("a page header with a number of more than 64 bits"))

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
