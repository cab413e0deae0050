"""Mapped files: any number of shards, in any order, under few descriptors and few maps."""

import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import DataError, RowReader, TokenStore
from lt_data.packing.pack_index import build_index
from lt_data.store import token_store
from lt_data.store.manifest import encode_manifest


def _run_in_threads(read: Callable[[int], None]) -> None:
    """Call a function with four seeds, each in a thread."""
    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _mapped_under(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


def test_a_map_lives_as_long_as_what_refers_to_it(counting_store: Callable[..., TokenStore]) -> None:
    store = counting_store([9] * 5, 1)
    folder, ids, first = store.path, store.read_shard(4), store.read_shard(0)[:3]
    assert not ids.flags.writeable
    assert _mapped_under(folder) == 2
    del store
    gc.collect()
    assert (ids.tolist(), first.tolist()) == ([*range(37, 46)], [1, 2, 3])
    del ids, first
    gc.collect()
    assert _mapped_under(folder) == 0


def test_threads_read_rows_that_span_shards_while_these_are_released(
    counting_store: Callable[..., TokenStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "_MAX_MAPS", 40)
    store = counting_store([21] * 100, 1)
    index = build_index(store.lengths, seq_len=8, mode="concat", store_fingerprint=store.manifest.fingerprint)
    reader = RowReader(store, index)
    wrong: list[object] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(150):
            rows = rng.integers(0, 2100 // 8, 12)
            if (reader.read_tokens(rows) != 1 + 8 * rows[:, None] + np.arange(8)).any():
                wrong.append(rows)

    _run_in_threads(read)
    assert not wrong


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    shard_documents=st.integers(1, 6),
    most=st.sampled_from([1, 2, 3, 7, 1000]),
    mode=st.sampled_from(["bfd", "concat"]),
    data=st.data(),
)
def test_rows_over_any_shards_are_those_of_the_flat_ids(
    counting_store: Callable[..., TokenStore],
    lengths: list[int],
    shard_documents: int,
    most: int,
    mode: str,
    data: st.DataObject,
) -> None:
    store = counting_store(lengths, shard_documents)
    index = build_index(store.lengths, seq_len=8, mode=mode, store_fingerprint=store.manifest.fingerprint)  # pyright: ignore[reportArgumentType]
    reader = RowReader(store, index)
    if not index.n_rows:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_store, "_MAX_MAPS", most)
        for _ in range(2):  # what the first call found may have been unmapped by its end
            _check_rows(reader, data.draw(st.lists(st.integers(0, index.n_rows - 1), max_size=30)))


def _check_rows(reader: RowReader, rows: list[int]) -> None:
    """Compare rows of a counting store with their ids."""
    index = reader.pack
    wanted = []
    for row in rows:
        spans = range(int(index.row_offsets[row]), int(index.row_offsets[row + 1]))
        ids = [t + 1 for i in spans for t in range(index.start[i], index.start[i] + index.length[i])]
        wanted.append(ids + [0] * (8 - len(ids)))
    assert reader.read_tokens(np.array(rows, np.int64)).tolist() == wanted
    found = reader.read_rows(np.array(rows, np.int64))
    assert found.input_ids.tolist() == wanted
    # in a counting store the label of a token is the token + 1
    assert ((found.labels == found.input_ids + 1) | (found.labels == -100)).all()


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_a_damaged_pack_reads_nothing_outside_the_store(counting_store: Callable[..., TokenStore], wrong: int) -> None:
    store = counting_store([3, 5, 6, 2, 8], 1)
    index = build_index(store.lengths, seq_len=8, mode="bfd", store_fingerprint=store.manifest.fingerprint)
    index.start[-1] = wrong
    with pytest.raises(DataError, match="rows outside the store: find it with lt data verify"):
        RowReader(store, index).read_tokens(np.arange(index.n_rows))


@pytest.mark.parametrize("wrong", [-1, -(10**6), 17, 10**6, 2**63 - 1])
def test_a_damaged_pack_of_full_rows_reads_nothing_outside_the_store(
    counting_store: Callable[..., TokenStore], wrong: int
) -> None:
    store = counting_store([8] * 3, 1)
    index = build_index(store.lengths, seq_len=8, mode="bfd", store_fingerprint=store.manifest.fingerprint)
    index.start[1] = wrong
    with pytest.raises(DataError, match="rows outside the store: find it with lt data verify"):
        RowReader(store, index).read_tokens(np.arange(index.n_rows))


def test_a_damaged_pack_has_no_label_outside_the_store(counting_store: Callable[..., TokenStore]) -> None:
    store = counting_store([8] * 3, 1)
    index = build_index(store.lengths, seq_len=8, mode="bfd", store_fingerprint=store.manifest.fingerprint)
    index.labels[index.start == 16] = 8  # that of the last token too
    with pytest.raises(DataError, match="rows outside the store: find it with lt data verify"):
        RowReader(store, index).read_rows(np.arange(index.n_rows))


def test_a_reader_goes_to_another_process(counting_store: Callable[..., TokenStore]) -> None:
    store = counting_store([21] * 40, 1)
    index = build_index(store.lengths, seq_len=8, mode="concat", store_fingerprint=store.manifest.fingerprint)
    rows = np.random.default_rng(0).permutation(index.n_rows)
    reader = pickle.loads(pickle.dumps(RowReader(store, index)))
    assert (reader.read_tokens(rows) == 1 + 8 * rows[:, None] + np.arange(8)).all()


def test_a_shard_that_changed_after_opening_is_named(counting_store: Callable[..., TokenStore], tmp_path: Path) -> None:
    store = counting_store([3, 5, 6, 4], 1)
    cut, linked, pipe = (store.path / f"shards/0000{i}.bin" for i in (1, 2, 3))
    cut.write_bytes(cut.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"00001\.bin: 16 bytes, the manifest says 20"):
        store.read_shard(1)
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"00002\.bin: a symbolic link leads out"):
        store.read_shard(2)
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(DataError, match=r"00003\.bin: not a regular file"):
        store.read_shard(3)
    assert store.read_shard(0).tolist() == [1, 2, 3]


def test_many_shards_are_read_under_few_descriptors(counting_store: Callable[..., TokenStore]) -> None:
    store = counting_store([8] * 600, 1)
    (store.path / "manifest.json").write_bytes(encode_manifest(store.manifest))
    script = f"""
import resource, os
import numpy as np
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from lt_data import RowReader, TokenStore
from lt_data.packing.pack_index import build_index
store = TokenStore({str(store.path)!r})
index = build_index(store.lengths, seq_len=8, mode="concat", store_fingerprint=store.manifest.fingerprint)
ids = RowReader(store, index).read_tokens(np.arange(600))
assert (ids.reshape(-1) == np.arange(4800) + 1).all()
assert [store.document_span(i) for i in range(600)] == [(8 * i, 8) for i in range(600)]
assert len(os.listdir("/proc/self/fd")) < 20
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
