"""Real file systems that are full or read-only: small tmpfs mounts in a mount namespace of their own.

Each test runs a script there, in a process whose mounts end with it. Where the system does not permit that, the tests
are skipped and say so: run them as root, or where unprivileged user namespaces are allowed.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import toy_check, toy_save, toy_shards, toy_state
from lt_ckpt import (
    CheckpointError, CheckpointMetadata, begin_save, commit_save, discard_save, find_latest_valid,
    prune_checkpoints, write_rank_files,
)
disk = Path({disk!r})
root = disk / "checkpoints"

def mount(options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)

def error_of(action):
    try:
        action()
    except CheckpointError as exc:
        return str(exc)
    return ""

def newest():
    found, rejected = find_latest_valid(root)
    assert rejected == [], rejected
    toy_check(found)
    return found.step

def unfinished():
    return [path for path in root.iterdir() if path.name.startswith(".tmp-")]
"""


@pytest.fixture
def in_own_mounts(tmp_path):
    """Runs a script in a process that may mount file systems, and returns what it printed."""
    if not (shutil.which("unshare") and shutil.which("mount")):
        pytest.skip("no unshare and mount here: the tests with real full and read-only disks did not run")
    disk = tmp_path / "disk"
    disk.mkdir()
    for flags in (["-rm"], ["-m"]):
        probe = ["unshare", *flags, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip("mounting a tmpfs is not permitted here: the tests with real full and read-only disks did not run")

    def run(code: str) -> str:
        program = HEAD.format(tests=str(Path(__file__).parent), disk=str(disk)) + code
        command = ["unshare", *flags, sys.executable, "-W", "error", "-c", program]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert list(disk.iterdir()) == [], "the mount was not its own"
        return done.stdout

    return run


FILL_BYTES = """
def fill(free):
    space = os.statvfs(disk)
    with open(disk / "filler", "wb") as filler:
        filler.write(bytes((space.f_bavail - free) * space.f_frsize))

def empty():
    os.unlink(disk / "filler")
"""

FILL_INODES = """
fillers = disk / "fillers"
fillers.mkdir()

def fill(free):
    for number in range(os.statvfs(disk).f_ffree - free):
        (fillers / str(number)).touch()

def empty():
    for path in fillers.iterdir():
        path.unlink()
"""

SAVE_ON_A_FULL_DISK = """
toy_save(root, 1)
where = set()
free = 0  # one page or one inode more each time, so that every write in turn is the one that does not fit
while True:
    fill(free)
    opened = []

    def save():
        opened.append(begin_save(root, step=2, world_size=2))
        for rank in range(2):
            write_rank_files(opened[0], rank=rank, shards=toy_shards(toy_state(2), rank, 2))
        commit_save(opened[0], world_size=2, metadata=CheckpointMetadata(step=2))

    said = error_of(save)
    if not said:
        break
    assert str(root) in said, said
    assert "No space left on device; free some space on that disk or save to another one" in said, said
    where.add(said.partition(" failed:")[0].rpartition(": ")[2])
    assert newest() == 1
    if opened:
        discard_save(opened[0])
    assert sorted(path.name for path in root.iterdir()) == ["step-00000001"]
    empty()
    free += 1
assert newest() == 2
assert unfinished() == []
assert free > 10, free
print(sorted(where))
"""


@pytest.mark.parametrize("fill", [FILL_BYTES, FILL_INODES], ids=["bytes", "inodes"])
def test_a_full_disk_at_every_write_of_a_save(in_own_mounts, fill):
    out = in_own_mounts('mount("size=4m,nr_inodes=500")' + fill + SAVE_ON_A_FULL_DISK)
    stages = ["beginning a save", "committing", "writing the files of rank 0", "writing the files of rank 1"]
    assert out.strip() == str(stages)


READ_ONLY = """
mount("size=4m")
def set_writable(writable):
    subprocess.run(["mount", "-o", "remount,rw" if writable else "remount,ro", str(disk)], check=True)
toy_save(root, 1)
toy_save(root, 2)

def save(stop_before):
    tmp = begin_save(root, step=3, world_size=2)
    for rank in range(2):
        if stop_before == rank:
            set_writable(False)
        write_rank_files(tmp, rank=rank, shards=toy_shards(toy_state(3), rank, 2))
    set_writable(False)
    commit_save(tmp, world_size=2, metadata=CheckpointMetadata(step=3))

for stop_before in (0, 1, 2):
    said = error_of(lambda: save(stop_before))
    assert str(root) in said, said
    assert "Read-only file system; the file system is mounted read-only: remount it or choose another path" in said
    assert newest() == 2
    for action in (
        lambda: begin_save(root, step=3, world_size=2),
        lambda: discard_save(unfinished()[0]),
        lambda: prune_checkpoints(root, keep_last=1),
    ):
        said = error_of(action)
        assert str(disk) in said, said
        assert "mounted read-only: remount it or choose another path" in said, said
    assert newest() == 2
    set_writable(True)
    for path in unfinished():
        discard_save(path)
toy_save(root, 3)
assert newest() == 3
print(sorted(path.name for path in root.iterdir()))
"""


def test_a_disk_that_becomes_read_only_at_any_stage_of_a_save(in_own_mounts):
    out = in_own_mounts(READ_ONLY)
    assert out.strip() == str([f"step-0000000{step}" for step in (1, 2, 3)])


def test_a_root_that_is_a_read_only_mount(in_own_mounts):
    """The folder is a read-only view of one that is writable elsewhere, as containers have it."""
    in_own_mounts("""
real = disk / "real"
mount("size=4m")
real.mkdir()
toy_save(real, 1)
root.mkdir()
subprocess.run(["mount", "--bind", str(real), str(root)], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", str(root)], check=True)
said = error_of(lambda: begin_save(root, step=2, world_size=1))
assert said.startswith(f"{root}: beginning a save failed: Read-only file system; "), said
assert newest() == 1
assert [path.name for path in real.iterdir()] == ["step-00000001"]
""")
