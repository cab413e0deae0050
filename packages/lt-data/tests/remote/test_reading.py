"""Stores that stay in S3: the same rows as from the disk, through a cache that keeps to its size and trusts nothing."""

import contextlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_data import DataError, RowReader, Stream, TokenStore, open_pack, pack
from lt_data.__main__ import main
from lt_data.remote.cache import LEAST_BYTES, BlockCache
from lt_data.remote.contents import BLOCK_BYTES, LISTING, block_digest
from lt_data.remote.reading import RemoteShards
from lt_data.remote.sending import upload


@pytest.fixture
def big(tmp_path: Path, counting_store: Callable[..., TokenStore]) -> TokenStore:
    """A store of shards of several blocks, in which the token at global offset t is t + 1."""
    rng = np.random.default_rng(2)
    made = counting_store([int(n) for n in rng.integers(1, 40_000, size=170)], shard_documents=60)
    (made.path / "manifest.json").write_text(json.dumps(made.manifest.to_dict()), encoding="utf-8")
    assert made.n_tokens * 4 > 3 * 4 * BLOCK_BYTES
    return made


def test_a_stream_from_s3_is_that_from_the_disk(store: TokenStore, bucket: Any, tmp_path: Path) -> None:
    local = RowReader(store, pack(store, seq_len=64))
    upload(store.path, bucket.url)
    remote = TokenStore(bucket.url, cache=tmp_path / "cache")
    assert remote.manifest == store.manifest
    reader = RowReader(remote, open_pack(remote, seq_len=64))
    streams = [Stream(reader_, global_batch_size=4, seed=3) for reader_ in (local, reader)]
    for _ in range(2 * local.n_rows // 4):
        one, two = (stream.next() for stream in streams)
        for name in ("input_ids", "labels", "position_ids", "doc_ids"):
            assert np.array_equal(getattr(one.rows, name), getattr(two.rows, name))
        assert one.state == two.state
    assert remote.tokenizer().sha256 == store.tokenizer().sha256
    assert np.array_equal(remote.lengths, store.lengths)
    assert np.array_equal(remote[7], store[7])
    remote.verify()


def test_a_pack_that_is_made_here_or_missing(store: TokenStore, bucket: Any, tmp_path: Path) -> None:
    upload(store.path, bucket.url)
    remote = TokenStore(bucket.url, cache=tmp_path / "cache")
    with pytest.raises(DataError, match="has no pack bfd-64"):
        open_pack(remote, seq_len=64)
    assert pack(remote, seq_len=64).fingerprint == pack(store, seq_len=64).fingerprint


def test_each_block_is_fetched_once_and_verified(big: TokenStore, bucket: Any, proxy: Any, tmp_path: Path) -> None:
    upload(big.path, bucket.url)
    proxy.log.clear()
    shards = RemoteShards(bucket.url, cache=tmp_path / "cache")
    assert shards.verified
    rng = random.Random(1)

    def ranges() -> list[str]:
        return [f"{r.key} {r.range}" for r in proxy.log if r.method == "GET" and r.key.endswith(".bin")]

    for _ in range(200):
        number = rng.randrange(len(big.manifest.shards))
        n = big.manifest.shards[number].tokens
        begin = rng.randrange(n + 1)
        end = min(n, begin + rng.choice((0, 1, 5, 3000, 600_000)))
        assert np.array_equal(shards.read(number, begin, end), big.read_shard(number)[begin:end])
    assert len(ranges()) == len(set(ranges()))
    before = len(ranges())
    for number in range(len(big.manifest.shards)):
        assert np.array_equal(shards.read(number, 0, big.manifest.shards[number].tokens), big.read_shard(number))
    proxy.log.clear()
    again = RemoteShards(bucket.url, cache=tmp_path / "cache")  # as another process would
    again.prefetch([(number, 0, shard.tokens) for number, shard in enumerate(big.manifest.shards)])
    assert np.array_equal(again.read(1, 5, 900_000), big.read_shard(1)[5:900_000])
    assert ranges() == []
    assert before > 3
    with pytest.raises(IndexError):
        shards.read(0, 0, big.manifest.shards[0].tokens + 1)


def test_prefetch_brings_all_blocks_at_once(big: TokenStore, bucket: Any, proxy: Any, tmp_path: Path) -> None:
    upload(big.path, bucket.url)
    shards = RemoteShards(bucket.url, cache=tmp_path / "cache")
    shards.prefetch([(0, 5, 10), (0, 6, 300_000), (1, 700_000, 700_001)])
    proxy.log.clear()
    shards.read(0, 0, 300_000)
    shards.read(1, 600_000, 780_000)
    assert proxy.log == []


def test_wrong_bytes_are_never_given(big: TokenStore, bucket: Any, proxy: Any, tmp_path: Path) -> None:
    upload(big.path, bucket.url)
    shards = RemoteShards(bucket.url, cache=tmp_path / "cache")
    rng = random.Random(4)
    proxy.fault = lambda r: rng.choice(
        [None, ("flip", rng.randrange(2**30)), ("cut", rng.randrange(2**20)), ("status", 503, "SlowDown"), ("reset",)]
    )
    for _ in range(40):
        number = rng.randrange(3)
        begin = rng.randrange(big.manifest.shards[number].tokens - 10)
        for _ in range(20):
            try:
                found = shards.read(number, begin, begin + 10)
            except DataError:
                continue
            assert np.array_equal(found, big.read_shard(number)[begin : begin + 10])
            break
    proxy.fault = lambda r: ("flip", 7) if r.key.endswith(".bin") else None
    fresh = RemoteShards(bucket.url, cache=tmp_path / "other")
    with pytest.raises(DataError, match="not those that were uploaded"):
        fresh.read(0, 0, 10)


def test_blocks_that_the_disk_damaged_are_fetched_again(big: TokenStore, bucket: Any, tmp_path: Path) -> None:
    upload(big.path, bucket.url)
    RemoteShards(bucket.url, cache=tmp_path / "cache").read(0, 0, 500_000)
    blocks = sorted((tmp_path / "cache" / "blocks").rglob("0*"))
    assert len(blocks) == 2
    blocks[0].write_bytes(bytes(BLOCK_BYTES))
    blocks[1].write_bytes(blocks[1].read_bytes()[:100])
    found = RemoteShards(bucket.url, cache=tmp_path / "cache").read(0, 0, 500_000)
    assert np.array_equal(found, big.read_shard(0)[:500_000])


def test_a_store_without_a_listing_says_that_blocks_are_not_verified(
    store: TokenStore, bucket: Any, tmp_path: Path
) -> None:
    upload(store.path, bucket.url)
    bucket.delete(LISTING)
    shards = RemoteShards(bucket.url, cache=tmp_path / "cache")
    assert not shards.verified
    assert np.array_equal(shards.read(0, 3, 900), store.read_shard(0)[3:900])


def test_what_is_no_store_is_refused(tmp_path: Path, bucket: Any, store: TokenStore) -> None:
    with pytest.raises(DataError, match="there is nothing"):
        RemoteShards(bucket.url, cache=tmp_path / "cache")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_bytes(b"a")
    upload(tmp_path / "files", bucket.url)
    with pytest.raises(DataError, match="not a token store"):
        RemoteShards(bucket.url, cache=tmp_path / "cache")
    upload(store.path, bucket.url, overwrite=True)
    with pytest.raises(DataError, match=f"cache_bytes=5: at least {LEAST_BYTES}"):
        RemoteShards(bucket.url, cache=tmp_path / "cache", cache_bytes=5)
    bucket.delete("shards/00000.bin")
    with pytest.raises(DataError, match=r"00000\.bin is not there"):
        RemoteShards(bucket.url, cache=tmp_path / "cache")


def test_it_can_be_sent_to_another_process(store: TokenStore, bucket: Any, tmp_path: Path) -> None:
    upload(store.path, bucket.url)
    shards = pickle.loads(pickle.dumps(RemoteShards(bucket.url, cache=tmp_path / "cache")))
    further = pickle.loads(pickle.dumps(shards))  # and from there to a third, before anything was asked for
    for one in (shards, further):
        assert np.array_equal(one.read(0, 3, 900), store.read_shard(0)[3:900])


def test_the_commands_take_an_address(
    store: TokenStore, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pack(store, seq_len=64)
    upload(store.path, bucket.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    found: list[str] = []
    for where in (store.path, bucket.url):
        monkeypatch.setattr(sys, "argv", ["lt-data", "stats", str(where), "--json"])
        assert not main()
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]
    assert (tmp_path / "home" / "lt-data" / "stores").is_dir()


# The cache alone


def size_of(cache: BlockCache) -> int:
    """Bytes on the disk while nothing is added or removed; a file that is renamed meanwhile counts once."""
    found: dict[int, int] = {}
    with cache._locked():
        for folder, _, names in os.walk(cache.folder / "blocks"):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    entry = os.stat(os.path.join(folder, name))
                    found[entry.st_ino] = entry.st_size
    return sum(found.values())


def block(number: int, size: int = BLOCK_BYTES) -> bytes:
    return number.to_bytes(4, "little") * (size // 4)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=120),
    st.sampled_from([LEAST_BYTES, LEAST_BYTES + 5 * BLOCK_BYTES // 2]),
)
def test_the_cache_keeps_to_its_limit_and_to_what_was_read_last(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, int]], limit: int
) -> None:
    cache = BlockCache(tmp_path_factory.mktemp("cache"), limit)
    kib = 2**10  # small files with the numbers of large ones would not meet the limit
    sizes = {number: BLOCK_BYTES - kib * (number % 3) for number in range(41)}
    used: dict[int, None] = {}  # in the order of use
    clock = 0
    for write, number in steps:
        digest = block_digest(block(number, sizes[number]))
        if write:
            cache.write("key", number, block(number, sizes[number]))
        found = cache.read("key", number, 3, 11, sizes[number], digest)
        assert found is None or found == block(number, sizes[number])[3:11]
        if write:
            assert found is not None, "what was written last is there"
        if found is not None:
            clock += 1
            os.utime(cache.folder / "blocks" / "key" / f"{number:08d}", ns=(clock, clock))  # a clock that never stands
            used.pop(number, None)
            used[number] = None
        assert size_of(cache) <= limit
    there = {int(path.name) for path in (cache.folder / "blocks" / "key").glob("*")} if used else set()
    newest = [*used][::-1]
    assert {*newest[: len(there)]} == there, "those read longest ago went first"
    assert cache.usage() == size_of(cache)


def test_blocks_on_their_way_count_and_are_left_alone(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, LEAST_BYTES)
    begun = [cache._begin(cache._path("key", number), BLOCK_BYTES) for number in range(16)]
    cache.write("key", 99, block(99))
    assert size_of(cache) == LEAST_BYTES
    assert cache.read("key", 99, 0, 4, BLOCK_BYTES, None) is None, "no room: it is given, and not kept"
    for one in begun:
        assert one is not None
        os.close(one[0])  # as if their processes had ended
    cache.write("key", 99, block(99))
    assert cache.read("key", 99, 0, 4, BLOCK_BYTES, None) == block(99)[:4]
    assert not [*tmp_path.rglob("*.tmp")]


def test_a_block_that_was_verified_once_is_verified_again_when_it_is_another_file(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, LEAST_BYTES)
    cache.write("key", 1, block(1))
    digest = block_digest(block(1))
    assert cache.read("key", 1, 0, 4, BLOCK_BYTES, digest) == block(1)[:4]
    path = cache._path("key", 1)
    other = path.with_name("other")
    other.write_bytes(block(2))  # another process brought it, and its disk is failing
    other.rename(path)
    assert cache.read("key", 1, 0, 4, BLOCK_BYTES, digest) is None
    assert not path.exists()


def test_reading_a_block_makes_it_the_newest(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, LEAST_BYTES)
    for number in range(16):
        cache.write("key", number, block(number))
        os.utime(tmp_path / "blocks" / "key" / f"{number:08d}", ns=(number, number))
    assert size_of(cache) == LEAST_BYTES
    assert cache.read("key", 0, 0, 4, BLOCK_BYTES, None) == block(0)[:4]
    cache.write("key", 99, block(99))
    there = {int(path.name) for path in (tmp_path / "blocks" / "key").iterdir()}
    assert {0, 99} <= there
    assert 1 not in there


WRITER = """
import sys
from pathlib import Path
from lt_data.remote.cache import BlockCache
from lt_data.remote.contents import BLOCK_BYTES, block_digest
folder, seed, limit, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
import random
rng = random.Random(seed)
cache = BlockCache(folder, limit)
print("begun", flush=True)
for _ in range(rounds):
    number = rng.randrange(60)
    data = number.to_bytes(4, "little") * (BLOCK_BYTES // 4)
    found = cache.read("key", number, 0, BLOCK_BYTES, BLOCK_BYTES, block_digest(data) if rng.random() < 0.5 else None)
    assert found in (None, data), "wrong bytes"
    if found is None:
        cache.write("key", number, data)
"""


def test_processes_share_a_cache_and_may_be_killed(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, LEAST_BYTES + 4 * BLOCK_BYTES)
    rng = random.Random(0)

    def start(seed: int, rounds: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(seed), str(cache.limit), str(rounds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE)

    for seed in range(3):
        process = start(seed, 10**9)
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(rng.randrange(30)):
            assert size_of(cache) <= cache.limit
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
    both = [start(seed, 150) for seed in (10, 11)]
    for process in both:
        while process.poll() is None:
            assert size_of(cache) <= cache.limit
        assert process.returncode == 0
        assert process.stdout is not None
        process.stdout.close()
    assert cache.usage() == size_of(cache)
    cache.write("other", 0, block(1))  # makes room, and so clears away what the dead left
    for number in range(100, 120):
        cache.write("key", number, block(number))
    assert not [*tmp_path.rglob("*.tmp")]
