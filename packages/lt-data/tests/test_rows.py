"""Rows against a plain rebuilding from the index, on stores in which the token at offset t is t + 1."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import IGNORE, DataError, RowReader, Rows, TokenStore, pack
from lt_data.packing import build_index

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=20)


def reader_of(store: TokenStore, seq_len: int, mode: str, document_mask: bool = True) -> RowReader:
    index = build_index(store.lengths, seq_len=seq_len, mode=mode, store_fingerprint=store.manifest.fingerprint)
    return RowReader(store, index, document_mask=document_mask)


@pytest.mark.parametrize("mode", ["bfd", "concat"])
@given(LENGTHS, st.integers(1, 12), st.integers(1, 5))
def test_all_rows_together(
    counting_store: Callable[..., TokenStore], mode: str, lengths: list[int], seq_len: int, shard_documents: int
) -> None:
    store = counting_store(lengths, shard_documents)
    reader = reader_of(store, seq_len, mode)
    rows = reader.gather(np.arange(reader.n_rows))
    for array in (rows.input_ids, rows.labels, rows.position_ids, rows.doc_ids):
        assert array.shape == (reader.n_rows, seq_len)
        assert array.dtype == np.int32
    padding = rows.doc_ids == -1
    # Every token of the store once.
    assert sorted(rows.input_ids[~padding].tolist()) == list(range(1, sum(lengths) + 1))
    # The label is the next token, where there is one to predict.
    ends = np.cumsum(lengths) if mode == "bfd" else np.array([sum(lengths)])
    expected = np.where(np.isin(rows.input_ids, ends), IGNORE, rows.input_ids + 1)
    assert np.array_equal(rows.labels[~padding], expected[~padding])
    # Padding.
    assert not rows.input_ids[padding].any()
    assert not rows.position_ids[padding].any()
    assert (rows.labels[padding] == IGNORE).all()
    assert np.array_equal(np.sort(padding, axis=1), padding)  # only at the end of a row
    assert reader.valid.tolist() == (rows.labels != IGNORE).sum(axis=1).tolist()


@pytest.mark.parametrize("mode", ["bfd", "concat"])
@given(LENGTHS, st.integers(1, 12))
def test_documents_are_numbered_and_positions_restart(
    counting_store: Callable[..., TokenStore], mode: str, lengths: list[int], seq_len: int
) -> None:
    store = counting_store(lengths)
    reader = reader_of(store, seq_len, mode)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    rows = reader.gather(np.arange(reader.n_rows))
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
def test_without_document_mask(
    counting_store: Callable[..., TokenStore], mode: str, lengths: list[int], seq_len: int
) -> None:
    store = counting_store(lengths)
    masked, plain = (reader_of(store, seq_len, mode, mask) for mask in (True, False))
    order = np.arange(masked.n_rows)
    assert np.array_equal(masked.gather(order).input_ids, plain.gather(order).input_ids)
    assert np.array_equal(masked.gather(order).labels, plain.gather(order).labels)
    assert plain.gather(order).position_ids.tolist() == [list(range(seq_len))] * order.size
    assert not plain.gather(order).doc_ids.any()
    assert masked.fingerprint != plain.fingerprint


@given(LENGTHS, st.integers(1, 12), st.data())
def test_any_rows_in_any_order(
    counting_store: Callable[..., TokenStore], lengths: list[int], seq_len: int, data: st.DataObject
) -> None:
    reader = reader_of(counting_store(lengths), seq_len, "bfd")
    whole = reader.gather(np.arange(reader.n_rows))
    chosen = np.array(data.draw(st.lists(st.integers(0, reader.n_rows - 1), max_size=10)), np.int64)
    some = reader.gather(chosen)
    for name in ("input_ids", "labels", "position_ids", "doc_ids"):
        assert np.array_equal(getattr(some, name), getattr(whole, name)[chosen])


def test_exact_rows(counting_store: Callable[..., TokenStore]) -> None:
    x = IGNORE
    store = counting_store([3, 11, 2, 5], shard_documents=1)
    assert as_lists(reader_of(store, 8, "bfd").gather(np.array([2, 0, 1]))) == (
        [[12, 13, 14, 15, 16, 0, 0, 0], [4, 5, 6, 7, 8, 9, 10, 11], [17, 18, 19, 20, 21, 1, 2, 3]],
        # The label of 11, at the end of a piece, is the token with which the next piece begins in another row.
        [[13, 14, x, 16, x, x, x, x], [5, 6, 7, 8, 9, 10, 11, 12], [18, 19, 20, 21, x, 2, 3, x]],
        [[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 0, 1, 2]],
        [[0, 0, 0, 1, 1, -1, -1, -1], [0] * 8, [0, 0, 0, 0, 0, 1, 1, 1]],
    )
    assert as_lists(reader_of(store, 8, "concat").gather(np.array([0, 2]))) == (
        [[1, 2, 3, 4, 5, 6, 7, 8], [17, 18, 19, 20, 21, 0, 0, 0]],
        [[2, 3, 4, 5, 6, 7, 8, 9], [18, 19, 20, 21, x, x, x, x]],
        [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 0, 0]],
        [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, -1, -1, -1]],
    )


def as_lists(rows: Rows) -> tuple[list, list, list, list]:
    arrays = (rows.input_ids, rows.labels, rows.position_ids, rows.doc_ids)
    return tuple(array.tolist() for array in arrays)  # pyright: ignore[reportReturnType]


def test_text_comes_back_from_rows(store: TokenStore, texts: list[str]) -> None:
    reader = RowReader(store, pack(store, seq_len=4096))
    rows = reader.gather(np.arange(reader.n_rows))
    tokenizer = store.tokenizer()
    found = [
        tokenizer.decode(ids[documents == n], skip_special=True)
        for ids, documents in zip(rows.input_ids, rows.doc_ids, strict=True)
        for n in range(documents.max() + 1)
    ]
    assert sorted(found) == sorted(text for text in texts if text)


@pytest.mark.parametrize("rows", [[-1], [3], [[0]]])
def test_rows_outside(counting_store: Callable[..., TokenStore], rows: list) -> None:
    with pytest.raises(IndexError, match=r"in 0\.\.2"):
        reader_of(counting_store([8, 8, 8]), 8, "bfd").gather(np.array(rows))


def test_pack_of_another_store(store: TokenStore, counting_store: Callable[..., TokenStore]) -> None:
    other = counting_store([3, 4])
    index = build_index(other.lengths, seq_len=8, mode="bfd", store_fingerprint=other.manifest.fingerprint)
    with pytest.raises(DataError, match=f"made for another store than {store.path}: make it again with lt data pack"):
        RowReader(store, index)
