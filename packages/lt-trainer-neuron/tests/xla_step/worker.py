"""Runs of a few steps on torch-xla (PJRT on the CPU) or on the cpu backend, each in a process of its own.

Runs have "sets", "broken", "seq_len", "told". One that is `told` gets the environment of a rank, as `lt train run` sets
it.
"""

import os
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as met

from lt_model import ModelConfig
from lt_model.rope import rope_tables
from lt_test_helpers.layouts import step_batch
from lt_test_helpers.xla_processes import run_forks
from lt_trainer.config.recipe import load
from lt_trainer.engine import StepBatch, World
from lt_trainer_neuron.engine import NeuronEngine
from lt_trainer_neuron.environment import neuron_env
from lt_trainer_neuron.nxd.backend import NxdBackend
from lt_trainer_neuron.nxd.decoder import NxdPipelineStage
from lt_trainer_neuron.spec import SPEC

RATES = (0.0, 1e-3, 0.013, 0.02, 1.0)
"""0 and 1 are constants of a graph where they are numbers."""
ROWS, VOCAB = 2, 62


def counts() -> dict[str, int]:
    """torch-xla's counters, and how often it compiled and fetched."""
    found = {name: int(met.counter_value(name) or 0) for name in met.counter_names()}
    for name in ("CompileTime", "TransferFromDeviceTime"):
        data = met.metric_data(name)
        found[name] = data[0] if data else 0
    return found


def batches(seq_len: int, broken: int) -> list[StepBatch]:
    """Global batches of three micro-batches; of number `broken` it is said that no token is valid."""
    rng, found = np.random.default_rng(3), []
    for step in range(len(RATES)):
        shape = (3, ROWS, seq_len)
        ids, labels = (rng.integers(0, VOCAB, shape, dtype=np.int32) for _ in range(2))
        labels[rng.random(shape) < 0.1 * step] = -100
        cuts = rng.integers(1, seq_len, (3, ROWS, 1))
        documents = (np.arange(seq_len) >= cuts).astype(np.int32)
        found.append(
            step_batch(
                input_ids=ids,
                labels=labels,
                position_ids=(np.arange(seq_len) - documents * cuts).astype(np.int32),
                doc_ids=documents,
                valid_tokens=int((labels != -100).sum()) if step != broken else 0,
            )
        )
    return found


def floats(shard: Any) -> list[float]:
    """A shard's numbers; those of `downcast` are float64 to torch, and fp32 on the device."""
    return shard.bytes().view({"F32": np.float32, "F64": np.float64}[shard.dtype]).astype(float).tolist()


def run(sets: list[str], broken: int, seq_len: int, *, told: bool) -> dict[str, Any]:
    """Metrics, what was counted in each step, the state afterwards."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 2,
    }
    base = {
        "run": {"engine": "neuron"},
        "model": sizes,
        "data": {"store": "unused", "seq_len": seq_len},
        "batch": {"global_batch_size": 3 * ROWS, "micro_batch_size": ROWS},
        "optimizer": {"beta1": 0.8, "grad_clip": 0.3, "weight_decay": 0.1, "z_loss": 1e-3},
        "schedule": {"max_steps": 9, "warmup_steps": 1},
        "engine": {"neuron": {"num_neuroncores": 1}},
    }
    recipe = load(base=base, overrides=sets).recipe
    xla = "engine.neuron.backend=xla" in sets
    if told:
        os.environ.update(neuron_env(recipe, os.environ))
    tied = "model.tie_word_embeddings=true" in sets
    config = ModelConfig(vocab_size=VOCAB, max_position_embeddings=seq_len, tie_word_embeddings=tied, **sizes)
    engine = SPEC.open(recipe, config, World())
    assert isinstance(engine, NeuronEngine)
    pendings, counted, given = [], [], batches(seq_len, broken)
    for batch, rate in zip(given, RATES, strict=True):
        before = counts() if xla else {}
        pendings.append(engine.step(batch, rate))
        counted.append({name: n - before.get(name, 0) for name, n in counts().items()} if xla else {})
    metrics = [(read.loss, read.grad_norm) for read in engine.fetch_metrics(pendings)]
    state = {f"{shard.group} {shard.name}": floats(shard) for shard in engine.iter_model_shards()}
    engine.fetch_metrics([])
    return {
        "turned": turned(engine.backend.stage, config) if isinstance(engine.backend, NxdBackend) else None,
        "metrics": metrics,
        "counted": counted,
        "state": state,
        "small": dict(engine.state().scalars),
        "eval": list(engine.validate([given[-1]])),
        "device": [engine.device.name, engine.device.kind, engine.peak_memory_bytes()],
    }


def turned(stage: NxdPipelineStage, config: ModelConfig) -> float:
    """How far the cosines and sines that the layers are given are from those of float64, at most."""
    positions = torch.arange(config.max_position_embeddings)[None]
    exact = rope_tables(config.rope(0), positions, torch.float64)
    made = stage.lookup_rope(config.rope(0), positions.to(stage.lm_head.weight.device))
    return max(float((a - b.cpu().double()).abs().max()) for a, b in zip(exact, made, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert torch_xla.__version__
    run_forks(lambda name, **given: run(**given))
