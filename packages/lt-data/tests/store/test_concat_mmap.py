"""Several maps as one array: places, what it keeps alive, and shards of a store that come and go."""

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lt_data import DataError, RowReader, TokenStore
from lt_data.packing.packs import build_index
from lt_data.store import token_store
from lt_data.store.concat_mmap import concat_mmaps


def mapped(folder: Path, values: list[int]) -> np.ndarray:
    path = folder / f"{len(list(folder.iterdir()))}.bin"
    np.array(values, "<u2").tofile(path)
    return np.asarray(np.memmap(path, "<u2", mode="r"))


def test_each_map_has_its_place(tmp_path: Path) -> None:
    values = [[1, 2, 3], [4], list(range(100, 3100)), [7, 8]]
    maps = [mapped(tmp_path, one) for one in values]
    ids, places = concat_mmaps(maps)
    assert ids.dtype == np.dtype("<u2")
    assert not ids.flags.writeable
    del maps
    gc.collect()  # the maps live on in the array
    for place, wanted in zip(places.tolist(), values, strict=True):
        assert ids[place : place + len(wanted)].tolist() == wanted
    alone = mapped(tmp_path, [5, 6])
    ids, places = concat_mmaps([alone])
    assert ids is alone
    assert places.tolist() == [0]


@pytest.mark.parametrize("most", [1, 2, 3, 256])
@pytest.mark.parametrize("mode", ["bfd", "concat"])
def test_any_shards_in_any_order(
    counting_store: Callable[..., TokenStore], monkeypatch: pytest.MonkeyPatch, mode: str, most: int
) -> None:
    monkeypatch.setattr(token_store, "_OPEN_SHARDS", most)
    lengths = [9, 4, 17, 30, 2, 2, 8, 8, 21, 5, 12]
    store = counting_store(lengths, 2)
    index = build_index(store.lengths, seq_len=8, mode=mode, store_fingerprint=store.manifest.fingerprint)  # pyright: ignore[reportArgumentType]
    reader = RowReader(store, index)
    offsets, rows = index.row_offsets, np.random.default_rng(0)
    wanted = []
    for row in range(index.n_rows):
        spans = range(int(offsets[row]), int(offsets[row + 1]))
        tokens = [t + 1 for i in spans for t in range(index.start[i], index.start[i] + index.length[i])]
        wanted.append(tokens + [0] * (8 - len(tokens)))
    for size in (1, 2, 3, 7, 40):  # from one shard at a time to all of them
        for _ in range(10):
            chosen = rows.integers(0, index.n_rows, size)
            assert reader.read_tokens(chosen).tolist() == [wanted[row] for row in chosen]
            assert reader.read_token_rows(chosen).to_int32().labels.shape == (size, 8)
    assert (store.mmap_shards(np.arange(6)) is None) == (most < 6)


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_a_damaged_pack_reads_nothing_outside_the_store(counting_store: Callable[..., TokenStore], wrong: int) -> None:
    store = counting_store([3, 5, 6, 2, 8], 1)
    index = build_index(store.lengths, seq_len=8, mode="bfd", store_fingerprint=store.manifest.fingerprint)
    index.start[-1] = wrong
    with pytest.raises(DataError, match="rows outside the store: find it with lt data verify"):
        RowReader(store, index).read_tokens(np.arange(index.n_rows))


def test_a_shard_that_was_cut_off_after_opening(counting_store: Callable[..., TokenStore]) -> None:
    store = counting_store([3, 5, 6], 1)
    path = store.path / "shards" / "00001.bin"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"00001\.bin: 16 bytes, the manifest says 20"):
        store.mmap_shards(np.array([0, 1]))
