import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lt_ckpt import CheckpointError, files
from lt_ckpt.file_names import check_name


def test_all_bytes_are_written_though_the_system_takes_them_in_parts(tmp_path, calls, monkeypatch):
    with calls.recording(monkeypatch, short_writes=True):
        files.write_file(tmp_path / "x", bytes(range(256)))
    assert (tmp_path / "x").read_bytes() == bytes(range(256))
    assert sum(name == "write" for name, _ in calls.log) == 9


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path):
    files.make_folders(tmp_path / "a" / "b")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="File exists"):
        files.make_folders(tmp_path / "file" / "c")


def test_a_folder_without_fsync_is_let_pass_but_no_other_error(tmp_path, calls, monkeypatch):
    with calls.recording(monkeypatch, fail_at=1, error=errno.EINVAL):
        files.fsync_folder(tmp_path)
    with calls.recording(monkeypatch, fail_at=1, error=errno.EIO), pytest.raises(OSError, match="Input/output"):
        files.fsync_folder(tmp_path)


def test_reading_past_the_end_is_an_error(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    descriptor = os.open(tmp_path / "x", os.O_RDONLY)
    buffer = bytearray(4)
    files.read_exactly(descriptor, 1, memoryview(buffer), tmp_path / "x")
    assert buffer == b"2345"
    with pytest.raises(CheckpointError, match="ends at byte 5, 1 bytes are missing"):
        files.read_exactly(descriptor, 2, memoryview(buffer), tmp_path / "x")
    os.close(descriptor)
    with pytest.raises(CheckpointError, match="5 bytes, more than the 4"):
        files.read_bounded(tmp_path / "x", 4)


@pytest.mark.parametrize("name", ["", ".", "..", "/a", "a/../b", "a//b", "a/", "./a", "a\\b", "a\nb", "a\0b"])
def test_a_name_that_leaves_its_folder_is_refused(name):
    assert check_name("optim/a..b.pt", "x") == "optim/a..b.pt"
    with pytest.raises(CheckpointError, match=r"index\.json: .*file name"):
        check_name(name, "index.json")


MODES = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from conftest import toy_save
from lt_ckpt import begin_save
os.umask({umask:#o})
toy_save(Path({root!r}), 1)
begin_save({root!r}, step=2, world_size=1)
"""


@pytest.mark.parametrize(
    ("umask", "file_mode", "folder_mode"),
    [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750), (0o002, 0o664, 0o775), (0o077, 0o600, 0o700)],
)
def test_modes_follow_the_umask(tmp_path, umask, file_mode, folder_mode):
    root = tmp_path / "ck"
    code = MODES.format(tests=str(Path(__file__).parent), umask=umask, root=str(root))
    subprocess.run([sys.executable, "-c", code], check=True)
    found = [root, *root.rglob("*")]
    assert len(found) > 10
    for path in found:
        expected = folder_mode if path.is_dir() else file_mode
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
