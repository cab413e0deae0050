"""What each graph of a step over stages has in it, on the cpu backend: passes and transfers; and tied copies.

`test_cpu_parity.py` has the numbers. What a graph is made of on a lazy device, and what NxD's layers add, are the
subjects of `test_xla_step.py` and `test_nxd_host.py`.
"""

import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from neuron_engine import SIZES

from lt_model import ModelConfig
from lt_test_helpers import layouts
from lt_trainer.config.recipe import load
from lt_trainer.engine import World
from lt_trainer_neuron.engine import NeuronEngine
from lt_trainer_neuron.nxd import backend as nxd
from lt_trainer_neuron.nxd.device import TensorDevice
from lt_trainer_neuron.nxd.gloo import GlooPipelineP2P
from lt_trainer_neuron.nxd.train_step import DtypePolicy
from lt_trainer_neuron.pipeline_schedule import forward_only, one_forward_one_backward

NARROW = DtypePolicy(compute_dtype=torch.float32, master_dtype=torch.float64, upcast_dtype=torch.float64)
ROWS, SEQ_LEN = 4, 16


class RecordingDevice(TensorDevice):
    """The host, which tells when a graph would end."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def mark_step(self) -> None:
        self._events.append("mark")


def shape(tied: bool = False, layers: int = 2) -> ModelConfig:
    """Return one of the little models."""
    return ModelConfig(
        vocab_size=62,
        hidden_size=24,
        intermediate_size=34,
        n_layers=layers,
        n_heads=4,
        n_kv_heads=4,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=tied,
    )


def trained(config: ModelConfig, policy: DtypePolicy | None, *sets: str) -> dict[str, Any]:
    """In a rank: what each of three steps, a validation and scores did in turn, and the weights after them."""
    world = World.from_env(os.environ)
    base = {
        "run": {"engine": "neuron"},
        "model": {name: getattr(config, name) for name in SIZES},
        "data": {"store": "unused", "seq_len": SEQ_LEN},
        "batch": {"global_batch_size": ROWS, "micro_batch_size": 1},
        "engine": {"neuron": {"backend": "cpu", "cpu_dtype": "float64", "num_neuroncores": world.size}},
    }
    recipe, events = load(base=base, overrides=sets).recipe, []
    engine = NeuronEngine(recipe, config, recording_backend(recipe, config, world, policy, events))
    turns, micro = [], recipe.batch.micro_batch_size
    for batch in layouts.global_batches(3, rows=ROWS, seq_len=SEQ_LEN, vocab=config.vocab_size):
        events.clear()
        part = layouts.rank_batch(batch, engine, micro)
        engine.fetch_metrics([engine.step(part, 1e-2)])
        turns.append(list(events))
    weights = {key: tensor.detach().double().numpy().copy() for key, tensor in engine.backend.weights.items()}
    found = {"weights": weights, "turns": turns, "stage": engine.backend.grid.pp_rank}
    for name, call in {"evaluation": lambda: engine.validate([part]), "scoring": lambda: engine.score(part)}.items():
        events.clear()
        call()
        found[name] = list(events)
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


PP2, PP3 = "parallel.pp=2", "parallel.pp=3"
TP2_SP = ("parallel.tp=2", "parallel.sequence_parallel=true")
STAGES: dict[str, tuple[int, ModelConfig, DtypePolicy | None, tuple[str, ...]]] = {
    # name: ranks, the model, precision, options; 4 rows
    "pp2-more-micros-than-stages": (2, shape(layers=3), None, (PP2,)),
    "pp3-fewer-micros-than-stages": (3, shape(layers=4), None, (PP3, "batch.micro_batch_size=2")),
    "pp3-one-micro-tied": (3, shape(tied=True, layers=4), None, (PP3, "batch.micro_batch_size=4")),
    "pp2-dp2-zero1-tied": (4, shape(tied=True, layers=3), None, (PP2,)),
    "tp2-pp2-sp-tied": (4, shape(tied=True, layers=3), None, (PP2, *TP2_SP, "batch.micro_batch_size=2")),
    "pp2-narrow": (2, shape(layers=3), NARROW, (PP2,)),
}


@pytest.mark.parametrize("name", STAGES)
def test_each_pass_and_transfer_is_in_a_graph_of_its_own(ranks, name: str) -> None:
    n, config, policy, sets = STAGES[name]
    found, n_stages = ranks.run(trained, config, policy, *sets, ranks=n), 2 if PP2 in sets else 3
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
