"""The cpu backend on every kind of layout against one process of lt-model, in float64.

The one process is `lt_model.decoder.Decoder` with attention by the formula, autograd and `torch.optim.AdamW`; nothing
of the engine is in it. Gradients, weights, losses and norms of three steps agree to ten digits, per parameter:
||difference|| <= 1e-10 ||gradient||. Documents are of uneven length, some rows have hardly a label, vocabularies are
such that ZeRO-1 has to pad, and stages have unlike numbers of layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from dense_families import MODELS
from neuron_engine import neuron_engine

from lt_model import ModelConfig
from lt_model.families import FAMILIES
from lt_test_helpers import layouts
from lt_test_helpers.layouts import (
    NamedTensors,
    StateSlice,
    TrainResult,
    assemble,
    assemble_scores,
    assert_near,
    learning_rate_at,
)
from lt_trainer.config.recipe import load
from lt_trainer.config.sections import ParallelOptions
from lt_trainer.engine import StepBatch, StepMetrics
from lt_trainer_neuron.engine import NeuronEngine
from lt_trainer_neuron.nxd import backend

STEPS, ROWS, SEQ_LEN = 3, 8, 16
BETA1, CLIP, DECAY = 0.8, 0.3, 0.1
NEAR, NEAR_WEIGHTS = 1e-10, 1e-9


def shape(kv_heads: int = 8, vocab: int = 62, layers: int = 2, tied: bool = False) -> ModelConfig:
    """Return a little Llama."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=40,
        n_heads=8,
        n_kv_heads=kv_heads,
        n_layers=layers,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=tied,
    )


def global_batches(n_steps: int, vocab: int, seed: int = 0) -> list[StepBatch]:
    return layouts.global_batches(n_steps, rows=ROWS, seq_len=SEQ_LEN, vocab=vocab, seed=seed)


def open_engine(config: ModelConfig, *sets: str) -> NeuronEngine:
    optimizer = {"beta1": BETA1, "grad_clip": CLIP, "weight_decay": DECAY}
    base = {"optimizer": optimizer, "engine": {"neuron": {"cpu_dtype": "float64"}}}
    return neuron_engine(config, *sets, rows=ROWS, seq_len=SEQ_LEN, base=base)


@dataclass(frozen=True)
class Alone:
    """What one process of lt-model computes: the numbers of each step, gradients of the first, weights at both ends."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    start: dict[str, np.ndarray]
    end: dict[str, np.ndarray]
    validation: tuple[float, int]
    log_probs: np.ndarray
    """Of the validation's labels by all logits, 0 where there is none: [rows, T]."""
    is_greedy: np.ndarray


def train_alone(config: ModelConfig, z_loss: float = 0.0) -> Alone:
    """Three steps by lt-model, autograd and torch's AdamW."""
    from lt_model.decoder import Decoder
    from lt_model.init import init_model
    from lt_model.params import param_specs

    model = Decoder(config, attention="reference").double()
    init_model(model, seed=load(base={"data": {"store": "unused"}}).recipe.run.seed)
    table, named = {p.name: p for p in param_specs(config)}, dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if table[n].decay is decay], "weight_decay": DECAY * decay}
        for decay in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(BETA1, 0.95), eps=1e-8)

    def tensors_of(batch: StepBatch) -> list[torch.Tensor]:
        arrays = (batch.input_ids, batch.position_ids, batch.doc_ids, batch.labels)
        return [torch.from_numpy(array[0]).long() for array in arrays]

    def values(tensors: Any) -> dict[str, np.ndarray]:
        return {name: tensor.detach().numpy().copy() for name, tensor in tensors}

    def loss_of(batch: StepBatch, z: float) -> Any:
        ids, positions, docs, labels = tensors_of(batch)
        return model(ids, position_ids_BT=positions, doc_ids_BT=docs, labels_BT=labels, z_loss=z, return_parts=True)

    losses, norms, gradients, start = [], [], {}, values(named.items())
    for step, batch in enumerate(global_batches(STEPS, config.vocab_size)):
        parts = loss_of(batch, z_loss)
        (parts.total / batch.valid_tokens).backward()
        losses.append(float(parts.cross_entropy / batch.valid_tokens))
        if not gradients:
            gradients = values((name, p.grad) for name, p in named.items())
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(named.values()), CLIP)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step)
        optimizer.step()
        optimizer.zero_grad()
    (rest,) = global_batches(1, config.vocab_size, seed=9)
    with torch.no_grad():
        validation = float(loss_of(rest, 0.0).cross_entropy), int((rest.labels != -100).sum())
        ids, positions, docs, labels = tensors_of(rest)
        logits = model(ids, position_ids_BT=positions, doc_ids_BT=docs)
        log_probs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels >= 0)
    scores = log_probs.numpy(), (logits.argmax(-1) == labels).numpy()
    return Alone(losses, norms, gradients, start, values(named.items()), validation, *scores)


def train(config: ModelConfig, sets: tuple[str, ...], micro_batch_size: int) -> TrainResult:
    """One rank's training, in that rank."""
    engine = open_engine(config, *sets)
    (rest,) = global_batches(1, config.vocab_size, seed=9)
    return layouts.train_steps(
        engine, global_batches(STEPS, config.vocab_size), rest, micro_batch_size, engine.iter_model_shards
    )


@pytest.fixture(scope="module")
def alone(ranks) -> Callable[..., Alone]:
    """The one process that layouts are compared with."""
    done: dict[Any, Alone] = {}

    def trained(*key: Any) -> Alone:
        if key not in done:
            (done[key],) = ranks.run(train_alone, *key, ranks=1)
        return done[key]

    return trained


def assert_group_near(found: NamedTensors, wanted: dict[str, np.ndarray], group: str, near: float) -> None:
    got = {key: tensor for key, tensor in found.items() if key[0] == group}
    assert_near(got, {(group, name): tensor for name, tensor in wanted.items()}, near)


def compare(one: Alone, found: list[TrainResult]) -> None:
    for rank in found:
        assert rank.losses == found[0].losses
        assert rank.grad_norms == found[0].grad_norms
        assert rank.validation == found[0].validation
        assert rank.state_bytes[0] == rank.state_bytes[1]
    before, after_1, after_all = (assemble([rank.states[i] for rank in found]) for i in range(3))
    assert {key[1]: tensor.tobytes() for key, tensor in before.items() if key[0] == "weights"} == {
        name: tensor.tobytes() for name, tensor in one.start.items()
    }
    assert found[0].losses == pytest.approx(one.losses, rel=1e-12)
    assert found[0].grad_norms == pytest.approx(one.norms, rel=NEAR)
    assert min(one.norms) > CLIP, "clipping must be at work"
    assert found[0].validation == (pytest.approx(one.validation[0], rel=1e-12), one.validation[1])
    log_probs, is_greedy = assemble_scores(found)
    np.testing.assert_allclose(log_probs[0], one.log_probs, rtol=1e-10)
    assert (is_greedy[0] == one.is_greedy).all()
    # After the first step exp_avg is the clipped gradient times 1 - beta1.
    scale = min(1.0, CLIP / (one.norms[0] + 1e-6)) * (1 - BETA1)
    moments = {key: tensor / scale for key, tensor in after_1.items() if key[0] == "exp_avg"}
    assert_group_near(moments, one.gradients, "exp_avg", NEAR)
    assert_group_near(after_all, one.end, "weights", NEAR_WEIGHTS)


TP2, TP4, PP2 = "parallel.tp=2", "parallel.tp=4", "parallel.pp=2"
SP, WHOLE = "parallel.sequence_parallel=true", "engine.neuron.zero1=false"
GQA2 = ("engine.neuron.qkv_linear=true", "engine.neuron.kv_size_multiplier=2")
FUSED = "engine.neuron.fuse_qkv=true"
GROUPED = shape(kv_heads=2, vocab=60)

LAYOUTS: dict[str, tuple[int, int, ModelConfig, tuple[str, ...]]] = {
    # name: ranks, rows of a micro-batch, the model, options
    "gqa-tp4-m2": (4, 8, GROUPED, (TP4, *GQA2)),
    "gqa-tp4-m2-fused-sp": (4, 4, GROUPED, (TP4, SP, *GQA2, FUSED)),
    "gqa-tp2-dp2-m1": (4, 2, GROUPED, (TP2, "engine.neuron.qkv_linear=true")),
    "tp2-pp2-uneven": (4, 2, shape(layers=3), (TP2, PP2)),
    "tp2-pp2-uneven-sp-tied": (4, 4, shape(layers=3, tied=True), (TP2, PP2, SP)),
    "pp3-dp1": (3, 4, shape(kv_heads=4, layers=4), ("parallel.pp=3",)),  # fewer micro-batches than stages
    "tp2-dp2-zero1": (4, 2, shape(), (TP2,)),
    "tp2-dp2-whole": (4, 2, shape(tied=True), (TP2, WHOLE)),
    "dp4-zero1-tied": (4, 1, shape(kv_heads=4, tied=True), ()),
}
WIDE: dict[str, tuple[int, int, ModelConfig, tuple[str, ...]]] = {
    "tp4-pp2-m2-fused-sp-tied": (8, 2, shape(kv_heads=2, vocab=60, layers=3, tied=True), (TP4, PP2, SP, *GQA2, FUSED)),
    "tp2-pp2-dp2": (8, 1, shape(layers=3), (TP2, PP2)),
    "tp2-pp2-dp2-whole-tied": (8, 2, shape(layers=3, tied=True), (TP2, PP2, SP, WHOLE)),
}


AXES = {"tp": (TP2,), "sp": (TP2, SP), "pp": (PP2,), "dp": ()}
FAMILY_MESHES = {
    "tp-pp": ("llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "gemma3_text"),
    "sp-dp": ("llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "gemma3_text"),
    "tp-dp": ("smollm3", "gemma2", "phi3", "gpt_neox", "granite", "starcoder2"),
    "sp-pp": ("smollm3", "gemma2", "phi3", "gpt_neox", "granite", "starcoder2"),
    "pp-dp": ("qwen3", "granite"),
}
"""Meshes of four ranks, and the families that train on each."""


def train_families(families: Sequence[str], sets: tuple[str, ...], micro_batch_size: int) -> list[TrainResult]:
    """In a rank: each family's training, all in one process group."""
    torch.distributed.destroy_process_group = lambda: None
    found = []
    for family in families:
        found.append(train(MODELS[family], sets, micro_batch_size))
        backend.init_process_group = lambda *_: None  # the ranks have met
    return found


def train_families_alone() -> dict[str, Alone]:
    return {family: train_alone(config) for family, config in MODELS.items()}


@pytest.fixture(scope="module")
def families_alone(ranks) -> dict[str, Alone]:
    (found,) = ranks.run(train_families_alone, ranks=1)
    return found


def compare_families(ranks, families_alone, families: Sequence[str], mesh: str) -> None:
    sets = [override for axis in mesh.split("-") for override in AXES[axis]]
    results = ranks.run(train_families, families, tuple(sets), 2, ranks=4)
    for family, *found in zip(families, *results, strict=True):
        compare(families_alone[family], found)


@pytest.mark.parametrize("mesh", FAMILY_MESHES)
def test_families_train_as_one_process_of_lt_model(ranks, families_alone, mesh: str) -> None:
    """A bias starts at 0 and counts from the second step on."""
    compare_families(ranks, families_alone, FAMILY_MESHES[mesh], mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", FAMILY_MESHES)
def test_every_family_trains_as_one_process_of_lt_model(ranks, families_alone, mesh: str) -> None:
    compare_families(ranks, families_alone, list(MODELS), mesh)


def test_each_dense_family_is_on_each_axis_and_each_axis_with_each_other() -> None:
    assert MODELS.keys() == {family for family, row in FAMILIES.items() if "n_experts" not in row.keys}
    listed = {
        (family, axis) for mesh, families in FAMILY_MESHES.items() for axis in mesh.split("-") for family in families
    }
    assert [(family, axis) for family in MODELS for axis in AXES if (family, axis) not in listed] == []
    together = {"-".join(pair) for pair in combinations(AXES, 2)} - {"tp-sp"}
    assert together == FAMILY_MESHES.keys()
    degrees = {name for name in ParallelOptions.model_fields if f"parallel.{name}=" in str(AXES)}
    data_degrees = {"n_nodes", "dp_replicate", "dp_shard"}  # follow from the number of ranks
    refused = {"cp", "ep"}
    assert ParallelOptions.model_fields.keys() - degrees == data_degrees | refused


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in WIDE)])
def test_a_layout_trains_as_one_process_of_lt_model(ranks, alone, name: str) -> None:
    n, micro_batch_size, config, sets = (LAYOUTS | WIDE)[name]
    compare(alone(config), ranks.run(train, config, sets, micro_batch_size, ranks=n))


def test_a_z_loss_is_in_the_gradient_and_not_in_the_loss_that_is_told(ranks, alone) -> None:
    config = shape()
    one = alone(config, 0.05)
    compare(one, ranks.run(train, config, (TP2, "optimizer.z_loss=0.05"), 4, ranks=2))
    assert abs(one.norms[0] / alone(config).norms[0] - 1) > 1e-3, "the z-loss must be at work"


def recomputed_flops(config: ModelConfig, *sets: str) -> float:
    """In a rank: what the engine says that a token costs a second time."""
    engine = open_engine(config, *sets)
    engine.close()
    return engine.recomputed_flops_per_token


def test_recomputed_flops_are_those_of_scores_and_values_of_the_keys_that_are_seen(ranks) -> None:
    selective, windows = "engine.neuron.selective_checkpointing=true", MODELS["mistral"]
    for config, keys in ((shape(), SEQ_LEN), (windows, windows.sliding_window)):
        wanted = 4 * config.n_layers * config.n_heads * config.head_width * keys
        assert ranks.run(recomputed_flops, config, selective, ranks=1) == [wanted]
    assert ranks.run(recomputed_flops, config, selective.replace("true", "false"), ranks=1) == [0]


@pytest.mark.parametrize(
    ("config", "sets"),
    [(GROUPED, (TP4,)), (GROUPED, (TP4, FUSED)), (shape(kv_heads=1, tied=True), (TP2, PP2))],
    ids=["tp4", "tp4-fused", "tp2-pp2-tied"],
)
def test_the_norm_counts_copies_of_heads_only_where_nxd_is_to_be_followed(
    ranks, alone, config: ModelConfig, sets: tuple[str, ...]
) -> None:
    """NxD counts the gradient of each copy: with m copies the squares of k and v are in its norm m times."""
    one: Alone = alone(config)
    found = ranks.run(train, config, (*sets, *GQA2, "engine.neuron.nxd_grad_norm=true"), ROWS, ranks=4)
    squares = {name: np.square(gradient).sum() for name, gradient in one.gradients.items()}
    once = sum(squares.values())
    copied = sum(square for name, square in squares.items() if "k_proj" in name or "v_proj" in name)
    assert copied > 0.01 * once
    assert one.norms[0] == pytest.approx(once**0.5, rel=NEAR)
    assert [rank.grad_norms[0] for rank in found] == pytest.approx([(once + copied) ** 0.5] * 4, rel=NEAR)


@pytest.mark.parametrize(
    ("dtype", "n", "config", "sets"),
    [
        pytest.param("bfloat16", 2, shape(), (TP2, SP), id="bfloat16-tp2-sp"),
        pytest.param("bfloat16", 4, shape(layers=3, tied=True), (PP2,), id="bfloat16-pp2-dp2"),
        pytest.param("float32", 4, shape(layers=3, tied=True), (PP2,), id="float32-pp2-dp2", marks=pytest.mark.slow),
    ],
)
def test_narrow_layouts_stay_near_one_process(
    ranks, alone, dtype: str, n: int, config: ModelConfig, sets: tuple[str, ...]
) -> None:
    """Activations round; masters and moments are float32 and equal on all ranks that hold the same.

    Losses and norms, and sum and tokens of a validation, are near those of one process, and the same on all ranks.
    """
    near, near_norms = (1e-2, 5e-2) if dtype == "bfloat16" else (1e-5, 1e-4)
    one: Alone = alone(config)
    found: list[TrainResult] = ranks.run(train, config, (f"engine.neuron.cpu_dtype={dtype}", *sets), 2, ranks=n)
    assert found[0].losses == pytest.approx(one.losses, rel=near)
    assert found[0].grad_norms == pytest.approx(one.norms, rel=near_norms)
    assert found[0].losses != pytest.approx(one.losses, rel=1e-9), "nothing was rounded"
    for rank in found:
        assert (rank.losses, rank.grad_norms) == (found[0].losses, found[0].grad_norms)
        assert rank.validation == found[0].validation
    assert found[0].validation == (pytest.approx(one.validation[0], rel=near), one.validation[1])
    assert {piece.dtype for rank in found for piece in rank.states[0]} == {"F32"}
    before = assemble([rank.states[0] for rank in found])
    for name, tensor in one.start.items():
        assert (before["weights", name] == tensor.astype(np.float32)).all(), "masters start unrounded"


def interrupted(
    config: ModelConfig, sets: tuple[str, ...], folder: str
) -> tuple[str, list[StateSlice], list[StateSlice], list[float]]:
    engine = open_engine(config, *sets)
    return layouts.train_save_train(engine, global_batches(3, config.vocab_size), folder, engine.iter_model_shards)


def resumed(
    config: ModelConfig, sets: tuple[str, ...], path: str
) -> tuple[list[StateSlice], list[StateSlice], list[float]]:
    engine = open_engine(config, "run.seed=7", *sets)
    return layouts.restore_and_train(engine, global_batches(3, config.vocab_size)[2], path, engine.iter_model_shards)


@pytest.mark.parametrize(
    ("config", "first", "second"),
    [
        (GROUPED, (4, (TP4, *GQA2, FUSED)), (2, ())),
        (shape(layers=3, tied=True), (4, (PP2,)), (4, (TP2, SP))),
        (shape(), (4, (TP2,)), (2, (TP2, WHOLE))),
    ],
    ids=["tp4-fused-to-dp2", "pp2-dp2-tied-to-tp2-dp2", "tp2-dp2-zero1-to-tp2-dp1"],
)
def test_a_checkpoint_of_one_layout_goes_on_in_another(ranks, tmp_path, config: ModelConfig, first, second) -> None:
    """The state has the same bits; the step after it the same loss and weights as the layout that was left."""
    (n, sets), (m, others) = first, second
    left = ranks.run(interrupted, config, sets, str(tmp_path), ranks=n)
    taken = ranks.run(resumed, config, others, left[0][0], ranks=m)
    saved, found = assemble([rank[1] for rank in left]), assemble([rank[0] for rank in taken])
    assert saved.keys() == found.keys()
    assert {group for group, _ in saved} == {"weights", "exp_avg", "exp_avg_sq"}
    assert [key for key in saved if saved[key].tobytes() != found[key].tobytes()] == []
    assert taken[0][2] == pytest.approx(left[0][3][2:], rel=1e-12)
    after = [assemble([rank[i] for rank in side]) for side, i in ((taken, 1), (left, 2))]
    weights = {name: tensor for (group, name), tensor in after[1].items() if group == "weights"}
    assert_group_near(after[0], weights, "weights", NEAR_WEIGHTS)


def with_a_bad_step(
    config: ModelConfig, sets: tuple[str, ...]
) -> tuple[list[StepMetrics], list[list[StateSlice]], int]:
    engine = open_engine(config, *sets)
    batches = global_batches(3, config.vocab_size)
    return layouts.train_with_nonfinite_step(
        engine, batches, engine.iter_model_shards, lambda: engine.backend.step_count
    )


def test_a_step_that_one_rank_finds_infinite_is_skipped_by_all(ranks) -> None:
    answers = ranks.run(with_a_bad_step, shape(layers=3), (PP2,), ranks=4)
    for numbers, (before, after, later), steps in answers:
        assert [one.is_finite for one in numbers] == [True, False, True]
        assert numbers[::2] == answers[0][0][::2], "all decide by the same numbers"
        assert [a.name for a, b in zip(before, after, strict=True) if a.values.tobytes() != b.values.tobytes()] == []
        assert any((a.values != b.values).any() for a, b in zip(after, later, strict=True))
        assert steps == 2
