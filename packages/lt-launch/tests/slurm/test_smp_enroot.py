"""The job of smp-enroot.toml on a real cluster with a model for CPUs: training in containers of plain enroot.

What stands in: enroot's rules of environment, mounts and options without its namespaces (`enroot_stand_in.sh`), the CPU
for the GPUs. Command, script and options are those of the example, with smaller numbers.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lt_launch.slurm.target import SlurmTarget
from lt_launch.target import Launch
from lt_trainer.run_directory.jsonl import read_jsonl

EXAMPLES = Path(__file__).parents[4] / "examples" / "launch"
JOB = {
    "nodes = 8": "nodes = 2",
    "procs_per_node = 8": "procs_per_node = 2",
    'time_limit = "3d"': 'time_limit = "1h"\nenv = { GLOO_SOCKET_IFNAME = "lo" }',
    "gpus_per_node = 8\nexclusive = true": "cpus_per_proc = 1",
    'image = "/fsx/lt.sqsh"\nmounts = ["/fsx:/fsx"]': 'image = "{base}/lt.sqsh"\nmounts = ["{base}:{base}"]',
    'python = "python3"': f'python = "{sys.executable}"',
    'partition = "p5"': 'partition = "low"',
}
RECIPE = {
    'dir = "/fsx/runs/llama2-70b"': 'dir = "{base}/run"',
    'preset = "llama2-70b"': "hidden_size = 32\nintermediate_size = 64\nn_heads = 2\nn_kv_heads = 1\nn_layers = 1",
    'store = "/fsx/stores/c4"': 'store = "{store}"',
    "seq_len = 4096": "seq_len = 64",
    "global_batch_size = 512": "global_batch_size = 4",
    "max_steps = 20000": "max_steps = 6",
    "warmup_steps = 2000": "warmup_steps = 2",
    "n_nodes = 8": "n_nodes = 2",
    "interval = 500": 'interval = 3\n[engine.gpu]\ndevice = "cpu"\ndtype = "float32"\n[metrics]\nlog_interval = 1',
}


def changed(name: str, pairs: dict[str, str], base: Path, store: Path) -> str:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    for old, new in pairs.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new.replace("{base}", str(base)).replace("{store}", str(store)))
    return text


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(folder / "metrics.jsonl") if "loss" in row]


@pytest.mark.slow
def test_training_in_containers(
    cluster: Any, submit: Callable[..., Launch], store: Path, enroot: Path, tmp_path: Path
) -> None:
    """In an image that has the packages of this environment."""
    from lt_test_helpers.runs import run
    from lt_trainer.config.recipe import load

    (tmp_path / "lt.sqsh").write_text(f"PATH={Path(sys.executable).parent}:/usr/bin:/bin\nHOME={tmp_path}\n")
    (tmp_path / "run.toml").write_text(changed("smp-enroot.toml", JOB, tmp_path, store))
    (tmp_path / "smp-recipe.toml").write_text(changed("smp-recipe.toml", RECIPE, tmp_path, store))
    made = submit()
    (id_,) = made.job_ids.values()
    state = cluster.wait_for_end(id_, 400)["JobState"]
    assert state == "COMPLETED", list(SlurmTarget().logs(made, stage="", rank=0, follow=False))
    found = losses(tmp_path / "run")
    assert len(found) == 6
    mounts = (enroot / "mounts").read_text().splitlines()
    assert mounts.count(f"{tmp_path} {tmp_path} rbind,x-create=auto") == 4, "one container for each rank"
    alone = [f"run.dir={tmp_path / 'alone'}", "parallel.n_nodes=1"]
    assert run(load(tmp_path / "smp-recipe.toml", overrides=alone)) == 0
    assert found == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)
