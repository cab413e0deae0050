"""Each loss term, each field of the optimizer and each precision on each axis of the mesh, against one process.

An axis is two ranks. Fields are compared in float64, where nothing may differ in ten digits: a recipe gives every field
of `[optimizer]` a value that is not its default, and each of them alone moves the weights of one process, so that a
field which ranks leave out on some axis shows. A precision is compared by its rounding: gradients and weights are as
far from those of float64 as in one process, not further and not nearer.

All ranks of an axis train all cases one after the other, as making ranks takes longer than the little model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from lt_model import ModelConfig
from lt_test_helpers import layouts
from lt_test_helpers.layouts import NamedTensors, StateSlice, assemble, assert_near
from lt_trainer.config.recipe import load
from lt_trainer_gpu import engine as engine_module

STEPS, ROWS, SEQ_LEN, VOCAB = 3, 4, 32, 61
MODEL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "n_heads": 2, "n_kv_heads": 2, "n_layers": 4}
CONFIG = ModelConfig(vocab_size=VOCAB, max_position_embeddings=SEQ_LEN, tie_word_embeddings=False, **MODEL)

AXES = {
    "tp": ("parallel.tp=2",),
    "sp": ("parallel.tp=2", "parallel.sequence_parallel=true"),
    "cp": ("parallel.cp=2",),
    "pp": ("parallel.pp=2",),
    "dp_shard": (),
    "dp_replicate": ("parallel.dp_replicate=2",),
}
ADAMW = {
    **{"z_loss": "0.05", "weight_decay": "0.3", "decay_embeddings": "true", "grad_clip": "0.3"},
    **{"beta1": "0.8", "beta2": "0.7", "eps": "1e-3"},
    **{"lr_scale.embedding": "0.5", "lr_scale.head": "2", "lr_scale.norm": "3", "lr_scale.matrices": "0.7"},
}
MUON = {"name": "muon", "momentum": "0.8", "nesterov": "false", "adjust_lr": "original"} | {
    "newton_schulz_steps": "3",
    "newton_schulz_dtype": "float32",
}
F32, BF16 = "engine.gpu.dtype=float32", "engine.gpu.dtype=bfloat16"
PRECISIONS: dict[str, tuple[tuple[str, ...], float, float]] = {
    # name: options, least and most that the gradients of one process are off
    "float32": ((F32,), 1e-8, 1e-6),
    "bfloat16": ((BF16,), 3e-3, 1.5e-2),
    "bfloat16-moments": ((F32, "optimizer.moments_dtype=bfloat16"), 1.2e-3, 2.2e-3),
    "bfloat16-weights": ((BF16, "optimizer.weights_dtype=bfloat16"), 3e-3, 1.5e-2),
    "fp8-tensorwise": ((F32, "engine.gpu.fp8=tensorwise"), 2e-2, 3.5e-2),
    "fp8-rowwise": ((F32, "engine.gpu.fp8=rowwise"), 1.2e-2, 2.2e-2),
}


def sets_of(fields: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"optimizer.{name}={value}" for name, value in fields.items())


CASES = {"adamw": sets_of(ADAMW), "muon": sets_of(ADAMW | MUON), "float64": ()} | {
    name: sets for name, (sets, *_) in PRECISIONS.items()
}


@dataclass(frozen=True)
class Outcome:
    """What a rank has.

    Metrics by step and of a validation, its first moments after the first step, its weights before and at the end.
    """

    losses: list[float]
    grad_norms: list[float]
    validation: tuple[float, int]
    moments: list[StateSlice]
    start: list[StateSlice]
    end: list[StateSlice]


def train_cases(axis: tuple[str, ...], cases: dict[str, tuple[str, ...]]) -> dict[str, Outcome]:
    """In a rank: the outcome of each case."""
    *batches, rest = layouts.global_batches(STEPS + 1, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
    found = {}
    for name, sets in cases.items():
        engine = layouts.open_engine(*axis, *sets, model=MODEL, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
        engine_module.init_process_group = lambda *_: None  # the ranks have met

        def slices(*groups: str, engine: Any = engine) -> list[StateSlice]:
            return layouts.copy_slices(shard for shard in engine.state().shards if shard.group in groups)

        start, moments, metrics = slices("weights"), [], []
        for step, batch in enumerate(batches):
            part = layouts.rank_batch(batch, engine, 2)
            metrics += engine.fetch_metrics([engine.step(part, layouts.learning_rate_at(step))])
            moments = moments or slices("exp_avg", "momentum")
        own = layouts.rank_batch(rest, engine, 2)
        validation = engine.validate([replace(own, valid_tokens=int((own.labels != -100).sum()))])
        losses, norms = [one.loss for one in metrics], [one.grad_norm for one in metrics]
        found[name] = Outcome(losses, norms, validation, moments, start, slices("weights"))
    return found


@pytest.fixture(scope="module")
def alone(ranks) -> dict[str, Outcome]:
    """One process."""
    (found,) = ranks.run(train_cases, (), CASES, ranks=1)
    return found


@pytest.fixture(scope="module")
def on_axis(ranks) -> Callable[[str], list[dict[str, Outcome]]]:
    """Outcomes by rank of an axis."""
    done: dict[str, list[dict[str, Outcome]]] = {}

    def trained(axis: str) -> list[dict[str, Outcome]]:
        if axis not in done:
            done[axis] = ranks.run(train_cases, AXES[axis], CASES, ranks=2)
        return done[axis]

    return trained


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_field_of_the_optimizer_does_what_it_does_in_one_process(alone, on_axis, axis: str, optimizer) -> None:
    one, found = alone[optimizer], [rank[optimizer] for rank in on_axis(axis)]
    assert min(one.grad_norms) > float(ADAMW["grad_clip"]), "clipping must be at work"
    for rank in found:
        assert rank.losses == pytest.approx(one.losses, rel=1e-12)
        assert rank.grad_norms == pytest.approx(one.grad_norms, rel=1e-10)
        assert rank.validation == (pytest.approx(one.validation[0], rel=1e-12), one.validation[1])
    assert_near(assemble(rank.moments for rank in found), assemble([one.moments]), 1e-10)
    assert_near(assemble(rank.end for rank in found), assemble([one.end]), 1e-9)


def leaves(options: Any) -> set[str]:
    """Names of the fields of `[optimizer]`."""
    scales = {f"lr_scale.{name}" for name in vars(options.lr_scale)}
    return {name for name in vars(options) if name != "lr_scale"} | scales


def test_every_field_moves_the_weights(ranks) -> None:
    """Else its comparison says nothing; the z-loss moves weights and stays out of the loss that is told."""
    recipe = load(base={"data": {"store": "unused"}}).recipe
    assert leaves(recipe.optimizer) == {*ADAMW, *MUON, "lr", "moments_dtype", "weights_dtype"}
    without = {name: sets_of({k: v for k, v in ADAMW.items() if k != name}) for name in ADAMW}
    without |= {name: sets_of(ADAMW | {k: v for k, v in MUON.items() if k != name}) for name in MUON if name != "name"}
    (found,) = ranks.run(train_cases, (), {"adamw": CASES["adamw"], "muon": CASES["muon"], **without}, ranks=1)
    for name in (*without, "muon"):
        full = found["muon" if name in MUON else "adamw"]
        assert distance(assemble([found[name].end]), assemble([full.end])) > 1e-6, name
    assert found["z_loss"].losses[0] == found["adamw"].losses[0]


def distance(found: NamedTensors, wanted: NamedTensors) -> float:
    """Relative distance of all tensors together."""
    assert found.keys() == wanted.keys()
    squares = sum(float(np.square(found[key] - wanted[key]).sum()) for key in wanted)
    return (squares / sum(float(np.square(tensor).sum()) for tensor in wanted.values())) ** 0.5


def wide(slices: list[StateSlice]) -> list[StateSlice]:
    """In float64, bfloat16 too."""

    def values(one: StateSlice) -> np.ndarray:
        narrow = one.dtype == "BF16"
        return ((one.values.astype(np.uint32) << 16).view(np.float32) if narrow else one.values).astype(np.float64)

    return [StateSlice(one.group, one.name, "F64", one.shape, one.offset, values(one)) for one in slices]


def errors(found: list[Outcome], exact: Outcome) -> dict[str, float]:
    """Distances to float64: of gradients all together; of weights that of 99 %, as AdamW's first steps are a sign.

    So a few weights whose gradients are near 0 would outweigh all others.
    """
    end, moments = (assemble(wide(getattr(rank, name)) for rank in found) for name in ("end", "moments"))
    exact_end = assemble([exact.end])
    of_weights = np.concatenate([np.abs(end[key] - exact_end[key]).ravel() for key in exact_end])
    return {
        "gradients": distance(moments, assemble([exact.moments])),
        "weights": float(np.quantile(of_weights, 0.99)),
        "losses": max(abs(a - b) for a, b in zip(found[0].losses, exact.losses, strict=True)),
        "validation": abs(found[0].validation[0] - exact.validation[0]),
    }


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_rounds_as_it_does_in_one_process(alone, on_axis, axis: str, precision: str) -> None:
    """Errors of gradients and weights are of tens of thousands of numbers; those of a loss are of one number."""
    found, (_, least, most) = [rank[precision] for rank in on_axis(axis)], PRECISIONS[precision]
    one, ours = (errors(outcomes, alone["float64"]) for outcomes in ([alone[precision]], found))
    assert least < one["gradients"] < most
    assert ours["gradients"] == pytest.approx(one["gradients"], rel=0.15)
    assert ours["weights"] == pytest.approx(one["weights"], rel=0.3 if precision == "float32" else 0.1)
    assert ours["losses"] < 4 * one["losses"]
    assert 0 < ours["validation"] < 1e-2 * alone["float64"].validation[0]
    for rank in found:
        assert (rank.losses, rank.grad_norms, rank.validation) == (
            found[0].losses,
            found[0].grad_norms,
            found[0].validation,
        )
