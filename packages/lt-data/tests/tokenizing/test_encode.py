"""Documents to batches and ids: order, resume points, documents that are ids already, workers that die."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError, Document, Tokenizer
from lt_data.tokenizing.encode import Encoder, encode_documents


def doc(**fields: Any) -> Document:
    return Document(**{"source": "made here", **fields})


def encoded_documents(docs: list[Any], encoder: Encoder, workers: int = 1) -> list[list[int]]:
    found: list[list[int]] = []
    for _, encoded in encode_documents(docs, encoder, workers):
        assert encoded.lengths.sum() == encoded.tokens.size
        found += [part.tolist() for part in np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1])]
    return found


@given(st.lists(st.one_of(st.text(max_size=12), st.lists(st.integers(0, 299), max_size=6)), max_size=12))
def test_texts_and_ids_in_any_mixture(tokenizer: Tokenizer, content: list[str | list[int]]) -> None:
    docs = [doc(text=c) if isinstance(c, str) else doc(ids=np.array(c, np.int64)) for c in content]
    known = [tokenizer.encode_batch([c])[0].tolist() if isinstance(c, str) else c for c in content]
    expected = [[*([0] if ids[0] != 0 else []), *ids, *([1] if ids[-1] != 1 else [])] for ids in known if ids]
    encoder = Encoder(tokenizer, bos=True, eos=True)
    assert [d for d in encoded_documents(docs, encoder) if d] == expected
    plain = Encoder(tokenizer, bos=False, eos=False)
    assert [d for d in encoded_documents(docs, plain) if d] == [ids for ids in known if ids]
    batches = list(encode_documents(docs, encoder, 1))
    assert sum(batch.documents for batch, _ in batches) == len(docs)
    assert sum(encoded.lengths.size for _, encoded in batches) == len(docs)
    assert sum(batch.text_bytes for batch, _ in batches) == sum(len(c.encode()) for c in content if isinstance(c, str))


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_tell_where_the_next_document_stands(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr("lt_data.tokenizing.encode._BATCH_DOCUMENTS", 3)
    kinds = "tttttiititt"
    docs = [
        doc(text=f"document {i}", file_index=i // 4, next_record=i % 4 + 1)
        if kind == "t"
        else doc(ids=[i + 2], file_index=i // 4, next_record=i % 4 + 1)
        for i, kind in enumerate(kinds)
    ]
    batches = list(encode_documents(docs, Encoder(tokenizer, bos=False, eos=False), workers))
    assert [batch.documents for batch, _ in batches] == [3, 2, 2, 1, 1, 2]  # "ttt", "tt", "ii", "t", "i", "tt"
    last = np.cumsum([batch.documents for batch, _ in batches]) - 1
    assert [(batch.file_index, batch.next_record) for batch, _ in batches] == [(i // 4, i % 4 + 1) for i in last]
    # Going on from any batch gives the batches' documents that follow.
    whole = encoded_documents(docs, Encoder(tokenizer, bos=False, eos=False), workers)
    for end in last:
        assert encoded_documents(docs[end + 1 :], Encoder(tokenizer, bos=False, eos=False)) == whole[end + 1 :]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, 300], r"jsonl:3: id 300 at position 1 is not in the vocabulary.*\(0 to 299\)"),
        ([5, -1], r"jsonl:3: id -1 at position 1"),
        ([0.5], r"jsonl:3: ids of shape \(1,\) and type float64"),
        ([True], r"type bool"),
        ([[1, 2]], r"shape \(1, 2\)"),
        (["a"], r"a list of whole numbers"),
    ],
)
def test_ids_that_are_none_of_the_tokenizer(tokenizer: Tokenizer, ids: Any, message: str) -> None:
    docs = [doc(text="a"), doc(ids=[5]), doc(ids=ids, source="jsonl:3")]
    with pytest.raises(DataError, match=message):
        list(encode_documents(docs, Encoder(tokenizer, bos=False, eos=False), 1))


def test_ids_of_any_width_are_stored_in_the_width_of_the_store(tokenizer: Tokenizer) -> None:
    docs = [doc(ids=np.array([7, 299], dtype)) for dtype in (np.uint16, np.int64, np.uint64, np.int32)]
    ((_, encoded),) = encode_documents(docs, Encoder(tokenizer, bos=False, eos=False), 1)
    assert encoded.tokens.dtype == np.dtype("<u2")
    assert encoded.tokens.tolist() == [7, 299] * 4


def test_a_worker_that_dies_is_an_error(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_data.tokenizing.encode._BATCH_DOCUMENTS", 1)
    hf = Encoder(tokenizer, bos=False, eos=False, engine="hf")

    def endless() -> Iterator[Document]:
        for i in count():
            if i == 20:
                workers = multiprocessing.active_children()
                assert len(workers) == 2
                os.kill(workers[0].pid or 0, signal.SIGKILL)
            yield doc(text=f"document {i}")

    with pytest.raises(DataError, match="a worker process died"):
        for _ in encode_documents(endless(), hf, 2):
            pass
