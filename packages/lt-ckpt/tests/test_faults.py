"""A save that fails or is cut off at every single call leaves the old checkpoint or the new one, never a mix."""

import errno
import os
import shutil
import threading
from functools import partial

import pytest
from disks import Disk
from nxd_trees import save_nxd

from lt_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    begin_save,
    commit_save,
    find_latest_valid,
    write_rank_files,
)
from lt_ckpt.save import discard_save


def saver(kind, toy):
    """The function that saves one step: two ranks with our own files, or one with NxD's."""
    return partial(save, toy) if kind == "toy" else partial(save_nxd, xser=kind == "nxd xser")


def save(toy, root, step):
    tmp = begin_save(root, step=step, world_size=2)
    for rank in range(2):
        write_rank_files(tmp, rank=rank, shards=toy.shards(toy.state(step), rank, 2))
    return commit_save(
        tmp, world_size=2, metadata=CheckpointMetadata(step=step, tokenizer_files={"tokenizer.json": b"{}"})
    )


def check(kind, toy, found):
    if kind == "toy":
        toy.check(found)
        return
    for group in found.groups:
        for name in found.names(group):
            assert (found.read(group, name).view("<f4") == found.step).all()


@pytest.mark.parametrize(
    ("kind", "error", "first", "every"),
    [("toy", errno.ENOSPC, 0, 3), ("toy", errno.EIO, 1, 3), ("nxd xser", errno.ENOSPC, 3, 17)],
)
def test_an_os_error_at_any_call_leaves_the_last_checkpoint(
    fast_path, toy, calls, monkeypatch, kind, error, first, every
):
    """Each error is met at some of the calls, at other ones: what follows does not depend on its number."""
    make = saver(kind, toy)
    make(fast_path / "dry", 1)
    with calls.recording(monkeypatch):
        make(fast_path / "dry", 2)
    names = [name for name, _ in calls.log]
    points = range(first, len(names), every)
    assert names.count("fsync") >= 20
    messages: list[str] = []
    n_threads = threading.active_count()
    for index in points:
        root = fast_path / f"{index}"
        make(root, 1)
        try:
            with calls.recording(monkeypatch, fail_at=index, error=error):
                make(root, 2)
        except CheckpointError as exc:
            messages.append(str(exc))
        found, rejected = find_latest_valid(root)
        assert found is not None
        assert rejected == []
        check(kind, toy, found)
        committed = (root / "step-00000002").exists()
        assert found.step == (2 if committed else 1), calls.log[index]
        calls.fail_at = -1
        for marker in root.glob(".tmp-*/save.json"):
            discard_save(marker.parent)
        if not committed:
            make(root, 2)
        check(kind, toy, Checkpoint.open(root / "step-00000002"))
        shutil.rmtree(root)
    assert len(messages) >= len(points) - (kind != "toy"), "an error was swallowed"
    assert all(os.strerror(error) in message for message in messages)
    assert threading.active_count() == n_threads, "a thread that wrote is left"


def test_a_save_over_an_older_one_is_never_a_mixture(fast_path, toy, calls, monkeypatch):
    def again(root):
        tmp = begin_save(root, step=1, world_size=2)
        for rank in range(2):
            write_rank_files(tmp, rank=rank, shards=toy.shards(toy.state(2), rank, 2))
        return commit_save(tmp, world_size=2, metadata=CheckpointMetadata(step=1), overwrite=True)

    toy.save(fast_path / "dry", 1)
    with calls.recording(monkeypatch):
        again(fast_path / "dry")
    seen = set()
    names = [name for name, _ in calls.log]
    for index in [i for i, name in enumerate(names) if name in ("write", "fsync", "rename")][::2]:
        root = fast_path / f"{index}"
        toy.save(root, 1)
        with calls.recording(monkeypatch, fail_at=index), pytest.raises(CheckpointError, match="No space left"):
            again(root)
        calls.fail_at = -1
        found, _ = find_latest_valid(root)
        assert found is not None
        which = int(found.read("weights", "norm").tobytes() == toy.state(2)["weights", "norm"][1].tobytes()) + 1
        toy.check(found, seed=which)
        seen.add(which)
    assert seen == {1, 2}


@pytest.mark.parametrize(("kind", "least"), [("toy", 50), ("nxd", 30), ("nxd xser", 150)])
def test_a_power_cut_at_any_call_leaves_the_old_or_the_new_one(fast_path, toy, monkeypatch, kind, least):
    """Everything that was not fsynced is lost, at every point of two saves in turn; NxD takes what is marked `done`."""
    live, cut = fast_path / "live", fast_path / "cut"
    live.mkdir()
    disk, make, seen, done = Disk(), saver(kind, toy), [], [0]

    def after():
        shutil.rmtree(cut, ignore_errors=True)
        disk.leave(live, cut)
        found, rejected = find_latest_valid(cut / "ck")
        assert rejected == []
        if found is not None:
            check(kind, toy, found)
        marked = {path.parent.name for path in (cut / "ck").glob("step-*/done")}
        assert kind == "toy" or marked == {path.parent.name for path in (cut / "ck").glob("step-*/COMMIT")}
        seen.append(found.step if found else 0)
        assert seen[-1] >= done[0], "a checkpoint that commit had returned is gone"

    with monkeypatch.context() as patch:
        disk.watch(patch, after)
        for step in (1, 2):
            make(live / "ck", step)
            done[0] = step
            after()
    assert seen == sorted(seen)
    assert set(seen) == {0, 1, 2}
    assert len(seen) > least
