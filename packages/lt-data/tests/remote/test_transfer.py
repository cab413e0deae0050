"""Uploads and downloads against a real server: what is sent, in which order, what is taken up, what is refused."""

import builtins
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lt_data import DataError, Tokenizer, TokenStore, join, pack, prepare
from lt_data.__main__ import main
from lt_data.packing.packs import verify_packs
from lt_data.remote.contents import LISTING
from lt_data.remote.fetching import download
from lt_data.remote.parcel import of_bucket
from lt_data.remote.s3 import RemoteError, S3Folder, S3Options
from lt_data.remote.sending import plan_upload, send, upload

PART = 5 * 2**20
SECRET = "a/Secret+AccessKeyOfNobody0123456789abcd"
SMALL_PARTS = S3Options(part_bytes=PART, connections=4)


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a file of three parts, one of exactly one part, small ones and an empty one."""
    folder = tmp_path / "files"
    (folder / "sub" / "deep").mkdir(parents=True)
    rng = np.random.default_rng(3)
    (folder / "large.bin").write_bytes(rng.bytes(2 * PART + 1234567))
    (folder / "one-part.bin").write_bytes(rng.bytes(PART))
    (folder / "sub" / "é 東京.txt").write_bytes(b"text")
    (folder / "sub" / "deep" / "empty").write_bytes(b"")
    return folder


def test_a_store_goes_up_and_comes_down(store: TokenStore, bucket: Any, proxy: Any, tmp_path: Path) -> None:
    pack(store, seq_len=64)
    before = tree(store.path)
    done = upload(store.path, bucket.url)
    objects = bucket.objects()
    listing = json.loads(objects.pop(LISTING))
    assert objects == before
    assert set(listing["files"]) == set(before)
    # Each once: a request that a busy machine answers late is sent again.
    puts = list(dict.fromkeys(request.key.removeprefix("data/store/") for request in proxy.sent("PUT")))
    assert puts[-2:] == [LISTING, "manifest.json"], "what makes the store whole comes last"
    assert sorted(puts) == sorted([*before, LISTING])
    assert puts.index("packs/bfd-64/pack.json") > max(i for i, name in enumerate(puts) if name.endswith(".npy"))
    assert set(done.sent) == set(before) - {"manifest.json"}
    assert done.n_bytes == sum(len(before[name]) for name in done.sent)

    got = download(bucket.url, tmp_path / "copy")
    assert tree(tmp_path / "copy") == before
    assert (got.files, got.n_bytes, got.fetched) == (len(before), sum(map(len, before.values())), done.n_bytes)
    copy = TokenStore(tmp_path / "copy")
    copy.verify()
    assert verify_packs(copy) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "store"], "nothing is left beside it"


def test_what_is_there_is_not_sent_or_fetched_again(store: TokenStore, bucket: Any, proxy: Any, tmp_path: Path) -> None:
    upload(store.path, bucket.url)
    download(bucket.url, tmp_path / "copy")
    proxy.log.clear()
    again = upload(store.path, bucket.url)
    assert (again.sent, again.n_bytes) == ((), 0)
    assert not [request for request in proxy.log if request.changes]
    proxy.log.clear()
    assert download(bucket.url, tmp_path / "copy").fetched == 0
    assert not [r for r in proxy.sent("GET") if "shards" in r.key]


def test_an_object_of_the_same_size_with_other_bytes_is_replaced(store: TokenStore, bucket: Any) -> None:
    upload(store.path, bucket.url)
    name = "shards/00001.bin"
    content = bucket.objects()[name]
    bucket.put(name, content[:-1] + bytes([content[-1] ^ 1]))
    assert upload(store.path, bucket.url).sent == (name,)
    assert bucket.objects()[name] == content


def test_packs_made_later_follow_and_those_gone_are_removed(store: TokenStore, bucket: Any, proxy: Any) -> None:
    pack(store, seq_len=64)
    upload(store.path, bucket.url)
    (store.path / "packs" / "bfd-64").rename(store.path / "packs" / "renamed")
    pack(store, seq_len=32)
    proxy.log.clear()
    sent = upload(store.path, bucket.url).sent
    assert {name.split("/")[1] for name in sent} == {"bfd-32", "renamed"}
    objects = bucket.objects()
    del objects[LISTING]
    assert objects == tree(store.path)
    assert "data/store/manifest.json" not in [r.key for r in proxy.log if r.changes], "it stood all the time"


def test_large_files_go_in_parts_and_only_whole_files_are_kept(
    files: Path, bucket: Any, proxy: Any, tmp_path: Path
) -> None:
    proxy.fault = lambda r: ("status", 403, "AccessDenied") if r.query.get("partNumber") == ["3"] else None
    with pytest.raises(RemoteError, match="AccessDenied"):
        upload(files, bucket.url, options=SMALL_PARTS)
    assert bucket.unfinished() == [], "it would be paid for and never be seen"
    assert "large.bin" not in bucket.objects()
    assert LISTING not in bucket.objects()
    with pytest.raises(DataError, match=r"an upload that has not ended|there is nothing"):
        download(bucket.url, tmp_path / "copy")
    there = set(bucket.objects())
    proxy.fault = lambda r: None
    proxy.log.clear()
    done = upload(files, bucket.url, options=SMALL_PARTS)
    assert {r.query["partNumber"][0] for r in proxy.log if r.operation == "PUT uploadId"} == {"1", "2", "3"}
    assert set(done.sent) == set(tree(files)) - there
    objects = bucket.objects()
    del objects[LISTING]
    assert objects == tree(files)
    assert upload(files, bucket.url, options=SMALL_PARTS).sent == ()
    download(bucket.url, tmp_path / "copy", options=SMALL_PARTS)
    assert tree(tmp_path / "copy") == tree(files)


def test_parts_that_a_killed_upload_left_are_given_up(files: Path, bucket: Any) -> None:
    key = "data/store/large.bin"
    upload_id = bucket.client.create_multipart_upload(Bucket=bucket.name, Key=key)["UploadId"]
    part = {"Bucket": bucket.name, "Key": key, "UploadId": upload_id, "PartNumber": 1}
    bucket.client.upload_part(**part, Body=bytes(PART))
    bucket.client.create_multipart_upload(Bucket=bucket.name, Key="data/store/of-somebody")
    upload(files, bucket.url, options=SMALL_PARTS)
    assert bucket.unfinished() == ["of-somebody"]
    assert bucket.objects()["large.bin"] == (files / "large.bin").read_bytes()


def test_a_large_file_that_is_not_its_manifests_is_not_made(files: Path, bucket: Any) -> None:
    """It is found out at the last part, so the upload in parts is given up."""
    plan = plan_upload(files, S3Folder(bucket.url, SMALL_PARTS))
    hashes = {"large.bin": "00" * 32}
    with pytest.raises(DataError, match=r"large\.bin: its SHA-256 is not the one in the store's manifest"):
        send(replace(plan, parcel=replace(plan.parcel, hashes=hashes)))
    assert not {"large.bin", LISTING} & set(bucket.objects())
    assert bucket.unfinished() == []


def test_something_else_that_is_there_gives_way_only_when_asked(
    store: TokenStore, files: Path, bucket: Any, proxy: Any
) -> None:
    upload(files, bucket.url)
    bucket.put("notes.txt", b"of somebody")
    before = bucket.objects()
    with pytest.raises(DataError, match="something else is there"):
        upload(store.path, bucket.url)
    assert bucket.objects() == before
    proxy.log.clear()
    done = upload(store.path, bucket.url, overwrite=True)
    objects = bucket.objects()
    assert objects.pop("notes.txt") == b"of somebody"
    assert done.others == 1
    del objects[LISTING]
    assert objects == tree(store.path)
    changes = [(r.operation, r.key) for r in proxy.log if r.changes]
    assert changes[0][0] == "POST delete"
    with pytest.raises(DataError, match="something else is there"):
        upload(files, bucket.url)


def test_a_damaged_store_is_not_uploaded(store: TokenStore, bucket: Any) -> None:
    path = store.path / "shards" / "00001.bin"
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 4]) + content[101:])
    with pytest.raises(DataError, match=r"00001\.bin: its SHA-256 is not the one in the store's manifest"):
        upload(store.path, bucket.url)
    assert not {"manifest.json", LISTING, "shards/00001.bin"} & set(bucket.objects())
    path.write_bytes(content[:-2])
    with pytest.raises(DataError, match="bytes, the manifest says"):
        upload(store.path, bucket.url)
    assert bucket.unfinished() == []


def test_a_store_that_another_program_copied(store: TokenStore, bucket: Any, tmp_path: Path) -> None:
    pack(store, seq_len=64)
    for name, content in tree(store.path).items():
        bucket.put(name, content)
    download(bucket.url, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(store.path)
    for name in ("shards/00000.bin", "packs/bfd-64/start.npy", "tokenizer/tokenizer.json"):
        content = tree(store.path)[name]
        bucket.put(name, content[:-1] + bytes([content[-1] ^ 1]))
        target = tmp_path / Path(name).stem
        with pytest.raises(DataError):
            download(bucket.url, target)
        assert not target.exists()
        bucket.put(name, content)
        download(bucket.url, target)
        assert tree(target) == tree(store.path)


def test_sources_and_columns_of_documents_go_along(
    tokenizer: Tokenizer, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    monkeypatch.setattr("lt_data.sources.reader.MAX_LISTED_SOURCES", 1)
    for name in "ab":
        lines = [json.dumps({"text": f"{name} {n}", "n": n}) for n in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    prepare(
        [tmp_path / "a.jsonl", tmp_path / "b.jsonl"],
        tokenizer=tokenizer,
        out=tmp_path / "store",
        keep=["n:int"],
        shard_tokens=100,
    )
    before = tree(tmp_path / "store")
    assert {"sources.jsonl", "shards/00001.src", "shards/00001.arrow"} <= set(before)
    upload(tmp_path / "store", bucket.url)
    download(bucket.url, tmp_path / "copy")
    assert tree(tmp_path / "copy") == before
    remote = TokenStore(bucket.url, cache=tmp_path / "cache")
    assert (str(remote.document_source(45)), remote.document_columns(45)) == (f"{tmp_path}/b.jsonl:16", {"n": 15})
    remote.verify()
    bucket.delete(LISTING)  # as another program copies it
    for name in ("sources.jsonl", "shards/00001.src", "shards/00001.arrow"):
        bucket.put(name, before[name][:-1] + b"?")
        with pytest.raises(DataError):
            download(bucket.url, tmp_path / f"bad{Path(name).suffix}")
        bucket.put(name, before[name])
    download(bucket.url, tmp_path / "again")
    assert tree(tmp_path / "again") == before


def test_objects_that_are_missing_or_cut_are_told_before_anything_is_fetched(
    store: TokenStore, bucket: Any, tmp_path: Path
) -> None:
    upload(store.path, bucket.url)
    content = bucket.objects()["shards/00000.bin"]
    bucket.put("shards/00000.bin", content[:-1])
    with pytest.raises(DataError, match=rf"00000\.bin has {len(content) - 1} bytes, not {len(content)}"):
        download(bucket.url, tmp_path / "copy")
    bucket.delete("shards/00000.bin")
    with pytest.raises(DataError, match=r"00000\.bin is not there"):
        download(bucket.url, tmp_path / "copy")
    bucket.put("shards/00000.bin", content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="not those that were uploaded"):
        download(bucket.url, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    bucket.put("shards/00000.bin", content)
    download(bucket.url, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(store.path)


def test_a_download_goes_on_where_it_was(files: Path, bucket: Any, proxy: Any, tmp_path: Path) -> None:
    upload(files, bucket.url)
    proxy.fault = lambda r: (
        ("status", 403, "AccessDenied") if r.method == "GET" and r.range == f"bytes={PART}-{2 * PART - 1}" else None
    )
    with pytest.raises(RemoteError, match="AccessDenied"):
        download(bucket.url, tmp_path / "copy", options=S3Options(connections=1, part_bytes=PART))
    assert not (tmp_path / "copy").exists()
    (building,) = tmp_path.glob(".copy.*.download")
    kept = {path.relative_to(building / "files").as_posix() for path in (building / "files").rglob("*")}
    proxy.fault = lambda r: None
    proxy.log.clear()
    got = download(bucket.url, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(files)
    asked = {r.key.partition("/store/")[2] for r in proxy.log if r.method == "GET" and "/store/" in r.key}
    fetched = asked - {LISTING, "manifest.json"}
    assert fetched == set(tree(files)) - kept
    assert "large.bin" in fetched
    assert got.fetched == sum(len(tree(files)[name]) for name in fetched)


def test_complete_files_of_an_earlier_download_are_verified(
    files: Path, bucket: Any, proxy: Any, tmp_path: Path
) -> None:
    upload(files, bucket.url)
    proxy.fault = lambda r: ("status", 403, "AccessDenied") if "sub/" in r.key and r.method == "GET" else None
    with pytest.raises(RemoteError):
        download(bucket.url, tmp_path / "copy", options=S3Options(connections=1))
    (building,) = tmp_path.glob(".copy.*.download")
    left = building / "files" / "one-part.bin"
    content = left.read_bytes()
    left.write_bytes(bytes(10) + content[10:])
    proxy.fault = lambda r: None
    download(bucket.url, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(files)


def test_all_that_was_fetched_is_on_the_disk_before_it_has_its_name(
    files: Path, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(files, bucket.url)
    synced: set[int] = set()
    target = tmp_path / "new" / "copy"

    def fsync(descriptor: int) -> None:
        only_the_parent_after = not target.exists() or os.path.samestat(os.fstat(descriptor), target.parent.stat())
        assert only_the_parent_after
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr("lt_data.storage.os.fsync", fsync)
    download(bucket.url, target)
    for path in (target, target.parent, tmp_path, *target.rglob("*")):
        assert path.stat().st_ino in synced, path


def test_something_else_at_the_target_stays(store: TokenStore, bucket: Any, tmp_path: Path) -> None:
    upload(store.path, bucket.url)
    target = tmp_path / "copy"
    target.write_text("mine", encoding="utf-8")
    with pytest.raises(DataError, match="is there already"):
        download(bucket.url, target)
    assert target.read_text(encoding="utf-8") == "mine"
    target.unlink()
    download(bucket.url, target)
    name = target / "shards" / "00000.bin"
    name.write_bytes(name.read_bytes()[::-1])
    with pytest.raises(DataError, match="is there already"):
        download(bucket.url, target)


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "a//b", "", ".", "a/..", "a\x00b"])
def test_a_listing_cannot_name_a_file_elsewhere(name: str, bucket: Any, tmp_path: Path) -> None:
    files = {name: {"bytes": 0, "sha256": "00" * 32, "blocks": ""}}
    listing = {"format": "lt-data-files", "version": 1, "block_bytes": 2**20, "files": files}
    bucket.put(LISTING, json.dumps(listing).encode())
    with pytest.raises(DataError, match="is no name of a file in a folder"):
        download(bucket.url, tmp_path / "inner" / "copy")
    assert [*tmp_path.iterdir()] == []


def test_a_download_writes_through_no_link(files: Path, bucket: Any, tmp_path: Path) -> None:
    upload(files, bucket.url)
    (tmp_path / "victim").mkdir()
    (tmp_path / "copy").symlink_to("victim")
    with pytest.raises(DataError, match="copy: is there already"):
        download(bucket.url, tmp_path / "copy")
    building = tmp_path / f".other.{of_bucket(S3Folder(bucket.url)).identity[:16]}.download"
    building.mkdir()
    (building / "files").symlink_to(tmp_path / "victim")
    with pytest.raises(DataError, match=r"files: a symbolic link; remove it"):
        download(bucket.url, tmp_path / "other")
    assert [*(tmp_path / "victim").iterdir()] == []


def test_what_is_no_plain_file_is_refused(files: Path, bucket: Any, tmp_path: Path) -> None:
    (files / "link").symlink_to(files / "large.bin")
    with pytest.raises(DataError, match="link: not a plain file"):
        upload(files, bucket.url)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(DataError, match=r"nothing to upload|No such file"):
            upload(folder, bucket.url)
    assert bucket.objects() == {}


def test_a_file_that_changes_meanwhile(files: Path, bucket: Any, proxy: Any) -> None:
    def cut(request: Any) -> None:
        if request.operation == "POST uploads":
            with open(files / "large.bin", "r+b") as file:
                file.truncate(PART + 5)

    proxy.fault = cut
    with pytest.raises(DataError, match="something is changing it"):
        upload(files, bucket.url, options=SMALL_PARTS)
    assert LISTING not in bucket.objects()


# Errors, each with its remedy


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (("status", 403, "AccessDenied"), "allow s3:ListBucket"),
        (("status", 403, "InvalidAccessKeyId"), "does not know the credentials"),
        (("status", 400, "ExpiredToken"), "the credentials have expired"),
        (("status", 404, "NoSuchBucket"), "no such bucket"),
        (("status", 503, "SlowDown"), "S3 is busy"),
        (("reset",), "check the network"),
    ],
)
def test_refusals_are_told_with_a_remedy(
    fault: tuple[Any, ...], message: str, store: TokenStore, bucket: Any, proxy: Any, tmp_path: Path
) -> None:
    proxy.fault = lambda r: fault if r.method != "HEAD" else None  # a HEAD has no body, and so other words
    bucket.put("manifest.json", b"{}")
    for work in (lambda: upload(store.path, bucket.url), lambda: download(bucket.url, tmp_path / "copy")):
        with pytest.raises(RemoteError, match=message) as caught:
            work()
        assert bucket.url in str(caught.value)
        assert SECRET not in str(caught.value)
    proxy.fault = lambda r: fault
    with pytest.raises(RemoteError):
        download(bucket.url, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_bucket_that_is_not_there(store: TokenStore, proxy: Any, bucket: Any, tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="no such bucket"):
        upload(store.path, "s3://nobody-has-this-bucket/x")
    with pytest.raises(DataError, match=r"no such bucket|there is nothing"):
        download("s3://nobody-has-this-bucket/x", tmp_path / "copy")
    with pytest.raises(DataError, match="there is nothing; check the address"):
        download(f"s3://{bucket.name}/elsewhere", tmp_path / "copy")


def test_no_credentials(proxy: Any, store: TokenStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    options = S3Options(endpoint_url=proxy.url)
    with pytest.raises(RemoteError, match="no credentials: set AWS_ACCESS_KEY_ID"):
        upload(store.path, "s3://bucket/x", options=options)
    assert proxy.log == []


@pytest.mark.parametrize(
    "url", ["bucket/x", "s3://", "s3://b", "s3://bucket/a/../b", "s3://bucket//a", "gs://bucket/a"]
)
def test_addresses_that_are_none(url: str, store: TokenStore) -> None:
    with pytest.raises(DataError, match="must be s3://bucket/folder"):
        upload(store.path, url)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"endpoint_url": "s3.example.org"}, "endpoint_url='s3.example.org'"),
        ({"connections": 0}, "connections=0"),
        ({"timeout": 0.0}, "timeout=0.0"),
        ({"part_bytes": 2**20}, "part_bytes=1048576"),
        ({"part_bytes": 6 * 2**20 + 1}, "part_bytes="),
    ],
)
def test_options_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        S3Options(**values)


def test_without_boto3(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> ModuleType:
        if name.split(".")[0] == "boto3":
            raise ModuleNotFoundError("No module named 'boto3'", name="boto3")
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r'pip install "lt-data\[s3\]"'):
        upload(store.path, "s3://bucket/x")


# The commands


def test_commands(
    store: TokenStore,
    bucket: Any,
    proxy: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")

    def run(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["lt-data", *map(str, arguments)])
        code = main()
        return (code or 0, *capsys.readouterr())

    code, out, err = run("upload", store.path, bucket.url, "--endpoint-url", proxy.url)
    assert code == 0, err
    assert out.startswith(f"{bucket.url}: ")
    assert "upload: " in err
    assert "bytes/s" in err
    code, out, err = run("download", bucket.url, tmp_path / "copy", "--endpoint-url", proxy.url)
    assert code == 0, err
    assert "verified" in out
    assert [line.split(":")[0] for line in err.splitlines()] == ["download"]
    assert tree(tmp_path / "copy") == tree(store.path)
    code, out, err = run("upload", tmp_path / "nowhere", bucket.url, "--endpoint-url", proxy.url)
    assert (code, out) == (64, "")
    assert err.startswith("error: ")


def test_importing_the_package_loads_no_boto3() -> None:
    import subprocess

    code = "import sys, lt_data.remote.sending, lt_data.remote.fetching, lt_data.cli; sys.exit('boto3' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("listed", [1, 1000])
def test_a_joined_store_goes_up_with_sources_and_columns(
    tokenizer: Tokenizer, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: int
) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    for module in ("sources.reader", "store.combined_manifest"):
        monkeypatch.setattr(f"lt_data.{module}.MAX_LISTED_SOURCES", listed)
    joined = tmp_path / "joined"
    for name in "abc":
        lines = [json.dumps({"text": f"{name} {n}", "n": n}) for n in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        prepare([tmp_path / f"{name}.jsonl"], tokenizer=tokenizer, out=joined / name, keep=["n:int"], shard_tokens=100)
    join(joined, [joined / name for name in "abc"])
    store = TokenStore(joined)
    expected = [(str(store.document_source(i)), store.document_columns(i)) for i in range(90)]
    assert upload(joined, bucket.url).sent
    assert upload(joined, bucket.url).sent == ()
    download(bucket.url, tmp_path / "copy")
    for copy in (TokenStore(tmp_path / "copy"), TokenStore(bucket.url, cache=tmp_path / "cache")):
        assert [(str(copy.document_source(i)), copy.document_columns(i)) for i in range(90)] == expected
        assert copy.manifest.fingerprint == store.manifest.fingerprint
        copy.verify()
    damaged = joined / "c/shards/00000.src"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match="SHA-256"):
        upload(joined, f"{bucket.url}-2")
