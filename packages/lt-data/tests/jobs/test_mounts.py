"""A real file system that is full: a small tmpfs in a mount namespace of its own.

Where the system does not permit such a mount, the test is skipped and says so: run it as root, or where unprivileged
user namespaces are allowed.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lt_data import Tokenizer

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
import lt_data

disk, sources = Path({disk!r}), Path({sources!r})
subprocess.run(["mount", "-t", "tmpfs", "-o", {options!r}, "tmpfs", str(disk)], check=True)
tokenizer = lt_data.Tokenizer.load(sources / "tok")

def prepare(out):
    lt_data.prepare([sources / "in"], tokenizer=tokenizer, out=out, engine="hf", shard_tokens=3000,
                    selection=lt_data.Selection(drop_duplicates=True))

def contents(folder):
    return {{p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}}

prepare(sources / "whole")
whole = contents(sources / "whole")
{fill}
free = kept = rounds = 0
while True:
    out = disk / str(rounds) / "store"
    out.parent.mkdir()
    fill(free)
    said = ""
    try:
        prepare(out)
    except lt_data.DataError as exc:
        said = str(exc)
    if not said:
        break
    assert "No space left on device; free some space or write to another disk" in said, said
    assert not out.exists()
    at_work = out.with_name("store.building")
    assert at_work.exists() == ("finished shards are kept in" in said), said
    kept += at_work.exists()
    try:
        prepare(out)
    except lt_data.DataError as exc:
        assert "No space left on device" in str(exc), exc
    else:
        raise AssertionError("still full")
    empty()
    prepare(out)
    assert contents(out) == whole
    assert not at_work.exists()
    subprocess.run(["rm", "-r", str(out.parent)], check=True)
    rounds += 1
    free += {step}
assert contents(out) == whole
print(rounds, kept)
"""

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


@pytest.mark.parametrize(
    ("fill", "options", "step"),
    [(FILL_BYTES, "size=1m", 2), (FILL_INODES, "size=4m,nr_inodes=100", 2)],
    ids=["bytes", "inodes"],
)
def test_a_full_disk_leaves_what_is_finished(
    tmp_path: Path, tokenizer: Tokenizer, fill: str, options: str, step: int
) -> None:
    if not (shutil.which("unshare") and shutil.which("mount")):
        pytest.skip("no unshare and mount here: the test with a real full disk did not run")
    disk = tmp_path / "disk"
    disk.mkdir()
    for flags in (["-rm"], ["-m"]):
        probe = ["unshare", *flags, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip("mounting a tmpfs is not permitted here: the test with a real full disk did not run")
    sources = tmp_path / "sources"
    (sources / "in").mkdir(parents=True)
    tokenizer.save(sources / "tok")
    for number in range(12):
        (sources / f"in/{number:02d}.txt").write_text(f"{number} the quick brown fox " * 150, encoding="utf-8")
    program = PROGRAM.format(disk=str(disk), sources=str(sources), fill=fill, options=options, step=step)
    command = ["unshare", *flags, sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rounds, kept = map(int, done.stdout.split())
    assert rounds > 8
    assert kept > 3
    assert list(disk.iterdir()) == []  # the mount was its own
