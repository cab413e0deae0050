"""Steps over stages and shards on the cpu backend, in float64, against one process of it, with each graph's content.

`test_cpu_parity.py` compares one process with lt-model. What a graph is made of on a lazy device, and what NxD's layers
add, are the subjects of `test_xla_step.py` and `test_nxd_host.py`.
"""

import os
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lt_model import LlamaConfig
from lt_model.loss import cross_entropy_sum
from lt_test_helpers.layouts import step_batch
from lt_trainer.config.recipe import load
from lt_trainer.engine import World
from lt_trainer_neuron.engine import NeuronEngine
from lt_trainer_neuron.grid import Grid
from lt_trainer_neuron.nxd import backend as nxd
from lt_trainer_neuron.nxd.device import TensorDevice
from lt_trainer_neuron.nxd.gloo import GlooCollectives, GlooPipelineP2P
from lt_trainer_neuron.nxd.gloo_groups import ProcessGroups, init_process_group
from lt_trainer_neuron.nxd.loss import vocab_parallel_loss
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


@dataclass(frozen=True)
class Shape:
    """The little models."""

    tied: bool = False
    layers: int = 2
    kv_heads: int = 1
    vocab: int = 63
    intermediate: int = 33

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=24,
            intermediate_size=self.intermediate,
            n_layers=self.layers,
            n_heads=4,
            n_kv_heads=self.kv_heads,
            max_position_embeddings=SEQ_LEN,
            tie_word_embeddings=self.tied,
        )


def trained(shape: Shape, policy: DtypePolicy | None, *sets: str) -> dict[str, Any]:
    """In a rank: four steps, the third of which is told that no token counts; everything that can be compared."""
    world, config = World.from_env(os.environ), shape.config
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
        ids, labels = (rng.integers(0, shape.vocab, (ROWS, SEQ_LEN), dtype=np.int32) for _ in range(2))
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
    scores = engine.score(batch)
    found["scored"], found["scoring"] = (float(scores.log_probs.sum()), int(scores.is_reported.sum())), list(events)
    found["stage"] = engine.backend.grid.pp_rank
    engine.close()
    return found


def recording_backend(
    recipe: Any, config: LlamaConfig, world: World, policy: DtypePolicy | None, events: list[str]
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
EVEN = Shape(layers=3, kv_heads=4, vocab=62, intermediate=34)
STAGES: dict[str, tuple[int, Shape, DtypePolicy | None, tuple[str, ...]]] = {
    # name: ranks, the model, precision, options; 4 rows
    "pp2-more-micros-than-stages": (2, Shape(layers=3), None, (PP2,)),
    "pp3-fewer-micros-than-stages": (3, Shape(layers=4), None, (PP3, "batch.micro_batch_size=2")),
    "pp3-one-micro-tied": (3, Shape(tied=True, layers=4), None, (PP3, "batch.micro_batch_size=4")),
    "pp2-dp2-zero1-tied": (4, Shape(tied=True, layers=3), None, (PP2,)),
    "tp2-pp2": (4, EVEN, None, (PP2, "parallel.tp=2")),
    "tp2-pp2-sp-tied": (4, replace(EVEN, tied=True), None, (PP2, *TP2_SP, "batch.micro_batch_size=2")),
    "pp2-narrow": (2, Shape(layers=3), NARROW, (PP2,)),
}


@pytest.mark.parametrize("name", STAGES)
def test_stages_give_what_one_process_gives(ranks, name: str) -> None:
    n, shape, policy, sets = STAGES[name]
    micro = tuple(one for one in sets if one.startswith("batch."))
    (one,) = ranks.run(trained, shape, None, *micro, ranks=1)
    found = ranks.run(trained, shape, policy, *sets, ranks=n)
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
    assert_evaluated(found, one, dp=n // n_stages // (2 if "parallel.tp=2" in sets else 1), rel=near)
    for rank in found:
        assert_graphs(rank, n_stages=n_stages)
    if shape.tied:  # both copies went the same way, to the last bit
        of_stage = n // n_stages
        for first, last in zip(found[:of_stage], found[-of_stage:], strict=True):
            assert np.array_equal(first["weights"]["model.embed_tokens.weight"], last["weights"]["lm_head.weight"])


REPLICAS = ("parallel.tp=2", "engine.neuron.qkv_linear=true", "engine.neuron.kv_size_multiplier=2")


@pytest.mark.parametrize(("tied", "fused"), [(True, False), pytest.param(False, True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count_copies", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_copies_of_heads_are_in_the_norm_of_two_stages_as_of_one(
    ranks, tied: bool, fused: bool, count_copies: bool
) -> None:
    """Losses, norms, and sum and tokens of validation, of every rank; stages change none of them.

    The norm of one stage is that of `test_cpu_parity.py`; a tied head is in it once, though two stages hold it.
    """
    shape = Shape(tied=tied, layers=3, vocab=62, intermediate=34)
    flags = {"fuse_qkv": fused, "nxd_grad_norm": count_copies}
    sets = (*REPLICAS, *(f"engine.neuron.{name}={str(value).lower()}" for name, value in flags.items()))
    (one,) = ranks.run(trained, shape, None, ranks=1)
    wanted, *others = ranks.run(trained, shape, None, *sets, ranks=2)  # one stage
    others += ranks.run(trained, shape, None, *sets, PP2, ranks=4)
    for rank in others:
        assert not np.isfinite(rank["numbers"].pop(BAD)).all()
        assert rank["steps"] == len(RATES) - 1
    del wanted["numbers"][BAD], one["numbers"][BAD]
    for rank in others:
        assert rank["numbers"] == [pytest.approx(pair, rel=1e-11) for pair in wanted["numbers"]]
        assert rank["evaluated"] == (pytest.approx(one["evaluated"][0], rel=1e-2), one["evaluated"][1])
        assert rank["evaluated"] == (pytest.approx(wanted["evaluated"][0], rel=1e-11), one["evaluated"][1])
    if count_copies:
        assert wanted["numbers"][0][1] > one["numbers"][0][1] * 1.0001
    else:
        assert wanted["numbers"] == [pytest.approx(pair, rel=1e-11) for pair in one["numbers"]]


def assert_evaluated(found: list[dict[str, Any]], one: dict[str, Any], *, dp: int, rel: float) -> None:
    """Every rank has the loss of all rows, and the tokens that the batches count; scores add up to the loss."""
    loss, tokens = one["evaluated"]
    assert tokens > 0
    for rank in found:
        assert rank["evaluated"] == (pytest.approx(loss, rel=rel), dp * tokens)
    log_probs, labels = (sum(numbers) for numbers in zip(*(rank["scored"] for rank in found), strict=True))
    assert log_probs == pytest.approx(-loss, rel=rel)
    assert labels == one["scored"][1] > 0


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


def losses(z_loss: float) -> tuple[float, float, np.ndarray]:
    """In one of two ranks with half of the columns each: the loss, its cross-entropy, the gradient."""
    world = World.from_env(os.environ)
    init_process_group(world, 60.0)
    ranks = GlooCollectives(ProcessGroups.make(Grid(tp=2, tp_rank=world.rank), [], 60.0))
    half, labels = logits_and_labels()[0].chunk(2, dim=1)[dist.get_rank()].clone(), logits_and_labels()[1]
    half.requires_grad_()
    first = dist.get_rank() * half.shape[1]
    parts = vocab_parallel_loss(
        half, labels, collectives=ranks, vocab_start_index=first, z_loss=z_loss, upcast_dtype=torch.float64
    )
    (parts.total * 3).backward()
    assert half.grad is not None
    found = float(parts.total.detach()), float(parts.cross_entropy), half.grad.numpy()
    dist.destroy_process_group()
    return found


def logits_and_labels() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 12, generator=random, dtype=torch.float64) * 30
    return logits, torch.tensor([0, 5, 6, 11, -100, 3, 7, -100, 2], dtype=torch.int32)


@pytest.mark.parametrize("z_loss", [0.0, 0.02])
def test_a_vocabulary_over_two_ranks_has_the_loss_and_gradient_of_a_whole_one(ranks, z_loss: float) -> None:
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    wanted = cross_entropy_sum(logits, labels, z_loss=z_loss)
    (wanted * 3).backward()
    assert logits.grad is not None
    found = ranks.run(losses, z_loss, ranks=2)
    for loss, cross_entropy, _ in found:
        assert loss == pytest.approx(float(wanted.detach()), rel=1e-12)
        assert cross_entropy == pytest.approx(float(cross_entropy_sum(logits.detach(), labels)), rel=1e-12)
    gradient = np.concatenate([rank[2] for rank in found], axis=1)
    assert gradient == pytest.approx(logits.grad.numpy(), rel=1e-10, abs=1e-13)
