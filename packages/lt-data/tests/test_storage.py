"""A disk that fails at any moment: one clear error, and what stood there before is whole."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lt_data import DataError, pack, prepare
from lt_data import storage as storage_module
from lt_data.storage import atomic_folder, check_inside, replace_file, write_file


def test_a_folder_whose_name_begins_alike_is_outside(tmp_path):
    for name in ("store", "store-other"):
        (tmp_path / name).mkdir()
    (tmp_path / "store-other" / "file").touch()
    (tmp_path / "store" / "link").symlink_to(tmp_path / "store-other" / "file")
    (tmp_path / "store" / "own").symlink_to(tmp_path / "store")
    with pytest.raises(DataError, match=r"link: a symbolic link leads out of .*store; put the file itself there"):
        check_inside(tmp_path / "store" / "link", tmp_path / "store")
    check_inside(tmp_path / "store" / "own", tmp_path / "store")


class FailingDisk:
    """Counts writes, syncs and renames, and fails at the one of a given number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.fail_at = list[str](), -1
        for owner, name in ((storage_module, "write"), (os, "fsync"), (Path, "rename")):
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name), name))
        monkeypatch.setattr("lt_data.store.shards.write", storage_module.write)

    def _wrapped(self, original: Callable[..., object], kind: str) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            number = len(self.calls)
            self.calls.append(kind)
            if number == self.fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*arguments)

        return call


@pytest.fixture
def disk(monkeypatch) -> FailingDisk:
    return FailingDisk(monkeypatch)


def test_full_disk_at_every_write_sync_and_rename(tmp_path, tokenizer, documents, disk):
    prepare(documents[:9], tokenizer=tokenizer, out=tmp_path / "trial", shard_tokens=1500)
    assert {"write", "fsync", "rename"} == set(disk.calls)
    for number in range(len(disk.calls)):
        disk.calls.clear()
        disk.fail_at = number
        with pytest.raises(DataError, match=r"No space left on device; free some space") as error:
            prepare(documents[:9], tokenizer=tokenizer, out=tmp_path / "store", shard_tokens=1500)
        disk.fail_at = -1
        assert str(tmp_path / "store") in str(error.value)
        assert error.value.__cause__ is not None
        assert [path.name for path in tmp_path.iterdir() if path.name != "store"] == ["trial"]
        if (tmp_path / "store").exists():  # the last sync failed
            shutil.rmtree(tmp_path / "store")


def test_full_disk_while_packing(tmp_path, store, disk):
    first = pack(store, seq_len=64)
    disk.calls.clear()
    pack(store, seq_len=64, overwrite=True)
    for number in range(len(disk.calls)):
        disk.calls.clear()
        disk.fail_at = number
        with pytest.raises(DataError, match="No space left on device"):
            pack(store, seq_len=64, overwrite=True)
        disk.fail_at = -1
        assert pack(store, seq_len=64).fingerprint == first.fingerprint
        assert [path.name for path in (store.path / "packs").iterdir()] == ["bfd-64"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to name what is synced")
def test_everything_is_synced_before_the_rename_and_the_parent_after(tmp_path, tokenizer, documents, monkeypatch):
    events: list[Path] = []
    sizes: dict[Path, int] = {}
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(path)
        sizes[path] = path.stat().st_size
        fsync(descriptor)

    def note_rename(self: Path, target: Path) -> Path:
        events.append(Path("rename"))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    out = tmp_path / "store"
    prepare(documents, tokenizer=tokenizer, out=out, shard_tokens=5000)
    assert events[-2:] == [Path("rename"), tmp_path]
    building = next(path for path in events if path.name == "unit")
    for path in [out, *out.rglob("*")]:
        synced = building / path.relative_to(out)
        assert synced in events, path
        if path.is_file():
            assert sizes[synced] == path.stat().st_size  # all of it was written by then
            last_of_parent = len(events) - 1 - events[::-1].index(synced.parent)
            assert events.index(synced) < last_of_parent < len(events) - 2


def test_target_that_appears_meanwhile_is_not_touched(tmp_path):
    def overtaken() -> None:
        with atomic_folder(tmp_path / "made"):
            (tmp_path / "made").mkdir()
            (tmp_path / "made/theirs").write_text("x", encoding="utf-8")

    with pytest.raises(DataError, match="another process wrote there"):
        overtaken()
    assert {path.name: (path / "theirs").read_text("utf-8") for path in tmp_path.iterdir()} == {"made": "x"}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to name what is synced")
def test_folders_made_on_the_way_are_on_the_disk_too(tmp_path, monkeypatch):
    """A power cut must not take the folders above a finished one."""
    kept: dict[Path, set[str]] = {}
    fsync = os.fsync

    def note(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            kept[path] = set(os.listdir(path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with atomic_folder(tmp_path / "a" / "b" / "made") as building:
        write_file(building / "file", b"x")
    assert kept[building] == {"file"}
    replace_file(tmp_path / "a" / "file", b"x")
    for name in ("a", "a/b", "a/b/made", "a/file"):
        assert (tmp_path / name).name in kept[(tmp_path / name).parent], name
