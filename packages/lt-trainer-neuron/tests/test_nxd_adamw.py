"""AdamW on tensors: torch's own numbers, a count beyond bf16's, and a step that has no effect."""

import pytest
import torch

from lt_trainer.sections import OptimizerOptions
from lt_trainer_neuron.nxd.adamw import AdamW

TRUE, ONE = torch.tensor(True), torch.tensor(1.0, dtype=torch.float64)


def options(**changed: float) -> OptimizerOptions:
    return OptimizerOptions(**{"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, **changed})


@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_its_numbers_are_those_of_torch(decay: float) -> None:
    torch.manual_seed(3)
    ours = {name: torch.randn(7, 3, dtype=torch.float64) for name in ("decayed", "kept")}
    theirs = {name: weight.clone().requires_grad_() for name, weight in ours.items()}
    mine = AdamW(ours, frozenset({"decayed"}), options(weight_decay=decay))
    groups = [
        {"params": [theirs["decayed"]], "weight_decay": decay},
        {"params": [theirs["kept"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    for step in range(5):
        rate = 0.01 * (step + 1)
        gradients = {name: torch.randn_like(weight) for name, weight in ours.items()}
        mine.update(ours, gradients, torch.tensor(rate, dtype=torch.float64), TRUE, 0.5 * ONE)
        for name, weight in theirs.items():
            weight.grad = 0.5 * gradients[name]
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name].detach(), rtol=1e-13, atol=1e-14)


def test_steps_are_counted_beyond_what_bf16_counts() -> None:
    weights = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    optimizer = AdamW(weights, frozenset(), options())
    rate, scale = torch.zeros((), dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16)
    for _ in range(300):
        optimizer.update(weights, {"w": torch.ones(1, dtype=torch.bfloat16)}, rate, TRUE, scale)
    assert int(optimizer.step) == 300


def test_a_step_that_does_not_count_changes_nothing() -> None:
    weights = {"w": torch.ones(2, dtype=torch.float64)}
    optimizer = AdamW(weights, frozenset({"w"}), options())
    bad = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    optimizer.update(weights, {"w": bad}, 0.1 * ONE, torch.tensor(False), ONE)
    assert weights["w"].tolist() == [1.0, 1.0]
    assert optimizer.exp_avg["w"].tolist() == optimizer.exp_avg_sq["w"].tolist() == [0.0, 0.0]
    assert int(optimizer.step) == 0
