"""Optimizers on tensors: AdamW's pure update against torch's, counts beyond bf16's, skipped steps, slots of slices."""

import math

import pytest
import torch

from lt_trainer.config.optimizer_section import OptimizerOptions
from lt_trainer.optimizers.adamw import ADAMW
from lt_trainer.optimizers.driver import OptimizerDriver
from lt_trainer.optimizers.spec import ParamSlice

TRUE, ONE = torch.tensor(True), torch.tensor(1.0, dtype=torch.float64)


def adamw(weights: dict[str, torch.Tensor], decayed: set[str], **changed: float) -> OptimizerDriver:
    options = OptimizerOptions(**{"beta1": 0.9, "beta2": 0.999, "eps": 3e-8, "weight_decay": 0.1, **changed})
    params = {name: ParamSlice(specs=(), offset=(0,) * w.ndim, decay=name in decayed) for name, w in weights.items()}
    return OptimizerDriver(ADAMW, options, params, weights)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)])
@pytest.mark.parametrize("size", [1.0, 1e-8], ids=["plain", "small"])
@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_adamw_is_torchs(decay: float, size: float, betas: tuple[float, float]) -> None:
    """Small gradients are of the size of eps, which then decides what the step is."""
    torch.manual_seed(3)
    ours = {name: torch.randn(7, 3, dtype=torch.float64) for name in ("decayed", "kept")}
    theirs = {name: weight.clone().requires_grad_() for name, weight in ours.items()}
    mine = adamw(ours, {"decayed"}, weight_decay=decay, beta1=betas[0], beta2=betas[1])
    groups = [{"params": [theirs["decayed"]], "weight_decay": decay}, {"params": [theirs["kept"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=betas, eps=3e-8)
    for step in range(5):
        rate = 0.01 * (step + 1)
        gradients = {name: size * torch.randn_like(weight) for name, weight in ours.items()}
        mine.step(ours, {name: weight * math.nan for name, weight in ours.items()}, rate, ~TRUE, ONE)  # no step
        mine.step(ours, gradients, rate if step % 2 else torch.tensor(rate, dtype=torch.float64), TRUE, 0.5 * ONE)
        for name, weight in theirs.items():
            weight.grad = 0.5 * gradients[name]
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name].detach(), rtol=1e-13, atol=1e-14)


def test_steps_are_counted_beyond_what_bf16_counts() -> None:
    weights = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    optimizer = adamw(weights, set())
    rate, scale = torch.zeros((), dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16)
    for _ in range(300):
        optimizer.step(weights, {"w": torch.ones(1, dtype=torch.bfloat16)}, rate, TRUE, scale)
    assert int(optimizer.step_count) == 300


def test_slots_take_their_dtype_from_the_options() -> None:
    narrow = adamw({"w": torch.ones(2)}, set(), moments_dtype="bfloat16", beta2=0.95)
    assert {tensors["w"].dtype for tensors in narrow.slots.values()} == {torch.bfloat16}
    assert ADAMW.state_bytes(narrow.options, [(3, 4), (5,)], master_bytes=4) == 2 * 2 * 17
    assert ADAMW.state_bytes(OptimizerOptions(), [(3, 4), (5,)], master_bytes=8) == 2 * 8 * 17
