"""The engine on plain torch-xla (PJRT on the CPU, one device): its graphs are counted by torch-xla's own metrics.

What is asserted is what costs hours on Trainium: a graph that is compiled again, an operation that falls back to the
host (counters `aten::`), a value that is fetched while micro-batches are added up. Losses, norms and weights are
compared with the cpu backend, which knows nothing of torch-xla.

Each case is a process of its own: torch-xla's counters and its device are a process's.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

needs_xla = pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch-xla is not installed (extra xla-cpu)")

STEPS = 5

SCRIPT = """
import json, sys
import numpy as np, torch
from lt_model import LlamaConfig
from lt_trainer.engine import StepBatch, World
from lt_trainer.recipe import load
from lt_trainer_neuron.spec import SPEC

sets, broken = json.loads(sys.argv[1]), int(sys.argv[2])
xla = "engine.neuron.backend=xla" in sets
config = LlamaConfig(
    vocab_size=62, hidden_size=32, intermediate_size=40, n_layers=2, n_heads=4, n_kv_heads=2,
    max_position_embeddings=16, tie_word_embeddings="model.tie_word_embeddings=true" in sets,
)
base = {
    "run": {"engine": "neuron"}, "model": {"hidden_size": 32, "intermediate_size": 40, "n_heads": 4, "n_kv_heads": 2,
    "n_layers": 2}, "data": {"store": "unused", "seq_len": 16}, "batch": {"global_batch": 6, "micro_batch": 2},
    "optimizer": {"beta1": 0.8, "grad_clip": 0.3, "weight_decay": 0.1, "z_loss": 1e-3},
    "schedule": {"max_steps": 9, "warmup_steps": 1},
    "engine": {"neuron": {"num_neuroncores": 1}},
}
recipe = load(base=base, sets=sets).recipe
engine = SPEC.open(recipe, config, World())

def counts():
    if not xla:
        return {}
    import torch_xla.debug.metrics as met
    found = {name: met.counter_value(name) for name in met.counter_names()}
    for name in ("CompileTime", "TransferFromDeviceTime"):
        data = met.metric_data(name)
        found[name] = data[0] if data else 0
    return found

rng = np.random.default_rng(3)
pendings, counted = [], []
rates = [0.0, 1e-3, 0.013, 0.02, 1.0]  # 0 and 1 are constants where they are numbers
for step, rate in enumerate(rates):
    shape = (3, 2, 16)
    ids, labels = (rng.integers(0, 62, shape, dtype=np.int32) for _ in range(2))
    labels[rng.random(shape) < 0.1 * step] = -100
    cuts = rng.integers(1, 16, (3, 2, 1))
    documents = (np.arange(16) >= cuts).astype(np.int32)
    batch = StepBatch(
        input_ids=ids, labels=labels, position_ids=(np.arange(16) - documents * cuts).astype(np.int32),
        doc_ids=documents, valid_tokens=int((labels != -100).sum()) if step != broken else 0,
    )
    before = counts()
    pendings.append(engine.step(batch, rate))
    after = counts()
    counted.append({name: after[name] - before.get(name, 0) for name in after})
metrics = [(read.loss, read.grad_norm) for read in engine.read(pendings)]
shards = {f"{shard.group} {shard.name}": shard for shard in engine.boxes()}
def floats(shard):
    data = shard.data() if callable(shard.data) else shard.data
    return np.frombuffer(bytes(data), np.float32).astype(float).tolist()
state = {name: floats(shard) for name, shard in shards.items()}
engine.read([])
loss, tokens = engine.evaluate([batch])
small = dict(engine.state().small)
out = {"metrics": metrics, "counted": counted, "state": state, "small": small, "eval": [loss, tokens]}
out["device"] = [engine.device.name, engine.device.kind, engine.memory_bytes()]
print("RESULT" + json.dumps(out))
"""


def run(*sets: str, broken: int = -1) -> Any:
    """What the script found with these settings; step number `broken` is told that no token is valid."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(sets), str(broken)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return json.loads(line.removeprefix("RESULT"))


def assert_alike(found: Any, wanted: Any) -> None:
    """Losses, norms, weights and moments of two runs, to what fp32 allows."""
    for mine, theirs in zip(found["metrics"], wanted["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=3e-6, nan_ok=True)
    assert found["state"].keys() == wanted["state"].keys()
    for name, values in found["state"].items():
        others = wanted["state"][name]
        size = sum(value * value for value in others) ** 0.5
        apart = sum((a - b) ** 2 for a, b in zip(values, others, strict=True)) ** 0.5
        near = 2e-3 if name.startswith("weights") else 2e-5  # the last step goes far, by the signs of small gradients
        assert apart <= near * size, (name, apart / size)
    assert found["small"] == wanted["small"]
    assert found["eval"] == pytest.approx(wanted["eval"], rel=1e-5)


SETTLED = 2
"""Steps after which nothing is compiled any more."""


def assert_graphs(found: Any, *, marks: int) -> None:
    """Nothing is compiled once settled; nothing falls back to the host or is fetched in any step."""
    for step, counted in enumerate(found["counted"]):
        fallbacks = {name: n for name, n in counted.items() if name.startswith("aten::") and n}
        assert not fallbacks, (step, fallbacks)
        assert counted["TransferFromDeviceTime"] == 0, step
        assert counted["MarkStep"] == marks, step
        if step >= SETTLED:
            assert counted["UncachedCompile"] == 0, step
            assert counted["CompileTime"] == 0, step


@needs_xla
def test_micro_batch_graphs_give_what_the_cpu_backend_gives() -> None:
    found = run("engine.neuron.backend=xla")
    assert_graphs(found, marks=3 + 1)
    assert found["device"][:2] == ["torch-xla on CPU", "cpu"]
    assert found["device"][2] > 2**20
    assert_alike(found, run("engine.neuron.backend=cpu"))


@needs_xla
def test_a_step_is_one_graph_and_a_bad_one_has_no_effect() -> None:
    found = run("engine.neuron.backend=xla", "engine.neuron.graph=step", "model.tie_word_embeddings=true", broken=3)
    assert_graphs(found, marks=1)
    executed = [counted["UncachedCompile"] + counted.get("CachedCompile", 0) for counted in found["counted"]]
    assert executed == [1] * STEPS
    wanted = run("engine.neuron.backend=cpu", "model.tie_word_embeddings=true", broken=3)
    assert found["small"] == {"optimizer_step": STEPS - 1}
    assert_alike(found, wanted)


@needs_xla
def test_narrow_weights_keep_wide_masters_on_one_graph() -> None:
    found = run("engine.neuron.backend=xla", "engine.neuron.precision=fp32_master", "engine.neuron.graph=step")
    assert_graphs(found, marks=1)
    wanted = run("engine.neuron.backend=cpu")
    for mine, theirs in zip(found["metrics"], wanted["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=0.02)
    name = "weights model.layers.0.mlp.down_proj.weight"
    fine = [value for value in found["state"][name] if value != float(f"{value:.3g}")]
    assert len(fine) > len(found["state"][name]) / 2
