"""The .idx layout, byte by byte as Megatron writes and reads it."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError
from lt_data.store.megatron import decode_index, encode_index, index_size


@pytest.mark.parametrize(("dtype", "code", "itemsize"), [("uint16", 8, 2), ("uint32", 4, 4)])
def test_layout_byte_by_byte(dtype: str, code: int, itemsize: int) -> None:
    content = encode_index(np.array([5, 1, 300]), dtype)
    expected = b"MMIDIDX\x00\x00"
    expected += struct.pack("<Q", 1)
    expected += struct.pack("<B", code)
    expected += struct.pack("<Q", 3)  # sequences
    expected += struct.pack("<Q", 4)  # document borders
    assert len(expected) == 34
    expected += struct.pack("<3i", 5, 1, 300)
    expected += struct.pack("<3q", 0, 5 * itemsize, 6 * itemsize)
    expected += struct.pack("<4q", 0, 1, 2, 3)
    assert content == expected
    assert index_size(3) == len(expected)


def test_read_as_megatron_reads_it() -> None:
    """The steps of Megatron-LM's `_IndexReader`, on a pair of files in memory."""
    lengths = [4, 2, 7]
    tokens = np.arange(13, dtype="<u2")
    content = encode_index(np.array(lengths), "uint16")
    assert content[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, borders = struct.unpack_from("<QBQQ", content, 9)
    assert (version, code) == (1, 8)
    sequence_lengths = np.frombuffer(content, np.int32, sequences, 34)
    pointers = np.frombuffer(content, np.int64, sequences, 34 + sequence_lengths.nbytes)
    documents = np.frombuffer(content, np.int64, borders, 34 + sequence_lengths.nbytes + pointers.nbytes)
    assert documents[0] == 0
    assert documents[-1] == sequences
    first = np.frombuffer(tokens.tobytes(), np.uint16, sequence_lengths[2], pointers[2])
    assert first.tolist() == [6, 7, 8, 9, 10, 11, 12]


@given(st.lists(st.integers(1, 2**31 - 1), max_size=30), st.sampled_from(["uint16", "uint32"]))
def test_round_trip(lengths: list[int], dtype: str) -> None:
    content = encode_index(np.array(lengths, np.int64), dtype)
    found, found_dtype = decode_index(content, "x.idx")
    assert found.tolist() == lengths
    assert found_dtype == dtype


def test_offsets_beyond_32_bits() -> None:
    content = encode_index(np.array([2**31 - 1, 2**31 - 1, 9]), "uint32")
    assert struct.unpack_from("<3q", content, 34 + 12) == (0, 4 * (2**31 - 1), 8 * (2**31 - 1))


@pytest.mark.parametrize("position", [0, 9, 17, 18, 26, 34, 46, 70])
def test_any_changed_field_is_noticed(position: int) -> None:
    content = bytearray(encode_index(np.array([5, 1, 3]), "uint16"))
    content[position] ^= 3
    with pytest.raises(DataError, match=r"^x\.idx: "):
        decode_index(bytes(content), "x.idx")


@pytest.mark.parametrize("cut", [0, 8, 33, 60])
def test_cut_off(cut: int) -> None:
    with pytest.raises(DataError, match=r"^x\.idx: "):
        decode_index(encode_index(np.array([5, 1, 3]), "uint16")[:cut], "x.idx")
