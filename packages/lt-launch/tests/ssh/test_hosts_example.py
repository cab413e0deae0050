"""The job of hosts.toml over ssh with a model for CPUs: a hostfile of two machines, two ranks on each."""

import subprocess
import sys
from pathlib import Path

import pytest

from lt_test_helpers.stores import make_stores
from lt_trainer.run_directory.jsonl import read_jsonl

EXAMPLES = Path(__file__).parents[4] / "examples" / "launch"
SMALL = (
    "model.preset= model.hidden_size=32 model.intermediate_size=64 model.n_heads=2 model.n_kv_heads=1 model.n_layers=1"
    " data.store=store data.seq_len=64 batch.global_batch_size=4 schedule.max_steps=6 schedule.warmup_steps=2"
    " metrics.log_interval=1 engine.gpu.device=cpu engine.gpu.dtype=float32"
)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(folder / "metrics.jsonl") if "loss" in row]


@pytest.mark.slow
def test_training_over_a_hostfile(net) -> None:
    pytest.importorskip("lt_trainer_gpu", reason="needs an engine: pip install lt-trainer-gpu")
    make_stores(net.folder, {"store": 60})
    python, text = "/data/venv/bin/python", (EXAMPLES / "hosts.toml").read_text()
    assert text.count(python) == 1
    (net.folder / "hosts.toml").write_text(text.replace(python, sys.executable))
    (net.folder / "llama-7b.toml").write_text((EXAMPLES / "llama-7b.toml").read_text())
    net.hostfile("b", "a", more="slots=2")
    sets = [word for field in SMALL.split() for word in ("--set", field)]
    env = ["--env", "OMP_NUM_THREADS=1", "--env", "GLOO_SOCKET_IFNAME=eth0"]
    net.lt("run", "hosts.toml", "--on", "ssh", "--nodes", "2", "--nproc-per-node", "2", *env, *sets)
    found = losses(net.folder / "runs/llama-7b")
    assert len(found) == 6
    command = [sys.executable, "-m", "lt_trainer", "run", "llama-7b.toml", *sets, "--set", "run.dir=alone"]
    subprocess.run(command, cwd=net.folder, check=True)
    assert found == pytest.approx(losses(net.folder / "alone"), rel=1e-6)
