"""The optimizer against the formula: fused with moments of the weights' dtype, and our own with moments in bfloat16."""

import numpy as np
import pytest
import torch

from lt_trainer.recipe import OptimizerOptions
from lt_trainer_gpu import gradients as gradients_module
from lt_trainer_gpu import optimizer
from lt_trainer_gpu.gradients import squared_norm
from lt_trainer_gpu.optimizer import AdamW

OPTIONS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SHAPES = {"a.weight": (7, 5), "norm.weight": (5,), "b.weight": (3, 11)}
LR = 1e-2


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


@pytest.mark.parametrize("bucket", [1, 40, 1 << 25])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_steps_are_those_of_the_formula(monkeypatch: pytest.MonkeyPatch, moments: str, bucket: int) -> None:
    monkeypatch.setattr(optimizer, "BUCKET", bucket)
    weights = given(0, torch.float32)
    adamw = AdamW(weights, {"a.weight", "b.weight"}, OptimizerOptions(**OPTIONS, moments=moments))
    steps = [given(seed, torch.float32) for seed in range(1, 6)]
    for gradients in steps:
        copies = {name: g.clone() for name, g in gradients.items()}
        adamw.step(weights, copies, LR, torch.tensor(True))
    wanted, first, second = by_the_formula(steps, narrow=moments == "bfloat16")
    assert adamw.steps == 5
    for name, slot in adamw.slots.items():
        np.testing.assert_allclose(weights[name].numpy(), wanted[name], rtol=1e-5, atol=2e-7)
        if moments == "bfloat16":
            assert slot.exp_avg.dtype == slot.exp_avg_sq.dtype == torch.bfloat16
            # float32 and float64 may lie on two sides of the middle between two bfloat16 numbers, which is rare.
            for found, exact in ((slot.exp_avg, first[name]), (slot.exp_avg_sq, second[name])):
                assert (found.double().numpy() == exact).mean() > 0.9
                np.testing.assert_allclose(found.double().numpy(), exact, rtol=2**-7)


@pytest.mark.parametrize("widened", [1, 8, 1 << 20])
def test_narrow_gradients_are_widened_in_slabs_that_do_not_show(monkeypatch: pytest.MonkeyPatch, widened: int) -> None:
    """A CPU updates a large weight some numbers at a time; its step is one step all the same."""
    monkeypatch.setattr(optimizer, "WIDENED", widened)
    weights = given(0, torch.float32)
    adamw = AdamW(weights, {"a.weight", "b.weight"}, OptimizerOptions(**OPTIONS))
    steps = [given(seed, torch.bfloat16) for seed in range(1, 4)]
    for gradients in steps:
        adamw.step(weights, gradients, LR, torch.tensor(True), torch.tensor(0.5))
    halves = [{name: g.float() / 2 for name, g in gradients.items()} for gradients in steps]
    wanted, first, second = by_the_formula(halves, narrow=False)
    assert [slot.step.item() for slot in adamw.slots.values()] == [3, 3, 3]
    for name, slot in adamw.slots.items():
        np.testing.assert_allclose(weights[name].numpy(), wanted[name], rtol=1e-5, atol=2e-7)
        np.testing.assert_allclose(slot.exp_avg.numpy(), first[name], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(slot.exp_avg_sq.numpy(), second[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("slab", [1, 7, 1 << 18])
def test_the_norm_of_narrow_gradients_is_that_of_all_their_numbers(monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
    monkeypatch.setattr(gradients_module, "SLAB", slab)
    narrow = list(given(1, torch.bfloat16).values())
    wanted = sum(float(tensor.double().square().sum()) for tensor in narrow)
    assert squared_norm(narrow, torch.device("cpu")).item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_step_without_effect_changes_no_bit(moments: str) -> None:
    weights = given(0, torch.float32)
    adamw = AdamW(weights, {"a.weight"}, OptimizerOptions(**OPTIONS, moments=moments))

    def bits() -> list[bytes]:
        tensors = [*weights.values(), *(t for s in adamw.slots.values() for t in (s.exp_avg, s.exp_avg_sq, s.step))]
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
    assert adamw.steps == 1


def test_a_second_moment_in_bfloat16_still_falls() -> None:
    """What the recipe's limit on betas is for: after one large gradient, small ones must bring it down."""
    weights = {"a": torch.zeros(1)}
    adamw = AdamW(weights, set(), OptimizerOptions(beta2=0.99, moments="bfloat16"))
    for gradient in [1.0] + [0.0] * 200:
        adamw.step(weights, {"a": torch.tensor([gradient])}, 0.0, torch.tensor(True))
    assert adamw.slots["a"].exp_avg_sq.item() < 0.01 * 0.99**200 * 1.6
