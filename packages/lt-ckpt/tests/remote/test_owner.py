"""Whose a folder in a bucket is, what a mirror does when it is not its own, and what retention here leaves it."""

import threading
import time

import pytest

from lt_ckpt import CheckpointError, prune_checkpoints
from lt_ckpt.s3.client import S3Folder, ServiceError
from lt_ckpt.s3.mirror import Mirror
from lt_ckpt.s3.owner import OWNER_FILE, NotOwnerError, Owner, claim, ensure_owner, read_owner

SOON = 120.0
A, B = "a" * 16, "b" * 16


def test_the_first_takes_it_and_a_new_start_of_the_same_run_takes_it_over(store, bucket):
    root = S3Folder(f"s3://{bucket}/run")
    assert read_owner(root) is None
    first, second = Owner(run=A, holder=A), Owner(run=A, holder=B)
    ensure_owner(root, first, allow_takeover=True)
    ensure_owner(root, first, allow_takeover=False)
    assert read_owner(root) == first
    ensure_owner(root, second, allow_takeover=True)
    assert read_owner(root) == second
    with pytest.raises(NotOwnerError, match="another process has resumed this run"):
        ensure_owner(root, first, allow_takeover=False)
    with pytest.raises(NotOwnerError, match=f"belongs to another run .its id is {A}, this one's {B}"):
        ensure_owner(root, Owner(run=B, holder=B), allow_takeover=True)
    assert read_owner(root) == second
    root.delete([OWNER_FILE])
    ensure_owner(root, first, allow_takeover=False)
    assert read_owner(root) == first


@pytest.mark.parametrize("raw", [b"{}", b'{"format":"lt-run","version":1,"run":"../x","holder":"y"}', b"\xff"])
def test_what_is_not_an_owner_is_an_error(store, bucket, raw):
    store.client.put_object(Bucket=bucket, Key=f"run/{OWNER_FILE}", Body=raw)
    with pytest.raises(CheckpointError):
        read_owner(S3Folder(f"s3://{bucket}/run"))
    with pytest.raises(CheckpointError, match="16 hex digits"):
        Owner(run="x", holder=A)


def test_nothing_goes_where_another_run_is_and_it_is_told_once_for_each(store, bucket, toy, tmp_path):
    root = S3Folder(f"s3://{bucket}/run")
    claim(root, Owner(run=B, holder=B))
    paths = tuple(toy.save(tmp_path, step) for step in (1, 2))
    running = Mirror(tmp_path, root, owner=Owner(run=A, holder=A), poll_interval_s=0.02, retry_delay_s=0.02)
    assert running.close(SOON) == paths
    assert [(problem.path, problem.final, problem.transient) for problem in running.problems] == [
        (path, True, False) for path in paths
    ]
    assert store.names(bucket) == [f"run/{OWNER_FILE}"]


def test_parts_that_a_killed_process_left_are_given_up_and_those_of_others_stay(store, bucket, toy, tmp_path):
    ours, foreign = "run/step-00000001/weights-00000.safetensors", "run/step-00000001/film.mkv"
    for key in (ours, foreign, "elsewhere/step-00000001/weights-00000.safetensors"):
        store.client.create_multipart_upload(Bucket=bucket, Key=key)
    toy.save(tmp_path, 2)
    running = Mirror(tmp_path, f"s3://{bucket}/run", owner=Owner(run=A, holder=A), poll_interval_s=0.02)
    assert running.close(SOON) == ()
    assert sorted(store.unfinished(bucket)) == ["elsewhere/step-00000001/weights-00000.safetensors", foreign]


def test_no_upload_begins_while_retention_works(store, bucket, toy, tmp_path):
    """Else what retention has just chosen could be removed under the upload."""
    reached = threading.Event()
    store.before = lambda operation, key: reached.set() if operation == "PutObject" else None
    running = Mirror(tmp_path / "run", f"s3://{bucket}/run", poll_interval_s=1000)
    with running.pause_uploads() as spared:
        assert spared == ()
        gone = [toy.save(tmp_path / "run", step) for step in (1, 2)]
        running.notify(toy.save(tmp_path / "run", 3))
        deadline = time.monotonic() + SOON
        while len(running._pending) < 3:  # it knows of all, and may begin none
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not reached.wait(0.2)
        assert sorted(prune_checkpoints(tmp_path / "run", keep_last=1, protect=spared)) == gone
    assert running.close(SOON) == ()
    assert [done.url for done in running.uploads] == [f"s3://{bucket}/run/step-00000003"]
    assert [(p.path, p.final) for p in running.problems] == [(path, True) for path in gone]
    assert all(name.startswith("run/step-00000003/") for name in store.names(bucket))


def test_what_is_removed_before_its_turn_is_told(store, bucket, toy, tmp_path):
    failures = [ServiceError("planted")]

    def fail(operation, key):
        if failures and operation == "PutObject":
            raise failures.pop()

    store.before = fail
    first, second = (toy.save(tmp_path, step) for step in (1, 2))
    running = Mirror(tmp_path, f"s3://{bucket}/run", poll_interval_s=1000, retry_delay_s=1000)
    deadline = time.monotonic() + SOON
    while not running.problems:  # the first has failed, and the second waits behind it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    toy.save(tmp_path, 3)
    assert prune_checkpoints(tmp_path, keep_last=1, protect=[first]) == [second]
    assert running.close(SOON) == ()
    assert [(p.path, p.message, p.final) for p in running.problems] == [
        (first, "planted", False),
        (second, "was removed before its turn to be uploaded came", True),
    ]
