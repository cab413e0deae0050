"""The .idx layout, byte by byte as Megatron writes and reads it."""

import struct

import numpy as np
import pytest

from lt_data import DataError
from lt_data.store.megatron import decode_index, encode_index, index_size


@pytest.mark.parametrize(("dtype", "code", "itemsize"), [("uint16", 8, 2), ("uint32", 4, 4)])
def test_layout_byte_by_byte(dtype, code, itemsize):
    content = encode_index(np.array([5, 1, 300]), dtype)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 3, 4)  # version, sequences, document borders
    expected += struct.pack("<3i", 5, 1, 300)
    expected += struct.pack("<3q", 0, 5 * itemsize, 6 * itemsize)
    expected += struct.pack("<4q", 0, 1, 2, 3)
    assert content == expected
    assert index_size(3) == len(expected)


@pytest.mark.parametrize("position", [0, 9, 17, 18, 26, 34, 46, 70])
def test_any_changed_field_is_noticed(position):
    content = bytearray(encode_index(np.array([5, 1, 3]), "uint16"))
    content[position] ^= 3
    with pytest.raises(DataError, match=r"^x\.idx: "):
        decode_index(bytes(content), "x.idx")


@pytest.mark.parametrize("cut", [0, 8, 33, 60])
def test_cut_off(cut):
    with pytest.raises(DataError, match=r"^x\.idx: "):
        decode_index(encode_index(np.array([5, 1, 3]), "uint16")[:cut], "x.idx")
