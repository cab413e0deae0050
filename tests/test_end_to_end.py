"""Text to 20 steps, stop, resume and export through the commands, on one process and on two ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lt_ckpt import Checkpoint
from lt_data import RowReader, Stream, TokenStore, open_pack
from lt_test_helpers.run_files import latest_checkpoint, read_losses

RUN = ("-m", "lt_trainer", "run")


def read_tensors(checkpoint: Checkpoint) -> dict[tuple[str, str], np.ndarray]:
    numpy_dtypes = {"F32": np.float32, "F64": np.float64}
    return {
        (group, name): checkpoint.read(group, name).view(numpy_dtypes[checkpoint.specs(group)[name].dtype])
        for group in checkpoint.groups
        for name in checkpoint.names(group)
    }


@pytest.fixture(scope="module")
def uninterrupted_run(prepared: Path, lt, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    cwd = tmp_path_factory.mktemp("whole")
    lt("train", "run", prepared / "run.toml", cwd=cwd)
    return cwd / "run"


def test_training_learns(uninterrupted_run: Path) -> None:
    found = read_losses(uninterrupted_run)
    assert sorted(found) == list(range(1, 21))
    assert found[1] == pytest.approx(np.log(320), abs=0.15)  # a fresh model knows nothing
    assert found[20] < found[1] - 1
    assert {path.name for path in uninterrupted_run.iterdir()} >= {
        "recipe.toml",
        "recipe.json",
        "environment.json",
        "metrics.jsonl",
        "events.jsonl",
        "checkpoints",
        "logs",
    }


def test_stop_and_resume_are_bit_equal(uninterrupted_run: Path, prepared: Path, lt, tmp_path: Path) -> None:
    lt("train", "run", prepared / "run.toml", "--stop-after-step", "11", cwd=tmp_path, code=75)
    run = tmp_path / "run"
    assert latest_checkpoint(run).step == 11
    lt("train", "run", prepared / "run.toml", cwd=tmp_path)
    assert read_losses(run) == read_losses(uninterrupted_run)
    expected, found = read_tensors(latest_checkpoint(uninterrupted_run)), read_tensors(latest_checkpoint(run))
    assert found.keys() == expected.keys()
    assert all((found[key] == expected[key]).all() for key in expected)


def test_a_real_sigterm_saves_and_exits_75(uninterrupted_run: Path, prepared: Path, lt, tmp_path: Path) -> None:
    command = [sys.executable, *RUN, str(prepared / "run.toml"), "--set", "schedule.max_steps=2000"]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        deadline = time.monotonic() + 120
        while len(read_losses(tmp_path / "run")) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75
    stopped = latest_checkpoint(tmp_path / "run").step
    assert stopped == max(read_losses(tmp_path / "run"))


def test_kill_9_resumes_from_the_last_checkpoint(uninterrupted_run: Path, prepared: Path, lt, tmp_path: Path) -> None:
    command = [sys.executable, *RUN, str(prepared / "run.toml")]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        checkpoint = tmp_path / "run" / "checkpoints" / "step-00000008"
        deadline = time.monotonic() + 120
        while not checkpoint.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    lt("train", "run", prepared / "run.toml", cwd=tmp_path)
    assert read_losses(tmp_path / "run") == read_losses(uninterrupted_run)


def test_two_ranks_train_as_one_and_go_on_as_one(prepared: Path, lt, torchrun, tmp_path: Path) -> None:
    """In float64: the same losses, the same weights, and a checkpoint of two ranks resumed by one process."""
    exact = ("--set", "engine.gpu.dtype=float64")
    lt("train", "run", prepared / "run.toml", *exact, "--set", "run.dir=one", cwd=tmp_path)
    two = (prepared / "run.toml", *exact, "--set", "run.dir=two")
    torchrun(2, *RUN, *two, "--set", "schedule.max_steps=20", "--stop-after-step", "12", cwd=tmp_path, code=1)
    assert latest_checkpoint(tmp_path / "two").step == 12
    assert latest_checkpoint(tmp_path / "two").manifest.layout["world"] == 2
    lt("train", "run", *two, cwd=tmp_path)
    expected, found = read_losses(tmp_path / "one"), read_losses(tmp_path / "two")
    assert sorted(found) == sorted(expected)
    assert all(found[step] == pytest.approx(expected[step], rel=1e-10) for step in expected)
    one, other = read_tensors(latest_checkpoint(tmp_path / "one")), read_tensors(latest_checkpoint(tmp_path / "two"))
    for key, tensor in one.items():
        assert np.abs(other[key] - tensor).max() <= 1e-9 * np.abs(tensor).max(), key
    validation = [read_losses(tmp_path / run, "val_loss") for run in ("one", "two")]
    assert validation[1] == pytest.approx(validation[0], rel=1e-9)


def test_export_loads_in_transformers_with_the_same_logits(uninterrupted_run: Path, lt, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lt_trainer.evaluation.local_model import load_model

    lt("ckpt", "verify", uninterrupted_run, cwd=tmp_path)
    lt("ckpt", "export", uninterrupted_run, "--out", "model", cwd=tmp_path)
    *groups, _ = lt("ckpt", "diff", "model", uninterrupted_run, cwd=tmp_path, code=1).splitlines()
    assert [line.partition(":")[0] for line in groups] == ["exp_avg", "exp_avg_sq"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    ids = torch.tensor([tokenizer("the loss of a model falls")["input_ids"]])
    for source in (uninterrupted_run, latest_checkpoint(uninterrupted_run).path, tmp_path / "model"):
        with torch.no_grad():
            ours = load_model(source).model(ids)
            assert (ours - theirs(input_ids=ids).logits).abs().max() <= 1e-5 * ours.abs().max()


def test_sample_and_show(uninterrupted_run: Path, prepared: Path, lt, tmp_path: Path) -> None:
    options = ("the loss", "--max-new-tokens", "8", "--seed", "3")
    text = lt("train", "sample", uninterrupted_run, *options, cwd=tmp_path)
    assert text.startswith("the loss")
    assert lt("train", "sample", uninterrupted_run, *options, cwd=tmp_path) == text
    shown = lt("train", "show", prepared / "run.toml", "--set", "optimizer.lr=1e-2", cwd=tmp_path)
    assert "lr = 0.01" in shown
    assert "--set" in shown
    as_json = json.loads(lt("train", "show", prepared / "run.toml", "--json", cwd=tmp_path))
    assert as_json["origins"]["data.seq_len"].endswith("run.toml")
    assert as_json["origins"]["optimizer.beta1"] == "default"


@pytest.mark.parametrize("is_exported", [False, True], ids=["checkpoint", "export"])
def test_a_flipped_bit_of_the_weights_is_not_sampled_from(
    is_exported: bool, uninterrupted_run: Path, lt, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    if is_exported:
        lt("ckpt", "export", uninterrupted_run, "--out", path, cwd=tmp_path)
    else:
        shutil.copytree(latest_checkpoint(uninterrupted_run).path, path)
    file = next(path.glob("weights-*.safetensors" if not is_exported else "*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    lt("train", "sample", path, "the loss", cwd=tmp_path, code=64)


def test_the_resolved_recipe_of_a_run_starts_the_same_run(uninterrupted_run: Path, lt, tmp_path: Path) -> None:
    lt("train", "run", uninterrupted_run / "recipe.toml", "--set", "run.dir=again", cwd=tmp_path)
    assert read_losses(tmp_path / "again") == read_losses(uninterrupted_run)


def test_the_documents_of_any_step_can_be_named(uninterrupted_run: Path, prepared: Path, lt, tmp_path: Path) -> None:
    """What `lt train inspect` says of a step is what the stream gave to it."""
    store = TokenStore(prepared / "train")
    stream = Stream(RowReader(store, open_pack(store, seq_len=64)), global_batch_size=8)
    for step in range(1, 18):
        batch = stream.next()
        if step in (1, 13, 17):
            told = json.loads(lt("train", "inspect", uninterrupted_run, "--step", str(step), "--json", cwd=tmp_path))
            assert [row["row"] for row in told["rows"]] == batch.row_ids.tolist()
            assert sum(row["labels"] for row in told["rows"]) == batch.valid_tokens
    text = (prepared / told["rows"][0]["spans"][0]["source"]).read_text(encoding="utf-8")
    assert told["rows"][0]["spans"][0]["text"].replace("<|bos|>", "").replace("<|eos|>", "") in text
