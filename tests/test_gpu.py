"""On a GPU, through the commands: torchrun with one rank on nccl is stopped by SIGTERM and goes on bit for bit."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lt_ckpt import Checkpoint
from lt_test_helpers.run_files import latest_checkpoint, read_events, read_losses

pytestmark = pytest.mark.gpu

DEVICE, STEPS, STOP = "cuda", 16, 7


SETS = (
    "model.hidden_size=128",
    "model.intermediate_size=256",
    f"schedule.max_steps={STEPS}",
    "checkpoint.interval=5",
    "metrics.validation_interval=5",
    f"engine.gpu.device={DEVICE}",
    "engine.gpu.dtype=bfloat16",
    "engine.gpu.deterministic=true",
)


def read_step_metrics(run: Path) -> dict[str, dict[int, float]]:
    return {name: read_losses(run, name) for name in ("loss", "grad_norm", "val_loss")}


def read_tensors(checkpoint: Checkpoint) -> dict[tuple[str, str], bytes]:
    return {
        (group, name): np.ascontiguousarray(checkpoint.read(group, name)).tobytes()
        for group in checkpoint.groups
        for name in checkpoint.names(group)
    }


def test_one_rank_of_torchrun_stops_and_goes_on_bit_equal(prepared: Path, torchrun: Callable, tmp_path: Path) -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here: what runs on a GPU stays untested")
    sets = (word for text in SETS for word in ("--set", text))
    run = ("-m", "lt_trainer", "run", str(prepared / "run.toml"), *sets, "--set")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    subprocess.run([sys.executable, *run, "run.dir=whole"], cwd=tmp_path, check=True)
    wanted = read_step_metrics(whole)
    assert wanted["loss"][1] == pytest.approx(np.log(320), abs=0.15)  # a fresh model knows nothing
    assert wanted["loss"][STEPS] < wanted["loss"][1] - 0.5

    # torchrun ends with 1 for any code
    torchrun(1, *run, "run.dir=stopped", "--stop-after-step", str(STOP), cwd=tmp_path, code=1)
    assert latest_checkpoint(stopped).step == STOP
    torchrun(1, *run, "run.dir=stopped", cwd=tmp_path)
    assert read_step_metrics(stopped) == wanted
    assert [event["step"] for event in read_events(stopped, "resume")] == [STOP]
    if DEVICE == "cuda":
        assert {event["device"] for event in read_events(stopped, "start")} == {torch.cuda.get_device_name(0)}

    assert latest_checkpoint(stopped).step == STEPS
    assert read_tensors(latest_checkpoint(stopped)) == read_tensors(latest_checkpoint(whole))
