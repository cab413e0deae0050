"""Sizes of the record batches of an Arrow file without compression, before they are decoded.

The file is a sequence of messages (after the first 8 bytes, if it begins with ARROW1): FF FF FF FF, an i32 size, a
flatbuffer of that size, and a body. The flatbuffer says where the body's buffers are; one that is compressed begins
with its size without compression (i64; -1: it is not compressed). Format: Arrow Columnar Format 1.5, Message.fbs.
Cost: one read per message, and one per compressed buffer.
"""

import struct
from typing import BinaryIO

from lt_data.sources.record import DamagedFileError

_CONTINUATION = 0xFFFFFFFF
_HEADER_TYPE, _HEADER, _BODY_BYTES = 1, 2, 3  # fields of a Message
_BUFFERS, _COMPRESSION = 2, 3  # fields of a RecordBatch
_DATA = 1  # field of a DictionaryBatch: a RecordBatch
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_MAX_METADATA_BYTES = 1 << 28
_BUFFER = struct.Struct("<qq")  # offset in the body, size


def check_sizes(file: BinaryIO, begin: int, max_bytes: int) -> None:
    """Check the compressed batches and dictionaries of a file.

    Args:
        file: the Arrow file.
        begin: offset of its first message.
        max_bytes: bytes that a batch may have without compression.

    Raises:
        DamagedFileError: one has more, or a message is broken.
    """
    at, size = begin, file.seek(0, 2)
    try:
        while at < size:
            file.seek(at)
            marker, metadata_bytes = struct.unpack("<Ii", file.read(8))
            if marker != _CONTINUATION:
                raise DamagedFileError("arrow file of a form before Arrow 0.15, or damaged; write it again")
            if not metadata_bytes:
                return
            if not 0 < metadata_bytes <= _MAX_METADATA_BYTES:
                raise IndexError
            message = _Table.root(file.read(metadata_bytes))
            body = at + 8 + metadata_bytes
            at = body + message.integer(_BODY_BYTES, "<q")
            if not body <= at <= size:
                raise IndexError
            n_bytes = _decompressed_bytes(file, body, message)
            if n_bytes > max_bytes:
                raise DamagedFileError(
                    f"arrow batch of {n_bytes} bytes without compression; write it in smaller batches, or raise "
                    "max_document_bytes (--max-document-bytes)"
                )
    except (struct.error, IndexError) as exc:
        raise DamagedFileError(f"damaged arrow file: no message at byte {at}; write or download it again") from exc


def _decompressed_bytes(file: BinaryIO, body: int, message: "_Table") -> int:
    kind, batch = message.integer(_HEADER_TYPE, "<B"), message.table(_HEADER)
    if kind == _DICTIONARY_BATCH and batch is not None:
        batch = batch.table(_DATA)
    elif kind != _RECORD_BATCH:
        return 0
    if batch is None or batch.table(_COMPRESSION) is None:
        return 0
    total = 0
    for offset, size in batch.structs(_BUFFERS, _BUFFER):
        if size:
            file.seek(body + offset)
            total += max(size, *struct.unpack("<q", file.read(8)))
    return total


class _Table:
    """Table of a flatbuffer; reading past the end raises struct.error."""

    def __init__(self, content: bytes, at: int) -> None:
        self._content, self._at = content, at
        (back,) = struct.unpack_from("<i", content, at)
        self._fields = at - back
        if not self._fields >= 0:
            raise IndexError
        (self._fields_bytes,) = struct.unpack_from("<H", content, self._fields)

    @classmethod
    def root(cls, content: bytes) -> "_Table":
        """Return the outermost table."""
        return cls(content, *struct.unpack_from("<I", content))

    def integer(self, field: int, form: str) -> int:
        """Return a number; 0 if it is left out."""
        at = self._place(field)
        return 0 if at is None else struct.unpack_from(form, self._content, at)[0]

    def table(self, field: int) -> "_Table | None":
        """Return an inner table, if it is there."""
        at = self._place(field)
        return None if at is None else _Table(self._content, at + struct.unpack_from("<I", self._content, at)[0])

    def structs(self, field: int, form: struct.Struct) -> list[tuple[int, ...]]:
        """Return a vector of structs."""
        at = self._place(field)
        if at is None:
            return []
        at += struct.unpack_from("<I", self._content, at)[0]
        (n,) = struct.unpack_from("<I", self._content, at)
        end = at + 4 + n * form.size
        if end > len(self._content):
            raise IndexError
        return list(form.iter_unpack(self._content[at + 4 : end]))

    def _place(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry + 2 > self._fields_bytes:
            return None
        (offset,) = struct.unpack_from("<H", self._content, self._fields + entry)
        return self._at + offset if offset else None
