"""Weights in bfloat16 with stochastic rounding: the same bits on every mesh and after a resume, and no lost updates."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lt_ckpt import Checkpoint
from lt_model import ModelConfig, param_specs, stochastic_rounding
from lt_model.init import init_slice
from lt_test_helpers import layouts
from lt_test_helpers.layouts import StateSlice, TrainResult, assemble, copy_slices
from lt_trainer.config.optimizer_section import OptimizerOptions
from lt_trainer.config.recipe import load
from lt_trainer.optimizers import OPTIMIZERS
from lt_trainer.optimizers.driver import OptimizerDriver
from lt_trainer.optimizers.spec import ParamSlice
from lt_trainer_gpu import optimizer
from lt_trainer_gpu.engine import GpuEngine
from lt_trainer_gpu.optimizer import GpuOptimizer

ROWS, SEQ_LEN, VOCAB = 8, 16, 61
MODEL = {"hidden_size": 32, "intermediate_size": 44, "n_heads": 8, "n_kv_heads": 4, "n_layers": 2}
CONFIG = ModelConfig(vocab_size=VOCAB, max_position_embeddings=SEQ_LEN, tie_word_embeddings=False, **MODEL)
SPECS = {spec.name: spec for spec in param_specs(CONFIG)}


def recipe_of(*sets: str):
    base = {
        "model": {**MODEL, "tie_word_embeddings": False},
        "data": {"store": "unused", "seq_len": SEQ_LEN},
        "batch": {"global_batch_size": ROWS, "micro_batch_size": 1},
        "optimizer": {"weights_dtype": "bfloat16", "weight_decay": 0.1},
        "schedule": {"max_steps": 9, "warmup_steps": 1},
        "engine": {"gpu": {"device": "cpu", "dtype": "bfloat16"}},
    }
    return load(base=base, overrides=sets).recipe


def open_engine(*sets: str) -> GpuEngine:
    optimizer = {"weights_dtype": "bfloat16", "weight_decay": 0.1}
    return layouts.open_engine(
        *sets, model=MODEL, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB, dtype="bfloat16", optimizer=optimizer
    )


def gradient(name: str, step: int) -> torch.Tensor:
    """Return the whole gradient of a step, float32, of the size of eps."""
    return (
        init_slice(SPECS[name], 100 + step)
        if isinstance(SPECS[name].init, float)
        else torch.full(SPECS[name].shape, 1e-3 * step)
    )


def given_updates(sets: tuple[str, ...]) -> list[StateSlice]:
    """In a rank: three steps of the optimizer alone, with this rank's slices of the same float32 gradients."""
    engine = open_engine(*sets)
    for step in (1, 2, 3):
        shards = engine._state.weight_shards()
        gradients = {
            name: gradient(name, step)[
                tuple(slice(at, at + n) for at, n in zip(part.offset, part.local.shape, strict=True))
            ].contiguous()
            for name, part in shards.items()
        }
        weights = {name: part.local for name, part in shards.items()}
        engine._state.optimizer.step(weights, gradients, 1e-3, torch.tensor(step != 2), torch.tensor(0.5))
    found = copy_slices(engine.state().shards)
    engine.close()
    return found


TP, SP, HSDP = "parallel.tp=2", "parallel.sequence_parallel=true", "parallel.dp_replicate=2"


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_equal_updates_are_rounded_equally_on_every_mesh(ranks: Callable[..., list], name: str) -> None:
    optimizer = (f"optimizer.name={name}", "optimizer.moments_dtype=bfloat16")
    (alone,) = ranks.run(given_updates, optimizer, ranks=1)
    wanted = assemble([alone])
    assert {one.dtype for one in alone} == {"BF16"}
    for n, sets in ((2, ()), (2, (TP, SP)), (4, (TP,)), (4, (HSDP,))):
        found = assemble(ranks.run(given_updates, (*optimizer, *sets), ranks=n))
        assert [key for key in wanted if wanted[key].tobytes() != found[key].tobytes()] == [], (n, sets)


def saved_by(folder: str) -> tuple[str, list[StateSlice], list[StateSlice], list[float]]:
    engine = open_engine()
    batches = layouts.global_batches(3, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
    return layouts.train_save_train(engine, batches, folder, lambda: engine.state().shards)


def resumed_by(path: str) -> tuple[list[StateSlice], list[StateSlice], list[float]]:
    engine = open_engine()
    batch = layouts.global_batches(3, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)[2]
    return layouts.restore_and_train(engine, batch, path, lambda: engine.state().shards)


@pytest.mark.parametrize("n", [1, 2])
def test_a_resumed_run_has_the_same_bits(ranks: Callable[..., list], tmp_path: Path, n: int) -> None:
    one = ranks.run(saved_by, str(tmp_path), ranks=n)
    two = ranks.run(resumed_by, one[0][0], ranks=n)
    dtypes = {(s.group, s.dtype) for rank in one for s in rank[1]}
    assert dtypes == {("weights", "BF16"), ("exp_avg", "F32"), ("exp_avg_sq", "F32")}
    assert set(Checkpoint.open(one[0][0]).groups) == {"weights", "exp_avg", "exp_avg_sq"}
    wanted, found = assemble([rank[2] for rank in one]), assemble([rank[1] for rank in two])
    assert [key for key in wanted if wanted[key].tobytes() != found[key].tobytes()] == []
    assert one[0][3][2:] == two[0][2]


def trained_by(sets: tuple[str, ...]) -> TrainResult:
    engine = open_engine("model.n_layers=4", *sets)
    batches = layouts.global_batches(4, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)
    return layouts.train_steps(engine, batches[:3], batches[3], 1, lambda: engine.state().shards)


def test_a_pipeline_has_the_bits_of_one_process(ranks: Callable[..., list]) -> None:
    """Micro-batches are summed in float32, in the same order; the norm's last bit is below what the update reads."""
    (one,) = ranks.run(trained_by, (), ranks=1)
    wanted = assemble([one.states[2]])
    for stages in ((), ("engine.gpu.pipeline_stages_per_rank=2",)):
        found = ranks.run(trained_by, ("parallel.pp=2", *stages), ranks=2)
        ours = assemble([rank.states[2] for rank in found])
        assert [key for key in wanted if wanted[key].tobytes() != ours[key].tobytes()] == []


@pytest.mark.parametrize(("bucket_bytes", "slab"), [(1, 1 << 20), (3000, 1 << 20), (1 << 22, 40), (3000, 40)])
def test_each_number_is_rounded_by_its_own_place(monkeypatch: pytest.MonkeyPatch, bucket_bytes: int, slab: int) -> None:
    """Whatever the rows of a bucket, of a slab of rounding and of a rank's slice are."""
    spec, options = SPECS["lm_head.weight"], OptimizerOptions(weights_dtype="bfloat16")
    whole = init_slice(spec, 1).to(torch.bfloat16)

    def updated(first: int, end: int) -> torch.Tensor:
        weights = {"w": whole[first:end].clone()}
        params = {"w": ParamSlice(specs=(spec,), offset=(first, 0), decay=True)}
        driver = GpuOptimizer(OPTIMIZERS["adamw"], options, params, weights, seed=1)
        for step in (1, 2):
            driver.step(weights, {"w": init_slice(spec, 100 + step)[first:end].clone()}, 1e-3, torch.tensor(True))
        return weights["w"]

    wanted = updated(0, VOCAB)
    monkeypatch.setattr(optimizer, "CPU_TEMPORARY_BYTES", bucket_bytes)
    monkeypatch.setattr(stochastic_rounding, "CHUNK_NUMEL", slab)
    for first, end in ((0, VOCAB), (7, 50)):
        assert torch.equal(updated(first, end), wanted[first:end])


@pytest.mark.parametrize("kind", [GpuOptimizer, OptimizerDriver])
def test_small_updates_are_not_lost(kind: type[OptimizerDriver]) -> None:
    """Updates of a hundredth of the spacing at 1 add up on average; rounding to nearest would keep each weight."""
    spec = SPECS["lm_head.weight"]
    options = OptimizerOptions(weights_dtype="bfloat16", weight_decay=0.0, beta1=0.0, beta2=0.0)
    weights = {"w": torch.ones(spec.shape, dtype=torch.bfloat16)}
    params = {"w": ParamSlice(specs=(spec,), offset=(0, 0), decay=False)}
    driver = kind(OPTIMIZERS["adamw"], options, params, weights, seed=1)
    assert {tensor.dtype for slot in driver.slots.values() for tensor in slot.values()} == {torch.float32}
    for _ in range(100):
        driver.step(weights, {"w": torch.full(spec.shape, -1.0)}, 2**-7 / 100, torch.tensor(True))
    moved = weights["w"].double() - 1
    assert float(moved.mean()) == pytest.approx(2**-7, rel=0.08)  # 1952 weights, each of variance about 2**-14
    before = weights["w"].clone()
    driver.step(weights, {"w": torch.full(spec.shape, float("nan"))}, 1.0, torch.tensor(False))
    assert torch.equal(weights["w"], before)
    assert int(driver.step_count) == 100
