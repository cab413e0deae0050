"""Steps over stages and shards on the cpu backend, in float64, against one process of it, with each graph's content.

`test_cpu_parity.py` compares one process with lt-model. What a graph is made of on a lazy device, and what NxD's layers
add, are the subjects of `test_xla_step.py` and `test_nxd_host.py`.
"""

import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from lt_model import ModelConfig
from lt_test_helpers.layouts import step_batch
from lt_trainer.config.recipe import load
from lt_trainer.engine import World
from lt_trainer_neuron.engine import NeuronEngine
from lt_trainer_neuron.nxd import backend as nxd
from lt_trainer_neuron.nxd.device import TensorDevice
from lt_trainer_neuron.nxd.gloo import GlooPipelineP2P
from lt_trainer_neuron.nxd.train_step import DtypePolicy
from lt_trainer_neuron.pipeline_schedule import forward_only, one_forward_one_backward

NARROW = DtypePolicy(compute_dtype=torch.float32, master_dtype=torch.float64, upcast_dtype=torch.float64)
RATES = (0.0, 1e-2, 5e-2, 1e-2)
BAD = 2
ROWS, SEQ_LEN = 4, 16


class RecordingDevice(TensorDevice):
    """The host, which tells when a graph would end."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def mark_step(self) -> None:
        self._events.append("mark")


def shape(tied: bool = False, layers: int = 2, even: bool = False) -> ModelConfig:
    """Return one of the little models; with `even`, of sizes that two tensor-parallel ranks can share."""
    return ModelConfig(
        vocab_size=62 if even else 63,
        hidden_size=24,
        intermediate_size=34 if even else 33,
        n_layers=layers,
        n_heads=4,
        n_kv_heads=4 if even else 1,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=tied,
    )


def trained(config: ModelConfig, policy: DtypePolicy | None, *sets: str) -> dict[str, Any]:
    """In a rank: four steps, the third of which is told that no token counts; everything that can be compared."""
    world = World.from_env(os.environ)
    names = ("hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "n_layers", "tie_word_embeddings")
    base = {
        "run": {"engine": "neuron"},
        "model": {name: getattr(config, name) for name in names},
        "data": {"store": "unused", "seq_len": SEQ_LEN},
        "batch": {"global_batch_size": ROWS, "micro_batch_size": 1},
        "optimizer": {"beta1": 0.8, "grad_clip": 0.3, "weight_decay": 0.1, "z_loss": 1e-3},
        "schedule": {"max_steps": 9, "warmup_steps": 1},
        "engine": {"neuron": {"backend": "cpu", "cpu_dtype": "float64", "num_neuroncores": world.size}},
    }
    recipe, events = load(base=base, overrides=sets).recipe, []
    engine = NeuronEngine(recipe, config, recording_backend(recipe, config, world, policy, events))
    place, rng, numbers, turns = engine.topology, np.random.default_rng(2), [], []
    mine = slice(place.dp_rank * ROWS // place.dp_size, (place.dp_rank + 1) * ROWS // place.dp_size)
    for step, rate in enumerate(RATES):
        ids, labels = (rng.integers(0, config.vocab_size, (ROWS, SEQ_LEN), dtype=np.int32) for _ in range(2))
        labels[rng.random(labels.shape) < rng.random((ROWS, 1))] = -100
        cuts = rng.integers(1, SEQ_LEN, (ROWS, 1))
        documents = (np.arange(SEQ_LEN) >= cuts).astype(np.int32)
        positions = (np.arange(SEQ_LEN) - documents * cuts).astype(np.int32)
        valid = int((labels != -100).sum()) if step != BAD else 0
        ids, labels, documents, positions = (
            x[mine].reshape(-1, recipe.batch.micro_batch_size, SEQ_LEN) for x in (ids, labels, documents, positions)
        )
        batch = step_batch(input_ids=ids, labels=labels, position_ids=positions, doc_ids=documents, valid_tokens=valid)
        events.clear()
        (read,) = engine.fetch_metrics([engine.step(batch, rate)])
        turns.append(list(events))
        numbers.append((read.loss, read.grad_norm))
    boxes = [
        (f"{s.group} {s.name}", s.global_shape, s.offset, s.shape, s.bytes().view(np.float64))
        for s in engine.iter_model_shards()
    ]
    weights = {key: tensor.detach().double().numpy().copy() for key, tensor in engine.backend.weights.items()}
    found = {"numbers": numbers, "steps": engine.backend.step_count, "boxes": boxes, "weights": weights, "turns": turns}
    events.clear()
    found["evaluated"], found["evaluation"] = engine.validate([batch]), list(events)
    events.clear()
    engine.score(batch)
    found["scoring"] = list(events)
    found["stage"] = engine.backend.grid.pp_rank
    engine.close()
    return found


def recording_backend(
    recipe: Any, config: ModelConfig, world: World, policy: DtypePolicy | None, events: list[str]
) -> nxd.NxdBackend:
    """The cpu backend; `events` is told of passes, transfers and ends of graphs."""
    real = nxd._open_runtime

    def open_runtime(*args: Any) -> Any:
        _, collectives, p2p, layers = real(*args)
        for name in ("send", "recv") if isinstance(p2p, GlooPipelineP2P) else ():
            setattr(p2p, name, told(name, getattr(p2p, name)))
        return RecordingDevice(events), collectives, p2p, layers

    def told(name: str, transfer: Any) -> Any:
        def call(*args: Any) -> Any:
            events.append(f"{name}_{args[-1]}")
            return transfer(*args)

        return call

    nxd._open_runtime = open_runtime
    backend = nxd.NxdBackend(recipe, config, world, dtype_policy=policy)
    nxd._open_runtime = real
    backend.stage.register_forward_hook(lambda *_: events.append("forward"))
    some = next(tensor for key, tensor in backend.stage.named_parameters() if "input_layernorm" in key)
    some.register_post_accumulate_grad_hook(lambda _: events.append("backward"))
    return backend


def whole(ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The tensors that all ranks' boxes make up, each element from exactly one of them."""
    tensors: dict[str, np.ndarray] = {}
    for rank in ranks:
        for name, shape, offset, extent, values in rank["boxes"]:
            tensor = tensors.setdefault(name, np.full(shape, np.nan))
            place = tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))
            assert np.isnan(tensor[place]).all(), name
            tensor[place] = values.reshape(extent)
    return tensors


PP2, PP3 = "parallel.pp=2", "parallel.pp=3"
TP2_SP = ("parallel.tp=2", "parallel.sequence_parallel=true")
STAGES: dict[str, tuple[int, ModelConfig, DtypePolicy | None, tuple[str, ...]]] = {
    # name: ranks, the model, precision, options; 4 rows
    "pp2-more-micros-than-stages": (2, shape(layers=3), None, (PP2,)),
    "pp3-fewer-micros-than-stages": (3, shape(layers=4), None, (PP3, "batch.micro_batch_size=2")),
    "pp3-one-micro-tied": (3, shape(tied=True, layers=4), None, (PP3, "batch.micro_batch_size=4")),
    "pp2-dp2-zero1-tied": (4, shape(tied=True, layers=3), None, (PP2,)),
    "tp2-pp2": (4, shape(layers=3, even=True), None, (PP2, "parallel.tp=2")),
    "tp2-pp2-sp-tied": (4, shape(tied=True, layers=3, even=True), None, (PP2, *TP2_SP, "batch.micro_batch_size=2")),
    "pp2-narrow": (2, shape(layers=3), NARROW, (PP2,)),
}


@pytest.mark.parametrize("name", STAGES)
def test_stages_give_what_one_process_gives(ranks, name: str) -> None:
    n, config, policy, sets = STAGES[name]
    micro = tuple(one for one in sets if one.startswith("batch."))
    (one,) = ranks.run(trained, config, None, *micro, ranks=1)
    found = ranks.run(trained, config, policy, *sets, ranks=n)
    near = 1e-11 if policy is None else 1e-4
    wanted, ours = whole([one]), whole(found)
    assert ours.keys() == wanted.keys()
    for key, tensor in ours.items():
        assert np.linalg.norm(tensor - wanted[key]) <= near * np.linalg.norm(wanted[key]), key
    for rank in found:
        assert rank["numbers"] == [pytest.approx(pair, rel=near, nan_ok=True) for pair in one["numbers"]]
        assert rank["steps"] == len(RATES) - 1
        assert rank["evaluated"] == found[0]["evaluated"]
    n_stages = 2 if PP2 in sets else 3
    for rank in found:
        assert_graphs(rank, n_stages=n_stages)
    if config.tie_word_embeddings:  # both copies went the same way, to the last bit
        of_stage = n // n_stages
        for first, last in zip(found[:of_stage], found[-of_stage:], strict=True):
            assert np.array_equal(first["weights"]["model.embed_tokens.weight"], last["weights"]["lm_head.weight"])


def assert_graphs(rank: dict[str, Any], *, n_stages: int) -> None:
    """Passes and transfers come in the schedule's order, each in a graph of its own; the last stage's are joined."""
    stage = rank["stage"]
    for told in rank["turns"]:
        done = [event for event in told if event != "mark"]
        assert done == [kind for kind, _ in one_forward_one_backward(stage, n_stages, done.count("forward"))]
        for one, next_one in pairwise(told):
            joined = stage == n_stages - 1 and (one, next_one) == ("forward", "backward")
            assert joined or "mark" in (one, next_one), (one, next_one)
        assert told[0] == told[-1] == "mark"
    for told in (rank["evaluation"], rank["scoring"]):
        done = [event for event in told if event != "mark"]
        assert done == [kind for kind, _ in forward_only(stage, n_stages, done.count("forward"))]
        assert all("mark" in pair for pair in pairwise(told))
