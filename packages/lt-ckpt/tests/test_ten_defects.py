"""What other writers of checkpoints get wrong, each shown not to happen here.

Every row was reproduced with the writer named (torch 2.13, safetensors 0.8), or, where marked *, read in its source.

| # | defect | seen in | test below |
|---|---|---|---|
| 1 | the marker is fsynced before its bytes are written, its folder never | torch.distributed.checkpoint | test_01 |
| 2 | an error of a writing thread is dropped, the save is committed | torch.distributed.checkpoint | test_02 |
| 3 | 0-dim tensors become zero, integers cannot be saved | HuggingFaceStorageWriter | test_03 |
| 4 | plain values make files unreadable, views fail, total_size is wrong | HuggingFaceStorageWriter | test_04 |
| 5 | a save over an older one, cut off, is loaded as a mixture | torch.distributed.checkpoint | test_05 |
| 6 | code in `.metadata` or in an object's bytes is executed | torch.distributed.checkpoint | test_06 |
| 7 | a flipped bit is loaded without a word | DCP, torch.load, safetensors | test_07 |
| 8 | another dtype is cast, other keys are ignored, silently | torch.distributed.checkpoint | test_08 |
| 9 | files have mode 0600 whatever the umask, renamed without an fsync | safetensors, transformers | test_09 |
| 10 | saving in the background runs the main script again | DCP's process saver | test_10 |
| 11 | a save in the background that failed gets its marker* | OLMo-core | test_11 |
| 12 | crashed saves are counted as kept and push out the last good one* | torchtitan | test_12 |
"""

import json
import os
import pickle
import struct
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from lt_ckpt import (
    AsyncRankSaver,
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    Shard,
    TensorSpec,
    begin_save,
    commit_save,
    discard_save,
    find_latest_valid,
    prune_checkpoints,
    verify,
    write_rank_files,
)
from lt_ckpt.comparison import compare
from lt_ckpt.files import finished_name
from lt_ckpt.formats import open_source
from lt_ckpt.tensorfile import read_header

MARKERS = {"lt": ["COMMIT"], "dcp": [".metadata"], "nxd gqa": ["checkpoint", "done"]}


@pytest.mark.parametrize("name", MARKERS)
def test_01_a_marker_comes_after_its_bytes_and_after_everything_else(fast_path, models, calls, monkeypatch, name):
    source = models.make(fast_path / "src")
    with calls.recording(monkeypatch):
        models.output(source, fast_path / "out", name)
    log = [(call, finished_name(Path(what).name), Path(what)) for call, what in calls.log]
    published = max(i for i, (call, _, _) in enumerate(log) if call == "rename")
    for marker in MARKERS[name]:
        written = [i for i, (call, what, _) in enumerate(log) if call in ("write", "pwrite") and what == marker]
        synced = [i for i, (call, what, _) in enumerate(log) if call == "fsync" and what == marker]
        renamed = [i for i, (call, what, _) in enumerate(log) if call == "rename" and what == marker]
        assert written[-1] < synced[0] < renamed[0] < published
        assert len(renamed) == 1
        folder = log[renamed[0]][2].parent
        assert ("fsync", folder) in [(call, path) for call, _, path in log[renamed[0] : published]]
        # All that the marker stands for is on the disk before it; the journal of a conversion is never published.
        writes = [path for call, _, path in log[: written[0]] if call in ("write", "pwrite")]
        before = {path for path in writes if path != fast_path / ".out.converting" / "journal"}
        unsynced = before - {path for call, _, path in log[: written[0]] if call == "fsync"}
        assert unsynced == set()
        assert len(before) >= 4
    assert ("fsync", fast_path if name != "lt" else fast_path / "out") in [
        (call, path) for call, _, path in log[published:]
    ]


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_02_an_error_of_a_writing_thread_ends_the_save(fast_path, toy, monkeypatch, writing, call):
    """The thread that writes a big file, and the one that writes while training goes on."""
    failing = threading.Event()
    real = getattr(os, call)

    def fail(*args):
        if failing.is_set():
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, call, fail)
    if writing == "buffered" and call == "pwrite":
        monkeypatch.setattr(os, "write", lambda *args, real=os.write: fail(*args) if failing.is_set() else real(*args))
    toy.save(fast_path, 1)
    tmp = begin_save(fast_path, step=2, world_size=1)
    failing.set()
    with pytest.raises(CheckpointError, match="No space left"):
        write_rank_files(tmp, rank=0, shards=toy.shards(toy.state(2), 0, 1))
    saver = AsyncRankSaver()
    committed: list[Path] = []
    failing.clear()
    again = begin_save(fast_path, step=3, world_size=1)
    failing.set()
    saver.start(
        again,
        rank=0,
        shards=toy.shards(toy.state(3), 0, 1),
        on_written=lambda given_up: committed.append(
            commit_save(again, world_size=1, metadata=CheckpointMetadata(step=3))
        ),
    )
    with pytest.raises(CheckpointError, match="No space left"):
        saver.wait()
    failing.clear()
    for folder in (tmp, again):
        with pytest.raises(CheckpointError, match=r"rank 0 failed to write its files"):
            commit_save(folder, world_size=1, metadata=CheckpointMetadata(step=2 if folder == tmp else 3))
    assert committed == []
    found, rejected = find_latest_valid(fast_path)
    assert found is not None
    assert (found.step, rejected) == (1, [])


def test_03_single_numbers_and_integers_keep_their_bits(tmp_path, toy):
    values = {
        "a": ("F32", np.array(7.0, "<f4")),
        "b": ("BF16", np.array(0x40E0, "<u2")),
        "c": ("I64", np.array(2**62 + 1, "<i8")),
        "d": ("I32", np.arange(-3, 3, dtype="<i4").reshape(2, 3)),
        "e": ("U8", np.array([0, 255], "u1")),
        "f": ("BOOL", np.array(True)),
        "g": ("F64", np.array(-0.0, "<f8")),
    }
    tmp = begin_save(tmp_path, step=1, world_size=1)
    shards = [
        Shard(
            group="other",
            name=name,
            dtype=dtype,
            global_shape=array.shape,
            offset=(0,) * array.ndim,
            shape=array.shape,
            data=toy.as_bytes(array),
        )
        for name, (dtype, array) in values.items()
    ]
    write_rank_files(tmp, rank=0, shards=shards)
    made = Checkpoint.open(commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=1)))
    from safetensors import safe_open

    with safe_open(made.path / "other-00000.safetensors", framework="numpy") as theirs:
        for name, (dtype, array) in values.items():
            assert made.specs("other")[name] == TensorSpec(dtype, array.shape)
            assert made.read("other", name).tobytes() == array.tobytes()
            if dtype != "BF16":  # which numpy has not
                assert theirs.get_tensor(name).tobytes() == array.tobytes()
                assert theirs.get_tensor(name).shape == array.shape


def test_04_every_file_is_readable_and_the_index_tells_the_truth(tmp_path, models):
    """Plain values have a place of their own, views are read as what they show, the index counts tensors' bytes."""
    from safetensors import safe_open

    tmp = begin_save(tmp_path / "ck", step=1, world_size=1)
    with pytest.raises(CheckpointError, match="uint8 array"):
        Shard(group="weights", name="w", dtype="F32", global_shape=(2,), offset=(0,), shape=(2,), data=np.zeros((2, 4)))
    view = np.zeros(16, np.uint8)[::2]
    with pytest.raises(CheckpointError, match="contiguous"):
        Shard(group="weights", name="w", dtype="F32", global_shape=(2,), offset=(0,), shape=(2,), data=view)
    write_rank_files(tmp, rank=0, shards=[])
    made = Checkpoint.open(
        commit_save(
            tmp,
            world_size=1,
            metadata=CheckpointMetadata(step=1, scalars={"epoch": 3, "note": "text", "lr": 1e-3, "on": True}),
        )
    )
    assert made.manifest.scalars == {"epoch": 3, "note": "text", "lr": 1e-3, "on": True}
    assert verify(made.path).is_ok

    source = models.make(tmp_path / "src")
    out = models.output(source, tmp_path / "out", "hf in shards")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    held: dict[str, str] = {}
    total = 0
    for file in out.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as theirs:
            assert theirs.metadata() == {"format": "pt"}
            held |= dict.fromkeys(theirs.keys(), file.name)
        header = read_header(file)
        total += sum(tensor.n_bytes for tensor in header.tensors.values())
        assert header.n_bytes == header.header_bytes + sum(tensor.n_bytes for tensor in header.tensors.values())
    assert index == {"metadata": {"total_size": total}, "weight_map": index["weight_map"]}
    assert index["weight_map"] == held


def test_05_a_save_over_an_older_one_is_never_a_mixture(fast_path, toy, calls, monkeypatch):
    def again(root):
        tmp = begin_save(root, step=1, world_size=2)
        for rank in range(2):
            write_rank_files(tmp, rank=rank, shards=toy.shards(toy.state(2), rank, 2))
        return commit_save(tmp, world_size=2, metadata=CheckpointMetadata(step=1), overwrite=True)

    toy.save(fast_path / "dry", 1)
    with calls.recording(monkeypatch):
        again(fast_path / "dry")
    seen = set()
    names = [name for name, _ in calls.log]
    for index in (i for i, name in enumerate(names) if name in ("write", "pwrite", "fsync", "rename", "unlink")):
        root = fast_path / f"{index}"
        toy.save(root, 1)
        with calls.recording(monkeypatch, fail_at=index), pytest.raises(CheckpointError, match="No space left"):
            again(root)
        calls.fail_at = -1
        found, _ = find_latest_valid(root)
        assert found is not None
        which = int(found.read("weights", "norm").tobytes() == toy.state(2)["weights", "norm"][1].tobytes()) + 1
        toy.check(found, seed=which)
        seen.add(which)
    assert seen == {1, 2}


class Runs:
    """Pickled so that Python makes a file when it reads it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_06_no_code_of_a_checkpoint_is_executed(tmp_path, models):
    source = models.make(tmp_path / "src")
    folder = models.output(source, tmp_path / "out", "dcp")
    (folder / "SHA256SUMS").unlink()  # every change would differ from it, before it is looked at
    config = source / "config.json"
    good = (folder / ".metadata").read_bytes()
    # In .metadata itself.
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"refers to '_?io.open'.*nothing of the file was executed"):
        open_source(folder, config=config)
    # In the bytes of an object beside the tensors: nobody looks into them.
    evil = pickle.dumps(Runs(tmp_path / "ran"), 2)
    (folder / "__1_0.distcp").write_bytes(evil)
    (folder / ".metadata").write_bytes(with_object(good, "train_state", "__1_0.distcp", len(evil)))
    opened = open_source(folder, config=config)
    assert opened.format_info["others"] == {"train_state": 1}
    assert all(c.is_equal for c in compare(open_source(source), opened))
    assert not (tmp_path / "ran").exists()
    pickle.loads(evil)
    assert (tmp_path / "ran").exists(), "not hostile, so the test shows nothing"


def with_object(raw: bytes, key: str, file: str, n_bytes: int) -> bytes:
    """Puts an entry for an object (a pickle in `file`) into a `.metadata`, by hand: before its dictionaries' ends."""

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def name(module: str, kind: str) -> bytes:
        return f"ctorch.distributed.checkpoint.{module}\n{kind}\n".encode()

    def of(module: str, kind: str, fields: bytes) -> bytes:
        return name(module, kind) + b")\x81}(" + fields + b"ub"

    item = text(key) + name("metadata", "BytesStorageMetadata") + b")\x81"
    index = of("metadata", "MetadataIndex", text("fqn") + text(key) + text("index") + b"N" + text("offset") + b"N")
    place = (
        text("relative_path")
        + text(file)
        + text("offset")
        + b"K\0"
        + text("length")
        + b"J"
        + struct.pack("<i", n_bytes)
    )
    info = of("filesystem", "_StorageInfo", place)
    first, rest = raw.split(text("planner_data"), 1)
    second, third = rest.split(text("storage_meta"), 1)
    opened = [part.rindex(b"u") for part in (first, second)]
    first = first[: opened[0]] + item + first[opened[0] :]
    second = second[: opened[1]] + index + info + second[opened[1] :]
    return first + text("planner_data") + second + text("storage_meta") + third


def test_07_a_flipped_bit_is_found_wherever_the_format_can_tell(tmp_path, models):
    """In the middle of every tensor of every format; which of them can tell is in `test_every_damage.py`."""
    from lt_ckpt.cli import verify as command

    source = models.make(tmp_path / "src")
    for i, name in enumerate(["lt", "pt", "dcp", "nxd gqa", "nxd xser"]):
        out = models.output(source, tmp_path / f"out-{i}", name)
        command(str(out), source / "config.json")
        opened = open_source(out, config=source / "config.json")
        place = opened.weights.locations["model.layers.3.self_attn.v_proj.weight"][0]
        file = opened.root / place.file
        raw = bytearray(file.read_bytes())
        raw[place.byte_offset + 5] ^= 4
        file.write_bytes(raw)
        with pytest.raises(CheckpointError, match=r"\d problems|did not verify"):
            command(str(out), source / "config.json")


def test_08_nothing_is_cast_and_nothing_is_ignored(tmp_path, toy, models):
    made = Checkpoint.open(toy.save(tmp_path, 1))
    wanted = {"weights": made.specs("weights")}
    made.check_specs(wanted)
    with pytest.raises(CheckpointError, match=r"norm is F32 \[3\] instead of BF16"):
        made.check_specs({"weights": {**wanted["weights"], "norm": TensorSpec("BF16", (3,))}})
    with pytest.raises(CheckpointError, match=r"unexpected: weights/norm"):
        made.check_specs({"weights": {name: spec for name, spec in wanted["weights"].items() if name != "norm"}})
    assert made.read("weights", "norm").tobytes() == toy.state(1)["weights", "norm"][1].tobytes()
    small = models.make(tmp_path / "small", n_layers=2)
    large = models.make(tmp_path / "large", n_layers=3)
    out = models.output(large, tmp_path / "out", "dcp")
    with pytest.raises(CheckpointError, match=r"'model\.layers\.2\.\S+' is not a tensor of this model"):
        open_source(out, config=small / "config.json")
    specs = open_source(out, config=large / "config.json").weights.specs
    assert {spec.dtype for spec in specs.values()} == {"BF16"}


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o007, 0o660, 0o770)])
def test_09_others_may_read_what_the_umask_lets_them(tmp_path, toy, models, umask, file_mode, folder_mode):
    before = os.umask(umask)
    try:
        source = models.make(tmp_path / "src")
        made = [toy.save(tmp_path / "ck", 1)]
        made += [models.output(source, tmp_path / f"out-{i}", name) for i, name in enumerate(models.outputs)]
    finally:
        os.umask(before)
    n_files = 0
    for out in made:
        for path in [out, *out.rglob("*")]:
            n_files += path.is_file()
            assert path.stat().st_mode & 0o777 == (file_mode if path.is_file() else folder_mode), path
    assert n_files > 300


def test_10_a_script_without_a_main_guard_is_run_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
            import sys
            print("begun", flush=True)
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from conftest import toy_shards, toy_state
            from lt_ckpt import AsyncRankSaver, CheckpointMetadata, begin_save, commit_save
            saver = AsyncRankSaver()
            for step in (1, 2):
                tmp = begin_save({str(tmp_path / "ck")!r}, step=step, world_size=1)
                meta = CheckpointMetadata(step=step)
                saver.start(tmp, rank=0, shards=toy_shards(toy_state(step), 0, 1),
                            on_written=lambda _, tmp=tmp, meta=meta: commit_save(tmp, world_size=1, metadata=meta))
            saver.wait()
            print("done", flush=True)
        """),
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.splitlines() == ["begun", "done"]
    found, rejected = find_latest_valid(tmp_path / "ck")
    assert found is not None
    assert (found.step, rejected) == (2, [])


def test_11_a_background_save_that_failed_is_not_committed(tmp_path, toy):
    toy.save(tmp_path, 1)
    tmp = begin_save(tmp_path, step=2, world_size=1)
    shard = Shard(
        group="weights",
        name="w",
        dtype="U8",
        global_shape=(4,),
        offset=(0,),
        shape=(4,),
        data=np.zeros(4, np.uint8),
        copy_fn=lambda target: None,
    )
    saver, reached = AsyncRankSaver(), []
    saver.start(
        tmp,
        rank=0,
        shards=[shard],
        on_written=lambda _: reached.append(commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=2))),
    )
    saver.wait()
    assert reached == [tmp_path / "step-00000002"]  # the callback is what commits
    failing = begin_save(tmp_path, step=3, world_size=1)
    os.rename(failing / "save.json", failing / "kept.json")  # so that the part cannot be written
    saver.start(failing, rank=0, shards=[shard], on_written=lambda _: reached.append(failing))
    with pytest.raises(CheckpointError, match=r"save\.json"):
        saver.wait()
    assert len(reached) == 1
    assert sorted(path.name for path in failing.iterdir()) == ["kept.json"]
    os.rename(failing / "kept.json", failing / "save.json")
    discard_save(failing)
    found, rejected = find_latest_valid(tmp_path)
    assert found is not None
    assert (found.step, rejected) == (2, [])


def test_12_crashed_saves_are_not_counted_as_kept(tmp_path, toy):
    good = toy.save(tmp_path, 1)
    for step in range(2, 6):  # four that lost a file each, as a crash of another writer would leave them
        broken = toy.save(tmp_path, step)
        (broken / ("COMMIT", "manifest.json", "weights-00000.safetensors", "part-00001.json")[step - 2]).unlink()
    assert prune_checkpoints(tmp_path, keep_last=1) == []
    assert good.is_dir()
    found, rejected = find_latest_valid(tmp_path)
    assert found is not None
    assert found.path == good
    assert len(rejected) == 4
    newest = toy.save(tmp_path, 6)
    gone = prune_checkpoints(tmp_path, keep_last=1)
    assert {path.name for path in tmp_path.iterdir()} == {newest.name}
    assert len(gone) == 5
