"""The optimizer against the formula: fused with moments of the weights' dtype, and our own with moments in bfloat16.

The spec's pure update, which other devices run, is held against the same formula and against both fast forms.
"""

from typing import Any

import numpy as np
import pytest
import torch

from lt_model import PRESETS, param_specs
from lt_trainer.config.optimizer_section import OptimizerOptions
from lt_trainer.config.recipe import load
from lt_trainer.optimizers.adamw import ADAMW, SECOND_MOMENT
from lt_trainer.optimizers.driver import OptimizerDriver
from lt_trainer.optimizers.spec import ParamSlice
from lt_trainer_gpu import gradients as gradients_module
from lt_trainer_gpu import optimizer
from lt_trainer_gpu.gradients import clip_coefficient, squared_norm
from lt_trainer_gpu.optimizer import GpuOptimizer, ParamUpdate

OPTIONS = {"beta1": 0.8, "beta2": 0.9, "eps": 3e-8, "weight_decay": 0.1}  # none is a default
SHAPES = {"a.weight": (7, 5), "norm.weight": (5,), "b.weight": (3, 11)}
LR = 1e-2


def make(
    weights: dict[str, torch.Tensor],
    decayed: set[str],
    options: OptimizerOptions,
    kind: type[OptimizerDriver] = GpuOptimizer,
) -> OptimizerDriver:
    params = {name: ParamSlice(specs=(), offset=(0,) * w.ndim, decay=name in decayed) for name, w in weights.items()}
    return kind(ADAMW, options, params, weights)


def given(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {name: torch.from_numpy(rng.standard_normal(shape)).to(dtype) for name, shape in SHAPES.items()}


def rounded(x: np.ndarray) -> np.ndarray:
    """To the nearest bfloat16, as float64."""
    return torch.from_numpy(x).to(torch.float32).to(torch.bfloat16).to(torch.float64).numpy()


def by_the_formula(steps: list[dict[str, torch.Tensor]], *, narrow: bool) -> tuple[dict, dict, dict]:
    """Weights and both moments after `steps`, computed in float64 number by number."""
    keep = rounded if narrow else (lambda x: x)
    weights = {name: w.double().numpy().copy() for name, w in given(0, torch.float32).items()}
    first = {name: np.zeros_like(w) for name, w in weights.items()}
    second = {name: np.zeros_like(w) for name, w in weights.items()}
    for t, gradients in enumerate(steps, start=1):
        for name, w in weights.items():
            g = gradients[name].double().numpy()
            m = OPTIONS["beta1"] * first[name] + (1 - OPTIONS["beta1"]) * g
            v = OPTIONS["beta2"] * second[name] + (1 - OPTIONS["beta2"]) * g * g
            first[name], second[name] = keep(m), keep(v)
            decay = 0.0 if name == "norm.weight" else OPTIONS["weight_decay"]
            w *= 1 - LR * decay
            m_hat, v_hat = m / (1 - OPTIONS["beta1"] ** t), v / (1 - OPTIONS["beta2"] ** t)
            w -= LR * m_hat / (np.sqrt(v_hat) + OPTIONS["eps"])
    return weights, first, second


@pytest.mark.parametrize("most", [1, 400, 1 << 22])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_steps_are_those_of_the_formula(monkeypatch: pytest.MonkeyPatch, moments: str, most: int) -> None:
    monkeypatch.setattr(optimizer, "CPU_TEMPORARY_BYTES", most)
    weights = given(0, torch.float32)
    adamw = make(weights, {"a.weight", "b.weight"}, OptimizerOptions(**OPTIONS, moments_dtype=moments))
    steps = [given(seed, torch.float32) for seed in range(1, 6)]
    for gradients in steps:
        copies = {name: g.clone() for name, g in gradients.items()}
        adamw.step(weights, copies, LR, torch.tensor(True))
    wanted, first, second = by_the_formula(steps, narrow=moments == "bfloat16")
    assert int(adamw.step_count) == 5
    m, v = (adamw.slots[slot] for slot in ADAMW.slot_names)
    for name in SHAPES:
        np.testing.assert_allclose(weights[name].numpy(), wanted[name], rtol=1e-5, atol=2e-7)
        if moments == "bfloat16":
            assert m[name].dtype == v[name].dtype == torch.bfloat16
            # float32 and float64 may lie on two sides of the middle between two bfloat16 numbers, which is rare.
            for found, exact in ((m[name], first[name]), (v[name], second[name])):
                assert (found.double().numpy() == exact).mean() > 0.9
                np.testing.assert_allclose(found.double().numpy(), exact, rtol=2**-7)


@pytest.mark.parametrize("most", [1, 64, 1 << 22])
def test_narrow_gradients_are_upcast_in_buckets_that_do_not_show(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A large weight is updated some rows at a time; its step is one step all the same."""
    monkeypatch.setattr(optimizer, "CPU_TEMPORARY_BYTES", most)
    weights = given(0, torch.float32)
    adamw = make(weights, {"a.weight", "b.weight"}, OptimizerOptions(**OPTIONS))
    steps = [given(seed, torch.bfloat16) for seed in range(1, 4)]
    for gradients in steps:
        adamw.step(weights, gradients, LR, torch.tensor(True), torch.tensor(0.5))
    halves = [{name: g.float() / 2 for name, g in gradients.items()} for gradients in steps]
    wanted, first, second = by_the_formula(halves, narrow=False)
    assert int(adamw.step_count) == 3
    m, v = (adamw.slots[slot] for slot in ADAMW.slot_names)
    for name in SHAPES:
        np.testing.assert_allclose(weights[name].numpy(), wanted[name], rtol=1e-5, atol=2e-7)
        np.testing.assert_allclose(m[name].numpy(), first[name], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(v[name].numpy(), second[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("slab", [1, 7, 1 << 18])
def test_the_norm_of_narrow_gradients_is_that_of_all_their_numbers(monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
    monkeypatch.setattr(gradients_module, "CHUNK_NUMEL", slab)
    narrow = list(given(1, torch.bfloat16).values())
    wanted = sum(float(tensor.double().square().sum()) for tensor in narrow)
    assert squared_norm(narrow, torch.zeros((), dtype=torch.float64)).item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_step_without_effect_changes_no_bit(moments: str) -> None:
    weights = given(0, torch.float32)
    adamw = make(weights, {"a.weight"}, OptimizerOptions(**OPTIONS, moments_dtype=moments))

    def bits() -> list[bytes]:
        tensors = [*weights.values(), *(t for s in adamw.slots.values() for t in s.values()), adamw.step_count]
        return [t.view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]

    fresh = bits()
    bad = {name: torch.full_like(w, float("nan")) for name, w in weights.items()}
    adamw.step(weights, dict(bad), LR, torch.tensor(False))
    assert bits() == fresh, "also the first step of all"
    adamw.step(weights, given(1, torch.float32), LR, torch.tensor(True))
    after = bits()
    bad = {name: torch.full_like(w, float("inf")) for name, w in weights.items()}
    adamw.step(weights, dict(bad), LR, torch.tensor(False))
    assert bits() == after
    assert after != fresh
    assert int(adamw.step_count) == 1


def test_a_second_moment_in_bfloat16_still_falls() -> None:
    """What the recipe's limit on betas is for: after one large gradient, small ones must bring it down."""
    weights = {"a": torch.zeros(1)}
    adamw = make(weights, set(), OptimizerOptions(beta2=0.99, moments_dtype="bfloat16"))
    for gradient in [1.0] + [0.0] * 200:
        adamw.step(weights, {"a": torch.tensor([gradient])}, 0.0, torch.tensor(True))
    assert adamw.slots[SECOND_MOMENT]["a"].item() < 0.01 * 0.99**200 * 1.6


@pytest.mark.parametrize("size", [1.0, 1e-8], ids=["plain", "small"])
@pytest.mark.parametrize(
    ("dtype", "moments", "near"),
    [
        (torch.float64, "float32", 1e-12),
        (torch.float32, "float32", 2e-6),
        (torch.float32, "bfloat16", 2e-6),
    ],
)
def test_the_fast_forms_are_the_pure_update(dtype: torch.dtype, moments: str, near: float, size: float) -> None:
    """Small gradients are of the size of eps, which then decides what the step is."""
    options = OptimizerOptions(**OPTIONS, moments_dtype=moments)
    decayed, scale = {"a.weight", "b.weight"}, torch.tensor(0.5, dtype=dtype)
    found = [{name: w.clone() for name, w in given(0, dtype).items()} for _ in range(2)]
    drivers = [make(w, decayed, options, kind) for w, kind in zip(found, (GpuOptimizer, OptimizerDriver), strict=True)]
    start = given(0, dtype)
    for seed in range(1, 6):
        finite = torch.tensor(seed != 3)
        for weights, driver in zip(found, drivers, strict=True):
            gradients = {name: size * g for name, g in given(seed, dtype).items()}
            driver.step(weights, gradients, LR, finite, scale)
    fast, pure = drivers
    assert int(fast.step_count) == int(pure.step_count) == 4
    for name in SHAPES:
        moved = (found[1][name] - start[name]).norm()
        assert (found[0][name] - found[1][name]).norm() <= 100 * near * moved, name
        for slot in ADAMW.slot_names:
            one, other = fast.slots[slot][name].double(), pure.slots[slot][name].double()
            assert (one - other).norm() <= (2**-8 if moments == "bfloat16" else near) * other.norm(), (slot, name)


@pytest.mark.parametrize("kind", [GpuOptimizer, OptimizerDriver])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_eps_decides_where_gradients_are_small(kind: type[OptimizerDriver], moments: str) -> None:
    """The first step is lr g / (|g| + eps), as the corrections of the moments cancel out."""
    weights = {name: torch.zeros_like(w) for name, w in given(0, torch.float32).items()}
    gradients = {name: 1e-8 * g for name, g in given(1, torch.float32).items()}
    optimizer = make(weights, set(), OptimizerOptions(**OPTIONS, moments_dtype=moments), kind)
    optimizer.step(weights, {name: g.clone() for name, g in gradients.items()}, LR, torch.tensor(True))
    for name, g in gradients.items():
        wanted = -LR * g.double() / (g.double().abs() + OPTIONS["eps"])
        np.testing.assert_allclose(weights[name].numpy(), wanted.numpy(), rtol=1e-4)


LLAMA_1B = PRESETS["llama3.2-1b"]


@pytest.mark.parametrize(
    ("gradient", "moments", "n_calls"),
    [
        (torch.float32, "float32", 2),
        (torch.bfloat16, "float32", 19),
        (torch.float32, "bfloat16", 37),
        (torch.bfloat16, "bfloat16", 56),
    ],
)
def test_the_fused_kernel_is_called_a_few_times_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gradient: torch.dtype, moments: str, n_calls: int
) -> None:
    """Llama 3.2 1B on the meta device, as on cuda: at most 256 MiB of temporaries a call, and no call too many."""
    weights = {spec.name: torch.empty(spec.shape, device="meta") for spec in param_specs(LLAMA_1B)}
    decayed = {spec.name for spec in param_specs(LLAMA_1B) if spec.decay}
    adamw = make(weights, decayed, OptimizerOptions(**OPTIONS, moments_dtype=moments))
    adamw.device_type = "cuda"
    calls: list[tuple[list[torch.Tensor], ...]] = []

    def record(*lists: list[torch.Tensor], **options: Any) -> None:
        assert options["grad_scale"].dtype == options["found_inf"].dtype == torch.float32
        calls.append(lists[:4])

    monkeypatch.setattr(torch, "_fused_adamw_", record)
    gradients = {name: torch.empty_like(weight, dtype=gradient) for name, weight in weights.items()}
    finite, scale = torch.empty((), dtype=torch.bool, device="meta"), torch.empty((), device="meta")
    adamw.step(weights, gradients, LR, finite, scale)
    assert len(calls) == n_calls
    assert sum(w.numel() for call in calls for w in call[0]) == sum(w.numel() for w in weights.values())
    n_upcast = (gradient != torch.float32) + 2 * (moments != "float32")
    assert max(n_upcast * 4 * sum(w.numel() for w in call[0]) for call in calls) <= 256 * 2**20
    assert {tensor.dtype for call in calls for tensors in call for tensor in tensors} == {torch.float32}


def test_a_tied_head_has_no_learning_rate_of_its_own() -> None:
    sets = ["optimizer.lr_scale.head=2", "model.tie_word_embeddings=true"]
    with pytest.raises(ValueError, match=r"optimizer\.lr_scale\.head = 2\.0.*: a tied head is the embedding"):
        load(base={"data": {"store": "unused"}}, overrides=sets)


@pytest.mark.parametrize(("norm", "factor"), [(0.0, 1.0), (0.01, 1.0), (0.5, 1.0), (1.0, 0.5), (8.0, 0.0625)])
def test_gradients_are_scaled_down_to_the_limit_and_never_up(norm: float, factor: float) -> None:
    assert clip_coefficient(torch.tensor(norm), 0.5).item() == pytest.approx(factor, rel=3e-6)


def test_rows_of_rows_know_their_place_in_the_slice() -> None:
    """Their numbers for stochastic rounding follow from it."""
    of_all = [torch.arange(20.0).reshape(10, 2) + 100 * i for i in range(4)]
    weight, gradient, first, second = of_all
    update = ParamUpdate(
        name="w", start_row=3, dtype=torch.float32, weight=weight, gradient=gradient, first=first, second=second
    )
    cut = update.rows(2, 9).rows(1, 4)
    assert cut.start_row == 3 + 2 + 1
    for rows, whole in zip((cut.weight, cut.gradient, cut.first, cut.second), of_all, strict=True):
        assert torch.equal(rows, whole[3:6])
