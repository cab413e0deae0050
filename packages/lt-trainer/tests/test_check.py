"""`lt train check`: what it tries and says, that nothing is left behind, and that errors end it as they end a run."""

import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from lt_ckpt import CheckpointError, files
from lt_test_helpers.runs import check, run, start
from lt_trainer.config.recipe import load
from lt_trainer.errors import RecipeError, RunDirError
from lt_trainer.resilience.stop_signals import STOP_SIGNALS
from lt_trainer.run_directory.run_dir import RunDir
from lt_trainer.training.check import CheckError


def checked(base, *overrides: str) -> None:
    check(load(base=base, overrides=["run.engine=fake", *overrides]), environ={})


def everything(folder: Path) -> dict[str, int]:
    """Files with the time of their last change, and folders."""
    return {str(path): path.stat().st_mtime_ns if path.is_file() else 0 for path in folder.rglob("*")}


def test_says_what_it_found_and_leaves_nothing(recipe_base, fake_engine, tmp_path, capsys) -> None:
    before = everything(tmp_path)
    recipe_base["run"]["dir"] = str(tmp_path / "not" / "there" / "yet")
    checked(recipe_base)
    assert everything(tmp_path) == before
    text = capsys.readouterr().out
    assert f"(uniform prediction: {math.log(300):.4f})" in text
    assert "# check: saved a checkpoint in 0.0 s" in text
    assert "# check: nothing was left behind" in text
    (engine,) = fake_engine.opened
    assert engine.calls == 3, "the first step, the second, and the second again after a restore"
    assert engine.rows[8:16] == engine.rows[16:24]
    assert engine.lrs[1] == engine.lrs[2]
    assert engine.closed


def test_says_that_transformers_will_read_other_ids(recipe_base, fake_engine, capsys) -> None:
    for shape, n_warnings in (('{"family": "qwen2", "qkv_bias": true}', 1), ('{"family": "llama"}', 0)):
        checked(recipe_base, f"model.shape={shape}")
        lines = capsys.readouterr().out.splitlines()
        warnings = [line for line in lines if "PreTrainedTokenizerFast.from_pretrained, train a model of" in line]
        assert len(warnings) == n_warnings, lines


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


def test_steps_as_the_run_would_from_its_newest_checkpoint_and_leaves_the_run_as_it_is(
    recipe_base, fake_engine, capsys
) -> None:
    resolved = load(base=recipe_base, overrides=["run.engine=fake"])
    assert run(resolved, environ={}, stop_after_step=9) == 75
    out = Path(recipe_base["run"]["dir"])
    before = everything(out.parent)
    checked(recipe_base)
    assert everything(out.parent) == before
    assert f"resuming after step 9 from {out}/checkpoints/step-00000009" in capsys.readouterr().out
    tried = fake_engine.opened[-1]
    assert run(resolved, environ={}) == 0
    resumed = fake_engine.opened[-1]
    assert tried.rows[:8] == resumed.rows[:8]
    assert tried.lrs[:2] == resumed.lrs[:2]
    checked(recipe_base)
    assert "check: all 20 steps are done" in capsys.readouterr().out


def test_errors_are_those_of_the_run(recipe_base, fake_engine, monkeypatch) -> None:
    out = Path(recipe_base["run"]["dir"])
    with pytest.raises(RecipeError, match=r"model.vocab_size = 32000 \(--set\)"):
        checked(recipe_base, "model.vocab_size=32000")
    with RunDir.open(out), pytest.raises(RunDirError, match=f"in use by process {os.getpid()}"):
        checked(recipe_base)
    checked(recipe_base)
    (out / ".lt-run").unlink()
    with pytest.raises(RunDirError, match="not a run directory"):
        checked(recipe_base)


def test_a_first_step_that_is_not_finite_is_refused(recipe_base, fake_engine, tmp_path) -> None:
    fake_engine.poison = lambda call, batch: True
    with pytest.raises(CheckError, match="step 1 has loss nan"):
        checked(recipe_base)
    assert not list(tmp_path.iterdir())


def test_a_loss_that_becomes_nan_is_no_broken_restore(recipe_base, fake_engine) -> None:
    """The first update made the weights useless."""
    fake_engine.poison = lambda call, batch: call >= 2
    with pytest.raises(CheckError, match=r"step 2 has loss nan .*lr = 0\.0016\): lower optimizer\.lr or lengthen"):
        checked(recipe_base)


def test_an_engine_that_restores_less_than_it_saves_is_found(recipe_base, fake_engine) -> None:
    def forget(call: int) -> None:
        if call == 3:  # the step after the restore
            fake_engine.opened[-1].weights = np.arange(16, dtype=np.float64) * 2

    fake_engine.on_step = forget
    with pytest.raises(CheckError, match="the step after a restore has loss"):
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
    with pytest.raises(CheckError, match="does not keep written data"):
        checked(recipe_base)
    assert not list(tmp_path.iterdir())


def test_room_for_a_checkpoint_is_looked_at_before_the_first_step(recipe_base, fake_engine, monkeypatch) -> None:
    """Sixteen float64 are 128 bytes."""
    fields = list(os.statvfs("/"))
    fields[:2], fields[4] = [1, 1], 100
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    with pytest.raises(CheckpointError, match=r"a checkpoint needs 128 bytes .*, 100 are free"):
        start(recipe_base)
    assert fake_engine.opened[-1].calls == 0
    fields[4] = 200
    assert start(recipe_base) == 0
