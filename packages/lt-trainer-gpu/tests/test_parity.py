"""Two and four ranks against one process in float64: gradients, weights, moments, losses, norms, and who read what.

Rows come from a real store through the stream, as in training, with documents so uneven that ranks differ widely in
their numbers of labels. Then a mean per micro-batch or per rank, an averaged reduction, a slice in the wrong place or a
row that is read twice all change numbers that are compared here to ten digits.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from lt_data import Document, Stream, Tokenizer, TokenStore, pack, prepare
from lt_test_helpers.layouts import NamedTensors, StateSlice, assemble, assert_near, copy_slices
from lt_trainer.config.recipe import load, model_config
from lt_trainer.config.sections import Recipe
from lt_trainer.data.step_parts import StreamStep
from lt_trainer.data.training_data import open_data, open_stream, validation_batches
from lt_trainer.engine import World
from lt_trainer_gpu.spec import SPEC

STEPS, GLOBAL_BATCH, SEQ_LEN = 5, 8, 32
BETA1, CLIP = 0.8, 0.3
NEAR = 1e-10


@dataclass(frozen=True)
class Trained:
    """What one rank saw: numbers by step; its state before the first, after the first and after the last step."""

    losses: list[float]
    grad_norms: list[float]
    validation: tuple[float, int]
    rows: list[np.ndarray]
    labels: list[int]
    states: tuple[list[StateSlice], list[StateSlice], list[StateSlice]]


def recipe_of(root: str, micro_batch_size: int, tied: bool, sets: tuple[str, ...] = ()) -> Recipe:
    base = {
        "model": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "n_heads": 4,
            "n_kv_heads": 2,
            "n_layers": 2,
            "tie_word_embeddings": tied,
        },
        "data": {"store": f"{root}/train", "validation": f"{root}/validation", "seq_len": SEQ_LEN},
        "batch": {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": micro_batch_size},
        "optimizer": {"beta1": BETA1, "grad_clip": CLIP, "weight_decay": 0.1},
        "schedule": {"max_steps": STEPS, "warmup_steps": 1},
        "engine": {"gpu": {"device": "cpu", "dtype": "float64"}},
    }
    return load(base=base, overrides=sets).recipe


def train(root: str, micro_batch_size: int, tied: bool, sets: tuple[str, ...] = ()) -> Trained:
    """One rank's training, in that rank."""
    recipe, world = recipe_of(root, micro_batch_size, tied, sets), World.from_env(os.environ)
    SPEC.check(recipe, world)
    data = open_data(recipe)
    engine = SPEC.open(recipe, model_config(recipe, data.vocab_size), world)
    stream = open_stream(recipe, data, engine.topology, None)

    def state() -> list[StateSlice]:
        return copy_slices(engine.state().shards)

    numbers, rows, labels, states = [], [], [], [state()]
    for step in range(STEPS):
        batch = stream.next()
        numbers += engine.fetch_metrics(
            [engine.step(StreamStep(batch, micro_batch_size, read_ahead=False), 1e-2 / (step + 1))]
        )
        rows.append(batch.row_ids)
        labels.append(int((batch.rows.labels >= 0).sum()))
        if step in (0, STEPS - 1):
            states.append(state())
    (validated,) = data.validation
    validation = engine.validate(validation_batches(validated.reader, engine.topology, micro_batch_size))
    engine.close()
    first, second, third = states
    return Trained(
        [n.loss for n in numbers], [n.grad_norm for n in numbers], validation, rows, labels, (first, second, third)
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Stores whose rows have from no label at all (32 documents of one token) to one at every position."""
    root = tmp_path_factory.mktemp("uneven")
    rng = np.random.default_rng(5)
    words = ["loss", "of", "a", "model", "falls", "when", "its", "data", "is", "read", "in", "order"]

    def documents(number: int) -> list[Document]:
        long = [" ".join(rng.choice(words, int(rng.integers(40, 90)))) for _ in range(number)]
        return [Document(text=text, source="made up") for text in [*long, *["a"] * (60 * number)]]

    train = documents(12)
    tokenizer = Tokenizer.train((d.text for d in train), vocab_size=280)
    for name, texts in (("train", train), ("validation", documents(2))):
        prepare(texts, tokenizer=tokenizer, out=root / name, bos=False, eos=False)
        pack(TokenStore(root / name), seq_len=SEQ_LEN)
    return str(root)


@pytest.fixture(scope="module")
def alone(ranks, root: str) -> Callable[[bool], Trained]:
    """The one process that all meshes are compared with: no accumulation, nothing sharded."""
    done: dict[bool, Any] = {}

    def trained(tied: bool) -> Trained:
        if tied not in done:
            (done[tied],) = ranks.run(train, root, GLOBAL_BATCH, tied, ranks=1)
        return done[tied]

    return trained


def in_order(rows_of_ranks: Sequence[Any], micro_batch_size: int) -> np.ndarray:
    """Return a step's rows in order, from those of data-parallel ranks, which have some of each micro-step."""
    by_micro_step = [np.reshape(rows, (-1, micro_batch_size)) for rows in rows_of_ranks]
    return np.stack(by_micro_step, axis=1).flatten()


@pytest.mark.parametrize(
    ("n", "micro_batch_size", "tied"),
    [(1, 2, True), (2, 4, False), (2, 1, True), (4, 2, True), (4, 1, False)],
    ids=["1-rank-4-micro-tied", "2-ranks", "2-ranks-4-micro-tied", "4-ranks-tied", "4-ranks-2-micro"],
)
def test_ranks_train_as_one_process(ranks, alone, root: str, n: int, micro_batch_size: int, tied: bool) -> None:
    one: Trained = alone(tied)
    found: list[Trained] = ranks.run(train, root, micro_batch_size, tied, ranks=n)

    data = open_data(recipe_of(root, micro_batch_size, tied))
    is_unlike: list[bool] = []
    for step in range(STEPS):
        labels = [rank.labels[step] for rank in found]
        assert sum(labels) == one.labels[step]
        is_unlike.append(max(labels) > 1.2 * min(labels))
        read = in_order([rank.rows[step] for rank in found], micro_batch_size)
        stream = Stream(data.train, global_batch_size=GLOBAL_BATCH)
        wanted = stream.global_rows(stream.state, STEPS * GLOBAL_BATCH)
        assert read.tolist() == wanted[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH].tolist()
    assert n == 1 or any(is_unlike), "the test needs ranks with unlike numbers of labels"

    for rank in found:
        assert rank.losses == found[0].losses
        assert rank.grad_norms == found[0].grad_norms
        assert rank.validation == found[0].validation
    assert found[0].losses == pytest.approx(one.losses, rel=NEAR)
    assert found[0].grad_norms == pytest.approx(one.grad_norms, rel=NEAR)
    assert min(one.grad_norms) > CLIP, "clipping must be at work"
    assert found[0].validation == pytest.approx(one.validation, rel=NEAR)

    before, after_1, after_all = (
        (assemble([rank.states[i] for rank in found]), assemble([one.states[i]])) for i in range(3)
    )
    bits = [{key: tensor.tobytes() for key, tensor in tensors.items()} for tensors in before]
    assert bits[0] == bits[1], "initial weights are the same bits on every mesh"
    # After one step exp_avg is the clipped gradient times 1 - beta1.
    assert_near(*(gradients(tensors, one.grad_norms[0]) for tensors in after_1), NEAR)
    assert_near(*after_all, NEAR)


def test_tensor_parallel_ranks_read_the_same_rows(ranks, alone, root: str) -> None:
    """Pairs of ranks compute together; between the pairs the rows are shared out. (All layouts: test_layouts.py.)"""
    one: Trained = alone(False)
    found: list[Trained] = ranks.run(train, root, 2, False, ("parallel.tp=2",), ranks=4)
    for step in range(STEPS):
        rows = [rank.rows[step].tolist() for rank in found]
        assert rows[0] == rows[1] != rows[2] == rows[3]
        assert in_order([rows[0], rows[2]], 2).tolist() == one.rows[step].tolist()
    assert found[0].losses == pytest.approx(one.losses, rel=NEAR)
    assert found[0].grad_norms == pytest.approx(one.grad_norms, rel=NEAR)
    assert found[0].validation == pytest.approx(one.validation, rel=NEAR)
    assert_near(assemble([rank.states[2] for rank in found]), assemble([one.states[2]]), NEAR)


def gradients(tensors: NamedTensors, norm: float) -> NamedTensors:
    """The gradients of the first step before clipping; their norm is checked against the one that was reported."""
    found = {key: tensor / (1 - BETA1) * norm / CLIP for key, tensor in tensors.items() if key[0] == "exp_avg"}
    assert sum(float((g**2).sum()) for g in found.values()) == pytest.approx(norm**2, rel=1e-4)  # torch adds 1e-6
    return found
