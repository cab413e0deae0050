import math
import os
import random
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nxd_trees import save_nxd

from lt_ckpt import Checkpoint, CheckpointError, files, find_latest_valid, verify


def flip(path, bit):
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


def files_of(path):
    return sorted(found for found in path.rglob("*") if found.is_file())


@pytest.fixture(scope="module")
def saved(memory, toy):
    return toy.save(memory / "verify", 4)


@pytest.fixture
def copy(saved, fast_path):
    return shutil.copytree(saved, fast_path / "step-00000004")


def test_a_good_checkpoint_verifies_with_progress(copy, toy):
    seen = []
    report = verify(copy, progress=lambda done, total, unit: seen.append((done, total, unit)))
    assert report.is_ok
    assert report.is_loadable
    assert (report.problems, report.extra_files) == ((), ())
    assert report.n_files == len(files_of(copy))
    total = sum(path.stat().st_size for path in files_of(copy) if path.name not in ("COMMIT", "manifest.json"))
    assert report.n_bytes == total
    assert seen[-1] == (total, total, "bytes")
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


def test_every_flipped_byte_is_found(saved, memory):
    """A random bit of every third byte of the tensor files and of every ninth of the others, one at a time."""
    rng = random.Random(0)
    folder = shutil.copytree(saved, memory / "flips")
    n_flips = 0
    for path in files_of(folder):
        raw = path.read_bytes()
        step = 3 if path.suffix == ".safetensors" else 9
        for position in range(rng.randrange(step), len(raw), step):
            bit = 8 * position + rng.randrange(8)
            flip(path, bit)
            report = verify(folder)
            assert report.problems, (path, bit)
            n_flips += 1
            path.write_bytes(raw)
    assert verify(folder).is_ok
    assert n_flips > 1000


@pytest.fixture(scope="module")
def saves(saved, memory):
    """Our own files, and those of NxD, which are hashed as wholes."""
    return {"toy": saved, "nxd": save_nxd(memory / "verify-nxd", 4)}


@pytest.mark.parametrize("of", ["toy", "nxd"])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flipped_truncated_swapped_and_missing_files_are_found(saves, memory, of, data):
    folder = memory / "damage"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saves[of], folder)
    path = data.draw(st.sampled_from(files_of(folder)))
    kind = data.draw(st.sampled_from(["flip", "truncate", "grow", "remove", "swap", "empty"]))
    raw = path.read_bytes()
    if kind == "truncate":
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    elif kind == "grow":
        path.write_bytes(raw + b"\0")
    elif kind == "remove":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "flip":
        flip(path, data.draw(st.integers(0, 8 * len(raw) - 1)))
    else:
        other = data.draw(st.sampled_from([found for found in files_of(folder) if found.read_bytes() != raw]))
        theirs = other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(raw)
    report = verify(folder)
    assert report.problems
    assert not report.is_loadable
    if kind in ("truncate", "grow", "remove", "empty"):
        with pytest.raises(CheckpointError):
            Checkpoint.open(folder)


def test_all_problems_are_named(copy):
    flip(copy / "weights-00000.safetensors", 8 * ((copy / "weights-00000.safetensors").stat().st_size - 1))
    (copy / "rng-00001.safetensors").unlink()
    flip(copy / "tokenizer" / "tokenizer.json", 0)
    flip(copy / "exp_avg-00000.safetensors", 8 * 12)
    problems = "\n".join(verify(copy).problems)
    assert "weights-00000.safetensors: the bytes of tensor b.weight have changed" in problems
    assert "rng-00001.safetensors: verifying failed: No such file" in problems
    assert "tokenizer.json: its bytes have changed" in problems
    assert "exp_avg-00000.safetensors: its header has changed" in problems
    assert len(verify(copy).problems) == 4


def test_extra_files_are_said_but_do_no_harm(copy, toy):
    (copy / "weights-00007.safetensors").write_bytes((copy / "weights-00000.safetensors").read_bytes())
    (copy / "tokenizer" / "notes.txt").write_text("x", encoding="utf-8")
    report = verify(copy)
    assert report.extra_files == ("tokenizer/notes.txt", "weights-00007.safetensors")
    assert report.is_loadable
    assert not report.is_ok
    found, rejected = find_latest_valid(copy.parent)
    assert found is not None
    assert rejected == []
    toy.check(found)


def test_a_folder_that_is_none_does_not_verify(tmp_path):
    assert "no such folder" in verify(tmp_path / "none").problems[0]
    assert "no COMMIT" in verify(tmp_path).problems[0]


def replace_in(path, old, new):
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"file":"weights-00000.safetensors"', b'"file":"../weights-00000.safetensors"', "is not listed"),
        (b'"weights-00000.safetensors":{', b'"/etc/passwd":{', "leads out of its folder"),
        (b'"version":2', b'"version":3', "use the version of lt-ckpt that wrote it"),
        (b'"offset":[0,0]', b'"offset":[3,0]', "overlap|does not lie"),
        (b'"byte_offset":', b'"byte_offset":8', "do not add up"),
        (b'"step":4,', b'"step":5,', "does not match manifest.json"),
        (b'"dtype":"F32"', b'"dtype":"F31"', "not known"),
        (b'"shape":[3]', b'"shape":[]', "does not lie"),
        (b'"key":', b'"kez":', "is damaged or not of this version"),
    ],
)
def test_a_forged_manifest_is_refused_though_its_commit_matches(copy, old, new, message):
    from lt_ckpt.manifest import make_commit

    replace_in(copy / "manifest.json", old, new)
    (copy / "COMMIT").write_bytes(make_commit((copy / "manifest.json").read_bytes(), 4))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(copy)
    assert verify(copy).problems


def test_a_file_cut_after_opening_is_an_error_and_not_zeros(copy):
    checkpoint = Checkpoint.open(copy)
    path = copy / "weights-00000.safetensors"
    os.truncate(path, path.stat().st_size - 5)
    with pytest.raises(CheckpointError, match="truncated"):
        checkpoint.read("weights", "b.weight")
    with pytest.raises(CheckpointError, match="no tensor 'x'"):
        checkpoint.read("weights", "x")
    with pytest.raises(CheckpointError, match="no group 'y'"):
        checkpoint.names("y")


def test_loading_is_strict(copy):
    from lt_ckpt import TensorSpec

    checkpoint = Checkpoint.open(copy)
    specs = {"weights": checkpoint.specs("weights")}
    checkpoint.check_specs(specs)
    for name, spec in (("norm", TensorSpec("BF16", (3,))), ("norm", TensorSpec("F32", (4,)))):
        with pytest.raises(CheckpointError, match=r"weights/norm is F32 \[3\] instead of"):
            checkpoint.check_specs({"weights": {**specs["weights"], name: spec}})
    with pytest.raises(CheckpointError, match=": weights: 1 missing: more"):
        checkpoint.check_specs({"weights": {**specs["weights"], "more": TensorSpec("F32", ())}})
    with pytest.raises(CheckpointError, match=r": weights: 2 not expected: a\.weight, b\.weight"):
        checkpoint.check_specs({"weights": {"norm": specs["weights"]["norm"]}})
    with pytest.raises(CheckpointError, match=": none: 1 missing: x"):
        checkpoint.check_specs({"none": {"x": TensorSpec("F32", ())}})


def test_slices_of_many_blocks_are_verified_to_their_end(fast_path, toy, monkeypatch):
    made = toy.save(fast_path, 1)
    monkeypatch.setattr(files, "BLOCK_BYTES", 8)
    assert verify(made).is_ok
    group = Checkpoint.open(made).manifest.tensors["weights"]
    slices = [piece for record in group.values() for piece in record.slices]
    last = max((piece for piece in slices if math.prod(piece.shape) > 8), key=lambda piece: piece.byte_offset)
    path = made / last.file
    flip(path, 8 * (last.byte_offset + 2 * math.prod(last.shape)) - 1)  # every element has two bytes or more
    (problem,) = verify(made).problems
    assert "have changed since they were written" in problem


def test_a_tokenizer_that_has_changed_is_never_handed_on(tmp_path, toy):
    checkpoint = Checkpoint.open(toy.save(tmp_path, 1))
    assert checkpoint.tokenizer_files() == {"tokenizer.json": b"{}"}
    (checkpoint.path / "tokenizer" / "tokenizer.json").write_bytes(b"[]")  # as long as before
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: its bytes have changed since they were written"):
        Checkpoint.open(checkpoint.path).tokenizer_files()
