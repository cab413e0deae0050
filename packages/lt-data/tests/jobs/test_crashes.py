"""A kill, a power cut or a full disk at every single call of a job: the same command ends as it would have.

A kill leaves what was written. A power cut leaves at least what was synced: of a folder the entries at its last fsync,
of a file the bytes at its last fsync. It may also leave all entries, with files that are shorter than they were. Each
of these states is built in another folder at every call in turn, and the command is run again there.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lt_data import DataError, Document, merge, prepare, prepare_documents
from lt_data import storage as storage_module
from lt_data.preparation.build_folder import BuildFolder

Contents = Callable[[Path], dict[str, bytes]]
MODULES = ("storage", "store.shards", "preparation.journal", "preparation.store_writer")  # that write


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

        for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
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


@dataclass
class State:
    """What a crash may leave.

    Attributes:
        what: when, and by what kind of crash.
        files: path -> bytes, or None for a folder.
        finished: shards that were finished by then and must not be made again.
    """

    what: str
    files: dict[str, bytes | None]
    finished: int


def states_of(monkeypatch: pytest.MonkeyPatch, root: Path, work: Callable[[Path], object]) -> tuple[list[State], int]:
    """Every state that a crash during the work may leave, each once, and the number of calls."""
    disk = Disk(root)
    found: dict[bytes, State] = {}
    n_calls = finished = 0
    add = BuildFolder.add_record

    def count(self: BuildFolder, *args: Any) -> None:
        nonlocal finished
        add(self, *args)
        finished += 1
        note("add")

    def note(call: str) -> None:
        for kind in ("killed", "torn", "least"):
            files = getattr(disk, kind)()
            digest = hashlib.sha256(repr(sorted(files.items())).encode()).digest()
            state = found.setdefault(digest, State(f"{kind} after call {n_calls} ({call})", files, finished))
            if finished > state.finished:
                state.what, state.finished = f"{kind} after call {n_calls} ({call})", finished

    def after(name: str, args: Sequence[Any]) -> None:
        nonlocal n_calls
        n_calls += 1
        if name == "fsync":
            disk.synced(args[0])
        note(f"{name} {args[0]}")

    with calls(monkeypatch, after), monkeypatch.context() as patch:
        patch.setattr(BuildFolder, "add_record", count)
        work(root)
    disk.close()
    return list(found.values()), n_calls


@pytest.fixture
def few(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "shard_tokens": 600}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to name what is synced")
@pytest.mark.usefixtures("small_batches")
def test_prepare(
    fast_path: Path, corpus: Path, few: dict[str, Any], contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare([corpus], out=fast_path / "whole", **few)
    whole = contents(fast_path / "whole")
    root = fast_path / "root"
    root.mkdir()
    states, n_calls = states_of(monkeypatch, root, lambda root: prepare([corpus], out=root / "store", **few))
    assert n_calls > 50
    assert len(states) > 50
    gone_on = 0
    for number, state in enumerate(states):
        what = state.what
        folder = fast_path / str(number)
        build(folder, state.files)
        published = (folder / "store").exists()
        notices: list[str] = []
        try:
            prepare([corpus], out=folder / "store", notify=notices.append, **few)
        except DataError as exc:  # all was done and cleared away already
            said = str(exc)
            assert not (folder / "store.building").exists(), what
        else:
            said = "holds a token store already"
        assert "holds a token store already" in said, what
        after = [int(found[1]) for n in notices if (found := re.search(r"resuming after (\d+) finished shards", n))]
        assert published or sum(after) >= state.finished, what
        gone_on += bool(after)
        assert contents(folder) == {f"store/{name}": content for name, content in whole.items()}, what
        shutil.rmtree(folder)
    assert gone_on > 20


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to name what is synced")
@pytest.mark.usefixtures("small_batches")
def test_prepare_over_an_older_store(
    fast_path: Path, corpus: Path, few: dict[str, Any], contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment the old store or the new one is whole, at its place or beside it; the new one wins in the end."""
    few = {**few, "shard_tokens": 100_000, "overwrite": True}
    prepare([corpus], out=fast_path / "whole", **few)
    whole = contents(fast_path / "whole")
    root = fast_path / "root"
    root.mkdir()
    older = [Document(text="the old one", source="")]
    prepare_documents(older, tokenizer=few["tokenizer"], engine="hf", out=root / "store")
    old = contents(root / "store")
    states, _ = states_of(monkeypatch, root, lambda root: prepare([corpus], out=root / "store", **few))
    aside = 0
    for number, state in enumerate(states):
        what = state.what
        folder = fast_path / str(number)
        build(folder, state.files)
        there = [contents(place) for place in (folder / "store", folder / "store.building/old") if place.exists()]
        assert old in there or whole in there, what
        aside += (folder / "store.building/old").exists() and not (folder / "store").exists()
        prepare([corpus], out=folder / "store", **few)
        assert contents(folder) == {f"store/{name}": content for name, content in whole.items()}, what
        shutil.rmtree(folder)
    assert aside > 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to name what is synced")
def test_merge(
    fast_path: Path, corpus: Path, few: dict[str, Any], contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fast_path / "root"
    for rank in (0, 1):
        prepare([corpus], out=root / "store", part_index=rank, num_parts=2, **few)
    shutil.copytree(root, fast_path / "whole")
    merge(fast_path / "whole/store")
    whole = contents(fast_path / "whole")
    states, n_calls = states_of(monkeypatch, root, lambda root: merge(root / "store"))
    assert n_calls > 40
    gone_on = 0
    for number, state in enumerate(states):
        folder = fast_path / str(number)
        build(folder, state.files)
        published = (folder / "store").exists()
        notices: list[str] = []
        try:
            merge(folder / "store", notify=notices.append)
        except DataError as exc:
            said = str(exc)
            assert not (folder / "store.building").exists(), state.what
        else:
            said = "holds a token store already"
        assert "holds a token store already" in said, state.what
        after = [int(found[1]) for n in notices if (found := re.search(r"resuming after (\d+) finished shards", n))]
        assert published or sum(after) >= state.finished, state.what
        gone_on += bool(after)
        assert contents(folder) == whole, state.what
        shutil.rmtree(folder)
    assert gone_on > 10


@pytest.mark.usefixtures("small_batches")
def test_what_was_moved_aside_comes_back_when_the_work_is_thrown_away(
    fast_path: Path, corpus: Path, few: dict[str, Any], contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare([corpus], out=fast_path / "store", **few)
    old = contents(fast_path / "store")

    def cut(name: str, args: Sequence[Any]) -> None:
        if name == "rename":
            raise KeyboardInterrupt

    with calls(monkeypatch, cut), pytest.raises(KeyboardInterrupt):
        prepare([corpus], out=fast_path / "store", overwrite=True, **few)
    assert contents(fast_path / "store.building/old") == old
    assert not (fast_path / "store").exists()
    with pytest.raises(DataError, match="holds a token store already"):
        prepare([corpus], out=fast_path / "store", no_resume=True, **few)
    assert contents(fast_path / "store") == old
    assert not (fast_path / "store.building").exists()


@pytest.mark.usefixtures("small_batches")
def test_a_full_disk_at_every_call(
    fast_path: Path, corpus: Path, few: dict[str, Any], contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare([corpus], out=fast_path / "whole", **few)
    whole = contents(fast_path / "whole")
    number = kept = left = 0
    names: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "mkdir")} | {"write": storage_module.write}

    def failing(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                names.append(name)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real[name](*args, **kwargs)

        return call

    while True:
        number += 1
        folder = fast_path / str(number)
        folder.mkdir()
        left = number
        with monkeypatch.context() as patch:
            for name in ("fsync", "rename", "mkdir"):
                patch.setattr(os, name, failing(name))
            for module in MODULES:
                patch.setattr(f"lt_data.{module}.write", failing("write"))
            try:
                prepare([corpus], out=folder / "store", **few)
            except DataError as exc:
                said = str(exc)
            else:
                break
        assert "No space left on device; free some space" in said, (names[-1], said)
        assert not (folder / "store").exists()
        at_work = folder / "store.building"
        assert at_work.exists() == ("finished shards are kept in" in said)
        kept += at_work.exists()
        prepare([corpus], out=folder / "store", **few)
        assert contents(folder) == {f"store/{name}": content for name, content in whole.items()}
        shutil.rmtree(folder)
    assert contents(folder / "store") == whole
    assert len(names) > 60
    assert {"fsync", "rename", "mkdir", "write"} == set(names)
    assert kept > 30
