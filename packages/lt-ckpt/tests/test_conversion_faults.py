"""Conversions whose disk fails, or that are killed or lose their power: the output is complete, or not there.

Threads read and write, so calls come in no fixed order; but each kind of call on the output's side comes a fixed number
of times, and the n-th of it is the one that fails. Every kind of output is tried.
"""

import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disks import Disk

from lt_ckpt import CheckpointError, files, find_latest_valid
from lt_ckpt.comparison import compare
from lt_ckpt.formats import ConvertOptions, convert_checkpoint, open_source
from lt_ckpt.nxd.options import NxdOptions
from lt_ckpt.output_hashes import OutputHashes

ZERO = Path(__file__).parent / "data" / "nxd" / "llama2-mha-tp2-dp2-zero1"
KINDS = ["hf", "hf in shards", "lt", "dcp", "pt", "nxd gqa", "nxd v1", "nxd xser", "state"]
CALLS = ("open", "write", "pwrite", "fsync", "rename", "mkdir")
EACH = 3
"""Failures per kind of call in the test command: the first, the last, and one between; the slow test takes all."""


@pytest.fixture(scope="module")
def model(memory, models):
    return models.make(memory / "conversion-faults", n_layers=3)


def make(kind: str, model: Path, out: Path, models: Any) -> Path:
    """Make an output in one call; return what it is called."""
    if kind == "state":
        source = open_source(ZERO / "nxd-plain", config=ZERO / "hf-start", optimizer=True)
        options = ConvertOptions(format="nxd", nxd=NxdOptions(tp=2), dp=3, allow_replica_mismatch=True)
        return convert_checkpoint(source, out, options)
    return models.output(model, out, kind)


def require_whole(kind: str, model: Path, made: Path) -> None:
    if kind == "state":
        source, again = (
            open_source(path, config=ZERO / "hf-start", optimizer=True) for path in (ZERO / "nxd-plain", made)
        )
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


def fail_at(kind: str, model: Path, models: Any, folder: Path, calls: Any, monkeypatch: Any, points: Any) -> None:
    """Make the output once for each chosen call, which fails."""
    (folder / "dry").mkdir()
    with calls.recording(monkeypatch, folder=folder / "dry"):
        made = make(kind, model, folder / "dry" / "out", models)
    require_whole(kind, model, made)
    descriptors = set(os.listdir("/proc/self/fd"))
    counts = {name: calls.count(name) for name in CALLS}
    assert counts["fsync"] >= 4
    assert counts["rename"] >= 1
    for name, index in [(name, index) for name, count in counts.items() if count for index in points(count)]:
        place = folder / f"{name}-{index}"
        place.mkdir()
        error = ""
        with calls.recording(monkeypatch, folder=place, fail_at=(name, index)):
            try:
                make(kind, model, place / "out", models)
            except CheckpointError as exc:
                error = str(exc)
        if kind == "dcp" and name == "mkdir" and not error:  # torch's own, of a folder that is there
            continue
        assert "No space left" in error, (name, index)
        left = sorted(os.listdir(place))
        if kind == "lt" and left == ["out"]:
            # A folder of checkpoints is made first, and stays; a committed one whose root was not fsynced is whole.
            if os.listdir(place / "out"):
                require_whole(kind, model, place / "out")
        elif left:  # putting the entry of the finished output on the disk failed
            assert (name in ("open", "fsync"), calls.failed_at) == (True, str(place)), calls.failed_at
            require_whole(kind, model, place / left[0])
    assert set(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_call_leaves_nothing_or_all(fast_path, model, models, calls, monkeypatch, kind):
    rng = random.Random(kind)

    def some(count: int) -> list[int]:
        return sorted({0, count - 1, *(rng.randrange(count) for _ in range(EACH - 2))})

    fail_at(kind, model, models, fast_path, calls, monkeypatch, some)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_failing_call_leaves_nothing_or_all(fast_path, model, models, calls, monkeypatch, kind):
    fail_at(kind, model, models, fast_path, calls, monkeypatch, lambda count: list(range(count)))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_gets_its_name_before_it_is_on_the_disk(fast_path, model, models, monkeypatch, kind):
    """So a power cut leaves nothing or all; and what was returned as made is on the disk under its name."""
    disk, published = Disk(), []
    real_rename = os.rename

    def rename(source: Path, target: Path, **more: Any) -> None:
        assert disk.is_durable(Path(source)), f"{target}: gets its name before all of it is on the disk"
        real_rename(source, target, **more)
        published.append(Path(target))

    folder = fast_path / "live"
    folder.mkdir()
    disk.watch(monkeypatch)
    monkeypatch.setattr(os, "rename", rename)
    made = make(kind, model, folder / "out", models)
    monkeypatch.undo()
    assert (made / "step-00000000" if kind == "lt" else made) in published
    assert disk.is_durable(made)
    kept, now = disk.kept[folder.stat().st_ino], disk.state(folder)
    assert kept[made.name] == now[made.name], "its name is lost with the power"
    assert os.listdir(folder) == [made.name]


KILLED = """
import os, signal, sys
from lt_ckpt import conversion
from lt_ckpt.formats import ConvertOptions, convert_checkpoint, open_source
from lt_ckpt.nxd.options import NxdOptions
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
conversion.OutputHashes.finish = die
convert_checkpoint(open_source(sys.argv[1]), sys.argv[2], ConvertOptions(format=sys.argv[3], nxd=NxdOptions(tp=2)))
"""


@pytest.mark.parametrize("kind", ["hf", "pt"])
def test_a_killed_conversion_leaves_no_output_and_the_next_one_makes_it(tmp_path, model, kind):
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, model, out, kind], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".out.converting"]
    convert_checkpoint(open_source(model), out, ConvertOptions(format=kind, nxd=NxdOptions(tp=2)))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    require_whole(kind, model, out)


def test_a_hidden_folder_of_someone_else_is_not_touched(tmp_path, model, monkeypatch):
    hidden, options = tmp_path / ".out.converting", ConvertOptions(format="hf")
    hidden.mkdir()
    (hidden / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"no conversion made thesis\.txt"):
        convert_checkpoint(open_source(model), tmp_path / "out", options)
    assert (hidden / "thesis.txt").read_text(encoding="utf-8") == "mine"
    (hidden / "thesis.txt").unlink()
    hidden.rmdir()
    hidden.symlink_to(model)
    with pytest.raises(CheckpointError, match=r"\.out\.converting"):
        convert_checkpoint(open_source(model), tmp_path / "out", options)
    hidden.unlink()

    def convert_again(hashes: OutputHashes, folder: Path, real: Any = OutputHashes.finish) -> Any:
        monkeypatch.setattr(OutputHashes, "finish", real)
        with pytest.raises(CheckpointError, match="another process is writing it"):
            convert_checkpoint(open_source(model), tmp_path / "out", options)
        return real(hashes, folder)

    monkeypatch.setattr(OutputHashes, "finish", convert_again)
    require_whole("hf", model, convert_checkpoint(open_source(model), tmp_path / "out", options))


@pytest.mark.parametrize("kind", ["hf", "nxd v1", "pt", "dcp", "lt"])
def test_a_disk_without_room_is_told_before_the_first_byte(tmp_path, model, models, monkeypatch, kind):
    needed: list[int] = []

    def refuse(folder: Path, n_bytes: int) -> None:
        needed.append(n_bytes)
        raise CheckpointError("no room")

    monkeypatch.setattr(files, "check_free_space", refuse)
    with pytest.raises(CheckpointError, match="no room"):
        models.output(model, tmp_path / "out", kind)
    weights = sum(spec.n_bytes for spec in open_source(model).weights.specs.values())
    assert weights <= needed[0] <= 1.2 * weights
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
