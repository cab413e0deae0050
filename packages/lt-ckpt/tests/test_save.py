import os
import threading
import time

import numpy as np
import pytest
from safetensors import safe_open

from lt_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointMetadata,
    OptimizerRecord,
    Shard,
    TensorSpec,
    begin_save,
    commit_save,
    find_latest_valid,
    verify,
    write_rank_files,
)
from lt_ckpt.save import discard_save


def test_a_save_holds_what_was_given(tmp_path, toy):
    path = toy.save(tmp_path, 1000, world=3)
    assert path == tmp_path / "step-00001000"
    checkpoint = Checkpoint.open(path)
    toy.check(checkpoint)
    assert checkpoint.step == 1000
    assert checkpoint.manifest.data == {"row": 8000}
    assert checkpoint.manifest.optimizer == OptimizerRecord(name="sgd", slots=("exp_avg",))
    assert checkpoint.tokenizer_files() == {"tokenizer.json": b"{}"}
    assert checkpoint.manifest.world_size == 3
    assert checkpoint.groups == ("weights", "exp_avg", "other", "rng")
    assert checkpoint.names("weights") == ("a.weight", "norm", "b.weight")
    assert sorted(os.listdir(tmp_path)) == ["step-00001000"]
    assert sorted(os.listdir(path)) == sorted(
        [
            "COMMIT",
            "manifest.json",
            "save.json",
            "tokenizer",
            *(f"part-{rank:05d}.json" for rank in range(3)),
            *(f"{group}-{rank:05d}.safetensors" for group in checkpoint.groups for rank in range(3)),
        ]
    )
    with safe_open(path / "weights-00001.safetensors", "np") as opened:
        assert (opened.get_tensor("norm") == toy.state(1000)["weights", "norm"][1][1:2]).all()


def test_parts_come_in_any_order_and_commit_waits_for_them(tmp_path, toy):
    tmp = begin_save(tmp_path, step=5, world_size=2)
    state = toy.state(5)
    made = []
    thread = threading.Thread(
        target=lambda: made.append(commit_save(tmp, world_size=2, metadata=CheckpointMetadata(step=5)))
    )
    write_rank_files(tmp, rank=1, shards=toy.shards(state, 1, 2))
    thread.start()
    time.sleep(0.1)
    assert find_latest_valid(tmp_path) == (None, [])
    write_rank_files(tmp, rank=0, shards=toy.shards(state, 0, 2))
    thread.join()
    toy.check(Checkpoint.open(made[0]))


def test_a_missing_part_is_named(tmp_path, toy):
    tmp = begin_save(tmp_path, step=5, world_size=3)
    write_rank_files(tmp, rank=1, shards=[])
    with pytest.raises(CheckpointError, match=r"after 0\.05 s the manifest of rank 0, 2 is missing"):
        commit_save(tmp, world_size=3, metadata=CheckpointMetadata(step=5), timeout_s=0.05)
    assert find_latest_valid(tmp_path)[0] is None


def test_a_failed_rank_ends_the_wait_at_once(tmp_path, toy, calls, monkeypatch):
    tmp = begin_save(tmp_path, step=5, world_size=2)
    with calls.recording(monkeypatch, fail_at=4), pytest.raises(CheckpointError, match="files of rank 1"):
        write_rank_files(tmp, rank=1, shards=toy.shards(toy.state(5), 1, 2))
    with pytest.raises(CheckpointError, match="rank 1 failed to write its files"):
        commit_save(tmp, world_size=2, metadata=CheckpointMetadata(step=5), timeout_s=60)


def one(offset=0, n=4, global_n=4, dtype="U8", name="a", group="weights", fill=1):
    data = np.full(n, fill, np.uint8)
    return Shard(group=group, name=name, dtype=dtype, global_shape=(global_n,), offset=(offset,), shape=(n,), data=data)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[one(0, 3)]], "weights/a of shape .4.: the slices hold 3 of 4 elements"),
        ([[one(0, 4)], [one(0, 4)]], "weights/a of shape .4.: two slices overlap"),
        ([[one(0, 3)], [one(2, 2)]], "two slices overlap"),
    ],
)
def test_slices_must_hold_each_element_exactly_once(tmp_path, ranks, message):
    tmp = begin_save(tmp_path, step=1, world_size=len(ranks))

    def save():
        for rank, shards in enumerate(ranks):
            write_rank_files(tmp, rank=rank, shards=shards)
        commit_save(tmp, world_size=len(ranks), metadata=CheckpointMetadata(step=1))

    with pytest.raises(CheckpointError, match=message):
        save()
    assert find_latest_valid(tmp_path)[0] is None


def test_what_was_expected_must_be_there(tmp_path, toy):
    specs = {"weights": {"a.weight": TensorSpec("F32", (6, 5)), "norm": TensorSpec("F32", (3,))}}
    with pytest.raises(CheckpointError, match=r": weights: 1 not expected: b\.weight"):
        toy.save(tmp_path, 1, expected_specs=specs)
    specs["weights"]["b.weight"] = TensorSpec("F32", (4, 7))
    specs["weights"]["c"] = TensorSpec("F32", ())
    with pytest.raises(CheckpointError, match=": weights: 1 missing: c"):
        toy.save(tmp_path, 1, expected_specs=specs)
    assert find_latest_valid(tmp_path)[0] is None
    del specs["weights"]["c"]
    with pytest.raises(CheckpointError, match=r"weights/b\.weight is BF16 .* instead of F32"):
        toy.save(tmp_path, 1, expected_specs=specs)
    specs["weights"]["b.weight"] = TensorSpec("BF16", (4, 7))
    toy.check(Checkpoint.open(toy.save(tmp_path, 1, expected_specs=specs)))


def test_a_folder_that_no_save_began_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match="reading failed"):
        write_rank_files(tmp_path / "other", rank=0, shards=[])


def test_a_part_of_another_save_or_a_folder_not_shared_is_noticed(tmp_path):
    one_save, other = begin_save(tmp_path, step=5, world_size=1), begin_save(tmp_path, step=5, world_size=1)
    write_rank_files(one_save, rank=0, shards=[one()])
    for name in ("part-00000.json", "weights-00000.safetensors"):
        (other / name).write_bytes((one_save / name).read_bytes())
    with pytest.raises(CheckpointError, match="not of this save"):
        commit_save(other, world_size=1, metadata=CheckpointMetadata(step=5))
    (one_save / "weights-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        commit_save(one_save, world_size=1, metadata=CheckpointMetadata(step=5))


def test_the_same_step_is_never_written_over(tmp_path, toy):
    path = toy.save(tmp_path, 7, seed=1)
    with pytest.raises(CheckpointError, match=f"{path}: .*already exists"):
        toy.save(tmp_path, 7, seed=2)
    toy.check(Checkpoint.open(path), seed=1)
    assert toy.save(tmp_path, 7, seed=2, overwrite=True) == path
    toy.check(Checkpoint.open(path), seed=2)
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".tmp")] == ["step-00000007"]


def test_a_broken_checkpoint_gives_way_and_is_kept_aside(tmp_path, toy):
    path = toy.save(tmp_path, 7, seed=1)
    file = path / "weights-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert toy.save(tmp_path, 7, seed=2) == path
    toy.check(Checkpoint.open(path), seed=2)
    aside = [name for name in os.listdir(tmp_path) if ".aside-" in name]
    assert len(aside) == 1
    assert (tmp_path / aside[0] / "weights-00000.safetensors").exists()
    found, rejected = find_latest_valid(tmp_path)
    assert found is not None
    assert (found.path, rejected) == (path, [])


def test_discard_removes_a_failed_save_only(tmp_path, toy):
    kept = toy.save(tmp_path, 1)
    tmp = begin_save(tmp_path, step=2, world_size=2)
    write_rank_files(tmp, rank=0, shards=toy.shards(toy.state(2), 0, 2))
    discard_save(tmp)
    assert os.listdir(tmp_path) == [kept.name]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x", encoding="utf-8")
    with pytest.raises(CheckpointError, match="reading failed"):
        discard_save(tmp_path / "mine")
    tmp = begin_save(tmp_path, step=3, world_size=1)
    (tmp / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not removed"):
        discard_save(tmp)
    assert (tmp / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_tensors_from_functions_are_asked_for_one_at_a_time(tmp_path):
    asked = []

    def lazy(i):
        def data():
            asked.append(i)
            return np.full(4, i, np.uint8)

        return Shard(group="weights", name=f"t{i}", dtype="U8", global_shape=(4,), offset=(0,), shape=(4,), data=data)

    tmp = begin_save(tmp_path, step=0, world_size=1)
    write_rank_files(tmp, rank=0, shards=[lazy(i) for i in range(3)])
    assert asked == [0, 1, 2]
    checkpoint = Checkpoint.open(commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=0)))
    assert [checkpoint.read("weights", f"t{i}")[0] for i in range(3)] == [0, 1, 2]


def test_a_file_that_is_not_as_its_rank_wrote_it_is_noticed(tmp_path):
    tmp = begin_save(tmp_path, step=5, world_size=1)
    write_rank_files(tmp, rank=0, shards=[one()])
    file = tmp / "weights-00000.safetensors"
    raw = file.read_bytes()
    for damaged in (raw[:-1], raw + b"\0", raw[:20] + b"!" + raw[21:], b""):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is not what rank 0 wrote; is the folder really shared"):
            commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=5))
    file.write_bytes(raw)
    assert verify(commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=5))).is_ok


def test_metadata_keeps_its_types_and_must_be_json(tmp_path):
    small = {"i": 2**70, "f": 1.0, "s": "ä", "b": True, "inf": float("inf"), "low": -float("inf"), "tiny": 5e-324}
    tmp = begin_save(tmp_path, step=0, world_size=1)
    write_rank_files(tmp, rank=0, shards=[one(name="w")])
    with pytest.raises(CheckpointError, match="File exists"):
        write_rank_files(tmp, rank=0, shards=[one(fill=9)])
    (tmp / "failed-00000").unlink()
    lacking = OptimizerRecord(name="sgd", slots=("momentum",))
    for problem, fields in (
        ("cannot be written as JSON", {"recipe": {"x": object()}}),
        ("optimizer 'sgd': no tensors of slot 'momentum'", {"optimizer": lacking}),
    ):
        with pytest.raises(CheckpointError, match=problem):
            commit_save(tmp, world_size=1, metadata=CheckpointMetadata(step=0, **fields))
    assert find_latest_valid(tmp_path) == (None, [])
    meta = CheckpointMetadata(step=0, scalars={**small, "nan": float("nan")}, recipe={"a": {"b": [1, None]}})
    found = Checkpoint.open(commit_save(tmp, world_size=1, metadata=meta)).manifest
    assert found.scalars.pop("nan") != found.scalars.get("nan")
    assert found.scalars == small
    assert {name: type(value) for name, value in found.scalars.items()} == {k: type(v) for k, v in small.items()}
    assert (found.recipe, found.data, found.optimizer) == ({"a": {"b": [1, None]}}, None, None)
    assert abs(found.created_at - time.time()) < 60
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        CheckpointMetadata(step=1, tokenizer_files={"../x": b""})
