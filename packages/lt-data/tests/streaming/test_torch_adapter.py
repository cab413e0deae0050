"""The adapter gives torch what the stream gives numpy, from any number of workers, with a state that resumes."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import DataError, Mixture, Prefetcher, RowReader, Stream, TokenStore, pack
from lt_data.packing.pack_index import build_index

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from lt_data.torch import StreamDataset, StreamLoader, to_cpu_tensors, to_tensors  # noqa: E402


def reader_of(store: TokenStore, seq_len: int, mode: str = "bfd", document_mask: bool = True) -> RowReader:
    index = build_index(store.lengths, seq_len=seq_len, mode=mode, store_fingerprint=store.manifest.fingerprint)
    return RowReader(store, index, document_mask=document_mask)


def assert_same(found: dict[str, Any], reader: RowReader, rows: np.ndarray) -> None:
    expected = reader.read_rows(rows)
    for name in ("input_ids", "labels", "position_ids", "doc_ids", "loss_mask"):
        assert np.array_equal(found[name].numpy(), getattr(expected, name)), name
    assert found["cu_seqlens"].tolist() == reader.read_token_rows(rows).cu_seqlens().tolist()


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=15),
    st.integers(1, 12),
    st.sampled_from(["bfd", "concat"]),
    st.booleans(),
    st.data(),
)
def test_tensors_are_the_widened_rows(
    counting_store: Callable[..., TokenStore], lengths: list[int], seq_len: int, mode: str, mask: bool, data: Any
) -> None:
    reader = reader_of(counting_store(lengths), seq_len, mode, mask)
    rows = np.array(data.draw(st.lists(st.integers(0, reader.n_rows - 1), min_size=1, max_size=6)))
    assert_same(to_tensors(reader.read_token_rows(rows)), reader, rows)


def test_two_byte_ids_and_types(store: TokenStore) -> None:
    reader = RowReader(store, pack(store, seq_len=64))
    compact = reader.read_token_rows(np.arange(5))
    assert compact.input_ids.dtype == np.uint16
    found = to_tensors(compact, dtype=torch.int32)
    assert_same(found, reader, np.arange(5))
    types = {name: tensor.dtype for name, tensor in found.items()}
    assert types == {
        "input_ids": torch.int32,
        "labels": torch.int32,
        "position_ids": torch.int32,
        "doc_ids": torch.int32,
        "cu_seqlens": torch.int32,
        "loss_mask": torch.bool,
    }
    assert to_tensors(compact)["labels"].dtype == torch.int64


def first(batches: Any, n: int) -> list[list[list[int]]]:
    """The ids of the first batches; the walk is ended."""
    walk: Iterator[Any] = iter(batches)
    return [batch["input_ids"].tolist() for batch in islice(walk, n)]


@pytest.fixture
def mixture(counting_store: Callable[..., TokenStore]) -> Mixture:
    sources = {"a": reader_of(counting_store([5, 3] * 11), 8), "b": reader_of(counting_store([40, 4]), 8)}
    return Mixture(sources, {"a": 2, "b": 1})


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # where there are fewer cores
def test_any_number_of_workers_gives_the_sequence_of_the_stream(mixture: Mixture) -> None:
    stream = Stream(mixture, global_batch_size=6, dp_rank=1, dp_size=2, seed=4)
    expected = [stream.next() for _ in range(9)]
    ids = [batch.rows.input_ids.tolist() for batch in expected]

    def dataset() -> StreamDataset:
        return StreamDataset(mixture, global_batch_size=6, dp_rank=1, dp_size=2, seed=4)

    for workers in (0, 2):
        assert first(DataLoader(dataset(), batch_size=None, num_workers=workers), 9) == ids
    loader = StreamLoader(dataset(), num_workers=3, prefetch_factor=2)
    assert first(loader, 4) == ids[:4]
    assert loader.state == expected[3].state  # not what the workers have made ahead
    assert first(loader, 2) == ids[4:6]  # a new walk goes on
    saved = json.loads(json.dumps(loader.state_dict()))
    other = StreamLoader(dataset(), num_workers=0)
    other.load_state_dict(saved)
    assert first(other, 3) == ids[6:]
    assert other.state == expected[8].state
    valid = next(iter(StreamLoader(dataset())))["valid_tokens"]
    assert int(valid) == expected[0].valid_tokens


def test_forgetting_that_batches_are_whole_is_an_error(mixture: Mixture) -> None:
    for transform in (to_cpu_tensors, lambda batch: {"rows": torch.from_numpy(batch.row_ids)}):
        dataset = StreamDataset(mixture, global_batch_size=6, seed=4, transform=transform)
        for options in ({}, {"batch_size": 2}):
            with pytest.raises(DataError, match=r"yields whole batches; give DataLoader\(\.\.\., batch_size=None\)"):
                next(iter(DataLoader(dataset, **options)))
        assert isinstance(next(iter(DataLoader(dataset, batch_size=None))), dict)


def test_a_dataset_resumes_where_it_was_read(mixture: Mixture) -> None:
    stream = Stream(mixture, global_batch_size=6, seed=4)
    ids = [batch.rows.input_ids.tolist() for batch in islice(stream, 7)]
    one = StreamDataset(mixture, global_batch_size=6, seed=4)
    assert first(one, 3) == ids[:3]
    saved = json.loads(json.dumps(one.state_dict()))
    assert first(one, 2) == ids[3:5]
    other = StreamDataset(mixture, global_batch_size=6, seed=4)
    other.load_state_dict(saved)
    assert first(other, 4) == ids[3:]
    with pytest.raises(DataError, match="not the state of a stream"):
        other.load_state_dict({"step": 1})
    assert other.state == stream.state


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.14
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # where there are fewer cores
def test_the_stateful_loader_of_torchdata(mixture: Mixture, workers: int) -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def make() -> Any:
        dataset = StreamDataset(mixture, global_batch_size=6, dp_rank=1, dp_size=2, seed=4)
        return module.StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

    stream = Stream(mixture, global_batch_size=6, dp_rank=1, dp_size=2, seed=4)
    ids = [batch.rows.input_ids.tolist() for batch in islice(stream, 12)]
    loader = make()
    walk = iter(loader)
    for n in range(1, 8):
        assert next(walk)["input_ids"].tolist() == ids[n - 1]
        if n in (1, 4, 7):
            saved = pickle.loads(pickle.dumps(loader.state_dict()))
            other = make()
            other.load_state_dict(saved)
            assert first(other, 4) == ids[n : n + 4]
    with pytest.raises(DataError, match="batch_size=None"):
        next(iter(module.StatefulDataLoader(StreamDataset(mixture, global_batch_size=6), batch_size=1)))


def test_going_on_with_other_ranks(mixture: Mixture) -> None:
    whole = Stream(mixture, global_batch_size=6, seed=4)
    ids = [whole.next().rows.input_ids.tolist() for _ in range(4)]
    loader = StreamLoader(StreamDataset(mixture, global_batch_size=6, seed=4))
    first(loader, 2)
    parts = []
    for rank in range(3):
        part = StreamLoader(StreamDataset(mixture, global_batch_size=6, dp_rank=rank, dp_size=3, seed=4), num_workers=0)
        part.load_state_dict(loader.state_dict())
        parts.append(first(part, 2))
    assert [[row for part in parts for row in part[i]] for i in range(2)] == ids[2:]


def test_skipping(mixture: Mixture) -> None:
    stream = Stream(mixture, global_batch_size=6, seed=4)
    stream.skip(12)
    loader = StreamLoader(StreamDataset(mixture, global_batch_size=6, seed=4))
    loader.skip(12)
    assert loader.state == stream.state
    assert first(loader, 1) == [stream.next().rows.input_ids.tolist()]


def test_a_state_of_other_data_is_refused_and_the_old_one_stays(mixture: Mixture) -> None:
    loader = StreamLoader(StreamDataset(mixture, global_batch_size=6, seed=4))
    other = StreamDataset(mixture, global_batch_size=6, seed=5).state
    with pytest.raises(DataError, match="seed: 5 before, 4 now"):
        loader.load_state_dict(other.to_dict())
    with pytest.raises(DataError, match="not the state of a stream"):
        loader.load_state_dict({"step": 1})
    assert loader.state.seed == 4


@pytest.mark.parametrize("options", [{"persistent_workers": True}, {"in_order": False}], ids=str)
def test_options_that_repeat_or_mix_up_batches_are_refused(mixture: Mixture, options: dict[str, bool]) -> None:
    dataset = StreamDataset(mixture, global_batch_size=6, seed=4)
    with pytest.raises(DataError, match=f"{next(iter(options))}=.*leave it out"):
        StreamLoader(dataset, num_workers=2, **options)


def test_with_a_prefetcher(mixture: Mixture) -> None:
    stream = Stream(mixture, global_batch_size=6, seed=4)
    with Prefetcher(Stream(mixture, global_batch_size=6, seed=4), transform=to_cpu_tensors) as ahead:
        for _ in range(3):
            expected, found = stream.next(), ahead.next()
            assert found["labels"].tolist() == expected.rows.labels.tolist()


def test_a_dataset_goes_to_another_process_without_its_tokens(store: TokenStore) -> None:
    reader = RowReader(store, pack(store, seq_len=64))
    reader.read_rows(np.arange(3))
    dataset = StreamDataset(reader, global_batch_size=2, seed=1)
    content = pickle.dumps(dataset)
    assert len(content) < 20_000 < store.n_tokens * 2
    assert first(pickle.loads(content), 3) == first(dataset, 3)


def test_without_torch_the_error_names_the_extra() -> None:
    program = "import sys; sys.modules['torch'] = None; import lt_data.torch"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=False)
    assert 'lt_data.torch needs torch: pip install "lt-data[torch]"' in run.stderr
