"""The set of hashes against Python's own, and what it costs."""

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lt_data.preparation.deduplication import HASH_DTYPE, DocumentHashSet, hash_ids, hash_text

blocks = st.lists(st.lists(st.binary(min_size=16, max_size=16), max_size=9), max_size=12)
close = st.lists(
    st.lists(st.integers(0, 5).map(lambda n: bytes(15) + bytes([n])), max_size=6), max_size=30
)  # differ in the last byte only, and may end in zeros


@given(blocks | close)
def test_tells_what_is_new(blocks: list[list[bytes]]) -> None:
    seen, expected = DocumentHashSet(), set()
    for block in blocks:
        new = []
        for value in block:
            new.append(value not in expected)
            expected.add(value)
        assert seen.add(np.array(block, HASH_DTYPE)).tolist() == new
        assert len(seen) == len(expected)


def test_memory_is_16_bytes_a_document_and_32_at_the_most() -> None:
    rng = np.random.default_rng(0)
    n, block = 1 << 18, 1 << 12
    hashes = rng.integers(0, 256, (n, 16), dtype=np.uint8).view(HASH_DTYPE).ravel()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        seen = DocumentHashSet()
        for begin in range(0, n, block):
            assert seen.add(hashes[begin : begin + block]).all()
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not seen.add(hashes[::7]).any()
    assert now - before < 17 * n
    assert peak - before < 34 * n


def test_hashes_are_of_the_text_and_of_the_ids() -> None:
    assert hash_text(b"abc").hex() == "ba7816bf8f01cfea414140de5dae2223"  # the first half of SHA-256
    ids = np.array([1, 2, 3], np.int64)
    assert hash_ids(ids) == hash_ids(ids.astype(np.uint16)) != hash_ids(ids[::-1])
    assert hash_ids(np.array([0x636261], np.int64)) != hash_text(b"abc\0")
