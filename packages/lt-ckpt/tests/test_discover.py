import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lt_ckpt import CheckpointError, begin_save, find_latest_valid, list_steps, prune_checkpoints, write_rank_files
from lt_ckpt.discovery import resolve_checkpoint
from lt_ckpt.folders import ABANDONED_AFTER_S, remove_abandoned_saves


def damage(path):
    file = path / "weights-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))


def test_a_root_that_cannot_be_read_is_an_error_and_not_empty(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError, match="looking for checkpoints failed"):
        find_latest_valid(tmp_path / "file")


def test_the_newest_step_is_found_by_number(tmp_path, toy):
    for step in (9, 10, 123_456_789, 1):
        toy.save(tmp_path, step)
    for name in ("step-1", "step-00000011x", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000099").write_text("a file", encoding="utf-8")
    assert [step for step, _ in list_steps(tmp_path)] == [123_456_789, 10, 9, 1]
    found, rejected = find_latest_valid(tmp_path)
    assert found is not None
    assert (found.step, rejected) == (123_456_789, [])


def test_a_broken_newest_one_is_passed_over_with_the_reason(tmp_path, toy):
    paths = {step: toy.save(tmp_path, step) for step in (1, 2, 3, 4)}
    damage(paths[4])
    (paths[3] / "COMMIT").unlink()
    found, rejected = find_latest_valid(tmp_path)
    assert found is not None
    assert found.step == 2
    toy.check(found)
    assert [item.path for item in rejected] == [paths[4], paths[3]]
    assert "b.weight have changed" in rejected[0].reason
    assert "no COMMIT in it" in rejected[1].reason
    unchecked, _ = find_latest_valid(tmp_path, verify=False)
    assert unchecked is not None
    assert unchecked.step == 4


def test_resolve_takes_a_checkpoint_a_folder_of_them_or_a_run(tmp_path, toy):
    root = tmp_path / "run" / "checkpoints"
    one, two = toy.save(root, 1), toy.save(root, 2)
    assert resolve_checkpoint(one)[0].path == one
    assert resolve_checkpoint(root)[0].path == two
    assert resolve_checkpoint(tmp_path / "run")[0].path == two
    moved = shutil.copytree(one, tmp_path / "renamed")
    assert resolve_checkpoint(moved)[0].step == 1
    damage(two)
    found, rejected = resolve_checkpoint(tmp_path / "run")
    assert (found.path, [item.path for item in rejected]) == (one, [two])
    with pytest.raises(CheckpointError, match="no valid checkpoint: no folder named step-"):
        resolve_checkpoint(tmp_path)
    (one / "COMMIT").unlink()
    with pytest.raises(CheckpointError, match="not a checkpoint: no COMMIT"):
        resolve_checkpoint(one)
    with pytest.raises(CheckpointError, match=r"no valid checkpoint: .*have changed.*no COMMIT"):
        resolve_checkpoint(root)


def left(root):
    return [step for step, path in reversed(list_steps(root)) if path.name == f"step-{step:08d}"]


def test_prune_keeps_the_last_the_multiples_and_the_protected(tmp_path, toy, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in range(10):
        toy.save(tmp_path, step)
    gone = prune_checkpoints(tmp_path, keep_last=2, keep_every=4, protect=[tmp_path / "step-00000001"])
    assert left(tmp_path) == [1, 4, 8, 9]
    assert sorted(path.name for path in gone) == [f"step-{step:08d}" for step in (0, 2, 3, 5, 6, 7)]
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:08d}" for step in (1, 4, 8, 9)]
    assert prune_checkpoints(".", keep_last=2, keep_every=4, protect=[tmp_path / "step-00000001"]) == []
    assert prune_checkpoints(tmp_path / "none", keep_last=1) == []


def test_crashed_and_broken_saves_never_push_out_a_good_one(tmp_path, toy):
    paths = {step: toy.save(tmp_path, step) for step in (1, 2, 3, 4, 5)}
    for step in (3, 4, 5):
        (paths[step] / "COMMIT").unlink()
    assert prune_checkpoints(tmp_path, keep_last=2) == []
    assert left(tmp_path) == [1, 2, 3, 4, 5]
    toy.save(tmp_path, 6)
    assert prune_checkpoints(tmp_path, keep_last=2) == [paths[1]]
    toy.save(tmp_path, 7)  # now two good ones are newer than the broken ones
    gone = prune_checkpoints(tmp_path, keep_last=2, protect=[paths[3]])
    assert sorted(path.name[-1] for path in gone) == ["2", "4", "5"]
    assert left(tmp_path) == [3, 6, 7]


@pytest.fixture(scope="module")
def ten(memory, toy):
    """Checkpoints of the steps 0 to 9, to be copied and damaged."""
    return {step: toy.save(memory / "ten", step) for step in range(10)}


@settings(max_examples=40, deadline=None)
@given(
    states=st.lists(st.sampled_from(["none", "good", "good", "flipped", "cut", "no COMMIT"]), min_size=10, max_size=10),
    last=st.integers(1, 4),
    every=st.sampled_from([0, 3, 4]),
)
@example(states=[*["none"] * 7, "good", "flipped", "flipped"], last=2, every=0)  # none of the kept ones is intact
def test_whatever_is_damaged_the_newest_good_one_and_those_asked_for_stay(ten, memory, states, last, every):
    root = memory / "pruned"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for step, state in enumerate(states):
        if state == "none":
            continue
        path = Path(shutil.copytree(ten[step], root / ten[step].name))
        if state == "flipped":
            damage(path)
        elif state == "cut":
            os.truncate(path / "weights-00000.safetensors", 30)
        elif state == "no COMMIT":
            (path / "COMMIT").unlink()
    before = find_latest_valid(root)[0]
    listed = [step for step in range(10) if states[step] in ("good", "flipped")]
    wanted = {*listed[-last:], *(step for step in listed if every and step and step % every == 0)}
    if before is not None:
        wanted.add(before.step)
    newer = [sum(other > step for other in listed) for step in range(10)]
    wanted |= {step for step in range(10) if states[step] in ("cut", "no COMMIT") and newer[step] < last}
    prune_checkpoints(root, keep_last=last, keep_every=every)
    assert left(root) == sorted(wanted)
    after = find_latest_valid(root)[0]
    assert (after and after.step) == (before and before.step)


def test_a_checkpoint_that_was_moved_aside_still_counts_when_nothing_better_is_there(tmp_path, toy):
    path = toy.save(tmp_path, 5, seed=1)
    aside = tmp_path / "step-00000005.aside-0123456789abcdef"
    os.rename(path, aside)
    found, _ = find_latest_valid(tmp_path)
    assert found is not None
    toy.check(found, seed=1)
    toy.save(tmp_path, 4)
    assert prune_checkpoints(tmp_path, keep_last=2) == []
    assert prune_checkpoints(tmp_path, keep_last=1) == [tmp_path / "step-00000004"]
    toy.save(tmp_path, 5, seed=2)
    found, _ = find_latest_valid(tmp_path)
    assert found is not None
    toy.check(found, seed=2)
    toy.save(tmp_path, 3)
    assert prune_checkpoints(tmp_path, keep_last=2) == [aside]


def test_a_removal_that_was_cut_off_is_finished_by_the_next_save(tmp_path, toy, monkeypatch):
    toy.save(tmp_path, 1)
    toy.save(tmp_path, 2)
    real, seen = os.unlink, []

    def unlink(path, **more):
        seen.append(path)
        if len(seen) == 3:
            raise PermissionError(13, "Permission denied")
        real(path, **more)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(CheckpointError, match="removing failed"):
        prune_checkpoints(tmp_path, keep_last=1)
    monkeypatch.setattr(os, "unlink", real)
    assert left(tmp_path) == [2]
    assert any(name.startswith(".trash-") for name in os.listdir(tmp_path))
    toy.save(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]


def test_abandoned_saves_are_swept_and_nothing_else(tmp_path, toy, monkeypatch):
    """Of this machine those whose process is gone, of others those that do not change for an hour."""
    kept = toy.save(tmp_path, 9)
    own, other, begun = (begin_save(tmp_path, step=step, world_size=1) for step in (1, 2, 3))
    write_rank_files(other, rank=0, shards=[])
    (begun / "save.json").rename(begun / f"save.json.{'0' * 16}.tmp")
    dead = begin_save(tmp_path, step=4, world_size=1)
    finished = subprocess.Popen(["true"])
    finished.wait()
    for folder, host in ((dead, b""), (other, b"other-")):
        content = (folder / "save.json").read_bytes().replace(b'"host":"', b'"host":"' + host)
        (folder / "save.json").write_bytes(content.replace(b'"pid":%d' % os.getpid(), b'"pid":%d' % finished.pid))
    trash = tmp_path / f".trash-{'0' * 16}"
    trash.mkdir()
    (trash / "part-00000.json").write_bytes(b"")
    for name in (".tmp-step-00000001-xyz", ".trash-x", ".tmp-other"):
        (tmp_path / name).mkdir()
    theirs = tmp_path / f".tmp-step-00000001-{'1' * 16}"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("theirs", encoding="utf-8")
    assert remove_abandoned_saves(tmp_path) == [dead, trash]
    real = time.time()
    monkeypatch.setattr("lt_ckpt.folders.time.time", lambda: real + ABANDONED_AFTER_S - 60)
    assert remove_abandoned_saves(tmp_path) == []
    monkeypatch.setattr("lt_ckpt.folders.time.time", lambda: real + ABANDONED_AFTER_S + 60)
    os.utime(own / "save.json", (real + 120, real + 120))
    assert set(remove_abandoned_saves(tmp_path)) == {other, begun}
    assert kept.exists()
    assert own.exists()
    assert (theirs / "notes.txt").exists()


def test_a_folder_that_no_save_made_is_not_pruned(tmp_path, toy):
    for step in (0, 1, 2, 3):
        toy.save(tmp_path, step)
    (tmp_path / "step-00000000" / "done.txt").write_text("mine", encoding="utf-8")  # begins as a name of ours
    (tmp_path / "step-00000001" / "save.json").unlink()
    os.rename(tmp_path / "step-00000002", tmp_path / "elsewhere")
    (tmp_path / "step-00000002").symlink_to(tmp_path / "elsewhere")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    assert prune_checkpoints(tmp_path, keep_last=1) == []
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
