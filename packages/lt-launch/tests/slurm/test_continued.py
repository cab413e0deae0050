"""The whole pipeline of continued.toml on a real cluster, with a model for CPUs: from download to export.

What stands in: a command for the hub's, a file for the dataset, a tool for AWS's compiler, the CPU backend for the
devices. All commands and options of the stages are those of the example, with smaller numbers.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lt_data import RowReader, Tokenizer, TokenStore, open_pack
from lt_data.streaming.rows import IGNORE_INDEX
from lt_launch.slurm.target import SlurmTarget
from lt_launch.target import Launch
from lt_trainer.observability.inspection import inspect_step

EXAMPLES = Path(__file__).parents[4] / "examples" / "launch"
PIPELINE = {
    'argv = ["hf"': 'argv = ["{base}/bin/hf"',
    '"hf://wikicorpus", "--config", "raw_en", "--split", "train"': '"{base}/text"',
    '"--seq-len", "8192"': '"--seq-len", "64"',
    '"lt train precompile': '"PATH={base}/bin:$PATH lt train precompile',
    '"--tp", "32", "--pp", "8"': '"--tp", "4", "--pp", "2"',
    '"--kv-size-multiplier", "4"': '"--kv-size-multiplier", "2"',
    "nodes = 16": "nodes = 2",
    'recipe = "llama3-70b.toml"\nprocs_per_node = 32': 'recipe = "llama3-70b-cpu.toml"\nprocs_per_node = 4',
    "cpus_per_proc = 16": "cpus_per_proc = 1",
    "memory_gib = 64\n": "",
    'partition = "cpu"': 'partition = "low"',
    'pass_env = ["HF_TOKEN"]': 'env = { OMP_NUM_THREADS = "1", PYTHONPATH = "{base}/packages" }',
    'python = "{base}/aws_neuron_venv_pytorch/bin/python"': 'python = "{python}"\n[profile.slurm]\npartition = "low"',
}
RECIPE = {
    "vocab_size = 128256": "vocab_size = 300",
    "hidden_size = 8192": "hidden_size = 64",
    "intermediate_size = 28672": "intermediate_size = 96",
    "n_heads = 64": "n_heads = 8",
    "n_kv_heads = 8": "n_kv_heads = 2",
    "n_layers = 80": "n_layers = 2",
    "max_position_embeddings = 8192": "max_position_embeddings = 64",
    "seq_len = 8192": "seq_len = 64",
    "global_batch_size = 1024": "global_batch_size = 4",
    "max_steps = 30000": "max_steps = 4",
    "warmup_steps = 2000": "warmup_steps = 2",
    "n_nodes = 16": "n_nodes = 2",
    "tp = 32": "tp = 4",
    "pp = 8": "pp = 2",
    "interval = 1000": "interval = 2",
    "flash_attention = true": "flash_attention = false",
    "kv_size_multiplier = 4": "kv_size_multiplier = 2\nnum_neuroncores = 4",
}
ON_A_CPU = {
    "[engine.neuron]": '[engine.neuron]\nbackend = "cpu"\ncpu_dtype = "float64"',
}
HUB = """\
#!{python}
import shutil, sys
assert sys.argv[1:3] == ["download", "meta-llama/Meta-Llama-3-70B"]
shutil.copytree("{base}/hub", sys.argv[sys.argv.index("--local-dir") + 1], dirs_exist_ok=True)
"""
COMPILER = """\
#!{python}
import json, os, sys
from pathlib import Path
cache = Path("{base}/cache")
cache.mkdir(exist_ok=True)
(cache / f"arguments-{{os.environ.get('SLURM_NODEID', '')}}.json").write_text(json.dumps(sys.argv[1:]))
"""


def replaced(text: str, pairs: dict[str, str], **values: Any) -> str:
    text = text.replace("/fsx/ubuntu", str(values["base"]))
    for old, new in pairs.items():
        old, new = (each.replace("{base}", str(values["base"])) for each in (old, new))
        assert old in text, old
        text = text.replace(old, new.replace("{python}", str(values.get("python"))))
    return text


def make_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64}
    rope = {"rope_type": "default", "rope_theta": 5e5}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, rope_parameters=rope, rms_norm_eps=1e-5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # far from where a model begins
    model.save_pretrained(folder)


@pytest.mark.slow
def test_from_download_to_export(cluster: Any, submit: Callable[..., Launch], tmp_path: Path) -> None:
    values = {"base": tmp_path, "python": sys.executable}
    for name, text in {
        "bin/hf": HUB.format(**values),
        "bin/neuron_parallel_compile": COMPILER.format(**values),
        "packages/neuronx_distributed/__init__.py": "",
        "packages/neuronx_distributed/parallel_layers/__init__.py": "",
        "continued.toml": replaced((EXAMPLES / "continued.toml").read_text(), PIPELINE, **values),
        "llama3-70b.toml": (recipe := replaced((EXAMPLES / "llama3-70b.toml").read_text(), RECIPE, **values)),
        "llama3-70b-cpu.toml": replaced(recipe, ON_A_CPU, **values),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    texts = [f"A page about {i} and {i * i % 97}, of which there are many. " * (i % 5 + 3) for i in range(300)]
    Tokenizer.train(texts, vocab_size=300).save(tmp_path / "hub")
    make_model(tmp_path / "hub")
    (tmp_path / "text").mkdir()
    for part in range(9):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[part::9])
        (tmp_path / f"text/{part}.jsonl").write_text(lines, encoding="utf-8")
    for program in (tmp_path / "bin").iterdir():
        program.chmod(0o755)
    made = submit(name="continued.toml")
    for stage in made.pipeline.stages:
        cluster.wait_for_end(made.job_ids[stage.name], 400)
        states = {one.stage: one.state for one in SlurmTarget().status(made)}
        failed = {name: state for name, state in states.items() if state in ("failed", "cancelled")}
        assert not failed, (failed, logs(made.directory))
    check_products(tmp_path)


def logs(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix in (".log", ".out", ".err")]
    return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(files))


def loss_of_the_released_model(base: Path) -> float:
    """Return the loss of the downloaded model on the first batch of the run, by transformers."""
    import torch
    from transformers import LlamaForCausalLM

    store = TokenStore(base / "wikicorpus")
    rows = np.array([row.row for row in inspect_step(base / "runs/llama3-70b", 1).rows])
    batch = RowReader(store, open_pack(store, seq_len=64), document_mask=False).read_rows(rows)
    ids, labels = (torch.from_numpy(array.astype(np.int64)) for array in (batch.input_ids, batch.labels))
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(base / "hub", dtype=torch.float64)(ids).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX))


def check_products(base: Path) -> None:
    from lt_ckpt import open_source
    from lt_trainer.config.recipe import load, model_config
    from lt_trainer.run_directory.jsonl import read_jsonl
    from lt_trainer_neuron.compile_key import check_compiled
    from lt_trainer_neuron.environment import neuron_env

    rows = [row for row in read_jsonl(base / "runs/llama3-70b/metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["loss"] == pytest.approx(loss_of_the_released_model(base), rel=1e-6)
    recipe = load(base / "llama3-70b.toml").recipe
    environ = {**os.environ, "PYTHONPATH": str(base / "packages")}
    assert check_compiled(recipe, model_config(recipe, 300), environ | neuron_env(recipe, environ)) == ""
    arguments = json.loads((base / "cache" / "arguments-1.json").read_text())
    assert "--nnodes 2 --node-rank 1" in " ".join(arguments)
    exported = open_source(base / "Llama-3-70B-wikicorpus")
    assert exported is not None
