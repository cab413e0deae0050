r"""Megatron IndexedDataset `.idx` files: offset and length of each document of a `.bin` file.

Layout, little-endian, without padding (n sequences; here each sequence is one document):

    9 bytes   b"MMIDIDX\0\0"
    u64       version, 1
    u8        dtype of the .bin file: 4 = int32, 8 = uint16
    u64       n
    u64       n + 1
    int32[n]  tokens per sequence
    int64[n]  byte offset of each sequence in the .bin file
    int64[n+1] document boundaries as sequence numbers: 0, 1, ..., n

Megatron has no uint32: ids stored as uint32 are labeled int32, which is the same bytes for ids below 2^31. The 34-byte
header leaves the arrays unaligned, so reading copies. Cost: 20 bytes per document.
"""

import struct
from collections.abc import Iterator
from typing import Literal

import numpy as np

from lt_data.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_CODES: dict[str, int] = {"uint16": 8, "uint32": 4}
_NAMES: dict[int, Literal["uint16", "uint32"]] = {8: "uint16", 4: "uint32"}
_CHUNK_DOCUMENTS = 1 << 20  # documents
UINT16_VOCAB_LIMIT = 65500  # Megatron uses uint16 for smaller vocabularies


def index_size(documents: int) -> int:
    """Return the size in bytes of an index of that many documents."""
    return _HEADER.size + 4 * documents + 8 * documents + 8 * (documents + 1)


def index_chunks(lengths: np.ndarray, dtype: Literal["uint16", "uint32"]) -> Iterator[bytes]:
    """Yield the index of consecutive documents of `lengths` tokens (integers [n]) in chunks of 8 MB."""
    assert lengths.size == 0 or (lengths.min() > 0 and lengths.max() < 2**31)
    n = lengths.size
    chunks = range(0, n, _CHUNK_DOCUMENTS)
    yield _HEADER.pack(MAGIC, 1, _CODES[dtype], n, n + 1)
    for begin in chunks:
        yield lengths[begin : begin + _CHUNK_DOCUMENTS].astype("<i4").tobytes()
    end = 0  # of the documents so far, in tokens
    for begin in chunks:
        ends = end + np.cumsum(lengths[begin : begin + _CHUNK_DOCUMENTS], dtype=np.int64)
        offsets = np.concatenate([[end], ends[:-1]]).astype("<i8")
        end = int(ends[-1])
        yield (offsets * np.dtype(dtype).itemsize).tobytes()
    for begin in range(0, n + 1, _CHUNK_DOCUMENTS):
        yield np.arange(begin, min(begin + _CHUNK_DOCUMENTS, n + 1), dtype="<i8").tobytes()


def encode_index(lengths: np.ndarray, dtype: Literal["uint16", "uint32"]) -> bytes:
    """Return the index of consecutive documents of `lengths` tokens (integers [n])."""
    return b"".join(index_chunks(lengths, dtype))


def split_index(content: np.ndarray, n: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths (tokens, int32 [n]) and offsets (bytes, int64 [n]) of a mapped index (bytes, uint8), as views.

    Raises:
        ValueError: not the index of `n` documents of this dtype.
    """
    expected = _HEADER.pack(MAGIC, 1, _CODES[dtype], n, n + 1)
    if content[: len(expected)].tobytes() != expected:
        raise ValueError(f"not the index of {n} documents of {dtype}")
    middle = len(expected) + 4 * n
    return content[len(expected) : middle].view("<i4"), content[middle : middle + 8 * n].view("<i8")


def decode_index(content: bytes, source: str) -> tuple[np.ndarray, Literal["uint16", "uint32"]]:
    """Decode an index that `encode_index` wrote.

    Returns:
        The lengths in tokens (int32 [n]) and the dtype of the token file.

    Raises:
        DataError: not such a file, or its sequences are not consecutive documents.
    """
    if len(content) < _HEADER.size or not content.startswith(MAGIC):
        raise DataError(f"{source}: not an index file (does not begin with {MAGIC[:7].decode()})")
    _, version, code, n, n_boundaries = _HEADER.unpack_from(content)
    if version != 1 or code not in _NAMES or n_boundaries != n + 1 or len(content) != index_size(n):
        raise DataError(
            f"{source}: broken index (version {version}, dtype {code}, {n} sequences, {len(content)} bytes)"
        )
    lengths = np.frombuffer(content, "<i4", n, _HEADER.size).astype(np.int32)
    if lengths.size and (lengths.min() <= 0 or encode_index(lengths.astype(np.int64), _NAMES[code]) != content):
        raise DataError(f"{source}: broken index (lengths and offsets do not match)")
    return lengths, _NAMES[code]
