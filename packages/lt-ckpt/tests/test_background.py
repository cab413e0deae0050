"""Saves in the background: the state of the moment, no failure lost, one at a time, and nothing lost when killed."""

import os
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from lt_ckpt import Checkpoint, CheckpointError, CheckpointMetadata, begin_save, commit_save, find_latest_valid
from lt_ckpt.async_save import AsyncRankSaver, allocate_host_memory
from lt_ckpt.errors import SaveCancelledError
from lt_ckpt.save import discard_save

SOON_S = 60


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def start(saver, root, toy, step, *, tmp=None, rank=0, world=1, state=None, **more):
    tmp = tmp or begin_save(root, step=step, world_size=world)

    def then(given_up):
        commit_save(tmp, world_size=world, metadata=CheckpointMetadata(step=step), is_cancelled=given_up, **more)

    shards = toy.shards(state or toy.state(step), rank, world)
    saver.start(tmp, rank=rank, shards=shards, on_written=then if rank == 0 else None)
    return tmp


@contextmanager
def disk_stands_still(monkeypatch):
    """Nothing is written until the block ends."""
    go_on, real = threading.Event(), os.fsync

    def fsync(descriptor):
        assert threading.current_thread() is threading.main_thread() or go_on.wait(SOON_S)
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        try:
            yield go_on
        finally:
            go_on.set()


def test_the_checkpoint_is_that_of_a_save_in_the_foreground(fast_path, toy):
    there = toy.save(fast_path / "foreground", 3)
    tmp = begin_save(fast_path / "background", step=3, world_size=2)
    savers = [AsyncRankSaver() for _ in range(2)]
    for rank in (0, 1):
        start(savers[rank], None, toy, 3, tmp=tmp, rank=rank, world=2)
    assert [saver.wait() for saver in savers] == [True, True]
    here = fast_path / "background" / "step-00000003"
    for path in there.glob("*.safetensors"):
        assert (here / path.name).read_bytes() == path.read_bytes()
    ours, theirs = Checkpoint.open(here), Checkpoint.open(there)
    assert ours.manifest.tensors == theirs.manifest.tensors
    toy.check(ours)


def test_memory_is_taken_once_and_shards_may_know_a_quicker_way_into_it(fast_path, toy):
    taken, ways = [], []

    def allocate(n_bytes):
        taken.append(n_bytes)
        return allocate_host_memory(n_bytes)

    def quick(shard):
        def into(target):
            assert target.ctypes.data % 64 == 0
            ways.append(shard.name)
            np.copyto(target, shard.data)

        return replace(shard, data=lambda: pytest.fail("asked for"), copy_fn=into)

    saver = AsyncRankSaver(allocate)
    n_bytes = saver.reserve(toy.shards(toy.state(1), 0, 1))
    start(saver, fast_path, toy, 1)
    tmp = begin_save(fast_path, step=2, world_size=1)
    shards = toy.shards(toy.state(2), 0, 1)
    saver.start(tmp, rank=0, shards=(quick(shard) for shard in shards))
    saver.wait()
    assert taken == [n_bytes]
    assert ways == [shard.name for shard in shards]
    toy.check(Checkpoint.open(fast_path / "step-00000001"))
    toy.check(Checkpoint.open(commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=2))))


def test_it_is_the_state_of_the_moment(fast_path, toy, monkeypatch):
    state = toy.state(1)
    saver = AsyncRankSaver()
    with disk_stands_still(monkeypatch):
        start(saver, fast_path, toy, 1, state=state)
        assert not saver.poll()
        for _, array in state.values():
            array.fill(0)
        assert find_latest_valid(fast_path) == (None, [])
    assert saver.wait()
    toy.check(Checkpoint.open(fast_path / "step-00000001"))


def test_a_new_save_waits_for_the_old_one(fast_path, toy, monkeypatch):
    """They share the memory, so the second begins to copy only when the first is done."""
    saver, log = AsyncRankSaver(), []

    def noted(shard):
        return replace(shard, data=lambda: log.append((fast_path / "step-00000001").exists()) or shard.data)

    first, second = (begin_save(fast_path, step=step, world_size=1) for step in (1, 2))
    with disk_stands_still(monkeypatch) as go_on:
        start(saver, fast_path, toy, 1, tmp=first)
        timer = threading.Timer(0.1, go_on.set)
        timer.start()
        saver.start(second, rank=0, shards=[noted(shard) for shard in toy.shards(toy.state(2), 0, 1)])
        timer.join()
    saver.wait()
    assert log == [True] * 8
    toy.check(Checkpoint.open(fast_path / "step-00000001"))
    toy.check(Checkpoint.open(commit_save(second, world_size=1, metadata=CheckpointMetadata(step=2))))


@pytest.mark.parametrize("call", ["poll", "wait", "start"])
def test_a_failure_is_told_once_by_the_next_call(fast_path, toy, call):
    saver = AsyncRankSaver()
    tmp = begin_save(fast_path, step=1, world_size=1)
    (tmp / "weights-00000.safetensors").mkdir()
    start(saver, fast_path, toy, 1, tmp=tmp)
    deadline = time.monotonic() + SOON_S
    while not saver.has_failed:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with pytest.raises(CheckpointError, match="writing the files of rank 0 failed: File exists"):
        start(saver, fast_path, toy, 2) if call == "start" else getattr(saver, call)()
    assert not saver.has_failed
    assert saver.poll()
    start(saver, fast_path, toy, 3)
    saver.wait()
    toy.check(Checkpoint.open(fast_path / "step-00000003"))


def test_a_save_can_be_given_up_while_its_part_is_written(fast_path, toy, monkeypatch):
    saver = AsyncRankSaver()
    with disk_stands_still(monkeypatch):
        tmp = start(saver, fast_path, toy, 1)
        saver.cancel()
    with pytest.raises(SaveCancelledError):
        saver.wait()
    assert (tmp / "failed-00000").exists()
    discard_save(tmp)
    start(saver, fast_path, toy, 2)  # which says nothing about the next one
    saver.wait()
    toy.check(Checkpoint.open(fast_path / "step-00000002"))
