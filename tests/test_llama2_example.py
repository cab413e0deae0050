"""The Trainium guide's run of Llama 2 7B with a model for CPUs: weights, precompile, training on ranks, export.

The recipe is examples/neuron/llama2-7b-tp8.toml with the changes that the guide describes, and smaller. What stands
in: the cpu backend for the devices, a tool for AWS's compiler.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lt_data import RowReader, TokenStore, open_pack
from lt_data.streaming.rows import IGNORE_INDEX
from lt_test_helpers.run_files import read_losses
from lt_test_helpers.runs import run
from lt_test_helpers.stores import make_stores
from lt_trainer.config.recipe import load, model_config
from lt_trainer.observability.inspection import inspect_step
from lt_trainer_neuron.compile_key import check_compiled
from lt_trainer_neuron.environment import neuron_env

EXAMPLE = Path(__file__).parents[1] / "examples" / "neuron" / "llama2-7b-tp8.toml"
CHANGES = {
    'preset = "llama2-7b"\nvocab_size = 32000\n': 'init_from = "nxd"\n',
    "synthetic = true ": 'store = "store" ',
    "seq_len = 4096": "seq_len = 64",
    "global_batch_size = 2048": "global_batch_size = 4",
    "max_steps = 31800 ": "max_steps = 4 ",
    'warmup_steps = "1%"': "warmup_steps = 1",
    "n_nodes = 16": "n_nodes = 1",
    "tp = 8 ": "tp = 2 ",
    "interval = 10600": "interval = 2",
    "log_interval = 10": "log_interval = 1",
    '"/fsx/neuron-compile-cache"': '"{folder}/cache"\nnum_neuroncores = 4',
}
ON_A_CPU = {"[engine.neuron]": '[engine.neuron]\nbackend = "cpu"\ncpu_dtype = "float64"'}
TOOL = """#!{python}
import json, sys
from pathlib import Path
Path("{folder}/cache").mkdir()
Path("{folder}/cache/arguments.json").write_text(json.dumps(sys.argv[1:]))
"""


def changed(text: str, changes: dict[str, str], folder: Path) -> str:
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new.replace("{folder}", str(folder)))
    return text


def make_model(folder: Path, vocab_size: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, rms_norm_eps=1e-5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # far from where a model begins
    model.save_pretrained(folder)


def first_loss(model: Path, run_dir: Path) -> float:
    """Return the loss of a Hugging Face model on the first batch of a run, by transformers."""
    import torch
    from transformers import LlamaForCausalLM

    rows = [row.row for row in inspect_step(run_dir, 1).rows]
    store = TokenStore("store")
    batch = RowReader(store, open_pack(store, seq_len=64), document_mask=False).read_rows(np.array(rows))
    ids, labels = (torch.from_numpy(array.astype(np.int64)) for array in (batch.input_ids, batch.labels))
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(model, dtype=torch.float64)(ids).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX))


def lt(*words: str, **environ: str) -> None:
    command = [sys.executable, "-m", "lt_launch", *words]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_from_weights_to_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_stores(tmp_path, {"store": 60})
    make_model(tmp_path / "Llama-2-7b-hf", 320)
    lt("ckpt", "convert", "Llama-2-7b-hf", "nxd", "--to", "nxd", "--tp", "2", "--xser")
    recipe = changed(EXAMPLE.read_text(encoding="utf-8"), CHANGES, tmp_path)
    Path("run.toml").write_text(recipe)
    Path("run-cpu.toml").write_text(changed(recipe, ON_A_CPU, tmp_path))

    for package in ("neuronx_distributed", "neuronx_distributed/parallel_layers"):
        (tmp_path / "packages" / package).mkdir(parents=True)
        (tmp_path / "packages" / package / "__init__.py").touch()
    Path("bin").mkdir()
    Path("bin/neuron_parallel_compile").write_text(TOOL.format(python=sys.executable, folder=tmp_path))
    Path("bin/neuron_parallel_compile").chmod(0o755)
    environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": f"{tmp_path}/packages"}
    lt("train", "precompile", "run.toml", **environ)
    given = load("run.toml").recipe
    found = check_compiled(given, model_config(given, 320), {**os.environ, **environ, **neuron_env(given, environ)})
    assert found == "", "the key that the run asks for"

    lt("train", "torchrun", "run-cpu.toml", "--nproc-per-node", "4")
    trained = list(read_losses(tmp_path / "runs/llama2-7b-tp8").values())
    assert len(trained) == 4
    assert trained[0] == pytest.approx(
        first_loss(tmp_path / "Llama-2-7b-hf", tmp_path / "runs/llama2-7b-tp8"), rel=1e-6
    )
    alone = ["parallel.tp=1", "parallel.sequence_parallel=false", "engine.neuron.num_neuroncores=1", "run.dir=alone"]
    assert run(load("run-cpu.toml", overrides=[*alone, "model.init_from=Llama-2-7b-hf"])) == 0
    assert trained == pytest.approx(list(read_losses(tmp_path / "alone").values()), rel=1e-9)

    lt("ckpt", "export", "runs/llama2-7b-tp8", "--out", "llama2-7b-papers")
    after = first_loss(tmp_path / "llama2-7b-papers", tmp_path / "runs/llama2-7b-tp8")
    assert after < trained[0], "what transformers reads has learned"
