"""The graphs of a pipeline stage on plain torch-xla (PJRT on the CPU, one device), counted by torch-xla's own metrics.

One process plays each of three stages alone: what it would be given is made up on the device, as NxD's transfer makes
it from what it gathers. Numbers mean nothing here; `test_nxd_step.py` has them. What is asserted is that a step has a
handful of graphs however many micro-batches there are, that none is compiled again, also after a restore, and that
nothing is fetched.
"""

import json
from importlib.util import find_spec
from typing import Any

import pytest

from lt_test_helpers.xla_processes import run_on_xla

pytestmark = pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch-xla is not installed (extra xla-cpu)")

SCRIPT = """
import json
import numpy as np, torch
import torch_xla.debug.metrics as met
from lt_model import ModelConfig
from lt_trainer.control import Control
from lt_trainer.engine import World
from lt_test_helpers.layouts import step_batch
from lt_trainer.config.recipe import load
from lt_trainer_neuron.engine import NeuronEngine
from lt_trainer_neuron.nxd import backend as nxd
from lt_trainer_neuron.nxd.device import XlaDevice
from lt_trainer_neuron.nxd.layers import LayerFactory
from lt_trainer_neuron.nxd.collectives import Collectives

config = ModelConfig(
    vocab_size=30, hidden_size=16, intermediate_size=24, n_layers=3, n_heads=2, n_kv_heads=1,
    max_position_embeddings=16, tie_word_embeddings=True,
)
base = {
    "run": {"engine": "neuron"}, "model": {"hidden_size": 16, "intermediate_size": 24, "n_heads": 2, "n_kv_heads": 1,
    "n_layers": 3, "tie_word_embeddings": True}, "data": {"store": "unused", "seq_len": 16},
    "batch": {"global_batch_size": 8, "micro_batch_size": 2}, "optimizer": {"grad_clip": 0.3, "weight_decay": 0.1},
    "schedule": {"max_steps": 9, "warmup_steps": 1}, "parallel": {"pp": 3},
    "engine": {"neuron": {"num_neuroncores": 3, "precision": "fp32_master_weights"}},
}
device = XlaDevice()

def gathered(tensor):
    return torch.split(torch.cat([tensor, tensor]), tensor.shape[0])[1].detach().clone()

class PipelineP2P:
    def send(self, tensor, direction):
        return gathered(tensor)

    def recv(self, shape, dtype, direction):
        return gathered(torch.full(shape, 0.5, dtype=dtype, device=device.torch_device))

nxd.GlooControl = lambda *_: Control()
nxd._open_runtime = lambda recipe, config, options, grid, policy: (
    device, Collectives(), PipelineP2P(), LayerFactory(policy.compute_dtype, policy.upcast_dtype)
)

def counts():
    found = {name: met.counter_value(name) for name in met.counter_names()}
    data = met.metric_data("TransferFromDeviceTime")
    return found | {"fetched": data[0] if data else 0}

def counted(work):
    before = counts()
    result = work()
    after = counts()
    return result, {name: after[name] - before.get(name, 0) for name in after}

out = []
for rank, global_batch_size in ((0, 8), (1, 8), (2, 8), (1, 12)):
    recipe = load(base=base, overrides=[f"batch.global_batch_size={global_batch_size}"]).recipe
    world = World(rank=rank, size=3, local_rank=rank, local_size=3)
    engine = NeuronEngine(recipe, config, nxd.NxdBackend(recipe, config, world))
    rng = np.random.default_rng(3)
    pendings, steps, evaluations = [], [], []
    for rate in (0.0, 1e-3, 1.0):
        shape = (recipe.accumulation_steps(3), 2, 16)
        ids, labels = (rng.integers(0, 30, shape, dtype=np.int32) for _ in range(2))
        labels[rng.random(shape) < 0.1] = -100
        batch = step_batch(
            input_ids=ids, labels=labels, position_ids=np.broadcast_to(np.arange(16, dtype=np.int32), shape).copy(),
            doc_ids=np.zeros(shape, np.int32), valid_tokens=int((labels != -100).sum()),
        )
        pending, one = counted(lambda: engine.step(batch, rate))
        pendings.append(pending)
        steps.append(one)
    metrics = [(read.loss, read.grad_norm) for read in engine.fetch_metrics(pendings)]
    for _ in range(2):
        evaluations.append(counted(lambda: engine.validate([batch]))[1])
    def restore_and_step():
        for slots in engine.backend.optimizer_state.values():
            for rows in slots.values():
                rows.store(rows.to_host())
        engine.backend.step_count = 1
        engine.backend.sync_model_params()
        engine.fetch_metrics([engine.step(batch, 1e-3)])
    restored = counted(restore_and_step)[1]
    out.append({"steps": steps, "metrics": metrics, "evaluations": evaluations, "restored": restored})
print("RESULT" + json.dumps(out))
"""


def run() -> list[dict[str, Any]]:
    """What the script counted for each of the stages with 4 micro-batches, then for the middle one with 6."""
    (line,) = [line for line in run_on_xla("-c", SCRIPT).splitlines() if line.startswith("RESULT")]
    return json.loads(line.removeprefix("RESULT"))


OTHERS = 1 + 2 + 1
"""Marks of a step beside those of the passes and transfers: before them, around the tied gradient's sum, at the end."""

TURNS = (4, 6, 3)
"""Graphs of a micro-batch on the first, a middle and the last stage."""


def test_a_stage_has_a_handful_of_graphs_and_none_is_compiled_again() -> None:
    first, middle, last, more = run()
    for stage, micros, found in ((0, 4, first), (1, 4, middle), (2, 4, last), (1, 6, more)):
        for step, counted in enumerate(found["steps"]):
            fallbacks = {name: n for name, n in counted.items() if name.startswith("aten::") and n}
            assert not fallbacks, (stage, step, fallbacks)
            assert counted["fetched"] == 0, (stage, step)
            assert counted["MarkStep"] == TURNS[stage] * micros + OTHERS, (stage, step)
        compiled = [counted.get("UncachedCompile", 0) for counted in found["steps"]]
        assert compiled[2] == 0, stage
        # More micro-batches are the same graphs more often.
        assert compiled == [0, 0, 0] if found is more else 0 < compiled[0] <= TURNS[stage] + OTHERS, stage
        assert found["evaluations"][1]["UncachedCompile"] == 0, stage
        assert found["restored"]["UncachedCompile"] == 0, stage
        assert all((loss > 0) == (stage == 2) for loss, _ in found["metrics"]), stage
        assert all(norm > 0 for _, norm in found["metrics"]), stage
