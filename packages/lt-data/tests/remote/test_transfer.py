"""Folders go up and come down whole or not at all, through a network that cuts, loses and spoils, and over kills.

A kill at the n-th request leaves in the bucket what a network leaves that is gone from then on. LT_SEED chooses faults.
"""

import contextlib
import hashlib
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_data import DataError
from lt_data.remote.download import download
from lt_data.remote.file_list import LIST, DamagedError, FileList, ListedFile, decode_list
from lt_data.remote.s3_folder import RemoteError, UnreachableError
from lt_data.remote.upload import upload

SEED = int(os.environ.get("LT_SEED", "0"))
LARGE = "notes/large.bin"
Tree = Callable[[Path], dict[str, bytes]]


def changes(proxy: Any) -> list[str]:
    return [request.key.removeprefix("data/store/") for request in proxy.log if request.changes]


def test_a_folder_goes_up_with_its_manifest_last_and_comes_down(folder, bucket, proxy, tree, tmp_path, monkeypatch):
    done = upload(folder, bucket.url)
    objects = bucket.objects()
    files = decode_list(objects.pop(LIST), LIST).files
    assert objects == tree(folder)
    assert (set(done.sent), done.kept, done.n_bytes) == (set(objects), (), sum(map(len, objects.values())))
    assert {name: (file.n_bytes, file.digest) for name, file in files.items()} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in objects.items()
    }
    assert changes(proxy)[-2:] == ["manifest.json", LIST]
    assert Counter(changes(proxy))[LARGE] == 5, "three parts, their beginning and their end"

    synced: set[int] = set()
    target = tmp_path / "new" / "copy"

    def fsync(descriptor: int) -> None:
        assert not target.exists() or os.path.samestat(os.fstat(descriptor), target.parent.stat())
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr("lt_data.storage.os.fsync", fsync)
    fetched = download(bucket.url, target)
    assert (set(fetched.fetched), fetched.n_bytes) == (set(objects), done.n_bytes)
    assert tree(target) == objects
    assert [*target.parent.iterdir()] == [target]
    assert {path.stat().st_ino for path in (target.parent, target, *target.rglob("*"))} <= synced

    proxy.log.clear()
    assert upload(folder, bucket.url).sent == ()
    assert download(bucket.url, target).fetched == ()
    assert changes(proxy) == []
    assert not [request for request in proxy.log if request.key.endswith(".bin") and request.method == "GET"]


def test_what_is_cut_or_other_is_sent_again_and_the_rest_is_kept(folder, bucket, proxy, tree):
    proxy.fault = lambda r: ("status", 403, "AccessDenied") if r.key.endswith("manifest.json") and r.changes else None
    with pytest.raises(RemoteError, match="AccessDenied"):
        upload(folder, bucket.url)
    assert not {LIST, "manifest.json"} & set(bucket.objects())
    proxy.fault = lambda r: None
    bucket.put("shards/00000.idx", (folder / "shards" / "00000.idx").read_bytes()[:-1])  # cut
    bucket.put("notes/größe 1.txt", b"")  # of another program
    left = bucket.client.create_multipart_upload(**bucket.at(LARGE))["UploadId"]  # of a killed upload
    bucket.client.upload_part(**bucket.at(LARGE), UploadId=left, PartNumber=1, Body=b"part")
    done = upload(folder, bucket.url)
    assert set(done.sent) == {"shards/00000.idx", "notes/größe 1.txt", "manifest.json"}
    assert set(done.kept) == set(tree(folder)) - set(done.sent)
    assert bucket.objects().items() >= tree(folder).items()
    assert bucket.unfinished() == []


def test_something_else_gives_way_only_when_asked(folder, bucket, proxy, tree):
    upload(folder, bucket.url)
    (folder / "more").touch()
    assert upload(folder, bucket.url).sent == ("more",), "a folder may grow"
    before = bucket.objects()
    (folder / LARGE).rename(folder / "other.bin")
    bucket.put("of another", b"")
    with pytest.raises(DataError, match="something else is there; give another address, or overwrite it"):
        upload(folder, bucket.url)
    assert bucket.objects() == {**before, "of another": b""}
    proxy.log.clear()
    assert set(upload(folder, bucket.url, overwrite=True).sent) == set(tree(folder))
    assert [request.operation for request in proxy.log if request.changes][:3] == ["POST delete"] * 3
    objects = bucket.objects()
    assert objects.pop(LIST) != before[LIST]
    assert objects == {**tree(folder), "of another": b""}
    assert upload(folder, bucket.url).sent == ()
    bucket.put(LIST, b"{")
    with pytest.raises(DataError, match="something else is there"):
        upload(folder, bucket.url)


def test_a_list_of_the_callers_own(folder, bucket, proxy, tree, tmp_path):
    """Its digests are of any kind, each file is compared before it is sent, and its last files are sent last."""

    def digest(path: Path, name: str) -> str:
        return f"{len(name)} {path.read_bytes()[:4]!r}"

    named = {name: ListedFile(len(data), digest(folder / name, name)) for name, data in tree(folder).items()}
    files = FileList(source="own", files=named, last=("manifest.json", "notes/größe 1.txt"), digest=digest)
    upload(folder, bucket.url, files=files)
    assert changes(proxy)[-2:] == ["manifest.json", "notes/größe 1.txt"]
    assert bucket.objects() == tree(folder), "no other list is made"
    download(bucket.url, tmp_path / "copy", files=files)
    assert tree(tmp_path / "copy") == tree(folder)

    bucket.put(LARGE, b"other" + bytes(named[LARGE].n_bytes - 5))
    with pytest.raises(DamagedError, match=r"large\.bin: its bytes are not those"):
        download(bucket.url, tmp_path / "second", files=files)
    assert not (tmp_path / "second").exists()
    (folder / LARGE).write_bytes(bytes(named[LARGE].n_bytes))
    with pytest.raises(DamagedError, match=r"large\.bin: is not what its list says"):
        upload(folder, bucket.url, files=files, overwrite=True)
    with pytest.raises(DataError, match=r"own: file name '\.\./a'"):
        FileList(source="own", files={"../a": ListedFile(1, "")})


def test_a_store_that_another_program_copied_comes_down_without_its_packs(store, bucket, tree, tmp_path):
    for name, data in tree(store.path).items():
        bucket.put(name, data)
    download(bucket.url, tmp_path / "copy")
    wanted = {name: data for name, data in tree(store.path).items() if not name.startswith("packs/")}
    assert tree(tmp_path / "copy") == wanted
    bucket.spoil("shards/00001.bin")
    with pytest.raises(DamagedError, match=r"00001\.bin: its bytes are not those"):
        download(bucket.url, tmp_path / "second")


def test_a_download_goes_on_with_the_files_that_are_whole(folder, bucket, proxy, tree, tmp_path):
    upload(folder, bucket.url)
    bucket.spoil("shards/00001.bin")
    with pytest.raises(DamagedError, match=r"00001\.bin: its bytes are not those that were uploaded"):
        download(bucket.url, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    bucket.spoil("shards/00001.bin")  # the same byte again
    (building,) = tmp_path.glob(".copy.*.download")
    left = tree(building)
    assert "shards/00001.bin" not in left
    whole = {name for name, data in left.items() if data == tree(folder)[name] and data}
    spoilt = whole.pop()
    (building / spoilt).write_bytes(bytes(len(left[spoilt])))
    done = download(bucket.url, tmp_path / "copy")
    assert not whole & set(done.fetched)
    assert {spoilt, "shards/00001.bin"} <= set(done.fetched)
    assert tree(tmp_path / "copy") == tree(folder)
    assert not building.exists()


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (("status", 403, "AccessDenied"), RemoteError, "AccessDenied.*what the credentials allow"),
        (("status", 503, "SlowDown"), UnreachableError, "S3 is busy"),
        (("reset",), UnreachableError, "check the network"),
    ],
)
def test_refusals_are_told_with_a_remedy_and_without_a_secret(fault, kind, message, folder, bucket, proxy, tmp_path):
    proxy.fault = lambda r: fault
    for work in (lambda: upload(folder, bucket.url), lambda: download(bucket.url, tmp_path / "copy")):
        with pytest.raises(kind, match=message) as caught:
            work()
        assert bucket.url in str(caught.value)
        assert "Secret" not in str(caught.value)
    assert caught.value.exit_code == (75 if kind is UnreachableError else 64)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    "url", ["bucket/x", "s3://", "s3://b", "s3://bucket/a/../b", "s3://bucket//a", "gs://bucket/a", "s3://me:PA/SS@b/c"]
)
def test_what_cannot_be_uploaded(url, store, tmp_path):
    with pytest.raises(DataError, match="must be s3://bucket/folder") as caught:
        upload(store.path, url)
    assert "PA" not in str(caught.value)
    (store.path / "link").symlink_to("manifest.json")
    for folder, message in ((store.path, "link: not a plain file"), (tmp_path / "none", "there is nothing to upload")):
        with pytest.raises(DataError, match=message):
            upload(folder, "s3://bucket/x")


def test_commands(store, bucket, tree, tmp_path, run):
    code, out, err = run("upload", store.path, bucket.url)
    assert (code, out.startswith(f"{bucket.url}: "), "bytes/s" in err) == (0, True, True)
    code, out, err = run("download", bucket.url, tmp_path / "copy")
    assert (code, "verified" in out) == (0, True)
    assert [line.split(":")[0] for line in err.splitlines()] == ["download"]
    assert tree(tmp_path / "copy") == tree(store.path)
    code, out, err = run("upload", tmp_path / "nowhere", bucket.url)
    assert (code, out, err.startswith("error: ")) == (64, "", True)


# Troubles


def trouble(seed: int) -> tuple[Callable[[Any], tuple[Any, ...] | None], Counter[str]]:
    """Four of ten requests go wrong, but no request more than twice running."""
    rng, running, done = random.Random(seed), Counter[object](), Counter[str]()

    def plan(request: Any) -> tuple[Any, ...] | None:
        name = (request.operation, request.key, request.range, tuple(request.query.get("partNumber", ())))
        if rng.random() > 0.4 or running[name] == 2:
            running[name] = 0
            return None
        running[name] += 1
        kinds: list[tuple[Any, ...]] = [("status", 503, "SlowDown"), ("status", 500, "InternalError"), ("reset",)]
        kinds += [("lost",), ("lost",)]
        if request.method == "GET" and request.key:
            kinds += [("cut", rng.randrange(2**20)), ("flip", rng.randrange(2**30))] * 2
        fault = rng.choice(kinds)
        done[fault[0]] += 1
        return fault

    return plan, done


@pytest.mark.parametrize(
    "seed", [SEED, SEED + 1, *(pytest.param(SEED + n, marks=pytest.mark.slow) for n in range(100, 130))]
)
def test_transfers_in_trouble(seed, folder, bucket, proxy, tree, tmp_path):
    wanted, target = tree(folder), tmp_path / "copy"
    for work in (lambda: upload(folder, bucket.url), lambda: download(bucket.url, target)):
        proxy.fault, done = trouble(seed)
        for _ in range(40):  # what boto3 gives up is taken up by the next call
            try:
                work()
            except DataError:
                objects = bucket.objects()
                assert LIST not in objects or wanted.items() <= objects.items(), "whole, or not there"
                assert not target.exists()
            else:
                break
        else:
            raise AssertionError("forty calls were not enough")
        assert sum(done.values()) > 3
        proxy.fault = lambda r: None
        objects = bucket.objects()
        assert objects.pop(LIST)
        assert objects == wanted
        assert bucket.unfinished() == []
    assert tree(target) == wanted


@pytest.mark.parametrize("first", [1, 9, pytest.param(0, marks=pytest.mark.slow)])
def test_uploads_that_end_at_a_request(first, folder, bucket, proxy, tree):
    """At every eighth request, or at each one; the next call makes it whole."""
    wanted, ended = tree(folder), 0
    for last in range(first, 60, 8) if first else range(1, 60):
        count = itertools.count(1)
        proxy.fault = lambda r, count=count, last=last: ("reset",) if next(count) > last else None
        with contextlib.suppress(UnreachableError):
            upload(folder, bucket.url)
            break
        ended += 1
        proxy.fault = lambda r: None
        objects = bucket.objects()
        assert all(wanted[name] == content for name, content in objects.items() if name != LIST)
        assert not {"manifest.json", LIST} & set(objects) or wanted.keys() <= objects.keys(), "whole, or not there"
        if last % 3:  # or the next one goes on where this one ended
            upload(folder, bucket.url)
            objects = bucket.objects()
            assert json.loads(objects.pop(LIST))["files"].keys() == wanted.keys()
            assert objects == wanted
            assert bucket.unfinished() == []
            for name in bucket.objects():
                bucket.delete(name)
    assert ended > 2
