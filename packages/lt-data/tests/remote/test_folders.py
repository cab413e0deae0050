"""Folders go up and come down whole or not at all, however often they are cut off."""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_data import DataError
from lt_data.remote import s3_folder
from lt_data.remote.download import download
from lt_data.remote.file_list import LIST, DamagedError, FileList, ListedFile, decode_list
from lt_data.remote.s3_folder import RemoteError
from lt_data.remote.upload import upload

PART = 5 * 2**20
SEED = int(os.environ.get("LT_SEED", "0"))


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_folder, "PART_BYTES", PART)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a manifest, a subfolder and a file of three parts."""
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "manifest.json").write_text('{"format": "of another program"}')
    (folder / "sub" / "größe 1.txt").write_bytes(b"text")
    (folder / "empty").touch()
    (folder / "large.bin").write_bytes(np.random.default_rng(5).bytes(2 * PART + 54321))
    return folder


def test_a_folder_goes_up_with_its_manifest_last_and_comes_down(
    folder: Path, bucket: Any, proxy: Any, tmp_path: Path
) -> None:
    done = upload(folder, bucket.url)
    assert (set(done.sent), done.kept) == (set(tree(folder)), ())
    objects = bucket.objects()
    files = decode_list(objects.pop(LIST), LIST).files
    assert objects == tree(folder)
    assert {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in objects.items()} == {
        name: (file.n_bytes, file.digest) for name, file in files.items()
    }
    assert [r.key.rpartition("/")[2] for r in proxy.log if r.changes][-2:] == ["manifest.json", LIST]
    fetched = download(bucket.url, tmp_path / "copy")
    assert (set(fetched.fetched), fetched.n_bytes) == (set(objects), sum(map(len, objects.values())))
    assert tree(tmp_path / "copy") == objects
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    proxy.log.clear()
    assert upload(folder, bucket.url).sent == ()
    assert download(bucket.url, tmp_path / "copy").fetched == ()
    assert not [r for r in proxy.log if r.changes]


def test_what_is_cut_or_other_is_sent_again_and_the_rest_is_kept(folder: Path, bucket: Any, proxy: Any) -> None:
    proxy.fault = lambda r: ("status", 403, "AccessDenied") if r.key.endswith("manifest.json") else None
    with pytest.raises(RemoteError, match="AccessDenied"):
        upload(folder, bucket.url)
    assert not {LIST, "manifest.json"} & set(bucket.objects())
    proxy.fault = lambda r: None
    bucket.put("sub/größe 1.txt", b"tex")  # cut
    bucket.put("empty", b"")  # by another program
    done = upload(folder, bucket.url)
    assert (set(done.sent), done.kept) == ({"sub/größe 1.txt", "empty", "manifest.json"}, ("large.bin",))
    assert bucket.objects().items() >= tree(folder).items()


def test_something_else_gives_way_only_when_asked(folder: Path, bucket: Any, proxy: Any) -> None:
    upload(folder, bucket.url)
    before = bucket.objects()
    (folder / "sub" / "größe 1.txt").rename(folder / "other.txt")
    (folder / "manifest.json").write_text('{"format": "of a third program"}')
    bucket.put("of another", b"")
    with pytest.raises(DataError, match="something else is there"):
        upload(folder, bucket.url)
    assert bucket.objects() == {**before, "of another": b""}
    proxy.log.clear()
    assert set(upload(folder, bucket.url, overwrite=True).sent) == set(tree(folder))
    deleted = [request.operation for request in proxy.log if request.changes][:3]
    assert deleted == ["POST delete"] * 3
    objects = bucket.objects()
    assert objects.pop(LIST) != before[LIST]
    assert objects == {**tree(folder), "of another": b""}
    assert upload(folder, bucket.url).sent == ()


def test_a_list_of_the_callers_own(folder: Path, bucket: Any, proxy: Any, tmp_path: Path) -> None:
    """Its digests are of any kind, each file is compared before it is sent, and its last files are sent last."""

    def digest(path: Path, name: str) -> str:
        return f"{len(name)} {path.read_bytes()[:4]!r}"

    named = {name: ListedFile(len(data), digest(folder / name, name)) for name, data in tree(folder).items()}
    files = FileList(source="own", files=named, last=("manifest.json", "sub/größe 1.txt"), digest=digest)
    upload(folder, bucket.url, files=files)
    assert [r.key.rpartition("/")[2] for r in proxy.log if r.changes][-2:] == ["manifest.json", "größe 1.txt"]
    assert bucket.objects() == tree(folder), "no other list is made"
    download(bucket.url, tmp_path / "copy", files=files)
    assert tree(tmp_path / "copy") == tree(folder)

    bucket.put("large.bin", b"other" + bytes(named["large.bin"].n_bytes - 5))
    with pytest.raises(DamagedError, match=r"large\.bin: its bytes are not those"):
        download(bucket.url, tmp_path / "second", files=files)
    assert not (tmp_path / "second").exists()
    (folder / "large.bin").write_bytes(bytes(named["large.bin"].n_bytes))
    with pytest.raises(DamagedError, match=r"large\.bin: is not what its list says"):
        upload(folder, bucket.url, files=files, overwrite=True)
    with pytest.raises(DataError, match=r"own: file name '\.\./a'"):
        FileList(source="own", files={"../a": ListedFile(1, "")})
