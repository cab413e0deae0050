"""A kill, a power cut or a full disk at any call of a job: the same command ends as it would have.

A kill leaves what was written. A power cut leaves at least what was synced: of a folder the entries at its last fsync,
of a file the bytes at its last fsync. It may also leave all entries, with files that are shorter than they were. Each
of these states is built in another folder, a sample of them or (slow) all, and the command is run again there.
"""

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lt_data import prepare
from lt_data import storage as storage_module

MODULES = ("storage", "store.shards")  # that write


class Disk:
    """Follows the calls that change a folder and knows what a power cut would leave of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[int, bytes] = {}  # inode -> bytes at the last fsync
        self.folders: dict[int, dict[str, int]] = {}  # inode -> entries at the last fsync
        self.kinds: dict[int, bool] = {}  # inode -> is a folder
        self._open: list[int] = []  # so that no inode is used twice
        for path in [root, *root.rglob("*")]:
            descriptor = os.open(path, os.O_RDONLY)
            self.synced(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)

    def synced(self, descriptor: int) -> None:
        self._open.append(os.dup(descriptor))
        inode = os.fstat(descriptor).st_ino
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            entries = {child.name: child.stat().st_ino for child in path.iterdir()}
            self.kinds.update({child.stat().st_ino: child.is_dir() for child in path.iterdir()})
            self.folders[inode] = entries
        else:
            self.files[inode] = path.read_bytes()

    def killed(self) -> dict[str, bytes | None]:
        """What is there: path -> bytes, or None for a folder."""
        paths = sorted(self.root.rglob("*"))
        return {p.relative_to(self.root).as_posix(): None if p.is_dir() else p.read_bytes() for p in paths}

    def torn(self) -> dict[str, bytes | None]:
        """All entries, with the bytes that were synced."""
        paths = sorted(self.root.rglob("*"))
        return {
            p.relative_to(self.root).as_posix(): None if p.is_dir() else self.files.get(p.stat().st_ino, b"")
            for p in paths
        }

    def least(self) -> dict[str, bytes | None]:
        """The entries and the bytes that were synced."""
        found: dict[str, bytes | None] = {}

        def walk(inode: int, prefix: str) -> None:
            for name, child in sorted(self.folders.get(inode, {}).items()):
                if self.kinds[child]:
                    found[prefix + name] = None
                    walk(child, f"{prefix}{name}/")
                else:
                    found[prefix + name] = self.files.get(child, b"")

        walk(self.root.stat().st_ino, "")
        return found


@contextmanager
def calls(monkeypatch: pytest.MonkeyPatch, after: Callable[[str, Sequence[Any]], None]) -> Iterator[None]:
    """Tells of every call that changes the disk, after it was made."""
    with monkeypatch.context() as patch:

        def follow(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = real(*args, **kwargs)
                after(name, args)
                return result

            return call

        for name in ("fsync", "rename", "mkdir", "unlink", "rmdir", "link"):
            patch.setattr(os, name, follow(name, getattr(os, name)))
        written = follow("write", storage_module.write)
        for module in MODULES:
            patch.setattr(f"lt_data.{module}.write", written)
        yield


def build(folder: Path, state: dict[str, bytes | None]) -> None:
    folder.mkdir()
    for name, content in state.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)


def states_of(
    monkeypatch: pytest.MonkeyPatch, root: Path, work: Callable[[Path], object]
) -> dict[bytes, tuple[str, dict[str, bytes | None]]]:
    """Every state that a crash during the work may leave, once: when and by what kind of crash, and the files."""
    disk = Disk(root)
    found: dict[bytes, tuple[str, dict[str, bytes | None]]] = {}
    n_calls = 0

    def after(name: str, args: Sequence[Any]) -> None:
        nonlocal n_calls
        n_calls += 1
        if name == "fsync":
            disk.synced(args[0])
        for kind in ("killed", "torn", "least"):
            files = getattr(disk, kind)()
            digest = hashlib.sha256(repr(sorted(files.items())).encode()).digest()
            found.setdefault(digest, (f"{kind} after call {n_calls} ({name} {args[0]})", files))

    with calls(monkeypatch, after):
        work(root)
    disk.close()
    return found


@pytest.fixture(params=[2**30, 700], ids=["one unit", "units"])
def job(corpus, options, request) -> Callable[[Path], object]:
    """Makes the store of the corpus, as one unit or several without the duplicates of each other."""
    chosen = {**options, "shard_tokens": 600, "unit_bytes": request.param}
    return lambda root: prepare([corpus], out=root / "store", **chosen)


@pytest.fixture
def whole_job(job, fast_path, contents) -> dict[str, bytes]:
    """The files below the folder of an undisturbed job."""
    job(fast_path / "whole")
    return contents(fast_path / "whole")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to name what is synced")
@pytest.mark.parametrize("sample", [40, pytest.param(None, marks=pytest.mark.slow)])
def test_a_crash_at_any_call(sample, fast_path, job, whole_job, contents, monkeypatch):
    root = fast_path / "root"
    root.mkdir()
    states = list(states_of(monkeypatch, root, job).values())
    assert len(states) > 30
    published = 0
    for number, (what, files) in enumerate(random.Random(5).sample(states, min(sample or len(states), len(states)))):
        folder = fast_path / str(number)
        build(folder, files)
        published += (folder / "store/manifest.json").exists()
        for path in folder.glob("store/units/*-of-*/*/**/*"):  # a unit that has its name is complete
            assert path.is_dir() or path.read_bytes() == whole_job[path.relative_to(folder).as_posix()], what
        job(folder)
        assert contents(folder) == whole_job, what
        shutil.rmtree(folder)
    assert 0 < published < len(states)
