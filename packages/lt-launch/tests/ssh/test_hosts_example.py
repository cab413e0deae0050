"""The job of hosts.toml over ssh with a model for CPUs: a hostfile of two machines, two ranks on each."""

import subprocess
import sys
from pathlib import Path

import pytest

from lt_test_helpers.stores import make_stores
from lt_trainer.run_directory.jsonl import read_jsonl

EXAMPLES = Path(__file__).parents[4] / "examples" / "launch"
JOB = {
    "nodes = 4": "nodes = 2",
    "procs_per_node = 8": "procs_per_node = 2",
    'NCCL_DEBUG = "WARN"': 'NCCL_DEBUG = "WARN"\nOMP_NUM_THREADS = "1"\nGLOO_SOCKET_IFNAME = "eth0"',
    'python = "/data/venv/bin/python"': 'python = "{python}"',
}
RECIPE = {
    'preset = "llama2-7b"': "hidden_size = 32\nintermediate_size = 64\nn_heads = 2\nn_kv_heads = 1\nn_layers = 1",
    'store = "/data/slimpajama"': 'store = "store"',
    "seq_len = 4096": "seq_len = 64",
    "global_batch_size = 512": "global_batch_size = 4",
    "max_steps = 20000": "max_steps = 6",
    "warmup_steps = 2000": "warmup_steps = 2",
    "[schedule]": '[metrics]\nlog_interval = 1\n[engine.gpu]\ndevice = "cpu"\ndtype = "float32"\n[schedule]',
}


def changed(name: str, pairs: dict[str, str], **values: str) -> str:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    for old, new in pairs.items():
        assert text.count(old) == 1, old
        for value, given in values.items():
            new = new.replace("{" + value + "}", given)
        text = text.replace(old, new)
    return text


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(folder / "metrics.jsonl") if "loss" in row]


@pytest.mark.slow
def test_training_over_a_hostfile(net) -> None:
    pytest.importorskip("lt_trainer_gpu", reason="needs an engine: pip install lt-trainer-gpu")
    make_stores(net.folder, {"store": 60})
    (net.folder / "hosts.toml").write_text(changed("hosts.toml", JOB, python=sys.executable))
    (net.folder / "llama-7b.toml").write_text(changed("llama-7b.toml", RECIPE))
    net.hostfile("b", "a", more="slots=2")
    net.lt("run", "hosts.toml", "--on", "ssh")
    found = losses(net.folder / "runs/llama-7b")
    assert len(found) == 6
    command = [sys.executable, "-m", "lt_trainer", "run", "llama-7b.toml", "--set", "run.dir=alone"]
    subprocess.run(command, cwd=net.folder, check=True)
    assert found == pytest.approx(losses(net.folder / "alone"), rel=1e-6)
