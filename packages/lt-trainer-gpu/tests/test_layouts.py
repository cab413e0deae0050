"""Every layout of ranks against one process, in float64: gradients, weights, losses, norms, state on disk.

The one process has a single micro-batch of all rows, attention by the formula and no option set. What is compared with
it is cut along rows, replicas, shards, heads, features, vocabulary and positions, recomputes activations or pads the
vocabulary, and must give the same numbers to ten digits: per parameter ||difference|| <= 1e-10 ||gradient||.

The shape is unkind on purpose: grouped heads, 61 ids (no degree divides them), documents of uneven length, rows with
hardly a label.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from lt_model import LlamaConfig
from lt_trainer.engine import StepBatch, World
from lt_trainer.recipe import load
from lt_trainer_gpu.engine import GpuEngine
from lt_trainer_gpu.spec import SPEC

STEPS, ROWS, SEQ_LEN, VOCAB = 3, 8, 16, 61
BETA1, CLIP = 0.8, 0.3
NEAR, NEAR_WEIGHTS = 1e-10, 1e-9


def model_of(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        n_heads=8,
        n_kv_heads=4,
        n_layers=2,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=tied,
    )


def global_batches(n_steps: int, seed: int = 0) -> list[StepBatch]:
    """Steps of ROWS rows [1, ROWS, T] in documents, with unlike numbers of labels."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(n_steps):
        shape = (1, ROWS, SEQ_LEN)
        cuts = rng.integers(1, SEQ_LEN, (1, ROWS, 1))
        counting = np.arange(SEQ_LEN, dtype=np.int32)
        docs = (counting >= cuts).astype(np.int32)
        labels = rng.integers(0, VOCAB, shape, dtype=np.int32)
        labels[rng.random(shape) < rng.random((1, ROWS, 1))] = -100
        batches.append(
            StepBatch(
                input_ids=rng.integers(0, VOCAB, shape, dtype=np.int32),
                labels=labels,
                position_ids=(counting - docs * cuts).astype(np.int32),
                doc_ids=docs,
                valid_tokens=int((labels != -100).sum()),
            )
        )
    return batches


def part_of(batch: StepBatch, engine: GpuEngine, micro_batch: int) -> StepBatch:
    """This rank's rows of a global batch, in micro-batches."""
    place = engine.topology
    mine = slice(place.dp_rank * ROWS // place.dp_size, (place.dp_rank + 1) * ROWS // place.dp_size)
    names = ("input_ids", "labels", "position_ids", "doc_ids")
    arrays = {n: getattr(batch, n)[0, mine].reshape(-1, micro_batch, SEQ_LEN) for n in names}
    return StepBatch(**arrays, valid_tokens=batch.valid_tokens)


def open_engine(sets: tuple[str, ...], tied: bool) -> GpuEngine:
    base = {
        "model": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "n_heads": 8,
            "n_kv_heads": 4,
            "n_layers": 2,
            "tie_word_embeddings": tied,
        },
        "data": {"store": "unused", "seq_len": SEQ_LEN},
        "batch": {"global_batch": ROWS, "micro_batch": 1},
        "optimizer": {"beta1": BETA1, "grad_clip": CLIP, "weight_decay": 0.1},
        "schedule": {"max_steps": STEPS, "warmup_steps": 1},
        "engine": {"gpu": {"device": "cpu", "dtype": "float64"}},
    }
    recipe, world = load(base=base, sets=sets).recipe, World.from_env(os.environ)
    SPEC.check(recipe, world)
    engine = SPEC.open(recipe, model_of(tied), world)
    assert isinstance(engine, GpuEngine)
    return engine


@dataclass(frozen=True)
class Piece:
    """One rank's slice of one tensor of its state."""

    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: np.ndarray


def pieces(engine: GpuEngine) -> list[Piece]:
    found = []
    for s in engine.state().shards:
        kind = {"F64": np.float64, "F32": np.float32, "BF16": np.uint16}[s.dtype]
        values = s.bytes().view(kind).reshape(s.shape).copy()
        found.append(Piece(s.group, s.name, s.dtype, s.global_shape, s.offset, values))
    return found


@dataclass(frozen=True)
class Trained:
    """What one rank saw: numbers by step, and its state before the first, after the first and after the last step."""

    losses: list[float]
    norms: list[float]
    validation: tuple[float, int]
    state_bytes: tuple[int, int]
    states: tuple[list[Piece], ...]


def train(sets: tuple[str, ...], tied: bool, micro_batch: int) -> Trained:
    """One rank's training, in that rank."""
    engine = open_engine(sets, tied)
    numbers, states = [], [pieces(engine)]
    for step, batch in enumerate(global_batches(STEPS)):
        numbers += engine.read([engine.step(part_of(batch, engine, micro_batch), 1e-2 / (step + 1))])
        if step in (0, STEPS - 1):
            states.append(pieces(engine))
    (rest,) = global_batches(1, seed=9)
    own = part_of(rest, engine, micro_batch)
    validation = engine.evaluate([replace(own, valid_tokens=int((own.labels != -100).sum()))])
    counted = engine.state_bytes(), sum(piece.values.nbytes for piece in states[-1])
    engine.close()
    return Trained([n.loss for n in numbers], [n.grad_norm for n in numbers], validation, counted, tuple(states))


Tensors = dict[tuple[str, str], np.ndarray]


def whole(parts: list[list[Piece]]) -> Tensors:
    """The tensors that the ranks' slices make up, each element from exactly one of them."""
    tensors: Tensors = {}
    seen: Tensors = {}
    for piece in (piece for part in parts for piece in part):
        key = (piece.group, piece.name)
        tensor = tensors.setdefault(key, np.zeros(piece.shape, piece.values.dtype))
        mask = seen.setdefault(key, np.zeros(piece.shape, bool))
        place = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.values.shape, strict=True))
        assert not mask[place].any(), f"{piece.name}: two ranks give the same elements"
        tensor[place], mask[place] = piece.values, True
    assert all(mask.all() for mask in seen.values())
    return tensors


def gradients(tensors: Tensors, norm: float) -> Tensors:
    """The gradients of the first step: after it exp_avg is the clipped gradient times 1 - beta1."""
    scale = min(1.0, CLIP / (norm + 1e-6)) * (1 - BETA1)
    return {key: tensor / scale for key, tensor in tensors.items() if key[0] == "exp_avg"}


def assert_near(found: Tensors, wanted: Tensors, near: float) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        scale = np.linalg.norm(tensor)
        assert scale > 0, f"{key} says nothing"
        assert np.linalg.norm(found[key] - tensor) <= near * scale, key


@pytest.fixture(scope="module")
def alone(ranks) -> Callable[..., Trained]:
    """The one process that all layouts are compared with."""
    done: dict[Any, Trained] = {}

    def trained(tied: bool, *sets: str) -> Trained:
        key = (tied, sets)
        if key not in done:
            (done[key],) = ranks.run(train, ("engine.gpu.attention=reference", *sets), tied, ROWS, ranks=1)
        return done[key]

    return trained


TP2, TP4 = "parallel.tp=2", "parallel.tp=4"
SP, HSDP = "parallel.sequence_parallel=true", "parallel.dp_replicate=2"
FULL, SELECTIVE = "engine.gpu.activation_checkpointing=full", "engine.gpu.activation_checkpointing=selective"
PADDED, KEEP = "engine.gpu.pad_vocab_to=16", "engine.gpu.reshard_after_forward=false"
EACH, DECAY = "engine.gpu.reduce_each_micro_batch=true", "optimizer.decay_embeddings=true"

LAYOUTS: dict[str, tuple[int, int, bool, tuple[str, ...]]] = {
    # name: ranks, rows of a micro-batch, tied, options
    "recompute-all": (1, 2, False, (FULL,)),
    "recompute-selectively": (1, 4, True, (SELECTIVE, PADDED)),
    "fsdp-reduce-each": (2, 1, True, (EACH, SELECTIVE)),
    "fsdp-keep-weights": (2, 2, False, (KEEP, FULL, PADDED)),
    "hsdp": (4, 1, False, (HSDP,)),
    "hsdp-reduce-each": (4, 1, True, (HSDP, EACH, KEEP)),
    "ddp": (2, 2, True, (HSDP,)),
    "tp": (2, 4, False, (TP2,)),
    "tp-tied-padded": (2, 8, True, (TP2, PADDED)),
    "tp4-sp": (4, 2, False, (TP4, SP, FULL)),
    "tp-sp-tied": (2, 4, True, (TP2, SP)),
    "fsdp-tp": (4, 2, False, (TP2, PADDED)),
    "fsdp-tp-sp": (4, 1, True, (TP2, SP, SELECTIVE)),
    "fsdp-tp-reduce-each": (4, 1, False, (TP2, EACH, FULL)),
    "hsdp-tp-as-ddp": (4, 1, False, (TP2, SP, HSDP, KEEP)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_process(ranks, alone, name: str) -> None:
    n, micro_batch, tied, sets = LAYOUTS[name]
    compare(alone(tied), ranks.run(train, sets, tied, micro_batch, ranks=n))


def compare(one: Trained, found: list[Trained]) -> None:
    for rank in found:
        assert rank.losses == found[0].losses
        assert rank.norms == found[0].norms
        assert rank.validation == found[0].validation
        assert rank.state_bytes[0] == rank.state_bytes[1]
    before, after_1, after_all = ((whole([rank.states[i] for rank in found]), whole([one.states[i]])) for i in range(3))
    assert before[0].keys() == before[1].keys()
    assert [key for key in before[1] if before[0][key].tobytes() != before[1][key].tobytes()] == []
    assert found[0].losses == pytest.approx(one.losses, rel=1e-12)
    assert found[0].norms == pytest.approx(one.norms, rel=NEAR)
    assert min(one.norms) > CLIP, "clipping must be at work"
    assert found[0].validation == pytest.approx(one.validation, rel=1e-12)
    assert_near(gradients(after_1[0], found[0].norms[0]), gradients(after_1[1], one.norms[0]), NEAR)
    assert_near(*after_all, NEAR_WEIGHTS)
