"""What killed saves and downloads leave: it is removed, also on a full disk, and never while it is in use."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lt_ckpt import CheckpointError, begin_save, discard_save, files, find_latest_valid, folders
from lt_ckpt.source import TensorReader

TESTS = str(Path(__file__).parent)
DIES = """
import os, signal, sys
from lt_ckpt import begin_save, files
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
real = files.{call}
def {call}(path, *more):
    if "save.json" in os.fspath(path) or ".tmp-step" in os.fspath(path):
        {when}
    return real(path, *more)
files.{call} = {call}
begin_save(sys.argv[1], step=3, world_size=1)
"""


def unfinished(root: Path) -> list[Path]:
    return sorted(root.glob(".tmp-step-*"))


@pytest.mark.parametrize(
    ("call", "when"),
    [("write_file", "die()"), ("write_all_", "die()"), ("rename", "die()")],
)
def test_a_save_killed_before_its_marker_is_removed(tmp_path, call, when):
    root = tmp_path / "checkpoints"
    root.mkdir()
    if call == "write_all_":  # in the middle of the marker
        code = DIES.format(call="create_file", when="real(path); die()")
    else:
        code = DIES.format(call=call, when=when)
    done = subprocess.run([sys.executable, "-c", code, str(root)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = unfinished(root)
    assert not (left / "save.json").exists()
    tmp = begin_save(root, step=4, world_size=1)
    assert unfinished(root) == [tmp]


def test_what_others_put_into_a_folder_of_that_name_stays(tmp_path):
    theirs = tmp_path / f".tmp-step-00000001-{'0' * 16}"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("theirs")
    begin_save(tmp_path, step=1, world_size=1)
    assert (theirs / "notes.txt").read_text() == "theirs"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / f".tmp-step-00000001-{'1' * 16}"
    link.symlink_to(elsewhere)
    begin_save(tmp_path, step=1, world_size=1)
    assert link.is_symlink()
    assert elsewhere.is_dir()


@pytest.mark.parametrize("when", ["before the marker", "while the marker is written"])
def test_a_save_whose_new_folder_another_sweep_takes_begins_anew(tmp_path, monkeypatch, when):
    real, swept = {"make_folder": files.make_folder, "rename": files.rename}, []

    def then_sweep(path: Path, *more: Path) -> None:
        if not swept and when == "while the marker is written":
            swept.extend(folders.remove_abandoned_saves(tmp_path))
        real[name](path, *more)
        if not swept:
            swept.extend(folders.remove_abandoned_saves(tmp_path))

    name = "make_folder" if when == "before the marker" else "rename"
    monkeypatch.setattr(files, name, then_sweep)
    tmp = begin_save(tmp_path, step=1, world_size=1)
    assert len(swept) == 1
    assert swept[0] != tmp
    assert unfinished(tmp_path) == [tmp]
    discard_save(tmp)


def test_many_saves_that_begin_at_once_do_not_take_each_others_folders(tmp_path):
    made: list[Path] = []

    def begin() -> None:
        made.extend(begin_save(tmp_path, step=1, world_size=1) for _ in range(10))

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 40
    assert all((tmp / "save.json").is_file() for tmp in made)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


FILLS = """
import os, sys
from lt_ckpt import begin_save
folder = begin_save(sys.argv[1], step=1, world_size=1)
try:
    with open(folder / "weights-00000.safetensors", "wb", 0) as file:
        while True:
            file.write(bytes(4096))
except OSError:
    os.kill(os.getpid(), 9)
"""


def test_a_retry_on_a_full_disk_frees_what_the_failed_save_left(small_disk, toy):
    root = small_disk / "checkpoints"
    done = subprocess.run([sys.executable, "-c", FILLS, str(root)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = unfinished(root)
    assert os.statvfs(small_disk).f_bavail == 0
    toy.save(root, 2)
    found, _ = find_latest_valid(root)
    assert found is not None
    assert found.step == 2
    assert not left.exists()


@pytest.mark.parametrize("kind", ["hf", "lt", "dcp", "pt", "nxd v1"])
def test_a_conversion_that_does_not_fit_writes_nothing(small_disk, tmp_path, models, monkeypatch, kind):
    model = models.make(tmp_path / "model", n_layers=1, vocab_size=20_000)
    monkeypatch.setattr(TensorReader, "read", lambda *_, **__: pytest.fail("it began to read"))
    with pytest.raises(CheckpointError, match=r"bytes will be written and [\d,]+ are free"):
        models.output(model, small_disk / "out", kind)
    assert [path for path in small_disk.rglob("*") if path.is_file()] == []


def test_a_planted_link_is_not_written_through(tmp_path, monkeypatch):
    target = tmp_path / "theirs"
    target.write_bytes(b"theirs")
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "0" * 2 * n)
    (tmp_path / f"x.{'0' * 16}.tmp").symlink_to(target)
    with pytest.raises(FileExistsError):
        files.write_file(tmp_path / "x", b"ours")
    assert target.read_bytes() == b"theirs"
