"""A rehearsal of a save finds at the start what would spoil the first checkpoint, and leaves nothing behind."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lt_ckpt import (
    CheckpointError,
    CheckpointMetadata,
    begin_preflight,
    begin_save,
    commit_save,
    direct_io,
    discard_save,
    find_latest_valid,
    finish_preflight,
    list_steps,
    write_preflight,
)


def test_the_needs_of_all_ranks_are_added_and_nothing_is_left(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    tmp = begin_preflight(root, world_size=3)
    for rank, need in enumerate((1000, 0, 24)):
        write_preflight(tmp, rank=rank, required_bytes=need)
    assert list_steps(root) == []
    assert find_latest_valid(root) == (None, [])
    space = os.statvfs(tmp_path)
    report = finish_preflight(tmp, world_size=3)
    assert (report.root, report.required_bytes) == (root, 1024)
    assert abs(report.free_bytes - space.f_bavail * space.f_frsize) < 2**30
    assert os.listdir(root) == []


def test_a_file_system_that_is_slow_for_big_files_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(
        direct_io, "_unsupported_devices", {os.stat(tmp_path).st_dev: "its file system refuses O_DIRECT (because)"}
    )
    tmp = begin_preflight(tmp_path, world_size=1)
    write_preflight(tmp, rank=0, required_bytes=5)
    assert finish_preflight(tmp, world_size=1).buffered_io_reason == "its file system refuses O_DIRECT (because)"


def test_older_checkpoints_stay_as_they_are(tmp_path, toy):
    path = toy.save(tmp_path, 0)
    tmp = begin_preflight(tmp_path, world_size=1)
    write_preflight(tmp, rank=0, required_bytes=5)
    finish_preflight(tmp, world_size=1)
    assert os.listdir(tmp_path) == [path.name]
    found, rejected = find_latest_valid(tmp_path)
    assert found is not None
    assert (found.path, rejected) == (path, [])


def test_a_disk_that_is_too_small_is_said_with_what_is_needed_and_what_is_free(tmp_path, monkeypatch):
    tmp = begin_preflight(tmp_path, world_size=2)
    for rank in range(2):
        write_preflight(tmp, rank=rank, required_bytes=2**61)
    with pytest.raises(CheckpointError) as caught:
        finish_preflight(tmp, world_size=2)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}: a checkpoint needs {2**62} bytes (4611.7 PB), ")
    assert text.endswith(" are free; free some space on that disk or save to another one")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("more", "enough"), [(0, True), (1, False)])
def test_exactly_one_checkpoint_must_fit(tmp_path, monkeypatch, more, enough):
    space = os.statvfs(tmp_path)
    free = space.f_bavail * space.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda _: space)
    tmp = begin_preflight(tmp_path, world_size=2)
    write_preflight(tmp, rank=0, required_bytes=free - 7)
    write_preflight(tmp, rank=1, required_bytes=7 + more)
    if enough:
        assert finish_preflight(tmp, world_size=2).required_bytes == free
    else:
        with pytest.raises(CheckpointError, match=rf"needs {free + 1} bytes .*, {free} \("):
            finish_preflight(tmp, world_size=2)
    assert os.listdir(tmp_path) == []


def test_unfinished_saves_that_take_the_space_are_named(tmp_path):
    other = begin_save(tmp_path, step=7, world_size=1)  # of a living process, so it is not swept
    tmp = begin_preflight(tmp_path, world_size=1)
    write_preflight(tmp, rank=0, required_bytes=2**62)
    with pytest.raises(CheckpointError, match=rf"remove them if no process writes them: {other.name}$"):
        finish_preflight(tmp, world_size=1)
    assert os.listdir(tmp_path) == [other.name]


def test_a_rank_that_does_not_write_is_named(tmp_path):
    tmp = begin_preflight(tmp_path, world_size=3)
    write_preflight(tmp, rank=1, required_bytes=1)
    with pytest.raises(CheckpointError, match=r"after 0\.05 s the manifest of rank 0, 2 is missing"):
        finish_preflight(tmp, world_size=3, timeout_s=0.05)
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointError, match="every machine sees the same shared folder"):
        write_preflight(tmp, rank=0, required_bytes=1)


def test_a_folder_that_a_rank_does_not_see_is_said_by_that_rank(tmp_path):
    tmp = begin_preflight(tmp_path / "mine", world_size=2)
    with pytest.raises(CheckpointError, match="every machine sees the same shared folder"):
        write_preflight(tmp_path / "theirs" / tmp.name, rank=1, required_bytes=1)
    discard_save(tmp)  # what rank 0 does when another rank has failed and said so
    assert os.listdir(tmp_path / "mine") == []


def test_a_rank_that_cannot_write_ends_the_wait_at_once(tmp_path, calls, monkeypatch):
    tmp = begin_preflight(tmp_path, world_size=2)
    write_preflight(tmp, rank=0, required_bytes=1)
    # 3 calls read the mark, 3 more read it again, the next one opens the file
    with calls.recording(monkeypatch, fail_at=7), pytest.raises(CheckpointError, match="free some space"):
        write_preflight(tmp, rank=1, required_bytes=1)
    assert calls.log[7] == ("write", str(tmp / "preflight-00001.safetensors"))
    with pytest.raises(CheckpointError, match="rank 1 failed to write its files"):
        finish_preflight(tmp, world_size=2, timeout_s=600)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("position", [20, -1])
def test_a_file_that_is_seen_otherwise_than_written_is_noticed(tmp_path, position):
    tmp = begin_preflight(tmp_path, world_size=2)
    for rank in range(2):
        write_preflight(tmp, rank=rank, required_bytes=2**40 + 3)
    file = tmp / "preflight-00001.safetensors"
    raw = bytearray(file.read_bytes())
    raw[position] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="is not what rank 1 wrote; is the folder really shared"):
        finish_preflight(tmp, world_size=2)
    assert os.listdir(tmp_path) == []


def test_a_stale_file_of_another_trial_is_noticed(tmp_path):
    old, new = begin_preflight(tmp_path, world_size=1), begin_preflight(tmp_path, world_size=1)
    write_preflight(old, rank=0, required_bytes=1)
    for path in old.glob("*-00000.*"):
        (new / path.name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match="not to this save"):
        finish_preflight(new, world_size=1)
    assert os.listdir(tmp_path) == [old.name]


def test_wrong_arguments_are_said(tmp_path):
    tmp = begin_preflight(tmp_path, world_size=2)
    for need in (-1, 2**63):
        with pytest.raises(CheckpointError, match=f"required_bytes = {need}: must be from 0 to"):
            write_preflight(tmp, rank=0, required_bytes=need)
    with pytest.raises(CheckpointError):
        write_preflight(tmp, rank=2, required_bytes=1)
    with pytest.raises(CheckpointError, match="begun for 2 ranks, not 3"):
        finish_preflight(tmp, world_size=3)
    assert os.listdir(tmp_path) == []


def test_an_interrupt_leaves_nothing_either(tmp_path, monkeypatch):
    tmp = begin_preflight(tmp_path, world_size=2)

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lt_ckpt.save.time.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish_preflight(tmp, world_size=2)
    assert os.listdir(tmp_path) == []


def test_what_others_put_there_is_not_removed_and_said(tmp_path):
    tmp = begin_preflight(tmp_path, world_size=1)
    write_preflight(tmp, rank=0, required_bytes=1)
    (tmp / "notes.txt").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="not removed: it contains files that no save of ours wrote"):
        finish_preflight(tmp, world_size=1)
    assert (tmp / "notes.txt").read_bytes() == b"mine"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_an_os_error_at_any_call_is_said_and_a_second_trial_goes_well(fast_path, calls, monkeypatch, error):
    def preflight(root):
        tmp = begin_preflight(root, world_size=2)
        failures = []
        for rank in range(2):
            try:
                write_preflight(tmp, rank=rank, required_bytes=rank)
            except CheckpointError as exc:
                failures.append(exc)
        try:
            finish_preflight(tmp, world_size=2, timeout_s=0)
        except CheckpointError as exc:
            failures.append(exc)
        if failures:
            raise failures[0]

    with calls.recording(monkeypatch):
        preflight(fast_path / "dry")
    log = list(calls.log)
    assert sum(name == "fsync" for name, _ in log) >= 10
    swallowed = []
    for index in range(len(log)):
        root = fast_path / f"{index}"
        said = ""
        try:
            with calls.recording(monkeypatch, fail_at=index, error=error):
                preflight(root)
        except CheckpointError as exc:
            said = str(exc)
        calls.fail_at = -1
        if os.strerror(error) not in said:
            swallowed.append(log[index])
        assert find_latest_valid(root) == (None, [])
        preflight(root)
    # `begin_preflight` reads the marker of its own folder (3 calls); a removal reads it too, and treats one that it
    # cannot read as another's (3 calls).
    names = [(name, Path(what).name) for name, what in swallowed]
    assert [pair for pair in names if pair[1] != "save.json"] == []
    assert len(swallowed) <= 6


TRIAL = """
import os, sys
from lt_ckpt import begin_preflight, write_preflight
tmp = begin_preflight({root!r}, world_size=2)
write_preflight(tmp, rank=0, required_bytes=1)
print(tmp, flush=True)
sys.stdin.read()
"""


def test_a_killed_trial_is_swept_by_the_next_save(tmp_path, toy):
    command = [sys.executable, "-c", TRIAL.format(root=str(tmp_path))]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
    assert child.stdin is not None
    assert child.stdout is not None
    tmp = Path(child.stdout.readline().strip())
    assert (tmp / "preflight-00000.safetensors").exists()
    path = toy.save(tmp_path, 1)
    assert tmp.exists(), "its process lives"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    assert find_latest_valid(tmp_path)[1] == []
    discard_save(begin_save(tmp_path, step=2, world_size=1))
    assert os.listdir(tmp_path) == [path.name]


def test_ranks_are_processes_and_rank_0_waits_for_them(tmp_path):
    tmp = begin_preflight(tmp_path, world_size=2)
    reports = []
    thread = threading.Thread(target=lambda: reports.append(finish_preflight(tmp, world_size=2, timeout_s=120)))
    thread.start()
    write_preflight(tmp, rank=0, required_bytes=1000)
    code = f"from lt_ckpt import write_preflight; write_preflight({str(tmp)!r}, rank=1, required_bytes=5)"
    subprocess.run([sys.executable, "-c", code], check=True)
    thread.join()
    assert reports[0].required_bytes == 1005


def test_a_trial_is_never_committed(tmp_path):
    tmp = begin_preflight(tmp_path, world_size=1)
    write_preflight(tmp, rank=0, required_bytes=1)
    with pytest.raises(CheckpointError, match="does not hold the expected state: missing: weights/a"):
        commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=0), expected_specs={"weights": {"a": None}})  # pyright: ignore[reportArgumentType]
    finish_preflight(tmp, world_size=1)
    assert os.listdir(tmp_path) == []
