"""The adapter gives torch what the stream gives numpy, from any number of workers, with a state that resumes."""

import json
import subprocess
import sys
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import DataError, Mixture, RowReader, Stream, TokenStore, pack
from lt_data.packing.pack_index import build_index

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from lt_data.torch import StreamLoader, to_tensors  # noqa: E402


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
def test_tensors_are_the_widened_rows(counting_store, lengths, seq_len, mode, mask, data):
    reader = reader_of(counting_store(lengths), seq_len, mode, mask)
    rows = np.array(data.draw(st.lists(st.integers(0, reader.n_rows - 1), min_size=1, max_size=6)))
    assert_same(to_tensors(reader.read_token_rows(rows)), reader, rows)


def test_two_byte_ids_and_types(store):
    reader = RowReader(store, pack(store, seq_len=64))
    compact = reader.read_token_rows(np.arange(5))
    assert compact.input_ids.dtype == np.uint16
    found = to_tensors(compact, dtype=torch.int32)
    assert_same(found, reader, np.arange(5))
    assert found["loss_mask"].dtype == torch.bool
    assert {tensor.dtype for name, tensor in found.items() if name != "loss_mask"} == {torch.int32}
    compact.input_ids[0, 0] = 65_499  # beyond a signed number of two bytes
    found = to_tensors(compact)
    assert (found["labels"].dtype, int(found["input_ids"][0, 0])) == (torch.int64, 65_499)


def first(batches: Any, n: int) -> list[list[list[int]]]:
    """The ids of the first batches; the walk is ended."""
    return [batch["input_ids"].tolist() for batch in islice(batches, n)]


@pytest.fixture
def mixture(counting_store) -> Mixture:
    sources = {"a": reader_of(counting_store([5, 3] * 11), 8), "b": reader_of(counting_store([40, 4]), 8)}
    return Mixture(sources, {"a": 2, "b": 1})


def loader_of(source: Any, workers: int = 0, rank: int = 0, ranks: int = 1, **options: Any) -> StreamLoader:
    stream = Stream(source, global_batch_size=6, dp_rank=rank, dp_size=ranks, seed=4)
    return StreamLoader(stream, num_workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # where there are fewer cores
def test_any_number_of_workers_gives_the_sequence_of_the_stream(mixture, workers):
    stream = Stream(mixture, global_batch_size=6, dp_rank=1, dp_size=2, seed=4)
    expected = [stream.next() for _ in range(9)]
    ids = [batch.rows.input_ids.tolist() for batch in expected]
    loader = loader_of(mixture, workers, 1, 2, **({"prefetch_factor": 2} if workers else {}))
    assert first(loader, 4) == ids[:4]
    assert loader.stream.state == expected[3].state  # not what the workers have made ahead
    assert first(loader, 2) == ids[4:6]  # a new walk goes on
    saved = json.loads(json.dumps(loader.state_dict()))
    other = loader_of(mixture, 0, 1, 2)
    other.load_state_dict(saved)
    assert first(other, 3) == ids[6:]
    assert other.stream.state == expected[8].state
    other.load_state_dict(saved)
    assert int(next(iter(other))["valid_tokens"]) == expected[6].valid_tokens


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's half-made iterator
def test_workers_of_others_are_refused(mixture):
    """They would move copies of the stream, and its state would stay at the beginning."""
    loader: Any = loader_of(mixture)
    for dataset in (loader, iter(loader), loader.stream):
        with pytest.raises(TypeError):
            next(iter(DataLoader(dataset, batch_size=None, num_workers=2)))


def test_a_walk_ends_where_the_stream_was_moved(mixture):
    """It would repeat rows, or the state would not be that of the batches."""
    loader = loader_of(mixture)
    saved = loader.state_dict()
    for move in (lambda: loader.load_state_dict(saved), lambda: loader.stream.skip(12), lambda: next(iter(loader))):
        walk = iter(loader)
        next(walk)
        move()
        with pytest.raises(DataError, match=r"the stream was moved during this iteration; begin a new one"):
            next(walk)


def test_a_state_of_other_data_is_refused_and_the_old_one_stays(mixture):
    loader = loader_of(mixture)
    other = Stream(mixture, global_batch_size=6, seed=5).state
    with pytest.raises(DataError, match="seed: 5 before, 4 now"):
        loader.load_state_dict(other.to_dict())
    with pytest.raises(DataError, match="not the state of a stream"):
        loader.load_state_dict({"step": 1})
    assert loader.stream.state.seed == 4


@pytest.mark.parametrize("options", [{"persistent_workers": True}, {"in_order": False}], ids=str)
def test_options_that_repeat_or_mix_up_batches_are_refused(mixture, options):
    with pytest.raises(DataError, match=f"{next(iter(options))}=.*leave it out"):
        loader_of(mixture, 2, **options)


def test_without_torch_the_error_names_the_extra():
    program = "import sys; sys.modules['torch'] = None; import lt_data.torch"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=False)
    assert 'lt_data.torch needs torch: pip install "lt-data[torch]"' in run.stderr


def test_rows_need_a_batch_size_and_a_stream_has_its_own(mixture):
    loader = StreamLoader(mixture, batch_size=6, seed=4)
    assert first(loader, 2) == first(loader_of(mixture), 2)
    assert len(loader) == mixture.n_rows // 6
    for source, options in ((mixture, {}), (loader.stream, {"batch_size": 6})):
        with pytest.raises(DataError, match="batch_size = "):
            StreamLoader(source, **options)
