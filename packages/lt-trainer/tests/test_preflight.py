"""Preflight: every stage is reported, nothing is left behind, and errors end it as they end a run."""

import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from lt_ckpt import CheckpointError, files, list_steps
from lt_trainer.checkpointing import async_saver
from lt_trainer.checkpointing.checkpoint_manager import max_checkpoints_on_disk
from lt_trainer.config.recipe import load
from lt_trainer.errors import RecipeError, RunDirError
from lt_trainer.resilience.stop_signals import STOP_SIGNALS
from lt_trainer.run_directory.run_dir import RunDir
from lt_trainer.training.preflight import PreflightError, run_preflight
from lt_trainer.training.runner import run


def checked(base, *overrides: str) -> list[str]:
    return run_preflight(load(base=base, overrides=["run.engine=fake", *overrides]), environ={})


def everything(folder: Path) -> dict[str, int]:
    """Files with the time of their last change, and folders."""
    return {str(path): path.stat().st_mtime_ns if path.is_file() else 0 for path in folder.rglob("*")}


def test_shows_every_stage_and_leaves_nothing(recipe_base, fake_engine, tmp_path, capsys) -> None:
    before = everything(tmp_path)
    lines = checked(recipe_base)
    assert everything(tmp_path) == before
    assert capsys.readouterr().out.splitlines() == lines
    assert all(line.startswith("ok ") for line in lines)
    text = "\n".join(lines)
    for part in (
        "40 documents",
        "vocabulary 300",
        "rows of 32 (bfd)",
        "run will be created",
        "fake",
        "at most 4 are kept",
    ):
        assert part in text, part
    assert f"uniform prediction: {math.log(300):.4f}" in text
    (engine,) = fake_engine.opened
    assert engine.calls == 3, "the first step, the second, and the second again after a restore"
    assert engine.rows[8:16] == engine.rows[16:24]
    assert engine.lrs[1] == engine.lrs[2]
    assert engine.closed


def test_memory_for_background_saves_is_tried(recipe_base, fake_engine, monkeypatch) -> None:
    assert "ok      async save" not in "\n".join(checked(recipe_base))
    assert "ok      async save" in "\n".join(checked(recipe_base, "checkpoint.async_save=true"))
    monkeypatch.setattr(async_saver, "_available_bytes", lambda: 0)
    with pytest.raises(RecipeError, match=r"checkpoint.async_save = True"):
        checked(recipe_base, "checkpoint.async_save=true")


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_leaves_nothing_behind(recipe_base, fake_engine, tmp_path, number) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("these tests were started with the signal ignored, as nohup does, and lt leaves it so")
    before, handler = everything(tmp_path), signal.getsignal(number)
    fake_engine.on_step = lambda call: os.kill(os.getpid(), number) if call == 2 else None
    with pytest.raises(KeyboardInterrupt):
        checked(recipe_base)
    assert everything(tmp_path) == before
    assert signal.getsignal(number) is handler


def test_a_run_that_exists_is_left_as_it_is(recipe_base, fake_engine) -> None:
    assert run(load(base=recipe_base, overrides=["run.engine=fake"]), environ={}, stop_after_step=9) == 75
    out = Path(recipe_base["run"]["dir"])
    before = everything(out)
    text = "\n".join(checked(recipe_base))
    assert "has a run; newest checkpoint step-00000009" in text
    assert everything(out) == before
    assert [step for step, _ in list_steps(out / "checkpoints")] == [9, 6]


def test_steps_as_the_run_would_from_its_newest_checkpoint(recipe_base, fake_engine) -> None:
    resolved = load(base=recipe_base, overrides=["run.engine=fake"])
    assert run(resolved, environ={}, stop_after_step=9) == 75
    text = "\n".join(checked(recipe_base))
    assert f"resuming after step 9 from {recipe_base['run']['dir']}/checkpoints/step-00000009" in text
    tried = fake_engine.opened[-1]
    assert run(resolved, environ={}) == 0
    resumed = fake_engine.opened[-1]
    assert tried.rows[:8] == resumed.rows[:8]
    assert tried.lrs[:2] == resumed.lrs[:2]
    assert "none: all 20 steps are done" in "\n".join(checked(recipe_base))


def test_a_run_in_progress_is_refused(recipe_base, fake_engine) -> None:
    resolved = load(base=recipe_base, overrides=["run.engine=fake"])
    with (
        RunDir.open(recipe_base["run"]["dir"], resolved=resolved),
        pytest.raises(RunDirError, match=f"in use by process {os.getpid()}"),
    ):
        checked(recipe_base)
    checked(recipe_base)


def test_the_line_that_failed_is_shown_and_the_error_is_the_runs(recipe_base, fake_engine, capsys) -> None:
    with pytest.raises(RecipeError, match=r"model.vocab_size = 32000 \(--set\)"):
        checked(recipe_base, "model.vocab_size=32000")
    assert capsys.readouterr().out.splitlines() == ["FAILED  recipe and data"]
    out = Path(recipe_base["run"]["dir"])
    out.mkdir()
    (out / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(RunDirError, match="not a run directory"):
        checked(recipe_base)
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED  run directory"


def test_a_first_step_that_is_not_finite_is_refused(recipe_base, fake_engine, tmp_path) -> None:
    fake_engine.poison = lambda call, batch: True
    with pytest.raises(PreflightError, match="the first step has loss nan"):
        checked(recipe_base)
    assert not list(tmp_path.iterdir())


def test_an_engine_that_restores_less_than_it_saves_is_found(recipe_base, fake_engine) -> None:
    def forget(call: int) -> None:
        if call == 3:  # the step after the restore
            fake_engine.opened[-1].weights = np.arange(16, dtype=np.float64) * 2

    fake_engine.on_step = forget
    with pytest.raises(PreflightError, match="the step after a restore has loss"):
        checked(recipe_base)


def test_a_disk_that_does_not_keep_what_it_takes_is_found(recipe_base, fake_engine, tmp_path, monkeypatch) -> None:
    real = files.rename

    def spoil(source, target) -> None:
        real(source, target)
        for file in Path(target).glob("weights-*.safetensors"):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)

    monkeypatch.setattr(files, "rename", spoil)
    with pytest.raises(CheckpointError, match="does not keep written data"):
        checked(recipe_base)
    assert not list(tmp_path.iterdir())


def test_room_for_all_checkpoints_is_counted(recipe_base, fake_engine, monkeypatch) -> None:
    real = os.statvfs

    def two_hundred_bytes(path):
        found = real(path)
        fields = list(found)
        fields[0] = fields[1] = 1
        fields[4] = 200  # f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", two_hundred_bytes)
    text = "\n".join(checked(recipe_base))  # 16 float64 are 128 bytes: one fits, the four that are held do not
    assert "warning: 0.00 MiB too little free space to keep them all" in text
    monkeypatch.setattr(fake_engine, "on_step", lambda call: None)
    fields = list(real("/"))
    fields[0] = fields[1] = 1
    fields[4] = 100
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    with pytest.raises(CheckpointError, match="needs 128 bytes"):
        checked(recipe_base)


def most_on_disk(interval: int, max_steps: int, keep_last: int, keep_every: int) -> int:
    """Save and prune as a run does; return the most checkpoints there ever are, before the oldest goes."""
    there: list[int] = []
    most = 0
    for step in range(1, max_steps + 1):
        if step == max_steps or (interval and step % interval == 0):
            there.append(step)
            most = max(most, len(there))
            there = [
                s for i, s in enumerate(there) if len(there) - i <= keep_last or (keep_every and not s % keep_every)
            ]
    return most


@pytest.mark.parametrize("interval", [0, 1, 3, 5, 50])
@pytest.mark.parametrize("keep_last", [1, 2, 3])
@pytest.mark.parametrize("keep_every", [0, 6, 15])
def test_the_room_that_is_asked_for_is_that_of_all_checkpoints_there_ever_are(
    recipe_base, interval: int, keep_last: int, keep_every: int
) -> None:
    """With `keep_every` some of the kept ones may also be among the last, so the bound may be larger by as many."""
    sets = [f"checkpoint.interval={interval}", f"checkpoint.keep_last={keep_last}"]
    recipe = load(base=recipe_base, overrides=[*sets, f"checkpoint.keep_every={keep_every}"]).recipe
    bound, most = max_checkpoints_on_disk(recipe), most_on_disk(interval, 20, keep_last, keep_every)
    assert bound >= most
    assert bound == most or keep_every
