"""Conversions that are killed with SIGKILL, wherever: the same command goes on, another one starts anew.

Each is run in a forked process that kills itself at a call of the system. LT_KILLS sets how many of them per kind of
output the slow test makes, LT_SEED which.
"""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_ckpt import CheckpointError, ConvertOptions, conversion, convert_checkpoint, open_source
from lt_ckpt.nxd.options import NxdOptions

SEED, KILLS = int(os.environ.get("LT_SEED", "1")), int(os.environ.get("LT_KILLS", "200"))
CALLS = ("open", "write", "pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir", "close")
OPTIONS = {
    "hf in shards": ConvertOptions(format="hf", max_shard_bytes=5000),
    "hf in shards, cast": ConvertOptions(format="hf", max_shard_bytes=5000, dtype="F32"),
    "nxd": ConvertOptions(format="nxd", nxd=NxdOptions(tp=2, pp=2, tag="step_3")),
    "nxd xser": ConvertOptions(format="nxd", nxd=NxdOptions(tp=2, xser=True)),
    "nxd v1": ConvertOptions(format="nxd", nxd=NxdOptions(tp=2, layout="v1")),
    "dcp": ConvertOptions(format="dcp", max_shard_bytes=5000),
    "pt": ConvertOptions(format="pt"),
}
IN_FILES = ("hf in shards", "hf in shards, cast", "nxd", "nxd xser", "nxd v1")
"""Kinds of output with files that are finished one after another."""


@pytest.fixture(scope="module")
def source(memory, models):
    """A checkpoint of lt: every byte has a checksum."""
    model = models.make(memory / "killed" / "model", n_layers=3)
    return convert_checkpoint(open_source(model), memory / "killed" / "lt", ConvertOptions(format="lt"))


def make(source: Path, out: Path, kind: str) -> None:
    convert_checkpoint(open_source(source), out, OPTIONS[kind])


def content(out: Path) -> dict[str, bytes]:
    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


def make_killed(at: int, *command: Any) -> bool:
    """`make` in a process that is killed at its n-th call; False if it ended before."""
    child = os.fork()
    if not child:
        try:
            count, lock = 0, threading.Lock()

            def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
                def call(*args: Any, **more: Any) -> Any:
                    nonlocal count
                    with lock:
                        count += 1
                        if count > at:
                            os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **more)

                return call

            for name in CALLS:
                setattr(os, name, wrapped(getattr(os, name)))
            make(*command)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def finished_files(out: Path) -> dict[str, tuple[int, int]]:
    """Files that the journal of a killed conversion names: inode and time of the last change."""
    hidden = out.with_name(f".{out.name}.converting")
    if not (hidden / "journal").exists():
        return {}
    lines = (hidden / "journal").read_bytes().split(b"\n")[1:-1]
    names = [name for line in lines for name in json.loads(line)["parts"]]
    stats = {name: (hidden / "output" / name).stat() for name in names if (hidden / "output" / name).exists()}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def kill_and_go_on(source: Path, folder: Path, kind: str, points: Callable[[int], list[int]]) -> int:
    """Kill conversions at points of their calls and finish them; return how many finished files were kept in all."""
    name = "out.pt" if kind == "pt" else "out"
    make(source, folder / "undisturbed" / name, kind)
    expected, total, n_kept = content(folder / "undisturbed" / name), 64, 0
    while make_killed(total, source, folder / f"{total}" / name, kind):
        total += 64
    for index in points(total):
        out = folder / f"kill-{index}" / name
        make_killed(index, source, out, kind)
        n_kept += go_on(source, out, kind, expected)
    return n_kept


def go_on(source: Path, out: Path, kind: str, expected: dict[str, bytes]) -> int:
    """Run the command of a killed conversion again; return how many finished files it kept."""
    finished = finished_files(out)
    if out.exists():  # killed after the rename, or ended
        with pytest.raises(CheckpointError, match="already exists"):
            make(source, out, kind)
    else:
        make(source, out, kind)
        stats = {name: (out if out.is_file() else out / name).stat() for name in finished}
        assert {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()} == finished, "written again"
    assert content(out) == expected
    assert os.listdir(out.parent) == [out.name]
    return len(finished)


def kill_with_finished_files(source: Path, out: Path, kind: str, n_files: int = 2) -> dict[str, tuple[int, int]]:
    """Kill a conversion, and those that go on, until some files are finished."""
    for index in range(60, 4000, 15):
        assert make_killed(index, source, out, kind)
        if len(found := finished_files(out)) >= n_files:
            return found
    raise AssertionError("no file was finished")


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_killed_conversion_goes_on(source, fast_path, kind):
    rng = random.Random(f"{SEED} {kind}")
    kill_and_go_on(source, fast_path, kind, lambda total: rng.sample(range(total), 4))
    if kind in IN_FILES:
        kill_with_finished_files(source, fast_path / "again" / "out", kind, n_files=1)
        assert go_on(source, fast_path / "again" / "out", kind, content(fast_path / "undisturbed" / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_conversion_killed_at_any_point_goes_on(source, fast_path, kind):
    rng = random.Random(f"{SEED} {kind} many")
    kept = kill_and_go_on(source, fast_path, kind, lambda total: rng.sample(range(total), min(KILLS, total)))
    sys.stdout.write(f"{kind}: {kept} finished files kept\n")


def test_another_command_starts_anew(source, fast_path):
    make(source, fast_path / "undisturbed", "hf in shards, cast")
    finished = kill_with_finished_files(source, fast_path / "out", "hf in shards")
    make(source, fast_path / "out", "hf in shards, cast")
    assert content(fast_path / "out") == content(fast_path / "undisturbed")
    assert not {path.stat().st_ino for path in (fast_path / "out").iterdir()} & {
        inode for inode, _ in finished.values()
    }
    assert sorted(os.listdir(fast_path)) == ["out", "undisturbed"]


def test_a_changed_source_is_another_job(source, fast_path, models):
    model = models.make(fast_path / "model", n_layers=3)
    finished = kill_with_finished_files(model, fast_path / "out", "hf in shards")
    file = model / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    before = file.stat()
    file.write_bytes(raw)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    make(model, fast_path / "out", "hf in shards")
    make(model, fast_path / "undisturbed", "hf in shards")
    assert content(fast_path / "out") == content(fast_path / "undisturbed")
    assert any((fast_path / "out" / name).stat().st_ino != inode for name, (inode, _) in finished.items())


@pytest.mark.parametrize("damage", ["flip", "cut", "link", "absent"])
def test_a_finished_file_that_changed_is_written_again(source, fast_path, damage):
    make(source, fast_path / "undisturbed", "hf in shards")
    finished = sorted(kill_with_finished_files(source, fast_path / "out", "hf in shards"))
    file = fast_path / ".out.converting" / "output" / finished[0]
    raw = file.read_bytes()
    file.unlink()
    if damage == "link":
        (fast_path / "aside").write_bytes(raw)
        file.symlink_to(fast_path / "aside")
    elif damage != "absent":
        file.write_bytes(raw[:-1] + (bytes([raw[-1] ^ 1]) if damage == "flip" else b""))
    make(source, fast_path / "out", "hf in shards")
    assert content(fast_path / "out") == content(fast_path / "undisturbed")
    assert not (fast_path / "out" / finished[0]).is_symlink()


def test_what_went_into_finished_files_is_verified_again(memory, source, fast_path, monkeypatch):
    """A range of the source may not have been read whole when its process was killed."""
    copy = fast_path / "lt"
    shutil.copytree(source, copy)
    monkeypatch.setattr(conversion, "_describe_job", lambda *_: "one job")
    kill_with_finished_files(copy, fast_path / "out", "hf in shards")
    (file,) = copy.rglob("weights-*.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-(2**10) :] = bytes(2**10)  # files of hf begin with other tensors than ours end with, or the same
    raw[-len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="differ from their checksum"):
        make(copy, fast_path / "out", "hf in shards")
    assert sorted(os.listdir(fast_path)) == ["lt"]


def jobs(source: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    describe = conversion._describe_job

    def keep(*args: Any) -> str:
        found.append(describe(*args))
        raise CheckpointError("described")

    monkeypatch.setattr(conversion, "_describe_job", keep)
    for kind in OPTIONS:
        with pytest.raises(CheckpointError, match="described"):
            make(Path(source), Path(source).parent / "never", kind)
    return found


def test_every_process_describes_a_job_alike_and_no_two_jobs_are_alike(source, monkeypatch):
    code = (
        f"import pytest, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_killed_conversion as t; "
    )
    code += f"print('\\n'.join(t.jobs({str(source)!r}, pytest.MonkeyPatch())))"
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONHASHSEED": "3"}
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    here = jobs(str(source), monkeypatch)
    assert here == there
    assert len(set(here)) == len(OPTIONS)


def test_one_in_use_is_refused(source, fast_path):
    kill_with_finished_files(source, fast_path / "out", "hf in shards")
    before = content(fast_path)
    with open(fast_path / ".out.converting" / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for kind in ("hf in shards", "hf in shards, cast"):
            with pytest.raises(CheckpointError, match=r"out: another process is writing it \(.*converting is locked\)"):
                make(source, fast_path / "out", kind)
    assert content(fast_path) == before


def plant(hidden: Path, what: str, theirs: Path) -> None:
    if what == "link":
        hidden.symlink_to(theirs)
        return
    if what == "file":
        hidden.write_text("theirs")
        return
    hidden.mkdir()
    if what == "notes":
        (hidden / "notes.txt").write_text("theirs")
    elif what == "output":
        (hidden / "output").mkdir()
        (hidden / "output" / "notes.txt").write_text("theirs")
    elif what == "journal":
        (hidden / "journal").write_text('{"format": "theirs"}\n')
    elif what == "output is a link":
        (hidden / "journal").write_text('{"format": "lt-conversion", "version": 1, "job": ""}\n')
        (hidden / "output").symlink_to(theirs)


@pytest.mark.parametrize("what", ["link", "file", "notes", "output", "journal", "output is a link"])
def test_what_no_conversion_made_stays(source, fast_path, what):
    theirs, hidden = fast_path / "theirs", fast_path / ".out.converting"
    theirs.mkdir()
    (theirs / "precious").write_text("theirs")
    plant(hidden, what, theirs)
    before = content(fast_path)
    with pytest.raises(CheckpointError, match=r"converting: no conversion made .*; move that folder away"):
        make(source, fast_path / "out", "hf in shards")
    assert content(fast_path) == before
    assert (theirs / "precious").read_text() == "theirs"


def test_a_planted_link_among_the_leftovers_is_not_written_through(source, fast_path):
    make(source, fast_path / "undisturbed", "nxd")
    kill_with_finished_files(source, fast_path / "out", "nxd")
    theirs = fast_path / "theirs"
    model = fast_path / ".out.converting" / "output" / "step_3" / "model"
    model.rename(theirs)
    model.symlink_to(theirs)
    before = content(theirs)
    make(source, fast_path / "out", "nxd")
    assert content(fast_path / "out") == content(fast_path / "undisturbed")
    assert content(theirs) == before
    assert not (fast_path / "out" / "step_3" / "model").is_symlink()


def test_a_file_system_without_locks_is_named(source, fast_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(CheckpointError, match=r"locking \(flock\) failed: Operation not supported"):
        make(source, fast_path / "out", "pt")
    assert os.listdir(fast_path) == []
