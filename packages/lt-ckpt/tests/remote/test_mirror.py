"""The mirror: checkpoints come to the bucket whole, in order, while saves go on and whatever happens meanwhile."""

import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lt_ckpt import Checkpoint, CheckpointError, find_latest_valid, prune_checkpoints
from lt_ckpt.s3.mirror import Mirror, MirrorUpload, delete_remote_checkpoint, prune_remote
from lt_ckpt.s3.owner import OWNER_FILE, NotOwnerError, Owner, ensure_owner, read_owner
from lt_ckpt.s3.transfer import download, download_latest, upload
from lt_data.remote.s3_folder import RemoteError, S3Folder

A, B = "a" * 16, "b" * 16
OWN = Owner(run=A, holder=A)
SOON = 120.0
"""Seconds after which something will not come any more."""


def steps(store, bucket, name="COMMIT"):
    """The steps that have this object in the bucket."""
    keys = (key for key in store.names(bucket) if key.endswith(f"/{name}"))
    return sorted(int(key.split("/")[-2][5:]) for key in keys)


def wait_for(condition):
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def start(bucket, tmp_path):
    """Starts mirrors that keep their uploads, and ends them whatever happens."""
    made: list[Mirror] = []

    def make(**more):
        uploads = []
        hear = more.pop("on_event", lambda _: None)

        def on_event(event):
            hear(event)
            if isinstance(event, MirrorUpload):
                uploads.append(event)

        settings = {"poll_interval_s": 0.02, "on_event": on_event, "owner": OWN, **more}
        made.append(Mirror(tmp_path / "run", S3Folder(f"s3://{bucket}/run"), **settings))
        made[-1].uploads = uploads  # pyright: ignore[reportAttributeAccessIssue]
        return made[-1]

    yield make
    for one in made:
        one.close(0)


class Gate:
    """Holds a request of the mirror until it is let go."""

    def __init__(self, store, operation, name):
        self.reached, self.go = threading.Event(), threading.Event()
        self.operation, self.name = operation, name
        store.before = self.hold

    def hold(self, operation, key):
        if operation == self.operation and key.endswith(self.name):
            self.reached.set()
            assert self.go.wait(SOON)

    def __enter__(self):
        assert self.reached.wait(SOON)
        return self

    def __exit__(self, *_):
        self.go.set()


def test_every_checkpoint_comes_in_step_order_while_saves_go_on(store, bucket, toy, tmp_path, start, monkeypatch):
    for step in (1, 2):
        toy.save(tmp_path / "run", step)
    running = start()
    for step in (3, 4, 5):
        toy.save(tmp_path / "run", step)
        running.notify()
    monkeypatch.setattr(running._stop, "set", lambda: None)
    assert running.close(SOON) == ()
    assert not running._thread.is_alive(), "it ends by itself when nothing waits"
    urls = [f"s3://{bucket}/run/step-{step:08d}" for step in (1, 2, 3, 4, 5)]
    assert [(done.url, done.sent, done.kept) for done in running.uploads] == [(url, 14, 0) for url in urls]
    assert running.problems == []
    commits = [key for operation, key in store.log if operation == "PutObject" and key.endswith("COMMIT")]
    assert commits == [f"run/step-{step:08d}/COMMIT" for step in (1, 2, 3, 4, 5)]
    for step in (1, 3, 5):
        toy.check(Checkpoint.open(download(urls[step - 1], tmp_path / "back" / str(step)).path))


@pytest.mark.parametrize("has_objects_of_others", [False, True])
def test_another_one_of_the_same_step_is_replaced(store, bucket, toy, tmp_path, start, has_objects_of_others):
    running = start()
    toy.save(tmp_path / "run", 1)
    wait_for(lambda: running.uploads)
    if has_objects_of_others:
        store.client.put_object(Bucket=bucket, Key="run/step-00000001/notes.txt", Body=b"mine")
    toy.save(tmp_path / "run", 1, seed=5, overwrite=True)
    assert running.close(SOON) == ()
    toy.check(Checkpoint.open(download(f"s3://{bucket}/run/step-00000001", tmp_path / "back").path), seed=5)
    assert start(force_upload=["step-00000001"]).close(SOON) == ()
    assert has_objects_of_others == ("run/step-00000001/notes.txt" in store.names(bucket))


def test_what_is_there_is_not_sent_again_and_what_is_unfinished_is_not_sent(store, bucket, toy, tmp_path, start):
    root = tmp_path / "run"
    for step in (1, 2):
        upload(toy.save(root, step), f"s3://{bucket}/run/step-{step:08d}")
    (toy.save(root, 3) / "COMMIT").unlink()
    toy.save(root, 4).rename(root / "step-00000004.aside-0123456789abcdef")
    (root / ".tmp-step-00000005-0123456789abcdef").mkdir()
    running = start()
    assert running.close(SOON) == ()
    assert running.uploads == running.problems == []
    assert steps(store, bucket) == [1, 2]


def test_a_save_does_not_wait_for_a_line_that_hangs(store, bucket, toy, tmp_path, start):
    gate = Gate(store, "PutObject", "step-00000001/COMMIT")
    running = start()
    toy.save(tmp_path / "run", 1)
    with gate:
        for step in (2, 3):  # were they to wait for the mirror, the gate would never open
            toy.save(tmp_path / "run", step)
            running.notify()
        assert find_latest_valid(tmp_path / "run")[0].step == 3
        with running.pause_uploads() as spared:
            assert spared == (tmp_path / "run" / "step-00000001",)
        assert steps(store, bucket) == []
    assert running.close(SOON) == ()
    with running.pause_uploads() as spared:
        assert spared == ()
    assert steps(store, bucket) == [1, 2, 3]


def test_errors_are_told_once_and_tried_again(store, bucket, toy, tmp_path, start):
    failures = [RemoteError("planted one"), RemoteError("planted one"), RemoteError("planted two")]

    def fail(operation, key):
        if failures and operation == "PutObject" and key.endswith("rng-00000.safetensors"):
            raise failures.pop(0)

    store.before = fail
    events = []
    path = toy.save(tmp_path / "run", 1)
    running = start(on_event=events.append)
    wait_for(lambda: running.uploads)
    expected = [(path, "planted one", False), (path, "planted two", False)]
    assert [(p.path, p.message, p.final) for p in running.problems] == expected
    assert events == [*running.problems, *running.uploads]
    assert running.close(SOON) == ()
    assert steps(store, bucket) == [1]


def test_what_retention_removes_meanwhile_leaves_nothing(store, bucket, toy, tmp_path, start):
    root = tmp_path / "run"
    gate = Gate(store, "PutObject", "step-00000001/rng-00000.safetensors")
    path = toy.save(root, 1)
    running = start()
    with gate:
        wait_for(lambda: any("step-00000001" in key for key in store.names(bucket)))
        for step in (2, 3):
            toy.save(root, step)
        assert prune_checkpoints(root, keep_last=2) == [path]
    wait_for(lambda: len(running.uploads) == 2)
    assert [p.message for p in running.problems] == ["was removed before it was uploaded; the bucket has nothing of it"]
    assert running.close(SOON) == ()
    assert {key.split("/")[1] for key in store.names(bucket)} == {"step-00000002", "step-00000003", OWNER_FILE}


def test_a_damaged_checkpoint_does_not_stand_in_the_way(store, bucket, toy, tmp_path, start):
    root = tmp_path / "run"
    bad = toy.save(root, 1)
    file = bad / "weights-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    toy.save(root, 2)
    running = start()
    assert running.close(SOON) == (bad,)
    (problem,) = running.problems
    assert "weights-00000.safetensors: is not what its list says" in problem.message
    assert (problem.final, problem.transient) == (True, False)
    assert steps(store, bucket) == [2]


def test_close_ends_in_time_and_says_what_is_missing(store, bucket, toy, tmp_path, start):
    gate = Gate(store, "PutObject", "step-00000001/rng-00000.safetensors")
    paths = tuple(toy.save(tmp_path / "run", step) for step in (1, 2))
    running = start()
    with gate:
        assert running.close(0.1, stop_timeout_s=0.1) == paths
    running._thread.join(SOON)
    assert not running._thread.is_alive()
    assert steps(store, bucket) == []
    assert start().close(SOON) == ()
    assert steps(store, bucket) == [1, 2]


def test_a_bug_is_not_silent(store, bucket, toy, tmp_path, start, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def bug(operation, key):
        raise ZeroDivisionError

    store.before = bug
    toy.save(tmp_path / "run", 1)
    events = []
    running = start(on_event=events.append)
    running._thread.join(SOON)
    assert ["the mirror has failed" in item.message for item in events] == [True]
    with running.pause_uploads() as spared:
        assert spared == ()
    with pytest.raises(ZeroDivisionError):
        running.close(SOON)
    running._thread_error = None


def test_only_so_many_are_kept_and_only_ours_go(store, bucket, toy, tmp_path, start):
    root = tmp_path / "run"
    for step in (1, 2, 3, 4):
        toy.save(root, step)
    running = start(keep_last=2)
    assert running.close(SOON) == ()
    assert steps(store, bucket) == [3, 4], "those that would be deleted at once are not sent"
    toy.save(root, 5)
    store.client.put_object(Bucket=bucket, Key="run/step-00000003/notes.txt", Body=b"mine")
    store.client.put_object(Bucket=bucket, Key="run/step-00000002/weights-00000.safetensors", Body=b"a part")
    store.client.put_object(Bucket=bucket, Key="run/other/COMMIT", Body=b"mine")
    running = start(keep_last=2)
    assert running.close(SOON) == ()
    names = {key.split("/")[1] for key in store.names(bucket)}
    assert names == {"step-00000003", "step-00000004", "step-00000005", "other", OWNER_FILE}
    assert steps(store, bucket, "notes.txt") == [3]


def test_retention_in_the_bucket_counts_whole_ones_only(store, bucket, toy, tmp_path):
    root = S3Folder(f"s3://{bucket}/run")
    for step in (1, 2, 3, 4):
        upload(toy.save(tmp_path, step), root.subfolder(f"step-{step:08d}"))
    store.client.delete_object(Bucket=bucket, Key="run/step-00000004/COMMIT")
    store.client.delete_object(Bucket=bucket, Key="run/step-00000003/rng-00000.safetensors")
    assert prune_remote(root, keep_last=2) == []
    store.log.clear()
    assert prune_remote(root, keep_last=1) == [f"s3://{bucket}/run/step-00000001"]
    assert steps(store, bucket) == [2, 3]


def test_what_is_half_erased_is_no_checkpoint(store, bucket, toy, tmp_path):
    folder = S3Folder(f"s3://{bucket}/run/step-00000001")
    upload(toy.save(tmp_path, 1), folder)
    seen = []

    def fail(operation, key):
        if operation == "DeleteObjects":
            seen.append(key)
            if len(seen) == 2:
                raise RemoteError("planted")

    store.before = fail
    with pytest.raises(RemoteError, match="planted"):
        delete_remote_checkpoint(folder)
    assert steps(store, bucket) == []
    assert len(store.objects(bucket)) > 5
    store.before = lambda operation, key: None
    assert delete_remote_checkpoint(folder)
    assert store.objects(bucket) == {}


def test_retention_deletes_nothing_while_nothing_is_intact(store, bucket, toy, tmp_path):
    """Same sizes, put there by others: first the two newest, then all."""
    root = S3Folder(f"s3://{bucket}/run")
    for step in (0, 1, 2, 3, 4, 5):
        upload(toy.save(tmp_path, step, world=1), root.subfolder(f"step-{step:08d}"))
    prune_remote(root, keep_last=2, keep_every=2)
    assert steps(store, bucket) == [2, 4, 5]

    def spoil(step):
        key = f"run/step-{step:08d}/weights-00000.safetensors"
        store.client.put_object(Bucket=bucket, Key=key, Body=store.objects(bucket)[key])

    spoil(4)
    spoil(5)
    assert prune_remote(root, keep_last=1) == [f"{root.url}/step-00000004"]
    assert steps(store, bucket) == [2, 5], "the newest that is known to be good stays, whatever the numbers say"
    spoil(2)
    assert prune_remote(root, keep_last=1) == []
    assert steps(store, bucket) == [2, 5]
    upload(tmp_path / "step-00000005", root.subfolder("step-00000005"))
    assert prune_remote(root, keep_last=1) == [f"{root.url}/step-00000002"]


def test_one_run_and_one_process_own_a_folder(store, bucket, toy, tmp_path, start):
    root = S3Folder(f"s3://{bucket}/run")
    assert read_owner(root) is None
    first, second = Owner(run=A, holder=A), Owner(run=A, holder=B)
    ensure_owner(root, first, allow_takeover=True)
    ensure_owner(root, first, allow_takeover=False)
    ensure_owner(root, second, allow_takeover=True)
    assert read_owner(root) == second
    with pytest.raises(NotOwnerError, match="another process has resumed this run"):
        ensure_owner(root, first, allow_takeover=False)
    with pytest.raises(NotOwnerError, match=f"belongs to another run .its id is {A}, this one's {B}"):
        ensure_owner(root, Owner(run=B, holder=B), allow_takeover=True)
    paths = tuple(toy.save(tmp_path / "run", step) for step in (1, 2))
    running = start(owner=Owner(run=B, holder=B))
    assert running.close(SOON) == paths
    assert [(p.path, p.final, p.transient) for p in running.problems] == [(path, True, False) for path in paths]
    assert store.names(bucket) == [f"run/{OWNER_FILE}"]
    for raw in (b"{}", b"[", b"\xff"):
        store.client.put_object(Bucket=bucket, Key=f"run/{OWNER_FILE}", Body=raw)
        with pytest.raises(CheckpointError, match="names no run"):
            read_owner(root)


def test_parts_that_a_killed_process_left_are_given_up_and_those_of_others_stay(store, bucket, toy, tmp_path, start):
    ours, foreign = "run/step-00000001/weights-00000.safetensors", "run/step-00000001/film.mkv"
    for key in (ours, foreign, "elsewhere/step-00000001/weights-00000.safetensors"):
        store.client.create_multipart_upload(Bucket=bucket, Key=key)
    toy.save(tmp_path / "run", 2)
    assert start().close(SOON) == ()
    assert sorted(store.unfinished(bucket)) == ["elsewhere/step-00000001/weights-00000.safetensors", foreign]


def test_no_upload_begins_while_retention_works(store, bucket, toy, tmp_path, start):
    """Else what retention has just chosen could be removed under the upload."""
    running = start(poll_interval_s=1000)
    looked, real = threading.Event(), running._list_candidates

    def look():
        found = real()
        if len(found) == 3:
            looked.set()
        return found

    running._list_candidates = look
    with running.pause_uploads() as spared:
        assert spared == ()
        gone = [toy.save(tmp_path / "run", step) for step in (1, 2)]
        toy.save(tmp_path / "run", 3)
        running.notify()
        assert looked.wait(SOON), "it knows of all, and may begin none"
        assert sorted(prune_checkpoints(tmp_path / "run", keep_last=1, protect=spared)) == gone
    assert running.close(SOON) == ()
    assert [done.path.name for done in running.uploads] == ["step-00000003"]
    assert [(p.path, p.final) for p in running.problems] == [(path, True) for path in gone]
    assert {key.split("/")[1] for key in store.names(bucket)} == {"step-00000003", OWNER_FILE}


TRAINER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from conftest import toy_save
from lt_ckpt import prune_checkpoints
from lt_ckpt.s3.mirror import Mirror
from lt_ckpt.s3.owner import Owner
from lt_data.remote.s3_folder import S3Folder
root, url, step = sys.argv[2], sys.argv[3], int(sys.argv[4])
mirror = Mirror(root, S3Folder(url), owner=Owner(run="a" * 16, holder="a" * 16), poll_interval_s=0.02)
print("ready", flush=True)
while True:
    toy_save(root, step)
    mirror.notify()
    with mirror.pause_uploads() as spared:
        prune_checkpoints(root, keep_last=3, protect=spared)
    step += 1
    time.sleep(0.05)
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_kill_9_at_any_moment(store, bucket, toy, tmp_path, seed):
    rng = random.Random(seed)
    root, url = tmp_path / "run", f"s3://{bucket}/run"
    step = 1
    for turn in range(2):
        tests = str(Path(__file__).parent.parent)
        command = [sys.executable, "-c", TRAINER, tests, str(root), url, str(step)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        wait_for(lambda turn=turn: len(steps(store, bucket)) > turn)
        time.sleep(rng.uniform(0, 0.5))
        child.kill()
        child.wait()
        child.stdout.close()
        here, _ = find_latest_valid(root)
        assert here is not None
        step = here.step + 1
        shutil.rmtree(tmp_path / "back", ignore_errors=True)
        found, _ = download_latest(url, tmp_path / "back")
        assert found is not None
        toy.check(Checkpoint.open(found.path))
    running = Mirror(root, S3Folder(url), owner=OWN, poll_interval_s=0.02)
    assert running.close(SOON) == ()
    shutil.rmtree(tmp_path / "back")
    found, rejected = download_latest(url, tmp_path / "back")
    assert found is not None
    assert (found.path.name, rejected) == (here.path.name, [])
    assert store.unfinished(bucket) == []
