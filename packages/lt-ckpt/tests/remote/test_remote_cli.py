"""`upload` and `download` as commands, and the choices that a restore on a machine with checkpoints makes."""

import re

import pytest
from typer.testing import CliRunner

from lt_ckpt import Checkpoint, CheckpointError, list_steps, verify
from lt_ckpt.cli import app
from lt_ckpt.s3.client import S3Folder, UnreachableError
from lt_ckpt.s3.download import download, download_latest, read_latest_manifest
from lt_ckpt.s3.mirror import prune_remote
from lt_ckpt.s3.upload import upload


def command(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_upload_and_download_tell_files_bytes_and_rate(store, bucket, toy, tmp_path):
    url = f"s3://{bucket}/run"
    path, other = toy.save(tmp_path / "a", 1), toy.save(tmp_path / "b", 1, seed=7)
    plan = command("upload", path, f"{url}/x", "--dry-run").splitlines()
    assert len(plan) == 13
    assert plan[-1] == f"{url}/x: 12 files to send (5.6 kB), 0 already present"
    assert S3Folder(f"{url}/x").list_sizes() == {}
    rate = r"\(5\.6 kB at [0-9.]+ (bytes|kB|MB|GB)/s\)"
    assert re.search(rf"{path} uploaded to {url}/x: 12 files sent {rate}$", command("upload", path, f"{url}/x").strip())
    assert command("upload", path, f"{url}/x").strip().endswith("0 files sent (0 bytes), 12 already present")
    with pytest.raises(CheckpointError, match=r"a different folder exists there; .* --overwrite"):
        command("upload", other, f"{url}/x")
    assert re.search(r": \d+ files sent", command("upload", other, f"{url}/x", "--overwrite"))
    text = command("download", f"{url}/x", tmp_path / "back")
    assert re.search(rf"{url}/x downloaded to {tmp_path}/back: 12 files received {rate}, verified$", text.strip())
    toy.check(Checkpoint.open(tmp_path / "back"), seed=7)
    text = command("download", f"{url}/x", tmp_path / "back")
    assert text.strip().endswith("0 files received (0 bytes), 12 already present, verified")


def test_the_newest_is_brought_where_it_is_newer_and_makes_way_for_itself(store, bucket, toy, tmp_path):
    url, here = f"s3://{bucket}/run", tmp_path / "here"
    assert read_latest_manifest(url) is None
    for step in (1, 2, 3):
        upload(toy.save(tmp_path / "there", step), f"{url}/step-{step:08d}")
    assert read_latest_manifest(url) == (
        f"{url}/step-00000003",
        Checkpoint.open(tmp_path / "there/step-00000003").manifest,
    )
    store.client.delete_object(Bucket=bucket, Key="run/step-00000003/COMMIT")
    store.client.delete_object(Bucket=bucket, Key="run/step-00000001/COMMIT")
    store.log.clear()
    found, rejected = download_latest(url, here, after_step=2)
    assert (found, [item.url for item in rejected]) == (None, [f"{url}/step-00000003"])
    assert not any("step-00000002" in key or "step-00000001" in key for _, key in store.log), "nobody asked for these"
    file = toy.save(here, 2) / "weights-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    seen = []

    def refuse(manifest):
        seen.append(manifest.step)
        raise CheckpointError("not this one")

    before = len(store.log)
    with pytest.raises(CheckpointError, match="not this one"):
        download_latest(url, here, after_step=1, validate_manifest=refuse)
    assert seen == [2]
    assert not any("safetensors" in key for _, key in store.log[before:])
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


def test_a_download_can_be_stopped_and_goes_on(store, bucket, toy, tmp_path):
    upload(toy.save(tmp_path, 1), f"s3://{bucket}/x")
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        download(f"s3://{bucket}/x", tmp_path / "back", check_stop=stop)
    assert not (tmp_path / "back").exists()
    done = download(f"s3://{bucket}/x", tmp_path / "back")
    assert 0 < len(done.skipped) < 12
    assert len(done.skipped) + len(done.downloaded) == 12
    assert verify(done.path).is_ok


def test_what_was_found_damaged_is_sent_anew(store, bucket, toy, tmp_path):
    path, key = toy.save(tmp_path, 1), "x/weights-00000.safetensors"
    upload(path, f"s3://{bucket}/x")
    found = store.client.get_object(Bucket=bucket, Key=key)
    spoiled = found["Body"].read()[:-1] + b"?"
    store.client.put_object(Bucket=bucket, Key=key, Body=spoiled, Metadata=found["Metadata"])
    assert upload(path, f"s3://{bucket}/x").uploaded == (), "the store says that it is what was uploaded"
    with pytest.raises(CheckpointError, match="is damaged"):
        download(f"s3://{bucket}/x", tmp_path / "back")
    assert len(upload(path, f"s3://{bucket}/x", force=True).uploaded) == 12
    assert verify(download(f"s3://{bucket}/x", tmp_path / "back").path).is_ok


def test_retention_keeps_multiples_and_the_newest_that_is_as_it_was_uploaded(store, bucket, toy, tmp_path):
    root = S3Folder(f"s3://{bucket}/run")
    for step in (0, 1, 2, 3, 4, 5):
        upload(toy.save(tmp_path, step, world=1), root.subfolder(f"step-{step:08d}"))

    def steps() -> list[int]:
        return sorted({int(key.split("/")[1][5:]) for key in store.names(bucket)})

    prune_remote(root, keep_last=2, keep_every=2)
    assert steps() == [2, 4, 5]
    for step in (4, 5):  # the same size, put there by others
        key = f"run/step-{step:08d}/weights-00000.safetensors"
        store.client.put_object(Bucket=bucket, Key=key, Body=store.objects(bucket)[key])
    assert prune_remote(root, keep_last=1) == [f"{root.url}/step-00000004"]
    assert steps() == [2, 5], "the newest that is known to be good stays, whatever the numbers say"
    with pytest.raises(CheckpointError, match="every >= 0"):
        prune_remote(root, keep_last=1, keep_every=-1)


def test_a_store_that_cannot_be_reached_is_an_error_that_passes(aws, toy, tmp_path, monkeypatch):
    aws(1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(UnreachableError, match="EndpointConnectionError") as caught:
        S3Folder("s3://bucket/x").list_sizes()
    assert caught.value.exit_code == 75
