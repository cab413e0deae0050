"""Conversions whose disk fails or loses its power: the output is there complete, or not at all.

Some threads read and some write, so the calls come in no fixed order; but each kind of call on the output's side comes
a fixed number of times, and the n-th of it is the one that fails. A power cut is a model of the disk that forgets what
was not fsynced. Every kind of output is tried, that of `reshard_optimizer` too.
"""

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lt_ckpt import CheckpointError, find_latest_valid
from lt_ckpt.comparison import compare
from lt_ckpt.formats import open_source, read_config
from lt_ckpt.nxd.zero1_reshard import reshard_optimizer

ZERO = Path(__file__).parent / "data" / "nxd" / "llama2-mha-tp2-dp2-zero1"
KINDS = ["hf", "hf in shards", "lt", "dcp", "pt", "nxd gqa", "nxd v1", "nxd small xser", "reshard", "state"]
CALLS = ("open", "write", "pwrite", "fsync", "rename", "mkdir", "close")
EACH = 5
"""Failures per kind of call in the test command: the first, the last, and some between; the slow test takes all."""


@pytest.fixture(scope="module")
def model(memory, models):
    return models.make(memory / "conversion-faults", n_layers=2)


def make(kind: str, model: Path, out: Path, models: SimpleNamespace) -> Path:
    """Makes an output in one call; returns what it is called."""
    if kind == "reshard":
        return reshard_optimizer(ZERO / "nxd-plain", out, dp=3, config=read_config(ZERO / "hf-start"))
    if kind == "state":
        from lt_ckpt.formats import ConvertOptions, convert_checkpoint
        from lt_ckpt.nxd.options import NxdOptions

        source = open_source(ZERO / "nxd-plain", config=ZERO / "hf-start", optimizer=True)
        return convert_checkpoint(
            source, out, ConvertOptions(format="nxd", nxd=NxdOptions(tp=2), dp=3, allow_replica_mismatch=True)
        )
    if kind == "nxd small xser":
        from lt_ckpt.formats import ConvertOptions, convert_checkpoint
        from lt_ckpt.nxd.options import NxdOptions

        cut = NxdOptions(tp=2, qkv="gqa_fused", xser=True, tag="step_3")
        return convert_checkpoint(open_source(model), out, ConvertOptions(format="nxd", nxd=cut))
    return models.output(model, out, kind)


def require_whole(kind: str, model: Path, made: Path) -> None:
    if kind == "reshard":
        assert len(list((made / "optim").glob("*.pt"))) == 6
        return
    if kind == "state":
        source = open_source(ZERO / "nxd-plain", config=ZERO / "hf-start", optimizer=True)
        again = open_source(made, config=ZERO / "hf-start", optimizer=True)
        assert again.format_info["dp"] == 3
        for group in ("exp_avg", "exp_avg_sq", "master"):
            a, b = (replace(s, groups={"weights": s.groups[group]}) for s in (source, again))
            assert all(c.is_equal for c in compare(a, b))
        return
    if kind == "lt":
        found, rejected = find_latest_valid(made)
        assert found is not None
        assert rejected == []
    config = None if kind.startswith(("hf", "lt")) else model
    assert all(c.is_equal for c in compare(open_source(model), open_source(made, config=config)))


class Calls:
    """The calls of the os module that touch a folder, from all threads: counted, and one of them failing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self.failing: tuple[str, int] | None = None
        self.failed_at = ""
        self._opened: dict[int, str] = {}
        self._lock = threading.RLock()

    @contextmanager
    def watching(self, monkeypatch: pytest.MonkeyPatch, failing: tuple[str, int] | None = None) -> Any:
        self.counts, self.failing, self.failed_at = Counter(), failing, ""
        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            yield self

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            with self._lock:
                first = args[0]
                what = self._opened.get(first) if isinstance(first, int) else os.fspath(first)
                if name == "open" and not args[1] & (os.O_WRONLY | os.O_DIRECTORY):
                    return real(*args, **more)  # looking at what was written, which changes nothing
                if what is None or not Path(what).is_relative_to(self.folder):
                    return real(*args, **more)
                fails = self.failing == (name, self.counts[name])
                self.counts[name] += 1
                if name == "close":
                    self._opened.pop(first, None)
                if fails:
                    self.failed_at = what
                    if name == "close":
                        real(first)  # the descriptor is gone all the same
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                result = real(*args, **more)
                if name == "open":
                    self._opened[result] = what
                return result

        return call


def fail_at(kind: str, model: Path, models: Any, folder: Path, monkeypatch: Any, points: Callable[[int], list[int]]):
    """Makes the output once for each chosen call, which fails; returns how many calls there were."""
    make(kind, model, folder / "first", models)  # what is loaded and opened once
    dry = Calls(folder / "dry")
    (folder / "dry").mkdir()
    with dry.watching(monkeypatch):
        made = make(kind, model, folder / "dry" / "out", models)
    require_whole(kind, model, made)
    descriptors, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    assert dry.counts["fsync"] >= 4
    assert dry.counts["rename"] >= 1
    for name, count in dry.counts.items():
        for index in points(count):
            place = folder / f"{name}-{index}"
            place.mkdir()
            calls = Calls(place)
            with calls.watching(monkeypatch, failing=(name, index)):
                error_text = ""
                try:
                    make(kind, model, place / "out", models)
                except CheckpointError as exc:
                    error_text = str(exc)
            assert calls.failed_at
            assert not error_text or "No space left" in error_text
            if not error_text:  # the output has its name, and what remained of the hidden folder was being removed
                assert Path(calls.failed_at).name in (
                    ("lock", "journal", "output") if kind == "pt" else ("lock", "journal")
                )
                out = place / ("out.pt" if kind == "pt" else "out")
                require_whole(kind, model, out)
                assert kind == "pt" or os.listdir(place) == [out.name]
                continue
            left = sorted(os.listdir(place))
            if kind == "lt" and left == ["out"]:
                # A folder of checkpoints is made first, and stays; a committed one whose root was not fsynced is whole.
                left = os.listdir(place / "out")
                if left:
                    require_whole(kind, model, place / "out")
            elif left:  # putting the entry of the finished output on the disk failed
                assert len(left) == 1
                assert (name in ("open", "fsync", "close"), calls.failed_at) == (True, str(place)), calls.failed_at
                require_whole(kind, model, place / left[0])
            assert threading.active_count() <= threads
    assert set(os.listdir("/proc/self/fd")) == descriptors
    return dry.counts


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_call_leaves_nothing_or_all(fast_path, model, models, monkeypatch, kind):
    rng = random.Random(kind)

    def some(count: int) -> list[int]:
        return sorted({0, count - 1, *(rng.randrange(count) for _ in range(EACH - 2))})

    fail_at(kind, model, models, fast_path, monkeypatch, some)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_failing_call_leaves_nothing_or_all(fast_path, model, models, monkeypatch, writing, kind):
    if (kind, writing) in (("reshard", "direct"), ("state", "direct")):
        pytest.skip("thousands of calls; every other kind is tried both ways")
    counts = fail_at(kind, model, models, fast_path, monkeypatch, lambda count: list(range(count)))
    assert sum(counts.values()) >= 15


class Disk:
    """What a folder's disk holds for certain: entries of folders and bytes of files that were fsynced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = SimpleNamespace(entries={}, kept={})
        self.published: list[str] = []
        self._opened: dict[int, Any] = {}
        self._lock = threading.RLock()

    def node(self, path: str | Path) -> Any:
        found = self.top
        for part in Path(path).relative_to(self.root).parts:
            found = found.entries[part]
        return found

    @contextmanager
    def watching(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        with monkeypatch.context() as patch:
            for name in ("open", "write", "pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir", "close"):
                patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            yield self

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            with self._lock:
                first = args[0]
                known = first in self._opened if isinstance(first, int) else Path(first).is_relative_to(self.root)
                if not known or "dir_fd" in more:
                    return real(*args, **more)
                if name == "rename" and self.node(args[0]).kept is not None:
                    self.before_rename(*args)
                result = real(*args, **more)
                getattr(self, name)(result, *args)
                return result

        return call

    def open(self, descriptor: int, path: Any, flags: int, *_: Any) -> None:
        if flags & os.O_CREAT:
            self.node(Path(path).parent).entries[Path(path).name] = SimpleNamespace(data=b"", kept=b"", entries=None)
        self._opened[descriptor] = self.node(path)

    def close(self, _: None, descriptor: int) -> None:
        del self._opened[descriptor]

    def write(self, n_bytes: int, descriptor: int, data: Any) -> None:
        self._opened[descriptor].data += bytes(data[:n_bytes])

    def pwrite(self, n_bytes: int, descriptor: int, data: Any, position: int) -> None:
        node = self._opened[descriptor]
        assert len(node.data) == position, "files grow from front to back"
        node.data += bytes(data[:n_bytes])

    def fsync(self, _: None, descriptor: int) -> None:
        node = self._opened[descriptor]
        node.kept = node.data if node.entries is None else dict(node.entries)

    def mkdir(self, _: None, path: Any, *__: Any) -> None:
        self.node(Path(path).parent).entries[Path(path).name] = SimpleNamespace(entries={}, kept={})

    def unlink(self, _: None, path: Any) -> None:
        del self.node(Path(path).parent).entries[Path(path).name]

    rmdir = unlink

    def before_rename(self, source: Any, target: Any) -> None:
        """A rename may reach the disk before anything else does: all that it gives a name must be there already."""
        node = self.node(source)
        assert durable(node), f"{target}: gets its name before all of it is on the disk"
        self.published.append(str(target))

    def rename(self, _: None, source: Any, target: Any) -> None:
        node = self.node(Path(source).parent).entries.pop(Path(source).name)
        self.node(Path(target).parent).entries[Path(target).name] = node


def durable(node: Any) -> bool:
    if node.entries is None:
        return node.kept == node.data
    return node.kept.keys() == node.entries.keys() and all(
        node.kept[name] is child and durable(child) for name, child in node.entries.items()
    )


def kept(node: Any, parts: tuple[str, ...]) -> Any:
    """What is left of a path after a power cut; None when nothing is."""
    for part in parts:
        if part not in node.kept:
            return None
        node = node.kept[part]
    return node


@pytest.mark.parametrize("kind", KINDS)
def test_a_power_cut_leaves_nothing_or_all(fast_path, model, models, monkeypatch, writing, kind):
    """Nothing gets its name before it is on the disk, and what was returned as made is on the disk under its name."""
    folder = fast_path / "live"
    folder.mkdir()
    disk = Disk(folder)
    with disk.watching(monkeypatch):
        made = make(kind, model, folder / "out", models)
    found = kept(disk.top, made.relative_to(folder).parts)
    assert found is not None, "its name is lost with the power"
    assert durable(found)
    assert str(made / "step-00000000" if kind == "lt" else made) in disk.published
    require_whole(kind, model, made)
    after = {path.relative_to(made): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    held = dict(contents(found, Path())) if found.entries is not None else {}
    assert held == after
    assert os.listdir(folder) == [made.name]


def contents(node: Any, path: Path) -> Any:
    for name, child in node.kept.items():
        if child.entries is None:
            yield path / name, child.kept
        else:
            yield from contents(child, path / name)
