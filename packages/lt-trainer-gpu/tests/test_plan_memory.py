"""The plan's memory against every byte that torch's CPU allocator hands out during a step of the engine.

The profiler records each allocation and release, those inside torch's own kernels among them. What was there before the
step are weights, moments and the model's own copy of the weights. Shapes are chosen so that in each case another moment
of the step is the peak. On several ranks: nullcuda/test_peak.py.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lt_test_helpers.layouts import step_batch
from lt_trainer.config.recipe import load, model_config
from lt_trainer.config.sections import Recipe
from lt_trainer.engine import Engine, StepBatch, World
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import plan_memory
from lt_trainer.planning.memory_state import OFFLOAD_BUFFER_BYTES, UPCAST_BYTES
from lt_trainer_gpu.engine import GpuEngine
from lt_trainer_gpu.mesh_layout import MeshLayout
from lt_trainer_gpu.optimizer import CPU_TEMPORARY_BYTES, DEVICE_TEMPORARY_BYTES
from lt_trainer_gpu.optimizer_offload import CHUNK_BYTES
from lt_trainer_gpu.spec import SPEC
from lt_trainer_gpu.weights import MixedPrecisionWeights

NEAR = 0.05

ACTIVE = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 352,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 4,
}
HEAVY = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 704, "n_heads": 4, "n_kv_heads": 4, "n_layers": 4}
WORDY = {"vocab_size": 8192, "hidden_size": 128, "intermediate_size": 192, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2}


def recipe_of(
    model: dict[str, int], seq_len: int, micro_batch_size: int, passes: int, ranks: int, sets: Sequence[str]
) -> Recipe:
    base: dict[str, Any] = {
        "model": model,
        "data": {"store": "unused", "seq_len": seq_len, "document_mask": False},
        "batch": {"global_batch_size": micro_batch_size * passes * ranks, "micro_batch_size": micro_batch_size},
        "engine": {"gpu": {"device": "cpu", "dtype": "bfloat16"}},
    }
    own_chunk = "engine.gpu.loss_chunk_tokens=256"  # what lt_model.loss takes on a CPU; the plan knows a GPU's
    return load(base=base, overrides=[own_chunk, *sets]).recipe


def measured_bytes(recipe: Recipe, passes: int) -> int:
    """The most that lives during a step after the first, in this process."""
    torch.set_num_threads(1)
    config = model_config(recipe, recipe.model.vocab_size)
    engine = SPEC.open(recipe, config, World.from_env(os.environ))
    rng, shape = np.random.default_rng(0), (passes, recipe.batch.micro_batch_size, recipe.data.seq_len)
    ids = rng.integers(0, config.vocab_size, shape, dtype=np.int32)
    positions = np.broadcast_to(np.arange(shape[2], dtype=np.int32), shape).copy()
    tokens = recipe.batch.global_batch_size * shape[2]
    batch = step_batch(
        input_ids=ids, labels=ids, position_ids=positions, doc_ids=np.zeros(shape, np.int32), valid_tokens=tokens
    )
    engine.step(batch, 1e-4)
    most = _peak_of_step(engine, batch)
    state = engine.state_bytes()
    if isinstance(engine, GpuEngine) and isinstance(engine._state.weights, MixedPrecisionWeights):
        state += sum(parameter.nbytes for stage in engine._stages for parameter in stage.parameters())
    engine.close()
    return state + most


def _peak_of_step(engine: Engine, batch: StepBatch) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.step(batch, 1e-4)
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


CASES = {
    "activations": (ACTIVE | {"vocab_size": 512}, 256, 4, 1, (), "last block"),
    "all recomputed": (ACTIVE, 256, 4, 1, ("engine.gpu.activation_checkpointing=full",), "last block"),
    "some recomputed": (ACTIVE, 256, 4, 1, ("engine.gpu.activation_checkpointing=selective",), "last block"),
    "state": (HEAVY, 64, 1, 1, (), "optimizer step"),
    "several passes": (HEAVY, 64, 1, 2, (), "last block"),
    "head": (WORDY, 512, 1, 1, (), "loss"),
    "head in small chunks": (WORDY, 512, 1, 1, ("engine.gpu.loss_chunk_tokens=64",), "loss"),
    "muon": (HEAVY, 64, 1, 1, ("optimizer.name=muon",), "optimizer step"),
    "narrow moments": (HEAVY, 64, 1, 1, ("optimizer.moments_dtype=bfloat16",), "optimizer step"),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # the profiler's own
@pytest.mark.parametrize("case", CASES)
def test_one_process_holds_what_the_plan_says(case: str) -> None:
    model, seq_len, micro_batch_size, passes, sets, moment = CASES[case]
    recipe = recipe_of(model, seq_len, micro_batch_size, passes, 1, sets)
    config = model_config(recipe, recipe.model.vocab_size)
    said = plan_memory(
        config,
        seq_len,
        layout_from_recipe(recipe, devices=1, nodes=1),
        workspace_bytes=0,
        upcast_bytes=CPU_TEMPORARY_BYTES,
    )
    assert said.peak_phase == moment
    assert measured_bytes(recipe, passes) == pytest.approx(said.peak, rel=NEAR)


def test_plan_and_engine_know_the_same_buffers() -> None:
    """The plan does not import the engine, so it says them again."""
    assert UPCAST_BYTES == DEVICE_TEMPORARY_BYTES
    assert OFFLOAD_BUFFER_BYTES == 2 * CHUNK_BYTES


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_plan_and_engine_shard_alike(cp: int, replicas: int, tp: int) -> None:
    sets = (f"parallel.cp={cp}", f"parallel.dp_replicate={replicas}", f"parallel.tp={tp}", f"parallel.ep={cp}")
    for world in (cp * replicas * tp, 2 * cp * replicas * tp):
        rows = world // (cp * tp)
        recipe = recipe_of(ACTIVE, 256, 1, 1, rows, sets)
        planned = layout_from_recipe(recipe, devices=world, nodes=1)
        mesh = MeshLayout.from_options(recipe.parallel, 0, world)
        for name in ("cp", "tp", "ep", "dp_replicate", "dp_shard", "fsdp_size", "efsdp_size", "uses_fsdp"):
            assert getattr(planned, name) == getattr(mesh, name)
        assert planned.accumulation_steps == 1
