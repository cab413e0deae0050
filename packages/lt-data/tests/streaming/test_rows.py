"""Rows against a plain rebuilding from the index, on stores in which the token at offset t is t + 1."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError, RowReader, TokenStore
from lt_data.packing.pack_index import build_index
from lt_data.streaming.rows import IGNORE_INDEX, Rows

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=20)


def reader_of(store: TokenStore, seq_len: int, mode: str, document_mask: bool = True) -> RowReader:
    index = build_index(store.lengths, seq_len=seq_len, mode=mode, store_fingerprint=store.manifest.fingerprint)
    return RowReader(store, index, document_mask=document_mask)


@pytest.mark.parametrize("mode", ["bfd", "concat"])
@given(LENGTHS, st.integers(1, 12), st.integers(1, 5), st.integers(1, 21))
def test_all_rows_together(counting_store, mode, lengths, seq_len, shard_documents, per_group):
    store = counting_store(lengths, shard_documents)
    options = {"seq_len": seq_len, "mode": mode, "store_fingerprint": store.manifest.fingerprint}
    reader = RowReader(store, build_index(store.lengths, documents_per_group=per_group, **options))
    rows = reader.read_rows(np.arange(reader.n_rows))
    for array in (rows.input_ids, rows.labels, rows.position_ids, rows.doc_ids):
        assert array.shape == (reader.n_rows, seq_len)
        assert array.dtype == np.int32
    padding = rows.doc_ids == -1
    assert np.array_equal(reader.read_tokens(np.arange(reader.n_rows)), rows.input_ids)
    # Every token of the store once.
    assert sorted(rows.input_ids[~padding].tolist()) == list(range(1, sum(lengths) + 1))
    # The label is the next token, where there is one to predict.
    ends = np.cumsum(lengths) if mode == "bfd" else np.array([sum(lengths)])
    expected = np.where(np.isin(rows.input_ids, ends), IGNORE_INDEX, rows.input_ids + 1)
    assert np.array_equal(rows.labels[~padding], expected[~padding])
    # Padding.
    assert not rows.input_ids[padding].any()
    assert not rows.position_ids[padding].any()
    assert (rows.labels[padding] == IGNORE_INDEX).all()
    assert np.array_equal(np.sort(padding, axis=1), padding)  # only at the end of a row
    assert reader.valid.tolist() == (rows.labels != IGNORE_INDEX).sum(axis=1).tolist()


@pytest.mark.parametrize("mode", ["bfd", "concat"])
@given(LENGTHS, st.integers(1, 12))
def test_documents_are_numbered_and_positions_restart(counting_store, mode, lengths, seq_len):
    store = counting_store(lengths)
    reader = reader_of(store, seq_len, mode)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    rows = reader.read_rows(np.arange(reader.n_rows))
    for tokens, positions, documents in zip(
        rows.input_ids.tolist(), rows.position_ids.tolist(), rows.doc_ids.tolist(), strict=True
    ):
        number, position, before = -1, 0, None
        for token, found_position, found_number in zip(tokens, positions, documents, strict=True):
            if token == 0:
                assert found_number == -1
                continue
            if owner[token - 1] != before:
                number, position, before = number + 1, 0, owner[token - 1]
            assert (found_position, found_number) == (position, number)
            position += 1


@pytest.mark.parametrize("mode", ["bfd", "concat"])
@given(LENGTHS, st.integers(1, 12))
def test_without_document_mask(counting_store, mode, lengths, seq_len):
    store = counting_store(lengths)
    masked, plain = (reader_of(store, seq_len, mode, mask) for mask in (True, False))
    order = np.arange(masked.n_rows)
    assert np.array_equal(masked.read_rows(order).input_ids, plain.read_rows(order).input_ids)
    assert np.array_equal(masked.read_rows(order).labels, plain.read_rows(order).labels)
    assert plain.read_rows(order).position_ids.tolist() == [list(range(seq_len))] * order.size
    assert not plain.read_rows(order).doc_ids.any()
    assert masked.fingerprint != plain.fingerprint


def test_exact_rows(counting_store):
    x = IGNORE_INDEX
    store = counting_store([3, 11, 2, 5], shard_documents=1)
    assert as_lists(reader_of(store, 8, "bfd").read_rows(np.array([2, 0, 1]))) == (
        [[12, 13, 14, 15, 16, 0, 0, 0], [4, 5, 6, 7, 8, 9, 10, 11], [17, 18, 19, 20, 21, 1, 2, 3]],
        # The label of 11, at the end of a piece, is the token with which the next piece begins in another row.
        [[13, 14, x, 16, x, x, x, x], [5, 6, 7, 8, 9, 10, 11, 12], [18, 19, 20, 21, x, 2, 3, x]],
        [[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 0, 1, 2]],
        [[0, 0, 0, 1, 1, -1, -1, -1], [0] * 8, [0, 0, 0, 0, 0, 1, 1, 1]],
    )
    assert as_lists(reader_of(store, 8, "concat").read_rows(np.array([0, 2]))) == (
        [[1, 2, 3, 4, 5, 6, 7, 8], [17, 18, 19, 20, 21, 0, 0, 0]],
        [[2, 3, 4, 5, 6, 7, 8, 9], [18, 19, 20, 21, x, x, x, x]],
        [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 0, 0]],
        [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, -1, -1, -1]],
    )


def as_lists(rows: Rows) -> tuple[list, list, list, list]:
    arrays = (rows.input_ids, rows.labels, rows.position_ids, rows.doc_ids)
    return tuple(array.tolist() for array in arrays)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("rows", [[-1], [3], [[0]]])
def test_rows_outside(counting_store, rows):
    with pytest.raises(IndexError, match=r"in 0\.\.2"):
        reader_of(counting_store([8, 8, 8]), 8, "bfd").read_rows(np.array(rows))


def test_pack_of_another_store(store, counting_store):
    other = counting_store([3, 4])
    index = build_index(other.lengths, seq_len=8, mode="bfd", store_fingerprint=other.manifest.fingerprint)
    with pytest.raises(DataError, match=f"made for another store than {store.path}; make it again with lt data pack"):
        RowReader(store, index)


@pytest.mark.parametrize("mode", ["bfd", "concat"])
@given(LENGTHS, st.integers(1, 12), st.integers(1, 5), st.booleans(), st.data())
def test_rows_as_the_store_holds_them(counting_store, mode, lengths, seq_len, shard_documents, document_mask, data):
    store = counting_store(lengths, shard_documents)
    reader = reader_of(store, seq_len, mode, document_mask)
    rows = np.array(data.draw(st.lists(st.integers(0, reader.n_rows - 1), max_size=8)), np.int64)
    compact, wide = reader.read_token_rows(rows), reader.read_rows(rows)
    assert compact.input_ids.dtype == store.dtype == np.uint32
    assert np.array_equal(compact.input_ids, wide.input_ids)
    assert np.array_equal(reader.read_tokens(rows), wide.input_ids)
    assert reader.read_tokens(rows).dtype == store.dtype
    assert compact.input_ids.flags.writeable
    assert reader.count_labels(rows) == int(wide.loss_mask.sum())
    assert np.array_equal(wide.loss_mask, wide.labels != IGNORE_INDEX)
    # Borders where a row begins or its document number changes.
    change = np.ones(wide.doc_ids.shape, bool)
    change[:, 1:] = wide.doc_ids[:, 1:] != wide.doc_ids[:, :-1]
    boundaries = [*np.flatnonzero(change.reshape(-1)).tolist(), rows.size * seq_len]
    found = compact.cu_seqlens()
    assert (found.tolist(), found.dtype) == (boundaries, np.dtype(np.int32))
    assert compact.cu_seqlens(size=len(boundaries) + 2).tolist() == [*boundaries, boundaries[-1], boundaries[-1]]
    assert compact.cu_seqlens(size=len(boundaries)).tolist() == boundaries
    with pytest.raises(DataError, match=f"size = {len(boundaries) - 1}: these rows have {len(boundaries)} boundaries"):
        compact.cu_seqlens(size=len(boundaries) - 1)
