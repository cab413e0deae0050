"""Float8 linear layers: rounding errors of one layer, layouts against one process, a loss curve beside bfloat16."""

import os
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lt_model import LlamaConfig
from lt_model.llama import Llama
from lt_test_helpers import layouts
from lt_test_helpers.layouts import TrainResult, assemble, step_batch
from lt_trainer.config.recipe import load
from lt_trainer.engine import StepMetrics, World
from lt_trainer.errors import RecipeError
from lt_trainer_gpu.checks import check_fp8_device
from lt_trainer_gpu.engine import GpuEngine
from lt_trainer_gpu.fp8 import E4M3, E5M2, LINEAR_CLASSES, apply_fp8, quantize
from lt_trainer_gpu.spec import SPEC

SCALINGS = ("tensorwise", "rowwise")


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error over the whole tensor."""
    return float((found.detach().double() - expected).norm() / expected.norm())


def layer_of(scaling: str, dtype: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor]:
    """A layer, its input and an upstream gradient."""
    torch.manual_seed(0)
    layer = nn.Linear(128, 96, bias=False, dtype=dtype)
    layer.__class__ = LINEAR_CLASSES[scaling]
    return layer, torch.randn(4, 32, 128, dtype=dtype).requires_grad_(), torch.randn(4, 32, 96, dtype=dtype)


# ---- one layer ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("scaling", "bounds"), [("tensorwise", (0.045, 0.075, 0.075)), ("rowwise", (0.045, 0.045, 0.004))]
)
def test_one_layer_is_off_by_the_rounding_of_its_operands(scaling, bounds, dtype) -> None:
    """Two e4m3 operands of normal numbers are off by 3.7 %, e5m2 and e4m3 by 5.8 %; float8 was really used."""
    layer, x, upstream = layer_of(scaling, dtype)
    y = layer(x)
    y.backward(upstream)
    wide_x, wide_w, wide_g = (one.detach().double() for one in (x, layer.weight, upstream))
    assert layer.weight.grad is not None
    assert x.grad is not None
    errors = (
        error(y, wide_x @ wide_w.T),
        error(x.grad, wide_g @ wide_w),
        error(layer.weight.grad, wide_g.flatten(0, 1).T @ wide_x.flatten(0, 1)),
    )
    assert [found < bound for found, bound in zip(errors, bounds, strict=True)] == [True] * 3, errors
    assert min(errors[:2]) > 0.02
    assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (dtype,) * 3


def test_an_outlier_costs_its_own_row_alone() -> None:
    """Beside a token 2^20 times as large, small tokens vanish with one scale, and do not with a scale by row."""
    found = {}
    for scaling in SCALINGS:
        layer, x, _ = layer_of(scaling, torch.float32)
        x = x.detach()
        x[0, 0] *= 2**20
        found[scaling] = error(layer(x)[1:], x[1:].double() @ layer.weight.detach().double().T)
    assert found["rowwise"] < 0.045
    assert found["tensorwise"] > 0.9


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("size", [1e-30, 3e-5, 1.0, 447.9, 448.1, 3e38])
def test_scales_are_powers_of_two_that_use_the_range(scaling, dtype, size) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16) * size if size < 1e38 else torch.full((8, 16), size)
    scaled = quantize(x, dtype, scaling)
    mantissa, _ = torch.frexp(scaled.inverse_scale)
    assert set(mantissa.flatten().tolist()) == {0.5}
    back = scaled.values.float() * scaled.inverse_scale
    assert torch.isfinite(back).all()
    if size > 1e-12:
        assert scaled.values.float().abs().max() > torch.finfo(dtype).max / 2.5
        assert error(back, x.double()) < (0.04 if dtype == E4M3 else 0.08)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_output(scaling: str, bad: float) -> None:
    layer, x, _ = layer_of(scaling, torch.float32)
    x = x.detach()
    x[2, 3, 5] = bad
    assert torch.isnan(layer(x)[2, 3]).all()
    assert torch.equal(layer(torch.zeros_like(x)), torch.zeros(4, 32, 96))


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_compiled_layer_is_the_eager_one(scaling: str) -> None:
    layer, x, upstream = layer_of(scaling, torch.bfloat16)
    found = []
    for forward in (layer.forward, torch.compile(layer.forward, fullgraph=True)):
        layer.weight.grad = x.grad = None
        y = forward(x)
        y.backward(upstream)
        found.append([y.detach(), x.grad, layer.weight.grad])
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("scaling", "recipe_name"), [("tensorwise", "tensorwise"), ("rowwise", "rowwise_with_gw_hp")])
def test_torchaos_emulation_is_off_by_as_much(scaling: str, recipe_name: str) -> None:
    if find_spec("torchao") is None:
        pytest.skip("torchao is not installed: float8 layers are compared with float64 only")
    import dataclasses

    from torchao.float8 import Float8LinearConfig  # pyright: ignore[reportMissingImports] - optional
    from torchao.float8.float8_linear import Float8Linear  # pyright: ignore[reportMissingImports] - optional

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe_name), emulate=True)
    layer, x, upstream = layer_of(scaling, torch.bfloat16)
    plain = nn.Linear(128, 96, bias=False, dtype=torch.bfloat16)
    plain.weight = layer.weight
    errors = []
    for one in (layer, Float8Linear.from_float(plain, config)):
        x.grad = None
        one.weight.grad = None
        y = one(x)
        y.backward(upstream)
        assert x.grad is not None
        wide_x, wide_w, wide_g = (part.detach().double() for part in (x, layer.weight, upstream))
        wide_dw = wide_g.flatten(0, 1).T @ wide_x.flatten(0, 1)
        errors.append([error(y, wide_x @ wide_w.T), error(x.grad, wide_g @ wide_w), error(one.weight.grad, wide_dw)])
    assert errors[0] == pytest.approx(errors[1], rel=0.15)


# ---- in a model ----

MODEL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "n_heads": 4, "n_kv_heads": 4, "n_layers": 3}
VOCAB, SEQ_LEN, ROWS = 61, 16, 4


def test_inner_blocks_change_their_class_and_nothing_else() -> None:
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=SEQ_LEN, **MODEL | {"n_layers": 5})
    with torch.device("meta"):
        plain, model = Llama(config), Llama(config)
    assert apply_fp8(model, "rowwise", 2) == 7
    changed = {name for name, module in model.named_modules() if type(module) in LINEAR_CLASSES.values()}
    projections = {f"self_attn.{one}_proj" for one in "qkvo"} | {f"mlp.{one}_proj" for one in ("gate", "up", "down")}
    assert changed == {f"model.layers.2.{name}" for name in projections}
    assert [(name, p.shape, p.dtype) for name, p in model.named_parameters()] == [
        (name, p.shape, p.dtype) for name, p in plain.named_parameters()
    ]


def train(sets: tuple[str, ...], micro_batch_size: int, dtype: str = "float32", seq_len: int = SEQ_LEN) -> TrainResult:
    """One rank's training, in that rank."""
    base = {
        "model": MODEL,
        "data": {"store": "unused", "seq_len": seq_len},
        "batch": {"global_batch_size": ROWS, "micro_batch_size": 1},
        "schedule": {"max_steps": 3, "warmup_steps": 1},
        "engine": {"gpu": {"device": "cpu", "dtype": dtype}},
    }
    recipe, world = load(base=base, overrides=sets).recipe, World.from_env(os.environ)
    SPEC.check(recipe, world)
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=seq_len, **MODEL)
    engine = SPEC.open(recipe, config, world)
    assert isinstance(engine, GpuEngine)
    batches = layouts.global_batches(4, rows=ROWS, seq_len=seq_len, vocab=VOCAB)
    return layouts.train_steps(engine, batches[:3], batches[3], micro_batch_size, lambda: engine.state().shards)


def gradient_errors(found: list[TrainResult], one: TrainResult) -> list[float]:
    """Relative difference of each parameter's gradient of the first step (its first moment)."""
    ours, theirs = assemble([rank.states[1] for rank in found]), assemble([one.states[1]])
    moments = [key for key in theirs if key[0] == "exp_avg"]
    assert len(moments) == 3 * 9 + 3
    return [float(np.linalg.norm(ours[key] - theirs[key]) / np.linalg.norm(theirs[key])) for key in moments]


FULL, SELECTIVE = "engine.gpu.activation_checkpointing=full", "engine.gpu.activation_checkpointing=selective"
TP, SP = "parallel.tp=2", "parallel.sequence_parallel=true"
LAYOUTS: dict[str, tuple[int, tuple[str, ...], float]] = {
    # name: ranks, options, most that a gradient may be off
    "recompute-all": (1, (FULL,), 1e-5),
    "recompute-selectively": (1, (SELECTIVE,), 1e-5),
    "fsdp": (2, (), 0.1),
    "tp": (2, (TP,), 0.1),
    "tp-sp": (2, (TP, SP), 0.1),
    "pp": (2, ("parallel.pp=2",), 1e-5),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree_to_the_rounding_of_float8(ranks, name: str, scaling: str) -> None:
    """Recomputation repeats the same scales; by row, data-parallel ranks do too, but for the weights' gradients."""
    n, sets, near = LAYOUTS[name]
    fp8 = f"engine.gpu.fp8={scaling}"
    micro = ROWS if name != "fsdp" else ROWS // n
    (one,) = ranks.run(train, (fp8,), ROWS, ranks=1)
    (plain,) = ranks.run(train, (), ROWS, ranks=1)
    found = ranks.run(train, (fp8, *sets), micro, ranks=n)
    if name == "fsdp" and scaling == "rowwise":
        near = 1e-5
    errors = gradient_errors(found, one)
    assert max(errors) < near
    assert 1e-3 < max(gradient_errors([one], plain)) < 0.2, "float8 was not used, or is far off"
    assert found[0].losses == pytest.approx(one.losses, rel=2e-3)
    assert found[0].grad_norms == pytest.approx(one.grad_norms, rel=2e-2)
    assert found[0].validation == pytest.approx(one.validation, rel=2e-3)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_context_parallel_ranks_agree_to_the_rounding_of_float8(ranks, scaling: str) -> None:
    """Each rank scales its own positions, of which it has as many as a product needs."""
    fp8, seq_len = f"engine.gpu.fp8={scaling}", 2 * SEQ_LEN
    (one,) = ranks.run(train, (fp8,), ROWS, "float32", seq_len, ranks=1)
    found = ranks.run(train, (fp8, "parallel.cp=2"), ROWS, "float32", seq_len, ranks=2)
    errors = gradient_errors(found, one)
    assert max(errors) < (1e-5 if scaling == "rowwise" else 0.1)
    assert found[0].losses == pytest.approx(one.losses, rel=2e-3)
    assert found[0].grad_norms == pytest.approx(one.grad_norms, rel=2e-2)
    assert found[0].validation == pytest.approx(one.validation, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS)
def test_weights_in_bfloat16_have_gradients_in_float8(ranks, scaling: str) -> None:
    """As far off those without float8 as gradients of other weights; the same bits recomputed and in a pipeline."""
    narrow, fp8 = ("optimizer.weights_dtype=bfloat16",), f"engine.gpu.fp8={scaling}"
    (plain,) = ranks.run(train, narrow, ROWS, "bfloat16", ranks=1)
    (one,) = ranks.run(train, (*narrow, fp8), ROWS, "bfloat16", ranks=1)
    assert {(part.group, part.dtype) for part in one.states[1]} == {
        ("weights", "BF16"),
        ("exp_avg", "F32"),
        ("exp_avg_sq", "F32"),
    }
    assert 1e-3 < max(gradient_errors([one], plain)) < 0.2
    wanted = assemble([one.states[2]])
    for n, sets in ((1, (FULL,)), (2, ("parallel.pp=2",))):
        found = assemble(
            [rank.states[2] for rank in ranks.run(train, (*narrow, fp8, *sets), ROWS, "bfloat16", ranks=n)]
        )
        assert [key for key in wanted if wanted[key].tobytes() != found[key].tobytes()] == [], sets
    sharded = ranks.run(train, (*narrow, fp8), ROWS // 2, "bfloat16", ranks=2)
    # Each rank rounds the gradients of its rows to bfloat16; tensorwise, a whole operand may get another scale.
    assert max(gradient_errors(sharded, one)) < (0.01 if scaling == "rowwise" else 0.1)


def test_a_run_says_that_it_computes_in_float8(open_on) -> None:
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=SEQ_LEN, **MODEL)
    device = open_on("cpu", config, "engine.gpu.fp8=tensorwise").device
    assert device.resolved["engine.gpu.fp8"] == "tensorwise"
    wanted = "fp8 tensorwise in the blocks' linear layers; mfu is relative to the bfloat16 peak"
    assert device.notes[-1].startswith(wanted)
    assert open_on("cpu", config).device.resolved["engine.gpu.fp8"] == "off"


# ---- what is refused ----


@pytest.mark.parametrize(
    ("sets", "world", "message"),
    [
        (["engine.gpu.fp8_skipped_blocks=2"], World(), r"skipped_blocks = 2.*none of the 4 blocks.*; lower"),
        (["model.hidden_size=72", "model.n_heads=9"], World(), r"model.hidden_size = 72.*has 72 features"),
        (["parallel.tp=4"], World(size=4, local_size=4), r"model.n_kv_heads = 4, parallel.tp = 4: .* has 8 features"),
        (["model.intermediate_size=88"], World(), r"model.intermediate_size = 88.*has 88 features"),
        (["data.seq_len=24"], World(), r"data.seq_len = 24: .* tokens, and a rank has 24"),
    ],
)
def test_sizes_that_float8_does_not_take_are_refused(recipe, sets, world, message) -> None:
    model = ["model.hidden_size=128", "model.n_heads=16", "model.n_kv_heads=4", "model.intermediate_size=96"]
    base = [*model, "model.n_layers=4", "data.seq_len=32", "engine.gpu.fp8=rowwise"]
    SPEC.check(recipe(*base), World())
    if "model.n_heads=9" in sets:
        sets = [*sets, "model.n_kv_heads=9"]
    with pytest.raises(RecipeError, match=message):
        SPEC.check(recipe(*base, *sets), world)


def test_devices_without_float8_are_refused() -> None:
    check_fp8_device("rowwise", "cuda", (8, 9), is_rocm=False)
    check_fp8_device("tensorwise", "cuda", (9, 0), is_rocm=False)
    check_fp8_device("tensorwise", "cpu", (0, 0), is_rocm=False)
    check_fp8_device("off", "cuda", (8, 0), is_rocm=False)
    with pytest.raises(RecipeError, match=r"fp8 = 'rowwise': .* capability 8.9, and this GPU has 8.0; set .* off"):
        check_fp8_device("rowwise", "cuda", (8, 0), is_rocm=False)
    with pytest.raises(RecipeError, match="not available on ROCm"):
        check_fp8_device("tensorwise", "cuda", (9, 4), is_rocm=True)
    with pytest.raises(RecipeError, match="not available on mps"):
        check_fp8_device("tensorwise", "mps", (0, 0), is_rocm=False)


def test_skipped_blocks_without_fp8_are_refused(recipe) -> None:
    with pytest.raises(RecipeError, match=r"fp8_skipped_blocks = 0.*, engine.gpu.fp8 = 'off'.*: has no effect"):
        recipe("engine.gpu.fp8_skipped_blocks=0")


# ---- a loss curve ----


def loss_curve(open_on, fp8: str) -> list[float]:
    """Losses of 50 steps on rows of a random Markov chain, in bfloat16."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, n_heads=4, n_kv_heads=2, n_layers=4,
        max_position_embeddings=64,
    )  # fmt: skip
    engine = open_on("cpu", config, "engine.gpu.dtype=bfloat16", f"engine.gpu.fp8={fp8}", "optimizer.weight_decay=0")
    rng = np.random.default_rng(1)
    table = np.exp(3 * rng.standard_normal((256, 256)))
    cumulative = (table / table.sum(axis=1, keepdims=True)).cumsum(axis=1)
    losses: list[StepMetrics] = []
    for _ in range(50):
        rows = np.empty((8, 65), np.int32)
        rows[:, 0] = rng.integers(256, size=8)
        for t in range(64):
            rows[:, t + 1] = np.minimum((cumulative[rows[:, t]] < rng.random((8, 1))).sum(axis=1), 255)
        ids, labels = rows[None, :, :-1].copy(), rows[None, :, 1:].copy()
        positions = np.broadcast_to(np.arange(64, dtype=np.int32), ids.shape).copy()
        batch = step_batch(
            input_ids=ids, labels=labels, position_ids=positions, doc_ids=np.zeros_like(ids), valid_tokens=ids.size
        )
        losses += engine.fetch_metrics([engine.step(batch, 3e-3)])
    return [one.loss for one in losses]


@pytest.mark.slow
def test_fifty_steps_in_float8_learn_as_much_as_in_bfloat16(open_on) -> None:
    """A model of 4 blocks and rows of a random Markov chain."""
    curves = {fp8: loss_curve(open_on, fp8) for fp8 in ("off", *SCALINGS)}
    for losses in curves.values():
        difference = np.abs(np.array(losses) - curves["off"])
        assert difference.max() < 0.1
        assert difference[25:].mean() < 0.02
        assert losses[-1] < losses[0] - 2
