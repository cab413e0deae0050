"""Stores that stay in S3: the same rows as from the disk, shard by shard into a bounded cache or by exact ranges."""

import os
import pickle
from typing import Any

import numpy as np
import pytest

from lt_data import DataError, RowReader, Stream, TokenStore, open_pack
from lt_data.remote.file_list import DamagedError
from lt_data.remote.shards import RemoteShards
from lt_data.remote.upload import upload
from lt_data.streaming.prefetch import Prefetcher

CACHE_BYTES = pytest.mark.parametrize("cache_bytes", [None, 0], ids=["cached", "ranges"])


@pytest.fixture
def uploaded(store, bucket, proxy) -> TokenStore:
    """The store, which lies in the bucket too."""
    upload(store.path, bucket.url)
    proxy.log.clear()
    return store


def requests_for_ids(proxy: Any) -> list[tuple[str, str | None]]:
    return [(r.key, r.range) for r in proxy.log if r.method == "GET" and r.key.endswith(".bin")]


@CACHE_BYTES
def test_a_stream_from_s3_is_that_from_the_disk(cache_bytes, uploaded, bucket, proxy, tmp_path):
    local = RowReader(uploaded, open_pack(uploaded, seq_len=64))
    remote = TokenStore(bucket.url, cache=tmp_path / "cache", cache_bytes=cache_bytes)
    assert remote.manifest == uploaded.manifest
    reader = RowReader(remote, open_pack(remote, seq_len=64))
    streams = [Stream(reader_, global_batch_size=8, seed=3) for reader_ in (local, reader)]
    for _ in range(2 * local.n_rows // 8 if cache_bytes is None else 30):
        one, two = (stream.next() for stream in streams)
        for name in ("input_ids", "labels", "position_ids", "doc_ids"):
            assert np.array_equal(getattr(one.rows, name), getattr(two.rows, name))
        assert one.state == two.state
    asked = requests_for_ids(proxy)
    assert len(uploaded.manifest.shards) >= 3
    if cache_bytes is None:
        assert len(asked) == len(set(asked)) == len(uploaded.manifest.shards), "each shard once"
    else:
        assert None not in {byte_range for _, byte_range in asked}
        assert not [*(tmp_path / "cache").rglob("*.bin")]
    assert remote.tokenizer().sha256 == uploaded.tokenizer().sha256
    assert np.array_equal(remote.lengths, uploaded.lengths)
    assert np.array_equal(remote[7], uploaded[7])
    remote.verify()
    for one in (pickle.loads(pickle.dumps(remote)), pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(remote))))):
        assert np.array_equal(one.read(0, 3, 900), uploaded.read(0, 3, 900))
    with pytest.raises(IndexError):
        remote.read(0, 0, uploaded.manifest.shards[0].tokens + 1)


@CACHE_BYTES
def test_steps_wait_for_no_data_that_was_fetched_ahead(cache_bytes, uploaded, bucket, proxy, tmp_path, wait_for):
    """While a step computes, the rows of the next ones come: they are there though no request is answered any more."""
    local = Stream(RowReader(uploaded, open_pack(uploaded, seq_len=64)), global_batch_size=4, seed=3)
    remote = TokenStore(bucket.url, cache=tmp_path / "cache", cache_bytes=cache_bytes)
    stream = Stream(RowReader(remote, open_pack(remote, seq_len=64)), global_batch_size=4, seed=3)
    fetched: list[np.ndarray] = []

    def keep(batch: Any) -> np.ndarray:
        fetched.append(batch.rows.input_ids)
        return batch.rows.input_ids

    with Prefetcher(stream, depth=3, transform=keep) as ahead:
        assert np.array_equal(next(ahead), local.next().rows.input_ids)
        wait_for(lambda: len(fetched) == 4)  # one was taken, three wait
        proxy.fault = lambda r: ("reset",)
        for _ in range(3):
            assert np.array_equal(next(ahead), local.next().rows.input_ids)


def test_ranges_of_a_batch_are_asked_for_together_and_again_where_they_are_cut(uploaded, bucket, proxy, tmp_path):
    shards = RemoteShards(bucket.url, cache=tmp_path / "cache", cache_bytes=0)
    spans = [(0, 5, 10), (0, 6, 3000), (1, 700, 701), (0, 5, 10), (1, 9, 9)]
    cut: list[str] = []

    def plan(request: Any) -> tuple[Any, ...] | None:
        if request.range and len(cut) < 3:
            cut.append(request.range)
            return ("cut", 1)
        return None

    proxy.fault = plan
    shards.prefetch(spans)
    assert sorted(set(requests_for_ids(proxy))) == [
        ("data/store/shards/00000.bin", "bytes=10-19"),
        ("data/store/shards/00000.bin", "bytes=12-5999"),
        ("data/store/shards/00001.bin", "bytes=1400-1401"),
    ]
    assert len(requests_for_ids(proxy)) == 3 + len(cut)
    proxy.fault = lambda r: ("reset",)
    for span in spans:
        assert np.array_equal(shards.read(*span), uploaded.read(*span))
    with pytest.raises(DataError, match="reading failed"):
        shards.read(0, 5, 11)


def test_the_cache_keeps_to_its_limit_over_stores_and_to_what_was_used_last(uploaded, bucket, proxy, tmp_path):
    other_url = f"{bucket.url}-2"
    (uploaded.path / "other list").touch()
    upload(uploaded.path, other_url)
    n_bytes = 2 * uploaded.n_tokens
    one = RemoteShards(bucket.url, cache=tmp_path / "cache", cache_bytes=n_bytes)
    all_shards = range(len(uploaded.manifest.shards))
    for shard in all_shards:
        assert np.array_equal(one.read(shard, 3, 90), uploaded.read(shard, 3, 90))
    for number, path in enumerate(sorted((tmp_path / "cache").rglob("*.bin"))):
        os.utime(path, (number, number))
    RemoteShards(bucket.url, cache=tmp_path / "cache", cache_bytes=n_bytes).read(0, 0, 1)  # used last
    two = RemoteShards(other_url, cache=tmp_path / "cache", cache_bytes=n_bytes)
    two.read(1, 0, 1)
    kept = {path.relative_to(tmp_path / "cache" / "stores").as_posix() for path in (tmp_path / "cache").rglob("*.bin")}
    assert f"{one.folder.name}/shards/00000.bin" in kept
    assert f"{one.folder.name}/shards/00001.bin" not in kept
    assert f"{two.folder.name}/shards/00001.bin" in kept
    assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.bin")) <= n_bytes
    for shard in all_shards:
        assert np.array_equal(one.read(shard, 3, 90), uploaded.read(shard, 3, 90)), "a mapped shard stays readable"
    assert not [*(tmp_path / "cache").rglob("*.part")]


def test_wrong_bytes_of_a_shard_are_never_given(uploaded, bucket, tmp_path):
    shards = RemoteShards(bucket.url, cache=tmp_path / "cache")
    bucket.spoil("shards/00000.bin")
    with pytest.raises(DamagedError, match=r"00000\.bin: its bytes are not those that were uploaded"):
        shards.read(0, 0, 10)
    assert not [*(tmp_path / "cache").rglob("*.bin*")]
    bucket.spoil("shards/00000.bin")  # the same byte again
    assert np.array_equal(shards.read(0, 0, 10), uploaded.read(0, 0, 10))


def test_what_is_no_whole_store_is_refused(uploaded, bucket, tmp_path):
    with pytest.raises(DataError, match=r"there is no lt-files\.json"):
        TokenStore(f"{bucket.url}/elsewhere", cache=tmp_path / "cache")
    upload(uploaded.path / "tokenizer", f"{bucket.url}-2")
    with pytest.raises(DataError, match="a folder of files, not a token store"):
        TokenStore(f"{bucket.url}-2", cache=tmp_path / "cache")
    with pytest.raises(DataError, match="cache_bytes = -1"):
        TokenStore(bucket.url, cache=tmp_path / "cache", cache_bytes=-1)
    with pytest.raises(DataError, match="for stores at s3:// addresses"):
        TokenStore(uploaded.path, cache=tmp_path / "cache")
    bucket.delete("shards/00000.bin")
    with pytest.raises(DamagedError, match=r"missing or cut \(shards/00000\.bin"):
        TokenStore(bucket.url, cache=tmp_path / "cache")
