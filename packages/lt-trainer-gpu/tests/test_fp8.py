"""Float8 linear layers: rounding errors of one layer, layouts against one process, a loss curve beside bfloat16."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lt_model import ModelConfig
from lt_model.decoder import Decoder
from lt_test_helpers import layouts
from lt_test_helpers.layouts import TrainResult, assemble, step_batch
from lt_trainer.config.recipe import model_config
from lt_trainer.engine import StepMetrics, World
from lt_trainer.errors import RecipeError
from lt_trainer_gpu.collectives import TensorParallelGroup
from lt_trainer_gpu.fp8 import E4M3, E5M2, LINEAR_CLASSES, apply_fp8, fp8_flops_share, quantize
from lt_trainer_gpu.mesh_layout import MeshLayout
from lt_trainer_gpu.model import build_stage
from lt_trainer_gpu.spec import SPEC
from lt_trainer_gpu.tensor_parallel import apply_tensor_parallel

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


WIDE, NARROW, EXACT = (0.036, 0.038), (0.057, 0.060), (0.0, 0.004)
"""Least and most that a product of two e4m3 operands of normal numbers is off; of e5m2 and e4m3; of none."""
LAYER_BOUNDS = [("tensorwise", (WIDE, NARROW, NARROW)), ("rowwise", (WIDE, WIDE, EXACT))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scaling", "bounds"), LAYER_BOUNDS)
def test_one_layer_is_off_by_the_rounding_of_its_operands(scaling, bounds, dtype) -> None:
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
    assert all(least <= one < most for one, (least, most) in zip(errors, bounds, strict=True)), errors
    assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (dtype,) * 3


def drawn(shape: tuple[int, ...], steps: int, dtype: torch.dtype) -> Tensor:
    """Numbers of random signs between 1 and 2 whose mantissas have so many steps: e4m3 holds 8, e5m2 holds 4."""
    generator = torch.Generator().manual_seed(steps)
    mantissas = torch.randint(0, steps, shape, generator=generator) / steps
    return ((1 + mantissas) * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)).to(dtype)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_are_exact_where_their_formats_hold_the_operands(scaling: str) -> None:
    """So an operand in the other format shows, in each of the three products; finer upstream gradients do not fit."""
    layer, _, _ = layer_of(scaling, torch.float32)
    weight, x = drawn((96, 128), 8, torch.float32), drawn((64, 128), 8, torch.float32)
    layer.weight = nn.Parameter(weight)
    for steps in (4, 8):
        upstream, x = drawn((64, 96), steps, torch.float32), x.detach().requires_grad_()
        layer.weight.grad = None
        y = layer(x)
        y.backward(upstream)
        assert x.grad is not None
        assert layer.weight.grad is not None
        assert torch.equal(y, x @ weight.T)
        for found, exact in ((x.grad, upstream @ weight), (layer.weight.grad, upstream.T @ x.detach())):
            if steps == 4 or scaling == "rowwise":
                assert torch.equal(found, exact)
            else:
                assert 0.03 < error(found, exact.double()) < 0.08


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


@pytest.mark.parametrize(("scaling", "fast"), [("tensorwise", [True, False, False]), ("rowwise", [True, False])])
def test_sums_of_gradients_are_never_in_less_than_float32(scaling, fast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen at torch's own product, which gives no other number on a CPU: forward, dx, and dW where it is in float8."""
    layer, x, upstream = layer_of(scaling, torch.bfloat16)
    asked: list[bool] = []
    product = torch._scaled_mm

    def spy(*operands: Tensor, use_fast_accum: bool, **options: Any) -> Tensor:
        asked.append(use_fast_accum)
        return product(*operands, use_fast_accum=use_fast_accum, **options)

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    layer(x).backward(upstream)
    assert asked == fast


# ---- in a model ----

MODEL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "n_heads": 4, "n_kv_heads": 4, "n_layers": 3}
VOCAB, SEQ_LEN, ROWS = 61, 16, 4


def test_inner_blocks_change_their_class_and_nothing_else() -> None:
    config = ModelConfig(vocab_size=VOCAB, max_position_embeddings=SEQ_LEN, **MODEL | {"n_layers": 5})
    with torch.device("meta"):
        plain, model = Decoder(config), Decoder(config)
    assert apply_fp8(model, "rowwise", 2) == 7
    changed = {name for name, module in model.named_modules() if type(module) in LINEAR_CLASSES.values()}
    projections = {f"self_attn.{one}_proj" for one in "qkvo"} | {f"mlp.{one}_proj" for one in ("gate", "up", "down")}
    assert changed == {f"model.layers.2.{name}" for name in projections}
    assert [(name, p.shape, p.dtype) for name, p in model.named_parameters()] == [
        (name, p.shape, p.dtype) for name, p in plain.named_parameters()
    ]


def train(sets: tuple[str, ...], micro_batch_size: int, dtype: str = "float32", seq_len: int = SEQ_LEN) -> TrainResult:
    """One rank's training, in that rank."""
    engine = layouts.open_engine(*sets, model=MODEL, rows=ROWS, seq_len=seq_len, vocab=VOCAB, dtype=dtype)
    batches = layouts.global_batches(4, rows=ROWS, seq_len=seq_len, vocab=VOCAB)
    return layouts.train_steps(engine, batches[:3], batches[3], micro_batch_size, lambda: engine.state().shards)


LATENT = {"family": "deepseek_v3", "q_rank": 32, "kv_rank": 32, "nope_width": 16, "rope_width": 16, "value_width": 16}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_latents_in_float8_are_refused_on_tensor_parallel_ranks(recipe, scaling: str) -> None:
    """Each rank would keep its part of their weights' gradients; the exchange of classes itself would not pass."""
    sets = [f"model.{name}={size}" for name, size in MODEL.items()]
    shape = json.dumps(LATENT | {"router_score": "sigmoid", "selection_bias": True})
    sets += [f"model.shape={shape}", f"engine.gpu.fp8={scaling}", "engine.gpu.dtype=float32"]
    SPEC.check(recipe(*sets), World())
    for width, size in (("kv_rank", 24), ("q_rank", 24), ("rope_width", 24), ("nope_width", 18)):
        narrow = json.dumps(json.loads(shape) | {width: size})
        with pytest.raises(RecipeError, match=r"multiples of 16 features, and model\.layers\.1\.self_attn\..* has"):
            SPEC.check(recipe(*sets, f"model.shape={narrow}"), World())
    made, world = recipe(*sets, "parallel.tp=2"), World(size=2, local_size=2)
    with pytest.raises(RecipeError, match=f'fp8 = "{scaling}", parallel.tp = 2: .* latent attention') as caught:
        SPEC.check(made, world)
    assert caught.value.remedy == "set engine.gpu.fp8 to off, or parallel.tp to 1"

    config, layout = model_config(made, VOCAB), MeshLayout.from_options(made.parallel, 0, 2)
    stage = build_stage(config, range(config.n_layers), attention="sdpa", dtype=torch.float32)
    group = TensorParallelGroup(size=2, rank=0, group_name="none", sequence_parallel=False)
    apply_tensor_parallel(stage, layout, group)
    with pytest.raises(AssertionError, match="would drop what PartialGradLinear does"):
        apply_fp8(stage, scaling, 1)


def gradient_errors(found: list[TrainResult], one: TrainResult) -> list[float]:
    """Relative difference of each parameter's gradient of the first step (its first moment)."""
    ours, theirs = assemble([rank.states[1] for rank in found]), assemble([one.states[1]])
    moments = [key for key in theirs if key[0] == "exp_avg"]
    assert len(moments) == 3 * 9 + 3
    return [float(np.linalg.norm(ours[key] - theirs[key]) / np.linalg.norm(theirs[key])) for key in moments]


FULL, SELECTIVE = "engine.gpu.activation_checkpointing=full", "engine.gpu.activation_checkpointing=selective"


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("recompute", [FULL, SELECTIVE])
def test_recomputation_repeats_the_same_scales(ranks, recompute: str, scaling: str) -> None:
    fp8 = f"engine.gpu.fp8={scaling}"
    (one,), (found,) = (ranks.run(train, sets, ROWS, ranks=1) for sets in ((fp8,), (fp8, recompute)))
    assert max(gradient_errors([found], one)) < 1e-5
    assert found.losses == pytest.approx(one.losses, rel=1e-6)


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
    config = ModelConfig(vocab_size=VOCAB, max_position_embeddings=SEQ_LEN, **MODEL)
    device = open_on("cpu", config, "engine.gpu.fp8=tensorwise").device
    assert device.resolved["engine.gpu.fp8"] == "tensorwise"
    share = f"{fp8_flops_share(config, 4096, 'tensorwise', 1):.1%} of the model's FLOPs"
    wanted = f"fp8 tensorwise in the blocks' linear layers: {share}; mfu is relative to the bfloat16 peak"
    assert device.notes[-1].startswith(wanted)
    assert open_on("cpu", config).device.resolved["engine.gpu.fp8"] == "off"


@pytest.mark.parametrize(("scaling", "passes"), [("tensorwise", 3), ("rowwise", 2)])
@pytest.mark.parametrize("gated", [True, False])
def test_the_share_of_flops_is_that_of_the_products_in_float8(gated: bool, scaling: Any, passes: int) -> None:
    """Against what torch counts: in a step, and by module in its forward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    family = {} if gated else {"family": "gpt_neox", "norm": "layer", "mlp_bias": True, "gated": False}
    config = ModelConfig(vocab_size=VOCAB, max_position_embeddings=64, **MODEL | {"n_layers": 4}, **family)
    model, ids = Decoder(config, attention="reference"), torch.zeros(1, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as step:
        model(ids, labels_BT=ids).backward()
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(ids)
    counts = {name: sum(flops.values()) for name, flops in forward.get_flop_counts().items()}
    inner = sum(n for name, n in counts.items() if name.endswith("_proj") and name.split(".")[-3] in ("1", "2"))
    assert len([name for name in counts if name.endswith("_proj")]) == 4 * (7 if gated else 6)
    share = inner * passes / step.get_total_flops()
    assert fp8_flops_share(config, 64, scaling, 1) == pytest.approx(share, rel=0.03)


# ---- a loss curve ----


def loss_curve(open_on, fp8: str) -> list[float]:
    """Losses of 50 steps on rows of a random Markov chain, in bfloat16."""
    config = ModelConfig(
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
