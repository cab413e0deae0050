"""A step whose loss or gradient norm is not finite must leave no trace, and cost the host no wait."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lt_trainer.config.recipe import load
from lt_trainer.engine import Snapshot, World
from lt_trainer_gpu import engine as engine_module
from lt_trainer_gpu.engine import GpuEngine


@pytest.fixture
def open_engine() -> Iterator:
    """Opens an engine, after closing the one that was open."""
    opened: list[GpuEngine] = []

    def open_one(config, *sets: str) -> GpuEngine:
        close()
        base = {"data": {"store": "unused"}, "schedule": {"max_steps": 10, "warmup_steps": 1}}
        recipe = load(base=base, overrides=["engine.gpu.device=cpu", "engine.gpu.dtype=float64", *sets]).recipe
        opened.append(GpuEngine(recipe, config, World()))
        return opened[-1]

    def close() -> None:
        while opened:
            opened.pop().close()

    yield open_one
    close()


def state(snapshot: Snapshot) -> dict[tuple[str, str], np.ndarray]:
    return {(s.group, s.name): s.bytes().copy() for s in snapshot.shards}


@pytest.mark.parametrize(
    ("dtype", "moments"),
    [("float64", "float32"), ("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")],
)
def test_a_step_that_is_not_finite_leaves_no_trace(config, batches, open_engine, dtype, moments) -> None:
    """Dividing by no tokens at all makes the loss and every gradient infinite or nan."""
    good = batches(3, n_micro=2, micro_batch_size=2)
    bad = replace(good[1], valid_tokens=0)
    sets = (f"engine.gpu.dtype={dtype}", f"optimizer.moments_dtype={moments}")
    engine = open_engine(config, *sets)
    numbers = engine.fetch_metrics([engine.step(batch, 1e-2) for batch in (good[0], bad, good[1], bad, bad, good[2])])
    found, small = state(engine.state()), engine.state().scalars
    assert [n.is_finite for n in numbers] == [True, False, True, False, False, True]

    clean = open_engine(config, *sets)
    wanted = clean.fetch_metrics([clean.step(batch, 1e-2) for batch in good])
    expected = state(clean.state())
    assert small == clean.state().scalars == {"optimizer_step": 3}
    assert [n for n in numbers if n.is_finite] == wanted
    assert all((found[key] == expected[key]).all() for key in expected)


def test_an_infinite_gradient_norm_alone_is_reason_enough(config, batches, open_engine) -> None:
    """In float32 the squares of gradients of 1e20 do not fit: the loss is finite, the norm is not."""
    (batch,) = batches(1, n_micro=1, micro_batch_size=2)
    engine = open_engine(config, "engine.gpu.dtype=float32")
    before = state(engine.state())
    for parameter in engine._stages[0].parameters():
        parameter.register_hook(lambda grad: grad * 1e25)
    (numbers,) = engine.fetch_metrics([engine.step(batch, 1e-2)])
    assert np.isfinite(numbers.loss)
    assert not numbers.is_finite
    after = state(engine.state())
    assert all((after[key] == before[key]).all() for key in before)


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_the_decision_is_made_without_reading_a_value_back(
    config, batches, open_engine, monkeypatch, moments: str
) -> None:
    """From the norm on, nothing may turn a tensor into a number: on CUDA that is where the host would wait."""
    (batch,) = batches(1, n_micro=2, micro_batch_size=2)
    engine = open_engine(config, f"optimizer.moments_dtype={moments}")
    engine.step(batch, 1e-2)

    def refuse(*args: object) -> None:
        raise AssertionError("the host asked for a value")

    with monkeypatch.context() as patch:
        agree = engine_module.reduce_loss_and_norm

        def from_here_on(*args: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
            for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
                patch.setattr(torch.Tensor, name, refuse)
            return agree(*args, **more)

        patch.setattr(engine_module, "reduce_loss_and_norm", from_here_on)
        pending = engine.step(replace(batch, valid_tokens=0), 1e-2)
    assert not engine.fetch_metrics([pending])[0].is_finite
