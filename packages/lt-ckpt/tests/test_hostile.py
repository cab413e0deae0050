"""Files that are damaged or made to do harm: refused by a `CheckpointError`, whatever they are and wherever.

Valid files of every format are changed at random (bytes, pieces, numbers and texts of JSON, lengths), and then used as
a person would: opened, checked, compared. What comes out is a result or a `CheckpointError` (a `ModelError` for what a
config.json says), never another exception; time and memory are bounded, nothing is executed, nothing is written outside
of the target. LT_FUZZ chooses how many changes per format the slow test makes, LT_SEED which.
"""

import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile
import zlib
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest import mock

import pytest

from lt_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    begin_save,
    commit_save,
    prune_checkpoints,
    verify,
    write_rank_files,
)
from lt_ckpt.checksums import iter_checksum_errors
from lt_ckpt.comparison import compare, find_replica_mismatches
from lt_ckpt.formats import ConvertOptions, convert_checkpoint, open_source
from lt_ckpt.manifest import make_commit
from lt_ckpt.nxd.format import open_nxd
from lt_ckpt.nxd.zero1_reshard import reshard_optimizer
from lt_ckpt.torchfile.file import load_pt, write_pt
from lt_ckpt.torchfile.stored_zip import StoredZip
from lt_model import ModelError

TESTS = Path(__file__).parent
ZERO = TESTS / "data" / "nxd" / "llama2-mha-tp2-dp2-zero1"
ZERO_CONFIG = json.loads((ZERO / "hf-start" / "config.json").read_text())
CHANGES = 30
MANY = int(os.environ.get("LT_FUZZ", "2000"))
SEED = int(os.environ.get("LT_SEED", "0"))
JUNK = [b"0", b"1", b"-1", b"9" * 30, b"1e400", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b"1.5", b"4294967295"]
JUNK += [b"9223372036854775807", b"18446744073709551616", b'"../x"', b'"/etc/passwd"', b'"a\\u0000"', b'"\\ud800"']
JUNK += [b"[" * 3000]
VALUE = re.compile(rb'-?\d+|"[^"]*"|\[[^\[\]]*\]|null|true|false')


def change_json(rng: random.Random, raw: bytes) -> bytes:
    """Another value, or one from elsewhere, in place of a value or a key."""
    spans = [match.span() for match in VALUE.finditer(raw)]
    if not spans:
        return raw[:-1]
    (begin, end), (b, e) = rng.choice(spans), rng.choice(spans)
    return raw[:begin] + rng.choice([*JUNK, raw[b:e]]) + raw[end:]


def changed(rng: random.Random, path: Path, raw: bytes) -> bytes:
    """A file that is no longer what it was."""
    how = rng.choice(["bytes", "insert", "delete", "repeat", "cut", "text", "text"])
    if how == "text" and path.suffix == ".safetensors":
        header = change_json(rng, raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        return len(header).to_bytes(8, "little") + header + raw[8 + int.from_bytes(raw[:8], "little") :]
    if how == "text" and path.suffix in (".json", ""):
        return change_json(rng, raw)
    data = bytearray(raw)
    place = rng.randrange(len(data) + 1)
    if how == "insert":
        data[place:place] = rng.randbytes(rng.randrange(1, 9))
    elif how == "delete":
        del data[place : place + rng.randrange(1, 9)]
    elif how == "repeat":
        data[place:place] = data[place : place + rng.randrange(1, 60)]
    elif how == "cut":
        del data[place:]
    else:
        near = rng.choice([(0, len(data)), (0, min(700, len(data))), (max(0, len(data) - 700), len(data))])
        for _ in range(rng.randrange(1, 5)):
            if data:
                data[rng.randrange(*near)] = rng.choice([0, 255, 0x7F, 0x80, rng.randrange(256)])
    return bytes(data)


def use(folder: Path, model: Path) -> None:
    """What `inspect`, `verify` and `diff` do."""
    if folder.name == "zero":
        opened = open_nxd(folder, config=ZERO_CONFIG, optimizer=True)
        list(find_replica_mismatches(opened))
        return
    if folder.name == "lt":
        for path in folder.glob("step-*"):
            verify(path)
    own = folder.name.startswith(("hf", "lt", "meta"))
    opened = open_source(folder, config=None if own else model)
    list(iter_checksum_errors(opened))
    list(find_replica_mismatches(opened))
    list(compare(open_source(model), opened))


@pytest.fixture(scope="module")
def every(memory, models):
    """Name → a folder or file in that format, of one model."""
    root = memory / "hostile"
    model = models.make(root / "model", n_layers=2)
    (model / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 1, "content": "<s>"}], "model": {"vocab": {"a": 2}}}), encoding="utf-8"
    )
    (model / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "a"}), encoding="utf-8")
    names = ["hf", "hf in shards", "lt", "dcp", "pt", "nxd", "nxd v1", "nxd gqa", "nxd xser"]
    made = {name: models.output(model, root / name, name) for name in names}
    for path in root.rglob("SHA256SUMS"):
        path.unlink()  # every change would differ from it, before it is looked at
    shutil.copytree(ZERO / "nxd-plain", root / "zero")
    made["zero"] = root / "zero"
    made["meta"] = root / "meta"
    made["meta"].mkdir()
    write_meta(model, made["meta"])
    return {"model": model, **made}


def write_meta(model: Path, folder: Path) -> None:
    """The same tensors under Meta's names (their values do not matter), and its params.json."""
    import numpy as np

    from lt_ckpt.meta_llama.names import dialect_key
    from lt_ckpt.source import TensorReader

    opened = open_source(model)
    assert opened.config is not None
    with TensorReader(opened.root) as reader:
        tree = {
            dialect_key(name, "meta"): reader.read(opened.weights, name)
            .view(np.uint16)
            .reshape(spec.shape)
            .astype("<f4")
            for name, spec in opened.weights.specs.items()
        }
    write_pt(folder / "consolidated.00.pth", tree)
    params = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 8, "norm_eps": 1e-5}
    (folder / "params.json").write_text(json.dumps({**params, "vocab_size": 32}), encoding="utf-8")


FORMATS = ["hf", "hf in shards", "lt", "dcp", "pt", "nxd", "nxd v1", "nxd gqa", "nxd xser", "zero", "meta"]


def fuzz(every, name: str, seed: int, n: int) -> dict[str, int]:
    model, place = every["model"], every[name]
    use(place, model)
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    rng = random.Random(f"{name} {seed}")
    results = {"taken": 0, "refused": 0}
    for i in range(n):
        path = rng.choice(files)
        raw = path.read_bytes()
        path.write_bytes(changed(rng, path, raw))
        # Every second file as if it had no checksums, which whoever changes a file on purpose can leave out.
        checksums = mock.patch.object(StoredZip, "has_checksums", new=False) if i % 2 else nullcontext()
        try:
            with checksums:
                use(place, model)
            results["taken"] += 1
        except CheckpointError:
            results["refused"] += 1
        except ModelError:
            assert path.name in ("config.json", "manifest.json", "params.json", "tokenizer.json")
            results["refused"] += 1
        finally:
            path.write_bytes(raw)
    use(place, model)
    return results


@pytest.mark.parametrize("name", FORMATS)
def test_a_changed_file_is_refused_or_read(every, name):
    results = fuzz(every, name, SEED, CHANGES)
    assert results["refused"] > CHANGES // 4


def _waits_for_ever(*_: object) -> None:
    raise AssertionError("it waits for a writer of the pipe")


@pytest.mark.parametrize("name", FORMATS)
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(every, name):
    place, rng = every[name], random.Random(name)
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    aside = place.parent / "aside"
    before = signal.signal(signal.SIGALRM, _waits_for_ever)
    try:
        for path in rng.sample(files, min(len(files), 6)):
            path.rename(aside)
            os.mkfifo(path)
            signal.alarm(20)
            try:  # NxD's markers and checksums' absence are no errors
                with suppress(CheckpointError, ModelError):
                    use(place, every["model"])
            finally:
                signal.alarm(0)
                path.unlink()
                aside.rename(path)
    finally:
        signal.signal(signal.SIGALRM, before)
    use(place, every["model"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_changed_files(every, name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results = fuzz(every, name, SEED + 1, MANY)
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    sys.stdout.write(f"{name}: {results}, {more:.0f} MiB more memory\n")
    assert more < 512


@pytest.mark.parametrize("seed", range(2))
def test_a_forged_manifest_with_its_commit_is_refused_or_read(every, seed):
    """The hash in COMMIT keeps accidents out; who forges both can still only be refused."""
    [folder] = every["lt"].glob("step-*")
    good, marker = (folder / "manifest.json").read_bytes(), (folder / "COMMIT").read_bytes()
    rng, refused = random.Random(seed), 0
    try:
        for _ in range(60):
            raw = change_json(rng, good)
            (folder / "manifest.json").write_bytes(raw)
            (folder / "COMMIT").write_bytes(make_commit(raw, 0))
            try:
                verify(folder)
                list(compare(open_source(every["model"]), open_source(folder)))
            except (CheckpointError, ModelError):
                refused += 1
    finally:
        (folder / "manifest.json").write_bytes(good)
        (folder / "COMMIT").write_bytes(marker)
    assert refused > 20


def test_a_changed_part_list_is_not_committed_or_is_whole(fast_path, toy):
    rng, refused = random.Random(0), 0
    for i in range(40):
        tmp = begin_save(fast_path / f"{i}", step=1, world_size=2)
        for rank in range(2):
            write_rank_files(tmp, rank=rank, shards=toy.shards(toy.state(1), rank, 2))
        path = tmp / rng.choice(["part-00000.json", "part-00001.json"])
        raw = path.read_bytes()
        path.write_bytes(change_json(rng, raw))
        try:
            made = commit_save(tmp, world_size=2, metadata=CheckpointMetadata(step=1), timeout_s=5)
        except CheckpointError:
            refused += 1
        else:
            # Equal values were swapped, or a hash that only `verify` reads anew.
            assert path.name in os.listdir(made)
            assert not verify(made).is_ok or toy.check(Checkpoint.open(made), 1) is None
    assert refused > 20


@pytest.fixture
def hostile(tmp_path):
    """Name → a pickle that makes `tmp_path / "ran"` when Python reads it."""
    sys.path.insert(0, str(TESTS))
    from test_safe_pickle import hostile as pickles  # pyright: ignore[reportMissingImports]

    sys.path.pop(0)
    return pickles(tmp_path / "ran")


def replaced(path: Path, data: bytes) -> None:
    """Puts another pickle into a file of torch."""
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in records.items():
            new.writestr(name, data if name.endswith("data.pkl") else content)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("pt", ""),
        ("dcp", ".metadata"),
        ("nxd", "model/dp_rank_00_tp_rank_01_pp_rank_00.pt"),
        ("nxd v1", "tp_rank_00_pp_rank_00/checkpoint.pt"),
        ("nxd xser", "step_3/model/dp_rank_00_tp_rank_01_pp_rank_00.pt"),
        ("nxd xser", "step_3/model/dp_rank_00_tp_rank_01_pp_rank_00.pt.info.pt"),
        ("nxd xser", "step_3/model/dp_rank_00_tp_rank_01_pp_rank_00.pt.tensors/tensor_0.pt"),
        ("zero", "step_3/optim/dp_rank_01_tp_rank_00_pp_rank_00.pt"),
        ("meta", "consolidated.00.pth"),
    ],
)
def test_no_pickle_of_any_format_is_executed(every, hostile, tmp_path, name, file):
    place = shutil.copytree(every[name], tmp_path / name) if every[name].is_dir() else tmp_path / "x.pt"
    if place.name == "x.pt":
        shutil.copy(every[name], place)
    path = place / file if file else place
    raw = path.read_bytes()
    for data in hostile.values():
        path.write_bytes(raw)
        if file == ".metadata":
            path.write_bytes(data)
        else:
            replaced(path, data)
        with pytest.raises(CheckpointError, match=r"its pickle (uses opcode|refers to).*nothing .*executed"):
            use(place, every["model"])
        assert not (tmp_path / "ran").exists()


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found.items() if path.name != "out"}


def test_nothing_is_read_or_written_outside_of_the_folders(every, tmp_path):
    """Names that lead out: in an index, a `.metadata`, a manifest, a tag, a tokenizer's file, the output's own path."""
    (tmp_path / "secret.safetensors").write_bytes((every["hf"] / "model.safetensors").read_bytes())
    work = tmp_path / "work"
    sharded = shutil.copytree(every["hf in shards"], work / "hf")
    index = sharded / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    key = next(iter(good["weight_map"]))
    before = tree(tmp_path)
    outside = [
        "../secret.safetensors",
        "../../secret.safetensors",
        str(tmp_path / "secret.safetensors"),
        "a\0.safetensors",
    ]
    for name in [*outside, "./x.safetensors", "x/../y.safetensors"]:
        index.write_text(json.dumps({**good, "weight_map": {**good["weight_map"], key: name}}))
        with pytest.raises(CheckpointError, match="not a safetensors file of this folder"):
            open_source(sharded)
    index.write_text(json.dumps(good))
    [saved] = shutil.copytree(every["lt"], work / "lt").glob("step-*")
    manifest = (saved / "manifest.json").read_bytes()
    for old, new in [
        (b'"tokenizer/tokenizer.json"', b'"tokenizer/../../../secret.safetensors"'),
        (b'"weights-00000.safetensors"', b'"../../../secret.safetensors"'),
        (b'"part-00000.json"', b'"/etc/passwd"'),
    ]:
        forged = manifest.replace(old, new)
        assert forged != manifest
        (saved / "manifest.json").write_bytes(forged)
        (saved / "COMMIT").write_bytes(make_commit(forged, 0))
        with pytest.raises(CheckpointError, match=r"not a name that a checkpoint's file can have|is not listed"):
            open_source(saved)
    for name in ("../x", "/x", "a/b", "", ".."):
        with pytest.raises(CheckpointError, match="tokenizer"):
            CheckpointMetadata(step=1, tokenizer_files={name: b""})
    from lt_ckpt.nxd.options import NxdOptions

    for tag in ("../x", "a/b", ".hidden", "a\nb"):
        with pytest.raises(CheckpointError, match="plain name of a folder"):
            NxdOptions(tag=tag)
    index.touch()
    shutil.rmtree(work)
    assert {k: v for k, v in before.items() if "work" not in k} == tree(tmp_path)


def test_links_are_not_followed_when_something_is_written_or_removed(every, tmp_path, toy):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("x")
    (tmp_path / "out").symlink_to(elsewhere)
    (tmp_path / "out.pt").symlink_to(elsewhere / "new.pt")
    source = open_source(every["model"])
    for kind, out in (("hf", "out"), ("dcp", "out"), ("pt", "out.pt")):
        with pytest.raises(CheckpointError, match="already exists"):
            convert_checkpoint(source, tmp_path / out, ConvertOptions(format=kind))
    root = tmp_path / "ck"
    old, new = toy.save(root, 1), toy.save(root, 2)
    (root / "step-00000000").symlink_to(elsewhere)
    (old / "weights-00000.safetensors").unlink()
    (old / "weights-00000.safetensors").symlink_to(elsewhere / "kept")
    assert prune_checkpoints(root, keep_last=1) == []
    assert (old.is_dir(), new.is_dir()) == (True, True)
    assert [path.name for path in elsewhere.iterdir()] == ["kept"]
    assert (elsewhere / "kept").read_text() == "x"


BOMBS = """
    import json, resource, struct, sys, time, zipfile
    from pathlib import Path
    from lt_ckpt import CheckpointError
    from lt_ckpt.formats import open_source
    from lt_ckpt.shards import find_tiling_error
    from lt_ckpt.tensorfile import read_header
    from lt_ckpt.torchfile.file import load_pt
    from lt_ckpt.torchfile.safe_globals import TORCH_SAFE_GLOBALS
    from lt_ckpt.torchfile.safe_pickle import loads
    from lt_model import ModelError

    def refused(what, action):
        began = time.process_time()
        try:
            action()
        except (CheckpointError, ModelError) as exc:
            assert time.process_time() - began < 30, what
            print(what, "|", str(exc)[:200])
        else:
            raise AssertionError(f"{what} was taken")

    def text(value):
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    folder, model = Path(sys.argv[1]), Path(sys.argv[2])
    load_pt(Path(sys.argv[3]))  # all that is needed is loaded
    usage = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (usage + 2**28, usage + 2**28))

    again = b"h\\x01h\\x00h\\x02\\x86R" * 20_000
    encode = b"(" + text("x" * 10**6) + b"q\\x00c_codecs\\nencode\\nq\\x01" + text("latin1") + b"q\\x02" + again + b"t."
    refused("a megabyte of text, encoded 20000 times", lambda: loads(b"\\x80\\x02" + encode, TORCH_SAFE_GLOBALS, "x"))
    keys = b"".join(b"\\x8a\\x0b" + (i * (2**61 - 1)).to_bytes(11, "little") + b"N" for i in range(1, 10**5))
    refused("keys that collide", lambda: loads(b"\\x80\\x02}(" + keys + b"u.", TORCH_SAFE_GLOBALS, "x"))
    lists = b"]q\\0" + b"".join(b"](h%ch%ce" % (i, i) + b"q%c" % (i + 1) for i in range(60)) 
    refused("lists of lists", lambda: loads(b"\\x80\\x02(" + lists + b"t.", TORCH_SAFE_GLOBALS, "x"))
    wide = b"\\x80\\x02\\x8b\\xff\\xff\\xff\\x7f" + bytes(2**20) + b"."
    refused("a huge integer", lambda: loads(wide, TORCH_SAFE_GLOBALS, "x"))
    long = b"\\x80\\x04\\x8d" + struct.pack("<Q", 2**62) + b"abc."
    refused("a huge text", lambda: loads(long, TORCH_SAFE_GLOBALS, "x"))
    refused("deep nesting", lambda: loads(b"\\x80\\x02)" + b"\\x85" * 10**6 + b".", TORCH_SAFE_GLOBALS, "x"))
    steps = [((i, i), (4000, 1)) for i in range(2000)]
    refused("slices like a staircase", lambda: find_tiling_error((8000, 4000), steps))
    with zipfile.ZipFile(folder / "bomb.pt", "w", compression=zipfile.ZIP_DEFLATED, compresslevel=1) as bomb:
        with bomb.open("x/data.pkl", "w") as record:
            for _ in range(24):
                record.write(bytes(2**24))
    assert (folder / "bomb.pt").stat().st_size < 2**23
    refused("400 MB of zeros, compressed", lambda: load_pt(folder / "bomb.pt"))
    header = folder / "sparse.safetensors"
    with header.open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)
    refused("a header of a terabyte", lambda: read_header(header))
    header.write_bytes((2**20).to_bytes(8, "little") + b"[" * 2**20)
    refused("a header of brackets", lambda: read_header(header))
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2**40}))
    (folder / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    refused("layers without end", lambda: open_source(folder))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory in use cannot be asked for here")
def test_bombs_take_little_memory_and_time(every, tmp_path):
    """All in one process that may take 256 MiB more than what it has after its imports."""
    script = textwrap.dedent(BOMBS)
    arguments = [str(tmp_path), str(every["model"]), str(every["pt"])]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 11


def test_an_optimizer_that_is_made_to_do_harm_is_refused_before_anything_is_written(every, tmp_path):
    place = shutil.copytree(every["zero"], tmp_path / "zero")
    path = place / "step_3" / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    replaced(path, pickle.dumps({"base_state": {}, "param_groups": [], "shape_info": {}}, 2))
    with pytest.raises(CheckpointError, match=r"dp_rank_00_tp_rank_00_pp_rank_00\.pt"):
        reshard_optimizer(place, tmp_path / "out", dp=1, config=ZERO_CONFIG)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["zero"]


def test_records_with_names_that_lead_out_write_nothing(every, tmp_path):
    """Nothing is ever unpacked, so such names are refused rather than dangerous."""
    whole = every["pt"].read_bytes()
    given = b"archive/version"
    assert whole.count(given) == 2  # in its header and in the directory
    for name in (b"../evil/version", b"/tmp/evil/versn", b"archive/../evil", b"archive/./versn", b"archive//versio"):
        path = tmp_path / "x.pt"
        path.write_bytes(whole.replace(given, name))
        with pytest.raises(CheckpointError, match=r"an invalid name|folders, not in one"):
            open_source(path, config=every["model"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.pt"]


def test_records_that_lie_in_one_another_are_refused(tmp_path):
    """How a small archive unpacks to a huge one: a record's bytes hold another record, header and all."""
    path = tmp_path / "x.pt"
    inner = zipfile.ZipInfo("x/data/1", date_time=(1980, 1, 1, 0, 0, 0))
    inner.file_size = inner.compress_size = 8
    inner.CRC = zlib.crc32(b"12345678")
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("x/data.pkl", pickle.dumps({}, 2))
        made.writestr("x/data/0", inner.FileHeader() + b"12345678")
        outer = made.getinfo("x/data/0")
        inner.header_offset = outer.header_offset + len(outer.FileHeader())
        made.filelist.append(inner)
        made.NameToInfo[inner.filename] = inner
    with zipfile.ZipFile(path) as theirs:
        assert theirs.read("x/data/1") == b"12345678"  # a good archive but for that
    with pytest.raises(CheckpointError, match=r"record 'x/data/1' overlaps another"):
        load_pt(path)
