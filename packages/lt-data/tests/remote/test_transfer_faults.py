"""Transfers through a proxy that does what networks and busy stores do: no wrong byte is taken, no object is lost."""

import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_data import DataError, TokenStore, pack
from lt_data.remote.contents import BLOCK_BYTES, LISTING
from lt_data.remote.fetching import download
from lt_data.remote.s3 import RemoteError, S3Options
from lt_data.remote.sending import upload

PART = 5 * 2**20
OPTIONS = S3Options(part_bytes=PART, connections=4, timeout=20.0)
SEED = int(os.environ.get("LT_SEED", "0"))
Plan = Callable[[Any], tuple[Any, ...] | None]


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(store: TokenStore, tmp_path: Path) -> Path:
    """A store with a file of three parts in it, so that all kinds of requests are made."""
    pack(store, seq_len=64)
    (store.path / "large.bin").write_bytes(np.random.default_rng(5).bytes(2 * PART + 54321))
    return store.path


def trouble(seed: int, share: float) -> tuple[Plan, Counter[str]]:
    """A share of the requests goes wrong, but no request more than twice running."""
    rng = random.Random(seed)
    running: Counter[tuple[object, ...]] = Counter()
    done: Counter[str] = Counter()

    def plan(request: Any) -> tuple[Any, ...] | None:
        name = (request.operation, request.key, request.range, tuple(request.query.get("partNumber", ())))
        if rng.random() > share or running[name] == 2:
            running[name] = 0
            return None
        running[name] += 1
        kinds: list[tuple[Any, ...]] = [("status", 503, "SlowDown"), ("status", 500, "InternalError"), ("reset",)]
        kinds += [("lost",), ("lost",)]
        if request.method in ("PUT", "HEAD"):
            kinds += [("etag",)] * 2
        if request.method == "PUT":
            kinds += [("spoil", rng.randrange(2**30))] * 2
        if request.method == "GET" and request.key:
            kinds += [("cut", rng.randrange(BLOCK_BYTES)), ("flip", rng.randrange(2**30))] * 2
        fault = rng.choice(kinds)
        done[fault[0]] += 1
        return fault

    return plan, done


def check_upload(folder: Path, bucket: Any, proxy: Any, seed: int) -> Counter[str]:
    proxy.fault, done = trouble(seed, 0.4)
    for _ in range(12):  # what boto3 and we give up is taken up by the next call
        try:
            upload(folder, bucket.url, options=OPTIONS)
        except RemoteError:
            objects = bucket.objects()
            assert "manifest.json" not in objects or tree(folder).items() <= objects.items(), "whole, or not there"
        else:
            break
    else:
        raise AssertionError("twelve calls were not enough")
    objects = bucket.objects()
    assert objects.pop(LISTING)
    assert objects == tree(folder)
    assert bucket.unfinished() == []
    return done


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_uploads_in_trouble(seed: int, folder: Path, bucket: Any, proxy: Any) -> None:
    assert sum(check_upload(folder, bucket, proxy, seed).values()) > 3


@pytest.mark.slow
def test_many_uploads_in_trouble(folder: Path, bucket: Any, proxy: Any) -> None:
    done: Counter[str] = Counter()
    for seed in range(SEED + 100, SEED + 130):
        for name in bucket.objects():
            bucket.delete(name)
        done += check_upload(folder, bucket, proxy, seed)
    assert set(done) == {"status", "reset", "lost", "etag", "spoil"}


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_downloads_in_trouble(seed: int, folder: Path, bucket: Any, proxy: Any, tmp_path: Path) -> None:
    upload(folder, bucket.url, options=OPTIONS)
    proxy.fault, done = trouble(seed, 0.4)
    for _ in range(12):
        try:
            download(bucket.url, tmp_path / "copy", options=OPTIONS)
        except DataError:
            assert not (tmp_path / "copy").exists(), "whole, or not there"
        else:
            assert tree(tmp_path / "copy") == tree(folder)
            if done["flip"] + done["cut"]:
                break
            shutil.rmtree(tmp_path / "copy")  # the order of threads has spared what was read: once more
    else:
        raise AssertionError("no whole copy with damage on the way in twelve calls")


def test_a_part_that_was_spoiled_on_the_way_is_sent_again(folder: Path, bucket: Any, proxy: Any) -> None:
    spoiled: list[Any] = []

    def plan(request: Any) -> tuple[Any, ...] | None:
        if request.query.get("partNumber") == ["2"] and len(spoiled) < 2:
            spoiled.append(request)
            return ("spoil", 4_000_000)
        return None

    proxy.fault = plan
    upload(folder, bucket.url, options=OPTIONS)
    assert bucket.objects()["large.bin"] == (folder / "large.bin").read_bytes()
    assert sum(r.query.get("partNumber") == ["2"] for r in proxy.log) == 3


def test_parts_that_are_always_spoiled_end_the_upload(folder: Path, bucket: Any, proxy: Any) -> None:
    proxy.fault = lambda r: ("spoil", 7) if r.query.get("partNumber") == ["2"] else None
    with pytest.raises(RemoteError, match="S3 does not hold what was sent, 3 times over"):
        upload(folder, bucket.url, options=OPTIONS)
    assert not {"manifest.json", LISTING} & set(bucket.objects())
    proxy.fault = lambda r: None
    upload(folder, bucket.url, options=OPTIONS)
    assert bucket.objects()["large.bin"] == (folder / "large.bin").read_bytes()


def test_a_spoiled_object_that_a_killed_upload_left_is_not_kept(folder: Path, bucket: Any, proxy: Any) -> None:
    proxy.fault = lambda r: ("spoil", 9) if r.key.endswith("00000.bin") and r.method == "PUT" else None
    with pytest.raises(RemoteError):
        upload(folder, bucket.url, options=OPTIONS)
    proxy.fault = lambda r: None
    upload(folder, bucket.url, options=OPTIONS)
    assert bucket.objects()["shards/00000.bin"] == (folder / "shards" / "00000.bin").read_bytes()


@pytest.mark.parametrize("fault", [("lost",), ("status", 404, "NoSuchUpload")])
def test_an_upload_that_was_finished_though_the_answer_is_missing(
    fault: tuple[Any, ...], folder: Path, bucket: Any, proxy: Any
) -> None:
    """The store has made the object of the parts, and says at the next try that it knows no such upload."""
    seen = threading.Event()

    def plan(request: Any) -> tuple[Any, ...] | None:
        if request.operation == "POST uploadId" and not seen.is_set():
            seen.set()
            return fault
        return None

    proxy.fault = plan
    upload(folder, bucket.url, options=OPTIONS)
    assert bucket.objects()["large.bin"] == (folder / "large.bin").read_bytes()
    assert bucket.unfinished() == []


def test_an_object_that_vanishes_is_noticed_before_the_manifest(folder: Path, bucket: Any, proxy: Any) -> None:
    def plan(request: Any) -> None:
        if "list-type" in request.query and "tokenizer/tokenizer.json" in bucket.objects():
            bucket.delete("tokenizer/tokenizer.json")

    proxy.fault = plan
    with pytest.raises(RemoteError, match="1 objects are not there as sent"):
        upload(folder, bucket.url, options=OPTIONS)
    assert not {"manifest.json", LISTING} & set(bucket.objects())


def test_a_stalled_connection_is_given_up(folder: Path, bucket: Any, proxy: Any, tmp_path: Path) -> None:
    upload(folder, bucket.url, options=OPTIONS)
    stalled: list[str] = []

    def plan(request: Any) -> tuple[Any, ...] | None:
        if request.key.endswith("large.bin") and request.range == f"bytes=0-{PART - 1}" and not stalled:
            stalled.append(request.range)
            return ("stall", 3 * BLOCK_BYTES + 5)
        return None

    proxy.fault = plan
    download(bucket.url, tmp_path / "copy", options=S3Options(timeout=1.0, part_bytes=PART))
    assert tree(tmp_path / "copy") == tree(folder)
    asked = [r.range for r in proxy.log if r.key.endswith("large.bin") and r.method == "GET"]
    assert asked.count(f"bytes=0-{PART - 1}") == 2
    assert len(asked) == 4, "other ranges of the file are not asked for again"


def test_a_block_that_is_always_wrong_is_refused(folder: Path, bucket: Any, proxy: Any, tmp_path: Path) -> None:
    upload(folder, bucket.url, options=OPTIONS)
    proxy.fault = lambda r: ("flip", 12345) if r.method == "GET" and r.key.endswith("large.bin") else None
    with pytest.raises(DataError, match="not those that were uploaded, 4 times over"):
        download(bucket.url, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
