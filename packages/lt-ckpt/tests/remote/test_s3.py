"""Uploads and downloads: bit for bit, whole or not at all, continued where they were cut off."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from nxd_trees import save_nxd
from typer.testing import CliRunner

from lt_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    Shard,
    begin_save,
    commit_save,
    list_steps,
    verify,
    write_rank_files,
)
from lt_ckpt.cli import app
from lt_ckpt.manifest import make_commit
from lt_ckpt.s3.mirror import delete_remote_checkpoint
from lt_ckpt.s3.transfer import check_upload_access, download, download_latest, find_latest_remote, upload
from lt_data import DataError
from lt_data.remote.file_list import DamagedError
from lt_data.remote.s3_folder import PART_BYTES, RemoteError, S3Folder, UnreachableError


def tree(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
    }


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def save_large(root, step):
    """A checkpoint whose second group is sent in three parts."""
    rng = np.random.default_rng(step)
    tmp = begin_save(root, step=step, world_size=1)
    shards = []
    for group, n_bytes in (("exp_avg", 1000), ("weights", 2 * PART_BYTES + 12345)):
        data = rng.integers(0, 256, n_bytes, dtype=np.uint8)
        size = (n_bytes,)
        shards.append(Shard(group=group, name="w", dtype="U8", global_shape=size, offset=(0,), shape=size, data=data))
    write_rank_files(tmp, rank=0, shards=shards)
    return commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=step))


def command(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return " ".join(done.output.split())


@pytest.mark.parametrize("kind", ["toy", "large", "nxd"])
def test_there_and_back_bit_for_bit(store, bucket, toy, tmp_path, kind):
    root, url = tmp_path / "here", f"s3://{bucket}/run/step-00000001"
    path = {
        "toy": lambda: toy.save(root, 1, world=3),
        "large": lambda: save_large(root, 1),
        "nxd": lambda: save_nxd(root, 1),
    }[kind]()
    n_files, n_bytes = len(tree(path)), sum(map(len, tree(path).values()))
    text = command("upload", path, url)
    assert text.startswith(f"{path} uploaded to {url}: {n_files} files sent (")
    assert {name.removeprefix("run/step-00000001/"): data for name, data in store.objects(bucket).items()} == tree(path)
    written = [key.rpartition("/")[2] for operation, key in store.log if operation == "PutObject"]
    assert written[-2:] == ["manifest.json", "COMMIT"]
    store.log.clear()
    assert command("upload", path, url).endswith(f": 0 files sent (0 bytes), {n_files} already present")
    assert {operation for operation, _ in store.log} <= {"ListObjectsV2", "HeadObject", "ListMultipartUploads"}
    told = []
    there = tmp_path / "machine" / "checkpoints" / "step-00000001"
    assert download(f"{url}/", there, progress=lambda *args: told.append(args)).n_bytes == n_bytes
    assert told[-1] == (n_bytes, n_bytes, "bytes")
    assert tree(there) == tree(path)
    assert verify(there).is_ok
    assert os.listdir(there.parent) == [there.name]
    assert command("download", url, there).endswith(f"), {n_files} already present, verified")
    flip(there / "manifest.json")
    with pytest.raises(DataError, match="is there already and is not what lies at"):
        download(url, there)
    name = next(name for name in tree(path) if name.endswith(("weights-00000.safetensors", "tensor_3.pt")))
    flip(path / name)
    with pytest.raises(DamagedError, match=f"{name}: is not what its list says"):
        upload(path, f"s3://{bucket}/again/step-00000001")
    assert f"again/step-00000001/{name}" not in store.names(bucket)
    assert "again/step-00000001/COMMIT" not in store.names(bucket)
    assert delete_remote_checkpoint(S3Folder(url))
    assert not any(key.startswith("run/") for key in store.names(bucket))


def test_an_upload_that_fails_at_any_request_is_no_checkpoint_and_is_continued(store, bucket, toy, tmp_path):
    path = toy.save(tmp_path, 3, world=1)
    root = S3Folder(f"s3://{bucket}")
    upload(path, root.subfolder("dry/step-00000003"))
    n_requests = len(store.log)
    for index in range(n_requests):
        url = root.subfolder(f"{index}")
        store.fail_at = len(store.log) + index
        with pytest.raises(UnreachableError, match="EndpointConnectionError; check the network") as caught:
            upload(path, url.subfolder("step-00000003"))
        assert "secret" not in str(caught.value)
        store.fail_at = -1
        assert find_latest_remote(url) is None
        with pytest.raises(DataError, match=r"there is no lt-files\.json"):
            download(url.subfolder("step-00000003"), tmp_path / "back")
        upload(path, url.subfolder("step-00000003"))
        found = find_latest_remote(url)
        assert found is not None
        assert (found[0], found[1].step) == (f"{url.url}/step-00000003", 3)
    assert not (tmp_path / "back").exists()


def test_a_checkpoint_that_replaces_another_is_never_mixed_with_it(store, bucket, toy, tmp_path):
    old, new = (toy.save(tmp_path / name, 3, world=1, seed=seed) for name, seed in (("old", 1), ("new", 2)))
    root = S3Folder(f"s3://{bucket}/x")
    url = root.subfolder("step-00000003")
    upload(old, url)
    with pytest.raises(DataError, match="something else is there"):
        upload(new, url)
    store.log.clear()
    upload(new, url, overwrite=True)
    n_requests = len(store.log)
    outcomes = set()
    for index in range(0, n_requests, 3):
        shutil.rmtree(tmp_path / "back", ignore_errors=True)
        upload(old, url, overwrite=True)
        store.fail_at = len(store.log) + index
        with pytest.raises(UnreachableError):
            upload(new, url, overwrite=True)
        store.fail_at = -1
        found, rejected = download_latest(root, tmp_path / "back")
        if found is None:
            assert "there is no COMMIT" in rejected[0].reason
        else:
            assert tree(found.path) == tree(old)
        outcomes.add(found is None)
    assert outcomes == {True, False}


UPLOADER = """
import sys, time
from lt_ckpt.s3.transfer import upload
from lt_data.remote.s3_folder import PART_BYTES, S3Folder
target = S3Folder(sys.argv[2])
def progress(done, total, unit):
    if done > PART_BYTES:  # in the middle of the large file: wait until the store knows of it
        while not target.client.list_multipart_uploads(Bucket=target._bucket).get("Uploads"):
            time.sleep(0.01)
        print("there", flush=True)
        time.sleep(600)
upload(sys.argv[1], target, progress=progress)
"""


def test_kill_9_in_the_middle_of_a_file(store, bucket, tmp_path):
    path = save_large(tmp_path, 5)
    url = f"s3://{bucket}/run"
    child = subprocess.Popen([sys.executable, "-c", UPLOADER, str(path), f"{url}/{path.name}"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"there\n"
    child.kill()
    child.wait()
    child.stdout.close()
    assert store.unfinished(bucket) == [f"run/{path.name}/weights-00000.safetensors"]
    assert find_latest_remote(url) is None
    upload(path, f"{url}/{path.name}")
    assert store.unfinished(bucket) == []
    found, _ = download_latest(url, tmp_path / "back")
    assert found is not None
    assert tree(found.path) == tree(path)


def test_the_newest_that_is_whole_and_undamaged_is_taken(store, bucket, toy, tmp_path):
    url, here = f"s3://{bucket}/run", tmp_path / "here"
    for step in (1, 2, 3, 4, 5):
        upload(toy.save(tmp_path / "there", step), f"{url}/step-{step:08d}")
    key = "run/step-00000005/weights-00000.safetensors"
    stored = store.client.get_object(Bucket=bucket, Key=key)
    spoiled = stored["Body"].read()[:-1] + b"?"
    store.client.put_object(Bucket=bucket, Key=key, Body=spoiled, Metadata=stored["Metadata"])
    store.client.delete_object(Bucket=bucket, Key="run/step-00000004/COMMIT")
    store.client.put_object(Bucket=bucket, Key="run/step-00000003/rng-00000.safetensors", Body=b"short")
    store.client.put_object(Bucket=bucket, Key="run/step-00000006/../../evil", Body=b"")
    found, rejected = download_latest(url, here)
    assert found is not None
    toy.check(Checkpoint.open(found.path))
    assert (found.path.name, os.listdir(here)) == ("step-00000002", ["step-00000002"])
    assert [item.damaged for item in rejected] == [False, True, False, False]
    for item, reason in zip(rejected[1:], ("is damaged: ", "there is no COMMIT", "has 5 bytes"), strict=True):
        assert reason in item.reason
    store.log.clear()
    found, _ = download_latest(url, here, after_step=4)
    assert found is None
    assert not any("step-00000002" in key for _, key in store.log), "nobody asked for it"
    flip(here / "step-00000002" / "weights-00000.safetensors")
    found, _ = download_latest(url, here, after_step=1)
    assert found is not None
    toy.check(Checkpoint.open(found.path))
    assert sorted(path.name.partition("-0123")[0][:19] for _, path in list_steps(here)) == [
        "step-00000002",
        "step-00000002.aside",
    ]
    toy.save(tmp_path / "valid", 2, seed=9)
    with pytest.raises(CheckpointError, match="another valid checkpoint of this step already exists"):
        download_latest(url, tmp_path / "valid")
    toy.check(Checkpoint.open(tmp_path / "valid" / "step-00000002"), seed=9)
    text = command("download", "--latest", url, tmp_path / "again")
    assert f"skipped {url}/step-00000005: is damaged" in text
    upload(tmp_path / "there/step-00000005", f"{url}/step-00000005", overwrite=True)
    assert verify(download(f"{url}/step-00000005", tmp_path / "sent anew").path).is_ok


def test_other_folders_and_what_is_not_uploaded(store, bucket, toy, tmp_path):
    url, folder = f"s3://{bucket}/m", tmp_path / "hf"
    (folder / "original").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "original/params.json"):
        (folder / name).write_bytes(name.encode() * 100)
    upload(folder, url)
    download(url, tmp_path / "back")
    assert tree(tmp_path / "back") == tree(folder)
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  config.json\n", encoding="utf-8")
    path = toy.save(tmp_path / "root", 1)
    for name in ("linked", "secret", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "linked" / "folder").symlink_to(tmp_path / "root")
    (tmp_path / "secret" / "notes").symlink_to(tmp_path / "hf" / "config.json")
    (path / "COMMIT").rename(tmp_path / "COMMIT")
    before = store.names(bucket)
    for wrong, message in (
        (folder, "SHA256SUMS"),
        (path, "the save was never finished"),
        (tmp_path / "linked", "neither a file nor a folder"),
        (tmp_path / "secret", "is a link to .* outside"),
        (tmp_path / "empty", "contains no file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            upload(wrong, f"s3://{bucket}/other")
    (tmp_path / "COMMIT").rename(path / "COMMIT")
    with pytest.raises(CheckpointError, match="is a folder of checkpoints: choose one"):
        upload(tmp_path / "root", f"s3://{bucket}/other")
    assert store.names(bucket) == before


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "a//b"])
def test_names_of_a_manifest_stay_in_the_folder(store, bucket, toy, tmp_path, name):
    path = toy.save(tmp_path / "here", 1)
    upload(path, f"s3://{bucket}/x")
    manifest = (path / "manifest.json").read_bytes().replace(b"rng-00000.safetensors", name.encode())
    for file, data in (("manifest.json", manifest), ("COMMIT", make_commit(manifest, 1))):
        store.client.put_object(Bucket=bucket, Key=f"x/{file}", Body=data)
    with pytest.raises(ValueError, match=name):
        download(f"s3://{bucket}/x", tmp_path / "there" / "back")
    assert not (tmp_path / "there").exists()


def test_addresses_access_and_messages(store, bucket, aws, tmp_path, monkeypatch):
    check_upload_access(S3Folder(f"s3://{bucket}/run"))
    assert store.objects(bucket) == {}
    with pytest.raises(DataError) as caught:
        download("s3://KEY:topsecret@bucket/x", tmp_path / "x")
    assert "topsecret" not in str(caught.value)
    with pytest.raises(RemoteError, match="NoSuchBucket"):
        check_upload_access(S3Folder("s3://no-such-bucket/x"))
    monkeypatch.undo()
    aws(1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(UnreachableError, match="EndpointConnectionError") as caught:
        find_latest_remote("s3://bucket/x")
    assert caught.value.exit_code == 75


def test_without_lt_data_the_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("lt_ckpt.s3")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lt_data", None)
    with pytest.raises(CheckpointError, match=r"pip install 'lt-ckpt\[s3\]'"):
        command("download", "s3://bucket/x", "y")
