"""Document boundaries of step batches: those of the pack's slices are those that `doc_ids` show, at a fixed length."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import Buckets, Mixture, RowReader, Stream, TokenStore
from lt_data.packing.groups import PackMode
from lt_data.packing.pack_index import build_index
from lt_data.store.extents import Extents
from lt_trainer.data.document_boundaries import find_document_starts, micro_batch_cu_seqlens
from lt_trainer.data.synthetic import SyntheticRows
from lt_trainer.data.training_data import to_step_batch, validation_batches
from lt_trainer.engine import StepBatch, Topology

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=20)
SEQ_LEN = 16


class CountingStore:
    """Documents of given lengths in memory; the token at offset t is t."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.n_tokens = np.array(lengths), sum(lengths)
        self.ids = np.arange(self.n_tokens, dtype=np.uint32)
        self.dtype, self.extents = self.ids.dtype, Extents.of_shards([self.n_tokens], [len(lengths)])
        self.manifest = SimpleNamespace(fingerprint="", tokenizer=SimpleNamespace(sha256=""))

    def mmap_shards(self, shard: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.ids, np.zeros(shard.size, np.int64)


def reader_of(lengths: list[int], mode: PackMode, document_mask: bool = True) -> RowReader:
    store = CountingStore(lengths)
    return RowReader(
        cast(TokenStore, store), build_index(store.lengths, seq_len=SEQ_LEN, mode=mode), document_mask=document_mask
    )


def rows_of(kind: str, lengths: list[int], document_mask: bool) -> Any:
    if kind == "synthetic":
        return SyntheticRows(vocab_size=9, seq_len=SEQ_LEN, seed=0)
    if kind == "mixture":
        sources = {"a": reader_of(lengths, "bfd", document_mask), "b": reader_of([3, 1], "bfd", document_mask)}
        return Mixture(sources, {"a": 1, "b": 1})
    if kind == "buckets":
        store = CountingStore(lengths)
        index = build_index(store.lengths, seq_len=SEQ_LEN, mode="buckets", min_seq_len=4)
        return Buckets(cast(TokenStore, store), index, global_batch_size=4, document_mask=document_mask)
    return reader_of(lengths, cast(PackMode, kind), document_mask)


def assert_boundaries(batch: StepBatch) -> None:
    """Compare with what the numbers of documents show, by the definition."""
    n_micro, n_rows, seq_len = batch.doc_ids.shape
    assert batch.cu_seqlens.dtype == np.int32
    assert len(batch.cu_seqlens) == n_micro
    for cu_seqlens, rows in zip(batch.cu_seqlens.tolist(), batch.doc_ids.tolist(), strict=True):
        flat = [(i, number) for i, row in enumerate(rows) for number in row]
        starts = [t for t, one in enumerate(flat) if not t or one != flat[t - 1]]
        end = n_rows * seq_len
        assert cu_seqlens == starts + [end] * (len(cu_seqlens) - len(starts))
        assert cu_seqlens[-1] == end


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("kind", ["bfd", "concat", "buckets", "mixture", "synthetic"])
@given(lengths=LENGTHS, micro_batch_size=st.sampled_from([1, 2, 4]))
@settings(deadline=None)
def test_boundaries_of_a_stream_are_those_of_its_documents(
    kind: str, document_mask: bool, lengths: list[int], micro_batch_size: int
) -> None:
    stream = Stream(rows_of(kind, lengths, document_mask), global_batch_size=4)
    sizes: dict[int, set[int]] = {}
    for _ in range(4):
        batch = to_step_batch(stream.next(), micro_batch_size, SEQ_LEN)
        assert_boundaries(batch)
        sizes.setdefault(batch.input_ids.shape[2], set()).add(batch.cu_seqlens.shape[1])
        if not document_mask:
            assert batch.cu_seqlens.shape[1] == batch.input_ids.shape[1] + 1
    assert all(len(found) == 1 for found in sizes.values()), "the length must not depend on the batch"


@pytest.mark.parametrize("document_mask", [True, False])
@given(lengths=LENGTHS, micro_batch_size=st.integers(1, 4), dp_size=st.integers(1, 3))
@settings(deadline=None)
def test_boundaries_of_validation_batches_cover_rows_that_fill_them_up(
    document_mask: bool, lengths: list[int], micro_batch_size: int, dp_size: int
) -> None:
    reader = reader_of(lengths, "bfd", document_mask)
    for dp_rank in range(dp_size):
        topology = Topology(rank=dp_rank, world_size=dp_size, dp_rank=dp_rank, dp_size=dp_size)
        for batch in validation_batches(reader, topology, micro_batch_size):
            assert_boundaries(batch)


@given(st.lists(st.lists(st.integers(-1, 3), min_size=5, max_size=5), min_size=1, max_size=4))
def test_a_row_that_returns_to_a_document_is_found(rows: list[list[int]]) -> None:
    returning = [
        i for i, row in enumerate(rows) if any(row[t] in row[: t - 1] and row[t] != row[t - 1] for t in range(1, 5))
    ]
    if returning:
        with pytest.raises(ValueError, match=f"^{returning[0]}$"):
            find_document_starts(np.array(rows))
        return
    starts = find_document_starts(np.array(rows))
    assert starts.tolist() == [[t == 0 or row[t] != row[t - 1] for t in range(5)] for row in rows]


@given(st.lists(st.lists(st.integers(-1, 3), min_size=6, max_size=6).map(sorted), min_size=1, max_size=4))
@settings(deadline=None)
def test_the_model_finds_the_same_boundaries_in_document_numbers(rows: list[list[int]]) -> None:
    torch = pytest.importorskip("torch")
    from lt_model import DocumentBoundaries

    doc_ids = np.array(rows)
    starts = np.flatnonzero(find_document_starts(doc_ids))
    found = micro_batch_cu_seqlens(starts, n_micro=1, n_tokens=doc_ids.size, max_documents=starts.size)
    assert DocumentBoundaries.from_doc_ids(torch.from_numpy(doc_ids)).cu_seqlens.tolist() == found[0].tolist()
