"""Losses and gradient norms beside torchtitan's own Trainer: equal weights and rows, float32, on the CPU.

Compared are, in each of 4 steps with AdamW, weight decay and clipping, the mean loss per label and the gradients' norm.
Between the two lie a few roundings: a loss of 7.5 in float32 has 6.4e-8, and a norm is a sum of millions of squares.
torchtitan's products of experts are bfloat16 whatever the rest is, so that a mixture agrees less closely.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lt_model import ModelConfig, param_specs, preset
from lt_model.init import init_slice
from lt_test_helpers.layouts import step_batch
from lt_test_helpers.pool import RankPool
from lt_trainer.config.model_section import architecture_values
from lt_trainer.config.recipe import load
from lt_trainer.config.section import unflatten
from lt_trainer.engine import World

SPEC = pytest.importorskip(
    "lt_trainer_gpu.spec", reason="the engine for GPUs is compared, and it is not installed"
).SPEC
BENCH, SEQ_LEN, STEPS = str(Path(__file__).parents[3] / "tools/bench"), 128, 4
LITTLE: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 256, "n_layers": 2, "n_heads": 16}
LLAMA = preset("llama3.2-1b", **LITTLE, n_kv_heads=16, intermediate_size=768, tie_word_embeddings=False)
assert LLAMA.rope_scaling is not None
MODELS = {
    "llama3": ("debugmodel", replace(LLAMA, rope_scaling=replace(LLAMA.rope_scaling, factor=8.0))),
    "qwen3": ("debugmodel", preset("qwen3-0.6b", **LITTLE, n_kv_heads=8, intermediate_size=3072)),
    "experts": ("debugmodel_moe", preset("qwen3-30b-a3b", **LITTLE, n_kv_heads=8, n_experts=64, expert_size=768)),
}
"""Two layers of torchtitan's little models, and the same shapes here."""
EXACT, NARROW = (2.5e-7, 2e-5), (1e-4, 3e-3)
"""Bounds of the relative difference of losses and norms; here 1.3e-7 and 9e-6, of experts 4e-5 and 1e-3."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The interpreter of an environment with torchtitan."""
    sys.path.insert(0, BENCH)
    from train import TITAN_REQUIREMENTS, create_environment

    try:
        yield create_environment(tmp_path_factory.mktemp("torchtitan") / "env", TITAN_REQUIREMENTS)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"torchtitan cannot be installed, so nothing is compared with it: {error}")
    finally:
        sys.path.remove(BENCH)


@pytest.fixture(scope="module")
def ranks() -> RankPool:
    return RankPool(2, preload=("lt_trainer_gpu.engine", "lt_trainer_gpu.parallelize"))


def train(config: ModelConfig, lrs: list[float], n_micro: int) -> list[tuple[float, float]]:
    """Our losses and norms on torchtitan's rows, in a rank."""
    from titan_on_cpu import make_rows

    torch.set_num_threads(1)
    world = World.from_env(os.environ)
    n_rows = world.size * n_micro
    base = {
        "model": unflatten(architecture_values(config)),
        "data": {"store": "unused", "seq_len": SEQ_LEN, "document_mask": False},
        "batch": {"global_batch_size": n_rows, "micro_batch_size": 1},
        "optimizer": {"beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_clip": 1.0},
        "schedule": {"max_steps": STEPS, "warmup_steps": 1},
        **({"moe": {"aux_loss": 0.0}} if config.has_experts else {}),
        "engine": {"gpu": {"device": "cpu", "dtype": "float32"}},
    }
    engine, found = SPEC.open(load(base=base).recipe, config, world), []
    for step, lr in enumerate(lrs):
        ids, labels = make_rows(range(step * n_rows, (step + 1) * n_rows), SEQ_LEN)
        positions = np.broadcast_to(np.arange(SEQ_LEN), ids.shape)
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions, "doc_ids": np.zeros_like(ids)}
        own = {name: one[world.rank :: world.size, None].astype(np.int32) for name, one in arrays.items()}
        batch = step_batch(**own, document_mask=False, valid_tokens=int((labels >= 0).sum()))
        metrics = engine.fetch_metrics([engine.step(batch, lr)])[0]
        found.append((metrics.loss, metrics.grad_norm))
    return found


def initial_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Our initial weights by their names in Hugging Face's files."""
    where, found = {"dtype": torch.float32, "device": torch.device("cpu")}, {}
    for spec in param_specs(config):
        weight = init_slice(spec, 0, offset=(0,) * len(spec.shape), shape=spec.shape, **where)
        before, is_stacked, kind = spec.name.partition(".experts.")
        names = [f"{before}.experts.{i}.{kind}.weight" for i in range(config.n_experts)] if is_stacked else [spec.name]
        found |= dict(zip(names, weight.unbind() if is_stacked else [weight], strict=True))
    return {name: weight.contiguous() for name, weight in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "n", "n_micro", "bounds"),
    [
        ("llama3", 1, 1, EXACT),
        ("llama3", 2, 2, EXACT),
        ("qwen3", 1, 2, EXACT),
        ("qwen3", 2, 1, EXACT),
        ("experts", 2, 2, NARROW),
    ],
)
def test_losses_are_those_of_torchtitan(python, ranks, tmp_path, model: str, n: int, n_micro: int, bounds) -> None:
    flavor, config = MODELS[model]
    save_file(initial_weights(config), tmp_path / "weights")
    job = {"out": str(tmp_path), "family": model.replace("experts", "qwen3"), "flavor": flavor, "n_layers": 2}
    job |= {"seq_len": SEQ_LEN, "steps": STEPS, "micro_batches": n_micro, "weights": str(tmp_path / "weights")}
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    command += [str(Path(__file__).parent / "helpers/titan_on_cpu.py"), json.dumps(job | {"whole_loss": n == 1})]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    wanted = json.loads((tmp_path / "found.json").read_text())
    losses, norms = zip(*ranks.run(train, config, wanted["lrs"], n_micro, ranks=n)[0], strict=True)
    assert len(losses) == STEPS
    assert min(norms) > 1, "clipping must be at work"
    assert losses == pytest.approx(wanted["losses"], rel=bounds[0])
    assert norms == pytest.approx(wanted["norms"], rel=bounds[1])
