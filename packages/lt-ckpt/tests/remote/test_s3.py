"""Uploads and downloads: bit for bit, whole or not at all, continued where they were cut off."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from lt_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    Shard,
    begin_save,
    commit_save,
    verify,
    write_rank_files,
)
from lt_ckpt import files as files_module
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.rank_writer import NxdRankWriter, optimizer_state_keys
from lt_ckpt.s3.client import CHUNK_BYTES, S3Folder, ServiceError
from lt_ckpt.s3.download import download, download_latest, find_latest_remote
from lt_ckpt.s3.file_digest import CheckedReader, DamagedError, digests_from_manifest
from lt_ckpt.s3.mirror import delete_remote_checkpoint
from lt_ckpt.s3.upload import DestinationExistsError, check_upload_access, upload
from lt_model import LlamaConfig


def tree(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
    }


def save_large(root, step):
    """A checkpoint whose second group is sent in three parts."""
    rng = np.random.default_rng(step)
    tmp = begin_save(root, step=step, world_size=1)
    shards = []
    for group, n_bytes in (("exp_avg", 1000), ("weights", 2 * CHUNK_BYTES + 12345)):
        data = rng.integers(0, 256, n_bytes, dtype=np.uint8)
        size = (n_bytes,)
        shards.append(Shard(group=group, name="w", dtype="U8", global_shape=size, offset=(0,), shape=size, data=data))
    write_rank_files(tmp, rank=0, shards=shards)
    return commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=step))


def test_there_and_back_bit_for_bit(store, bucket, toy, tmp_path):
    path = toy.save(tmp_path / "here", 7, world=3)
    reports = []
    done = upload(path, f"s3://{bucket}/run/step-00000007", progress=lambda *args: reports.append(args))
    assert {name.removeprefix("run/step-00000007/"): data for name, data in store.objects(bucket).items()} == tree(path)
    n_bytes = sum(len(data) for name, data in tree(path).items() if name not in ("manifest.json", "COMMIT"))
    assert reports[-1] == (n_bytes, n_bytes, "bytes")
    assert done.n_bytes == n_bytes
    assert done.skipped == ()
    there = tmp_path / "machine" / "checkpoints" / "step-00000007"
    reports.clear()
    assert (
        download(f"s3://{bucket}/run/step-00000007/", there, progress=lambda *args: reports.append(args)).path == there
    )
    assert tree(there) == tree(path)
    assert verify(there).is_ok
    toy.check(Checkpoint.open(there))
    assert os.listdir(there.parent) == [there.name]
    assert reports[-1][0] == reports[-1][1]
    umask = os.umask(0)
    os.umask(umask)
    assert (there / "COMMIT").stat().st_mode & 0o777 == 0o666 & ~umask
    assert download(f"s3://{bucket}/run/step-00000007", there).path == there, "the very same is there"
    (there / "tokenizer" / "tokenizer.json").write_bytes(b"[]")
    with pytest.raises(CheckpointError, match="already exists and differs from"):
        download(f"s3://{bucket}/run/step-00000007", there)


def test_files_of_nxd_there_and_back(store, bucket, tmp_path):
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, n_heads=2, n_kv_heads=2, n_layers=1)
    part = NxdRankWriter(
        config=config,
        options=NxdOptions(xser=True),
        param_group_keys=(optimizer_state_keys(config, NxdOptions(), 0, 0),),
        user_content={"step": 1},
    )
    shards = [
        Shard(
            group=group,
            name=tensor.key,
            dtype="F32",
            global_shape=tensor.shape,
            offset=(0,) * len(tensor.shape),
            shape=tensor.shape,
            data=np.random.default_rng(len(tensor.key)).random(tensor.shape, "<f4").reshape(-1).view(np.uint8),
        )
        for tensor in part.model_tensors()
        for group in ("weights", "exp_avg", "exp_avg_sq", "master")
    ]
    tmp = begin_save(tmp_path / "here", step=1, world_size=1)
    write_rank_files(tmp, rank=0, shards=shards, writer=part)
    tokenizer = {"tokenizer.json": b"{}", "additional_chat_templates/tool_use.jinja": b"{{ tools }}"}
    metadata = CheckpointMetadata(step=1, model=config.to_dict(), tokenizer_files=tokenizer)
    path = commit_save(tmp, world_size=1, metadata=metadata)
    assert {"done", "user_content.pt", *(f"tokenizer/{name}" for name in tokenizer)} <= set(tree(path))
    url = f"s3://{bucket}/run/step-00000001"
    upload(path, url)
    written = [key for operation, key in store.log if operation == "PutObject"]
    assert [key.rpartition("/")[2] for key in written[-3:]] == ["done", "manifest.json", "COMMIT"]
    there = download(url, tmp_path / "there").path
    assert tree(there) == tree(path)
    assert verify(there).is_ok
    # A changed byte here never gets there, in whichever of NxD's files it is.
    name = next(name for name in tree(path) if "optim/" in name and name.endswith("tensor_3.pt"))
    bad = bytearray((path / name).read_bytes())
    bad[-1] ^= 1
    (path / name).write_bytes(bad)
    with pytest.raises(DamagedError, match="have changed since they were written"):
        upload(path, f"s3://{bucket}/again/step-00000001")
    assert delete_remote_checkpoint(S3Folder(url))
    assert not any(key.startswith("run/") for key in store.names(bucket))


def test_large_files_go_in_parts(store, bucket, tmp_path):
    path = save_large(tmp_path, 1)
    upload(path, f"s3://{bucket}/x")
    parts = [key for operation, key in store.log if operation == "UploadPart"]
    assert parts == ["x/weights-00000.safetensors"] * 3
    download(f"s3://{bucket}/x", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(path)


def test_the_order_of_an_upload(store, bucket, toy, tmp_path):
    path = toy.save(tmp_path, 1)
    upload(path, f"s3://{bucket}/x")
    written = [key.removeprefix("x/") for operation, key in store.log if operation == "PutObject"]
    assert written[-2:] == ["manifest.json", "COMMIT"]
    assert len(written) == len(set(written)) == len(tree(path))
    store.log.clear()
    again = upload(path, f"s3://{bucket}/x")
    assert again.uploaded == ()
    assert {operation for operation, _ in store.log} <= {"ListObjectsV2", "HeadObject", "GetObject"}
    store.client.delete_object(Bucket=bucket, Key="x/weights-00001.safetensors")
    store.log.clear()
    again = upload(path, f"s3://{bucket}/x")
    assert again.uploaded == ("weights-00001.safetensors",)
    changes = [(operation, key) for operation, key in store.log if operation[:3] in ("Put", "Del")]
    names = ["weights-00001.safetensors", "manifest.json", "COMMIT"]
    assert changes == [("DeleteObjects", ""), *(("PutObject", f"x/{name}") for name in names)]
    assert {name.removeprefix("x/"): data for name, data in store.objects(bucket).items()} == tree(path)


def test_an_upload_that_fails_at_any_request_is_no_checkpoint_and_is_continued(store, bucket, toy, tmp_path):
    path = toy.save(tmp_path, 3, world=1)
    root = S3Folder(f"s3://{bucket}")
    upload(path, root.subfolder("dry/step-00000003"))
    n_requests = len(store.log)
    assert n_requests == len(tree(path)) + 2
    for index in range(n_requests):
        url = root.subfolder(f"{index}")
        store.log.clear()
        store.fail_at = index
        with pytest.raises(ServiceError, match="EndpointConnectionError; check the network") as caught:
            upload(path, url.subfolder("step-00000003"))
        assert "secret" not in str(caught.value)
        store.fail_at = -1
        found, rejected = find_latest_remote(url)
        assert found is None
        assert [item.url for item in rejected] == ([f"{url.url}/step-00000003"] if index > 2 else [])
        with pytest.raises(CheckpointError, match=r"neither COMMIT nor .lt-upload.json exists"):
            download(url.subfolder("step-00000003"), tmp_path / "back")
        done = upload(path, url.subfolder("step-00000003"))
        assert len(done.skipped) == max(0, min(index - 2, len(tree(path)) - 2))
        assert find_latest_remote(url) == (f"{url.url}/step-00000003", [])
    assert not (tmp_path / "back").exists()


def test_a_checkpoint_that_replaces_another_is_never_mixed_with_it(store, bucket, toy, tmp_path):
    old, new = (toy.save(tmp_path / name, 3, world=1, seed=seed) for name, seed in (("old", 1), ("new", 2)))
    root = S3Folder(f"s3://{bucket}/x")
    url = root.subfolder("step-00000003")
    upload(old, url)
    with pytest.raises(DestinationExistsError, match="a different folder exists there"):
        upload(new, url)
    store.log.clear()
    upload(new, url, overwrite=True)
    n_requests = len(store.log)
    outcomes = set()
    for index in range(0, n_requests, 3):
        shutil.rmtree(tmp_path / "back", ignore_errors=True)
        upload(old, url, overwrite=True)
        store.log.clear()
        store.fail_at = index
        with pytest.raises(ServiceError):
            upload(new, url, overwrite=True)
        store.fail_at = -1
        found, rejected = download_latest(root, tmp_path / "back")
        if found is None:
            assert "neither COMMIT nor" in rejected[0].reason
        else:
            assert tree(found.path) == tree(old)
        outcomes.add(found is None)
    assert outcomes == {True, False}


UPLOADER = """
import sys, time
from lt_ckpt.s3.client import S3Folder, CHUNK_BYTES
from lt_ckpt.s3.upload import upload
target = S3Folder(sys.argv[2])
def progress(done, total, unit):
    if done > CHUNK_BYTES:  # in the middle of the large file: wait until the store knows of it
        while not target._client.list_multipart_uploads(Bucket=target._bucket).get("Uploads"):
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
    assert find_latest_remote(url)[0] is None
    before = store.objects(bucket)
    assert set(before) == {f"run/{path.name}/exp_avg-00000.safetensors"}
    done = upload(path, f"{url}/{path.name}")
    assert done.skipped == ("exp_avg-00000.safetensors",)
    assert store.unfinished(bucket) == []
    found, _ = download_latest(url, tmp_path / "back")
    assert found is not None
    assert tree(found.path) == tree(path)


def test_parts_of_a_failed_upload_are_given_up(store, bucket, tmp_path):
    path = save_large(tmp_path, 1)
    seen = []

    def fail(operation, key):
        if operation == "UploadPart":
            seen.append(key)
            if len(seen) == 2:
                raise ServiceError("planted")

    store.before = fail
    with pytest.raises(ServiceError, match="planted"):
        upload(path, f"s3://{bucket}/x")
    assert ("AbortMultipartUpload", "x/weights-00000.safetensors") in store.log
    assert store.unfinished(bucket) == []
    assert set(store.objects(bucket)) == {"x/exp_avg-00000.safetensors"}


@pytest.mark.parametrize("where", ["header", "first part", "last byte", "small file", "shorter", "longer"])
def test_bytes_that_changed_here_do_not_go_out(store, bucket, tmp_path, where):
    path = save_large(tmp_path, 1)
    name = "exp_avg-00000.safetensors" if where == "small file" else "weights-00000.safetensors"
    data = bytearray((path / name).read_bytes())
    if where == "shorter":
        del data[-1]
    elif where == "longer":
        data += b"x"
    else:
        data[{"header": 20, "first part": 5000}.get(where, -1)] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(DamagedError, match=f"{name}: (its bytes have changed|has .* bytes)"):
        upload(path, f"s3://{bucket}/x")
    assert store.unfinished(bucket) == []
    assert f"x/{name}" not in store.objects(bucket)
    assert "x/COMMIT" not in store.objects(bucket)


def test_what_a_file_must_hold_is_told_by_its_manifest_in_any_order(toy, tmp_path):
    path = toy.save(tmp_path, 1, world=3)
    manifest = Checkpoint.open(path).manifest
    tensors = {g: dict(reversed(members.items())) for g, members in reversed(manifest.tensors.items())}
    contents = digests_from_manifest(replace(manifest, tensors=tensors))
    assert contents == digests_from_manifest(manifest)
    for name, content in contents.items():
        with CheckedReader(path / name, content) as reader:
            assert reader.read() == (path / name).read_bytes()


def test_what_changed_in_the_bucket_is_found_and_the_one_before_is_taken(store, bucket, toy, tmp_path):
    for step in (1, 2, 3, 4):
        upload(toy.save(tmp_path, step), f"s3://{bucket}/run/step-{step:08d}")
    key = "run/step-00000004/weights-00000.safetensors"
    data = bytearray(store.objects(bucket)[key])
    data[-1] ^= 1
    store.client.put_object(Bucket=bucket, Key=key, Body=bytes(data))
    store.client.delete_object(Bucket=bucket, Key="run/step-00000003/COMMIT")
    assert find_latest_remote(f"s3://{bucket}/run") == (f"s3://{bucket}/run/step-00000004", [])
    store.client.put_object(Bucket=bucket, Key="run/step-00000002/rng-00000.safetensors", Body=b"short")
    found, rejected = download_latest(f"s3://{bucket}/run", tmp_path / "back")
    assert found is not None
    toy.check(Checkpoint.open(found.path))
    assert (found.path.name, os.listdir(found.path.parent)) == ("step-00000001", ["step-00000001"])
    reasons = [item.reason for item in rejected]
    assert "is damaged: " in reasons[0]
    assert "have changed" in reasons[0]
    assert "neither COMMIT nor" in reasons[1]
    assert "has 5 bytes" in reasons[2]
    again = upload(tmp_path / "step-00000004", f"s3://{bucket}/run/step-00000004")
    assert again.uploaded == ("weights-00000.safetensors",), "what is there under our hash stays, what is not is sent"
    assert find_latest_remote(f"s3://{bucket}/run")[0] == f"s3://{bucket}/run/step-00000004"
    store.client.delete_object(Bucket=bucket, Key="run/step-00000004/COMMIT")
    assert find_latest_remote(f"s3://{bucket}/run")[0] == f"s3://{bucket}/run/step-00000001", "by the sizes alone"


def test_a_download_that_was_cut_off_is_continued_and_not_believed(store, bucket, toy, tmp_path):
    path = toy.save(tmp_path / "here", 3)
    upload(path, f"s3://{bucket}/x")
    target = tmp_path / "back" / "step-00000003"
    asked: list[str] = []

    def follow(operation, key):
        if operation == "GetObject" and key.endswith(".safetensors"):
            asked.append(key)
            if len(asked) == 4:
                raise ServiceError("planted")

    store.before = follow
    with pytest.raises(ServiceError, match="planted"):
        download(f"s3://{bucket}/x", target)
    assert not target.exists()
    (tmp,) = target.parent.iterdir()
    assert len(list(tmp.glob("*.safetensors"))) == 3
    assert download(f"s3://{bucket}/x", target).path == target
    assert len(asked) == len(set(asked)) + 1, "only the one that failed is asked for twice"
    assert tree(target) == tree(path)
    shutil.rmtree(target)
    tmp.mkdir()
    for name in ("weights-00000.safetensors", "weights-00001.safetensors"):
        data = bytearray((path / name).read_bytes())
        data[-1] ^= name.startswith("weights-00001")
        (tmp / name).write_bytes(data)
    assert download(f"s3://{bucket}/x", target).path == target
    assert tree(target) == tree(path)


def test_downloads_do_not_meet(store, bucket, toy, tmp_path):
    upload(toy.save(tmp_path / "here", 3), f"s3://{bucket}/x")
    met = []

    def second(operation, key):
        if operation == "GetObject" and key.endswith("weights-00000.safetensors") and not met:
            met.append(key)
            with pytest.raises(CheckpointError, match="another process is downloading it"):
                download(f"s3://{bucket}/x", tmp_path / "back")

    store.before = second
    download(f"s3://{bucket}/x", tmp_path / "back")
    assert met


def test_other_folders(store, bucket, tmp_path):
    folder = tmp_path / "hf"
    (folder / "original").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("config.json", "model.safetensors", "original/params.json", ".lt-hub.json", "empty"):
        (folder / name).write_bytes(rng.bytes(0 if name == "empty" else 5000))
    os.symlink("model.safetensors", folder / "link.safetensors")
    upload(folder, f"s3://{bucket}/m")
    assert [key for operation, key in store.log if operation == "PutObject"][-1] == "m/.lt-upload.json"
    download(f"s3://{bucket}/m", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(folder)
    store.log.clear()
    assert upload(folder, f"s3://{bucket}/m").uploaded == ()
    (folder / "config.json").write_bytes(b"{}")
    (folder / "empty").unlink()
    with pytest.raises(DestinationExistsError):
        upload(folder, f"s3://{bucket}/m")
    assert upload(folder, f"s3://{bucket}/m", overwrite=True).uploaded == ("config.json",)
    assert "m/empty" not in store.objects(bucket)
    store.client.delete_object(Bucket=bucket, Key="m/.lt-upload.json")
    with pytest.raises(CheckpointError, match="not an upload of ours, or an unfinished one"):
        download(f"s3://{bucket}/m", tmp_path / "other")


def test_what_is_not_uploaded(store, bucket, toy, tmp_path):
    url = f"s3://{bucket}/x"
    path = toy.save(tmp_path / "root", 1)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "a\nb").touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "folder").symlink_to(tmp_path / "root")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "pipe")
    (tmp_path / "empty").mkdir()
    (path / "COMMIT").rename(tmp_path / "COMMIT")
    for folder, message in (
        (path, "the save was never finished"),
        (tmp_path / "root", "is a folder of checkpoints: choose one"),
        (tmp_path / "odd", "a file of that name cannot be uploaded"),
        (tmp_path / "linked", "neither a file nor a folder"),
        (tmp_path / "pipe", "neither a file nor a folder"),
        (tmp_path / "empty", "contains no file"),
        (tmp_path / "none", "No such file|holds no file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            upload(folder, url)
    assert store.objects(bucket) == {}


def test_hostile_names_in_a_bucket(store, bucket, tmp_path):
    import json

    for name in ("../evil", "/evil", "a/../../evil", "COMMIT", ".lt-part", "a//b", "a\n"):
        entry = {"bytes": 0, "xxh3_128": "0" * 32}
        raw = json.dumps({"format": "lt-upload", "version": 1, "files": {name: entry}}).encode()
        store.client.put_object(Bucket=bucket, Key="m/.lt-upload.json", Body=raw)
        with pytest.raises(CheckpointError, match="not a name that an uploaded file can have"):
            download(f"s3://{bucket}/m", tmp_path / "x" / "back")
    assert not (tmp_path / "x").exists()


def test_no_byte_is_believed_to_be_on_the_disk_that_is_not(store, bucket, toy, tmp_path, monkeypatch):
    upload(toy.save(tmp_path / "here", 1), f"s3://{bucket}/x")
    synced, renamed = [], []
    fsync, rename = files_module.fsync, files_module.rename
    monkeypatch.setattr(files_module, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), fsync(fd))[1])
    monkeypatch.setattr(files_module, "rename", lambda a, b: (renamed.append((a, a.stat().st_ino)), rename(a, b))[1])
    target = download(f"s3://{bucket}/x", tmp_path / "back").path
    assert {path.stat().st_ino for path in target.rglob("*")} <= set(synced)
    assert all(inode in synced for _, inode in renamed), "no name is given to what is not on the disk"
    assert renamed[-1][0].name.endswith(".download")
    assert synced[-1] == tmp_path.stat().st_ino


def test_a_disk_that_is_too_small(store, bucket, toy, tmp_path, monkeypatch):
    upload(toy.save(tmp_path / "here", 1), f"s3://{bucket}/x")
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=100))
    with pytest.raises(CheckpointError, match="must be downloaded and 100 bytes are free"):
        download(f"s3://{bucket}/x", tmp_path / "back")


def test_try_address(store, bucket):
    check_upload_access(f"s3://{bucket}/run")
    assert store.objects(bucket) == {}
    assert len(store.log) == 4


def test_addresses(store):
    for url in ("s3://", "s3://b", "bucket/x", "s3://bucket/../x", "s3://bucket//x", "s3://UPPER/x", "s3://bucket/a b"):
        with pytest.raises(CheckpointError, match="must be s3://bucket/folder"):
            S3Folder(url)
    assert S3Folder("s3://bucket/").url == "s3://bucket"
    assert S3Folder("s3://bucket").subfolder("x").url == "s3://bucket/x"


def test_messages_say_what_to_do_and_no_secret(s3_store, toy, tmp_path, monkeypatch, aws, caplog):
    aws(s3_store.port)
    path = toy.save(tmp_path, 1)

    def refused(url="s3://bucket/x"):
        with pytest.raises(CheckpointError) as caught:
            upload(path, url)
        text = str(caught.value) + "".join(map(str, (caught.value.__cause__, caplog.text)))
        for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
            assert os.environ.get(name, "none") not in text
        return str(caught.value)

    assert "(NoSuchBucket): there is no such bucket" in refused("s3://no-such-bucket/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert "EndpointConnectionError; check the network, the proxy and AWS_ENDPOINT_URL_S3" in refused()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "nonsense")
    assert "is not an address" in refused()
    aws(s3_store.port)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE" in refused()
    aws(s3_store.port)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "ProfileNotFound; check AWS_PROFILE" in refused()


def test_wrong_credentials(s3_server, aws, toy, tmp_path, monkeypatch, caplog):
    import boto3

    path = toy.save(tmp_path, 1)
    with s3_server(tmp_path, INITIAL_NO_AUTH_ACTION_COUNT="3") as port:
        aws(port)
        boto3.client("s3").create_bucket(Bucket="bucket")
        iam = boto3.client("iam", endpoint_url=f"http://127.0.0.1:{port}")
        iam.create_user(UserName="nobody")
        key = iam.create_access_key(UserName="nobody")["AccessKey"]
        with pytest.raises(ServiceError, match=r"InvalidAccessKeyId\): S3 does not know the credentials") as unknown:
            upload(path, "s3://bucket/x")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        with pytest.raises(ServiceError, match=r"AccessDenied\): the credentials may not do that: allow") as denied:
            upload(path, "s3://bucket/x")
        for secret in (key["AccessKeyId"], key["SecretAccessKey"]):
            assert secret not in str(unknown.value) + str(denied.value) + caplog.text


def test_a_download_follows_no_planted_link(bucket, toy, tmp_path, monkeypatch):
    path, url = toy.save(tmp_path / "here", 7), f"s3://{bucket}/run/step-00000007"
    upload(path, url)
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"theirs")
    source = S3Folder(url)
    (tmp_path / ".lt-part").symlink_to(theirs)
    with pytest.raises(CheckpointError, match="already exists"):
        source.download_file("COMMIT", tmp_path / ".lt-part", lambda n: None)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    identity = xxhash.xxh3_64_hexdigest((path / "COMMIT").read_bytes())
    (tmp_path / f".there.{identity}.download").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="is a link"):
        download(url, tmp_path / "there")
    assert list(elsewhere.iterdir()) == []
    (tmp_path / f".there.{identity}.download").unlink()
    assert verify(download(url, tmp_path / "there").path).is_ok
    assert theirs.read_bytes() == b"theirs"
