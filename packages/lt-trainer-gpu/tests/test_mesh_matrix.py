"""Every mesh against one process in float64: the product of all axes is made here, and each cell is proved.

A cell is a mesh (pipeline schedule, context, tensor and sequence parallelism, data parallelism), an optimizer and tied
or untied weights; size of a micro-batch, recomputation and FSDP's options are drawn for each cell. It has five steps
on rows of several documents with clipping at work, and a validation; losses, norms, every gradient and every weight
must equal those of one process. What `check` refuses of these meshes: `test_mesh_refusals.py`.

A seeded sample runs in CI (LT_SEED chooses another one), all of it by `tools/slow.py`.
"""

import itertools
import os
import random
from dataclasses import dataclass

import numpy as np
import pytest

from lt_test_helpers import layouts
from lt_test_helpers.layouts import NamedTensors, TrainResult, assemble, assemble_scores, assert_near
from lt_test_helpers.meshes import CONTEXTS, DATA, DATA_RANKS, MAX_RANKS, PIPELINES, TENSORS

STEPS, ROWS, SEQ_LEN, VOCAB, N_LAYERS = 5, 8, 16, 61, 5
BETA1, CLIP = 0.8, 0.3
N_SAMPLED = 8
MODEL = {"hidden_size": 32, "intermediate_size": 48, "n_heads": 8, "n_kv_heads": 4, "n_layers": N_LAYERS}

RECOMPUTED = {"": (), "full": ("engine.gpu.activation_checkpointing=full",)} | {
    "selective": ("engine.gpu.activation_checkpointing=selective",)
}
FSDP_OPTIONS = {"": (), "each": ("engine.gpu.reduce_each_micro_batch=true",)} | {
    "keep": ("engine.gpu.reshard_after_forward=false",)
}
OPTIMIZERS = {"adamw": (), "muon": ("optimizer.name=muon",)}


@dataclass(frozen=True)
class Cell:
    """One cell: its name, ranks and recipe."""

    name: str
    ranks: int
    optimizer: str
    tied: bool
    micro_batch_size: int
    sets: tuple[str, ...]


def cells() -> list[Cell]:
    """Every mesh x optimizer x tied; what is left turns with them."""
    found = []
    meshes = itertools.product(PIPELINES, CONTEXTS, TENSORS, DATA, OPTIMIZERS, (False, True))
    for index, (pp, cp, tp, dp, optimizer, tied) in enumerate(meshes):
        ranks = 2 ** sum(map(bool, (pp, cp, tp))) * DATA_RANKS[dp]
        if ranks > MAX_RANKS:
            continue
        draw = random.Random(index)
        recompute, fsdp = draw.choice(list(RECOMPUTED)), draw.choice(list(FSDP_OPTIONS))
        micro_batch_size = draw.choice((1, 2))
        if pp == "interleaved" and ROWS % (2 * micro_batch_size * DATA_RANKS[dp]):
            micro_batch_size = 1  # an interleaved pipeline needs a multiple of its two stages on each data rank
        sharded = FSDP_OPTIONS[fsdp] if cp or dp else ()
        sets = PIPELINES[pp] + CONTEXTS[cp] + TENSORS[tp] + DATA[dp] + RECOMPUTED[recompute] + sharded
        names = [pp, cp, tp, dp, optimizer, "tied" if tied else "untied", recompute, fsdp if sharded else ""]
        name = "-".join([one for one in names if one] + [f"micro{micro_batch_size}"])
        found.append(Cell(name, ranks, optimizer, tied, micro_batch_size, sets + OPTIMIZERS[optimizer]))
    return found


CELLS = {cell.name: cell for cell in cells()}
SAMPLE = random.Random(int(os.environ.get("LT_SEED", "20"))).sample(sorted(CELLS), N_SAMPLED)


def train(cell: Cell) -> TrainResult:
    """One rank's training, in that rank."""
    optimizer = {"beta1": BETA1, "grad_clip": CLIP, "weight_decay": 0.1, "z_loss": 0.01}
    model = {**MODEL, "tie_word_embeddings": cell.tied}
    engine = layouts.open_engine(*cell.sets, model=model, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB, optimizer=optimizer)
    batches = layouts.global_batches(STEPS, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
    (rest,) = layouts.global_batches(1, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB, seed=9)
    return layouts.train_steps(engine, batches, rest, cell.micro_batch_size, lambda: engine.state().shards)


@pytest.fixture(scope="module")
def alone(ranks):
    """One process with attention by the formula and one micro-batch, per optimizer and tied or not."""
    done: dict[tuple[str, bool], TrainResult] = {}

    def trained(cell: Cell) -> TrainResult:
        key = (cell.optimizer, cell.tied)
        if key not in done:
            sets = ("engine.gpu.attention=reference", *OPTIMIZERS[cell.optimizer])
            (done[key],) = ranks.run(train, Cell("one", 1, cell.optimizer, cell.tied, ROWS, sets), ranks=1)
        return done[key]

    return trained


def first_gradients(tensors: NamedTensors, norm: float) -> NamedTensors:
    """The gradients of the first step: a first moment after it is the clipped gradient times 1 - beta1."""
    scale = min(1.0, CLIP / (norm + 1e-6)) * (1 - BETA1)
    return {key: tensor / scale for key, tensor in tensors.items() if key[0] == "exp_avg"}


def largest_error(found: NamedTensors, wanted: NamedTensors) -> float:
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[key] - wanted[key]).max() / np.abs(wanted[key]).max()) for key in wanted)


def prove(ranks, alone, cell: Cell) -> None:
    """Train the cell and one process and compare."""
    one, found = alone(cell), ranks.run(train, cell, ranks=cell.ranks, timeout_s=300)
    for rank in found:
        assert rank.losses == found[0].losses
        assert rank.grad_norms == found[0].grad_norms
        assert rank.validation == found[0].validation
    before, after_1, after_all = (
        (assemble([rank.states[i] for rank in found]), assemble([one.states[i]])) for i in range(3)
    )
    assert [key for key in before[1] if before[0][key].tobytes() != before[1][key].tobytes()] == []
    assert found[0].losses == pytest.approx(one.losses, rel=1e-12)
    assert found[0].grad_norms == pytest.approx(one.grad_norms, rel=1e-10)
    assert min(one.grad_norms) > CLIP, "clipping must be at work"
    assert found[0].validation == pytest.approx(one.validation, rel=1e-12)
    scores = assemble_scores(found), assemble_scores([one])
    np.testing.assert_allclose(scores[0][0], scores[1][0], rtol=1e-9)
    assert (scores[0][1] == scores[1][1]).all()
    moments = (first_gradients(after_1[0], found[0].grad_norms[0]), first_gradients(after_1[1], one.grad_norms[0]))
    if moments[1]:
        assert largest_error(*moments) <= 1e-10
    assert_near(*after_all, 1e-9)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sampled_mesh_trains_as_one_process(ranks, alone, name: str) -> None:
    prove(ranks, alone, CELLS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_a_mesh_trains_as_one_process(ranks, alone, name: str) -> None:
    prove(ranks, alone, CELLS[name])
