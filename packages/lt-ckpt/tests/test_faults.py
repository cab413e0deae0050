"""A save that fails or is cut off at every single call leaves the old checkpoint or the new one, never a mix."""

import errno
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from lt_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    Shard,
    begin_save,
    commit_save,
    find_latest_valid,
    write_rank_files,
)
from lt_ckpt.files import finished_name
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.nxd.rank_writer import NxdRankWriter, optimizer_state_keys
from lt_ckpt.save import discard_save
from lt_model import ModelConfig


def save(root, toy, step, opened=None):
    """Two ranks save one step; keeps the temporary folder's path so that a test can look at it."""
    tmp = begin_save(root, step=step, world_size=2)
    if opened is not None:
        opened.append(tmp)
    for rank in range(2):
        write_rank_files(tmp, rank=rank, shards=toy.shards(toy.state(step), rank, 2))
    return commit_save(
        tmp, world_size=2, metadata=CheckpointMetadata(step=step, tokenizer_files={"tokenizer.json": b"{}"})
    )


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_an_os_error_at_any_call_leaves_the_last_checkpoint(fast_path, toy, calls, monkeypatch, error):
    save(fast_path / "dry", toy, 1)
    with calls.recording(monkeypatch):
        save(fast_path / "dry", toy, 2)
    names = [name for name, _ in calls.log]
    n_calls = len(names)
    assert names.count("fsync") >= 20
    assert names.count("rename") == 7
    messages: list[str] = []
    n_threads = threading.active_count()
    # Each error is met at every third call, at other ones: what follows an error does not depend on its number.
    points = range(0 if error == errno.ENOSPC else 1, n_calls, 3)
    for index in points:
        root = fast_path / f"{index}"
        save(root, toy, 1)
        opened: list[Path] = []
        try:
            with calls.recording(monkeypatch, fail_at=index, error=error):
                save(root, toy, 2, opened)
        except CheckpointError as exc:
            messages.append(str(exc))
        found, rejected = find_latest_valid(root)
        assert found is not None
        assert rejected == []
        toy.check(found)
        committed = (root / "step-00000002").exists()
        assert found.step == (2 if committed else 1), calls.log[index]
        calls.fail_at = -1
        for tmp in opened:
            if tmp.exists():
                discard_save(tmp)
        if not committed:
            save(root, toy, 2)
        toy.check(Checkpoint.open(root / "step-00000002"))
        assert [name for name in os.listdir(root) if name.startswith(".tmp") and opened] == []
    assert len(messages) == len(points), "an error was swallowed"
    assert all(os.strerror(error) in message for message in messages)
    assert threading.active_count() == n_threads, "a thread that wrote is left"


def test_the_order_of_a_save(fast_path, toy, calls, monkeypatch):
    with calls.recording(monkeypatch):
        save(fast_path, toy, 3)
    log = [(name, finished_name(Path(what).name)) for name, what in calls.log]
    tmp = next(name for call, name in log if call == "mkdir" and name.startswith(".tmp"))
    last_write: dict[str, int] = {}
    for i, (name, what) in enumerate(log):
        if name in ("write", "pwrite"):
            last_write[what] = i
    for what, i in last_write.items():  # every file: its last write, then its fsync, then a fsync of its folder
        synced = next(j for j in range(i, len(log)) if log[j] == ("fsync", what))
        folder = "tokenizer" if what == "tokenizer.json" else tmp
        assert ("fsync", folder) in log[synced:], what
    assert len(last_write) == 14
    renames = [what for name, what in log if name == "rename"]
    assert renames == [
        "save.json",
        "part-00000.json",
        "part-00001.json",
        "tokenizer.json",
        "manifest.json",
        "COMMIT",
        tmp,
    ]
    publish = log.index(("rename", tmp))
    # Before the folder gets its name nothing in it waits for the disk; after it only the root does.
    assert ("fsync", tmp) in log[log.index(("rename", "COMMIT")) : publish]
    assert [entry for entry in log[publish + 1 :] if entry[0] != "close"] == [
        ("open", fast_path.name),
        ("fsync", fast_path.name),
    ]
    for rank in range(2):  # the tensor files' entries are on the disk before the part list can be seen
        listed = log.index(("rename", f"part-{rank:05d}.json"))
        written = max(i for i, entry in enumerate(log) if entry == ("fsync", f"rng-{rank:05d}.safetensors"))
        assert ("fsync", tmp) in log[written:listed]


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


class Disk:
    """A model of what a power cut leaves: entries of folders that were fsynced, bytes of files that were fsynced.

    `leave` builds, in another folder, the least that a file system may keep; it changes with each fsync only. What is
    kept goes by inode, whoever wrote it; descriptors stay open so that no inode is used again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kept: dict[int, bytes | dict[str, os.DirEntry[str]]] = {}

    def wrap(self, monkeypatch: pytest.MonkeyPatch, after) -> None:
        real = os.fsync

        def fsync(descriptor):
            real(descriptor)
            file = Path(f"/proc/self/fd/{os.dup(descriptor)}")
            kept = {entry.name: entry for entry in os.scandir(file)} if file.is_dir() else file.read_bytes()
            self.kept[os.fstat(descriptor).st_ino] = kept
            after()

        monkeypatch.setattr(os, "fsync", fsync)

    def leave(self, folder: Path) -> None:
        self._leave(folder, self.root.stat().st_ino, is_folder=True)

    def _leave(self, path: Path, number: int, *, is_folder: bool) -> None:
        found = self.kept.get(number, {} if is_folder else b"")
        if isinstance(found, bytes):
            path.write_bytes(found)
            return
        path.mkdir()
        for name, entry in found.items():
            self._leave(path / name, entry.inode(), is_folder=entry.is_dir())


def test_a_power_cut_at_any_call_leaves_the_old_or_the_new_one(fast_path, toy, monkeypatch):
    """Everything that was not fsynced is lost, at every point of two saves in turn."""
    live, cut = fast_path / "live", fast_path / "cut"
    live.mkdir()
    disk, seen, done = Disk(live), [], [0]

    def after():
        folder = cut / f"{len(seen)}"
        disk.leave(folder)
        found, rejected = find_latest_valid(folder / "ck")
        assert rejected == []
        if found is not None:
            toy.check(found)
        step = found.step if found else 0
        seen.append(step)
        assert step >= done[0], "a checkpoint that commit had returned is gone"

    cut.mkdir()
    with monkeypatch.context() as patch:
        disk.wrap(patch, after)
        for step in (1, 2):
            save(live / "ck", toy, step)
            done[0] = step
            after()
    assert seen == sorted(seen)
    assert set(seen) == {0, 1, 2}
    assert len(seen) > 50


def save_for_nxd(root: Path, step: int, *, xser: bool) -> Path:
    """One rank saves files of NxD; every number in them is the step."""
    config = ModelConfig(vocab_size=4, hidden_size=4, intermediate_size=4, n_heads=2, n_kv_heads=2, n_layers=1)
    cut = NxdOptions(xser=xser)
    part = NxdRankWriter(
        config=config,
        options=cut,
        param_group_keys=(optimizer_state_keys(config, cut, 0, 0),),
        step=step,
        user_content={"step": step},
    )
    shards = [
        Shard(
            group=group,
            name=tensor.key,
            dtype="F32",
            global_shape=tensor.shape,
            offset=(0,) * len(tensor.shape),
            shape=tensor.shape,
            data=np.full(tensor.shape, step, "<f4").reshape(-1).view(np.uint8),
        )
        for tensor in part.model_tensors()
        for group in ("weights", "exp_avg", "exp_avg_sq", "master")
    ]
    tmp = begin_save(root, step=step, world_size=1)
    write_rank_files(tmp, rank=0, shards=shards, writer=part)
    return commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=step, model=config.to_dict()))


@pytest.mark.parametrize("xser", [False, True], ids=["plain", "xser"])
def test_a_power_cut_while_nxds_files_are_written(fast_path, monkeypatch, xser):
    """The old one or the new one, for us and for NxD, which takes what has its marker `done`."""
    live, cut = fast_path / "live", fast_path / "cut"
    live.mkdir()
    disk, seen, done = Disk(live), [], [0]

    def after():
        folder = cut / "now"
        shutil.rmtree(folder, ignore_errors=True)
        disk.leave(folder)
        found, rejected = find_latest_valid(folder / "ck")
        assert rejected == []
        if found is not None:
            for group in found.groups:
                for name in found.names(group):
                    assert (found.read(group, name).view("<f4") == found.step).all()
        marked = {int(path.parent.name[5:]) for path in (folder / "ck").glob("step-*/done")}
        assert marked == {int(path.parent.name[5:]) for path in (folder / "ck").glob("step-*/COMMIT")}
        seen.append(found.step if found else 0)
        assert seen[-1] >= done[0], "a checkpoint that commit had returned is gone"

    cut.mkdir()
    with monkeypatch.context() as patch:
        disk.wrap(patch, after)
        for step in (1, 2):
            save_for_nxd(live / "ck", step, xser=xser)
            done[0] = step
            after()
    assert seen == sorted(seen)
    assert set(seen) == {0, 1, 2}
    assert len(seen) > (150 if xser else 30)


def test_an_error_at_any_call_of_nxds_files_is_told_and_leaves_the_last_checkpoint(fast_path, calls, monkeypatch):
    save_for_nxd(fast_path / "dry", 1, xser=True)
    with calls.recording(monkeypatch):
        save_for_nxd(fast_path / "dry", 2, xser=True)
    n_calls = len(calls.log)
    points = range(3, n_calls, 11)
    messages: list[str] = []
    for index in points:
        root = fast_path / f"{index}"
        save_for_nxd(root, 1, xser=True)
        try:
            with calls.recording(monkeypatch, fail_at=index, error=errno.ENOSPC):
                save_for_nxd(root, 2, xser=True)
        except CheckpointError as exc:
            messages.append(str(exc))
        calls.fail_at = -1
        found, rejected = find_latest_valid(root)
        assert found is not None
        assert rejected == []
        assert found.step == (2 if (root / "step-00000002").exists() else 1)
        shutil.rmtree(root)
    assert len(messages) >= len(points) - 1, "an error was swallowed"
    assert all(os.strerror(errno.ENOSPC) in message for message in messages)
