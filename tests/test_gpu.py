"""On a GPU, through the commands: torchrun with one rank on nccl is stopped by SIGTERM and goes on bit for bit."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lt_ckpt import Checkpoint, find_latest_valid
from lt_trainer.run_directory.jsonl import read_jsonl

pytestmark = pytest.mark.gpu

DEVICE, STEPS, STOP = "cuda", 16, 7


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packed stores and `run.toml`, made with this interpreter alone, so no command needs to be there."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here: what runs on a GPU stays untested")
    root = tmp_path_factory.mktemp("gpu")
    words = ["the", "loss", "of", "a", "model", "falls", "when", "its", "data", "is", "read", "in", "order"]
    for half, documents in (("train", 40), ("validation", 5)):
        (root / "text" / half).mkdir(parents=True)
        for i in range(documents):
            text = " ".join(words[(i * 5 + j * j + j // 7) % len(words)] for j in range(8 + 13 * i % 170))
            (root / "text" / half / f"{i:03}.txt").write_text(f"{half} {i}: {text}.\n")
    data = [sys.executable, "-m", "lt_data"]
    commands = [["train-tokenizer", "text/train", "--vocab-size", "320", "--out", "tokenizer"]]
    for half in ("train", "validation"):
        commands.append(["prepare", f"text/{half}", "--tokenizer", "tokenizer", "--out", half])
        commands.append(["pack", half, "--seq-len", "64", "--mode", "bfd"])
    for command in commands:
        subprocess.run([*data, *command], cwd=root, check=True)
    (root / "run.toml").write_text(
        f"""
[model]
hidden_size = 128
intermediate_size = 256
n_heads = 4
n_kv_heads = 2
n_layers = 2
tie_word_embeddings = true

[data]
store = "{root}/train"
validation = "{root}/validation"
seq_len = 64

[batch]
global_batch_size = 8
micro_batch_size = 2

[optimizer]
lr = 3e-3

[schedule]
max_steps = {STEPS}
warmup_steps = 3
min_lr = 3e-4

[checkpoint]
interval = 5

[metrics]
log_interval = 1
validation_interval = 5

[engine.gpu]
device = "{DEVICE}"
dtype = "bfloat16"
deterministic = true
"""
    )
    return root


def read_step_metrics(run: Path) -> dict[tuple[str, int], float]:
    records = read_jsonl(run / "metrics.jsonl")
    return {(name, r["step"]): r[name] for r in records for name in ("loss", "grad_norm", "val_loss") if name in r}


def latest_checkpoint(run: Path) -> Checkpoint:
    found, rejected = find_latest_valid(run / "checkpoints")
    assert found is not None
    assert not rejected
    return found


def read_tensors(checkpoint: Checkpoint) -> dict[tuple[str, str], bytes]:
    return {
        (group, name): np.ascontiguousarray(checkpoint.read(group, name)).tobytes()
        for group in checkpoint.groups
        for name in checkpoint.names(group)
    }


def test_one_rank_of_torchrun_stops_and_goes_on_bit_equal(store: Path, torchrun: Callable[..., str], tmp_path) -> None:
    run = ("-m", "lt_trainer", "run", str(store / "run.toml"), "--set")
    subprocess.run([sys.executable, *run, "run.dir=whole"], cwd=tmp_path, check=True)
    wanted = read_step_metrics(tmp_path / "whole")
    assert wanted["loss", 1] == pytest.approx(np.log(320), abs=0.15)  # a fresh model knows nothing
    assert wanted["loss", STEPS] < wanted["loss", 1] - 0.5

    torchrun(
        1, *run, "run.dir=stopped", "--stop-after-step", str(STOP), cwd=tmp_path, code=1
    )  # torchrun's word for any code
    assert latest_checkpoint(tmp_path / "stopped").step == STOP
    torchrun(1, *run, "run.dir=stopped", cwd=tmp_path)
    assert read_step_metrics(tmp_path / "stopped") == wanted
    events = list(read_jsonl(tmp_path / "stopped" / "events.jsonl"))
    assert [e["step"] for e in events if e["event"] == "resume"] == [STOP]
    if DEVICE == "cuda":
        assert {e["device"] for e in events if e["event"] == "start"} == {torch.cuda.get_device_name(0)}

    expected, found = (
        read_tensors(latest_checkpoint(tmp_path / "whole")),
        read_tensors(latest_checkpoint(tmp_path / "stopped")),
    )
    assert latest_checkpoint(tmp_path / "stopped").step == STEPS
    assert found == expected
