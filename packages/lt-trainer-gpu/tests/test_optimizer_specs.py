"""Another optimizer than AdamW: registered here, trained, saved, resumed and planned without a line elsewhere.

The toy has a second moment per row, which is not of its weight's shape.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from lt_ckpt import Checkpoint, OptimizerRecord
from lt_model import ModelConfig, n_parameters, param_specs
from lt_test_helpers import layouts
from lt_test_helpers.layouts import StateSlice, assemble, assert_near
from lt_trainer.config.optimizer_section import OptimizerOptions
from lt_trainer.config.recipe import load
from lt_trainer.engine import StepBatch
from lt_trainer.errors import RecipeError
from lt_trainer.optimizers import OPTIMIZERS
from lt_trainer.optimizers.spec import OptimizerSpec, ParamSlice, StateSlot, UpdateFn
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import plan_memory
from lt_trainer_gpu.engine import GpuEngine

ROWS, SEQ_LEN, VOCAB = 8, 16, 61
MODEL = {"hidden_size": 32, "intermediate_size": 48, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2}
CONFIG = ModelConfig(vocab_size=VOCAB, max_position_embeddings=SEQ_LEN, tie_word_embeddings=False, **MODEL)


def row_update(options: OptimizerOptions, lr: Tensor | float, step: Tensor) -> UpdateFn:
    """Return a step by the mean square of each row of a matrix, kept in each of its elements."""

    def update(
        param: ParamSlice, weight: Tensor, gradient: Tensor, slots: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert param.specs[0].shape[1:] == weight.shape[1:], "whole rows"
        square = gradient.square()
        square = square.mean(1, keepdim=True).expand_as(square) if weight.ndim > 1 else square
        second = slots["row_square"] + (square - slots["row_square"]) * (1 - options.beta2)
        corrected = second / -(step.to(weight.dtype) * math.log(options.beta2)).expm1()
        return weight - lr * gradient / (corrected.sqrt() + options.eps), {"row_square": second}

    return update


BY_ROW = OptimizerSpec(
    name="by_row",
    slots=(StateSlot(name="row_square"),),
    options=frozenset({"beta2", "eps"}),
    make_update=row_update,
)


def register() -> None:
    OPTIMIZERS["by_row"] = BY_ROW


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "by_row", BY_ROW)


def open_engine(*sets: str) -> GpuEngine:
    return layouts.open_engine(*sets, model=MODEL, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)


def global_batches(n_steps: int) -> list[StepBatch]:
    return layouts.global_batches(n_steps, rows=ROWS, seq_len=SEQ_LEN, vocab=VOCAB)


def bits(engine: GpuEngine) -> dict[tuple[str, str], bytes]:
    return {(s.group, s.name): s.bytes().tobytes() for s in engine.state().shards}


def test_another_optimizer_trains_and_resumes_bit_equal(tmp_path: Path) -> None:
    name, slot = "by_row", "row_square"
    sets = (f"optimizer.name={name}", "optimizer.beta2=0.9")
    engine = open_engine(*sets)
    batch = layouts.rank_batch(global_batches(1)[0], engine, 1)
    first, *_, last = engine.fetch_metrics([engine.step(batch, 2e-3) for _ in range(6)])
    assert last.loss < first.loss - 0.1
    path = layouts.save_checkpoint(engine, str(tmp_path), step=6)
    checkpoint, saved = Checkpoint.open(path), bits(engine)
    assert checkpoint.manifest.optimizer == OptimizerRecord(name=name, slots=(slot,))
    assert checkpoint.groups == ("weights", slot)
    assert engine.state_bytes() == sum(len(data) for data in saved.values())
    wanted = engine.fetch_metrics([engine.step(batch, 1e-3) for _ in range(2)])
    after = bits(engine)
    engine.close()

    resumed = open_engine("run.seed=7", *sets)
    resumed.restore(checkpoint)
    assert bits(resumed) == saved
    assert resumed.fetch_metrics([resumed.step(batch, 1e-3) for _ in range(2)]) == wanted
    assert bits(resumed) == after
    bad = replace(batch, valid_tokens=0)
    assert not resumed.fetch_metrics([resumed.step(bad, 1e-3)])[0].is_finite
    assert bits(resumed) == after, "a step that is not finite changes no bit"
    resumed.close()


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    engine = open_engine("optimizer.name=by_row")
    path = layouts.save_checkpoint(engine, str(tmp_path), step=0)
    engine.close()
    adamw = open_engine()
    with pytest.raises(RecipeError) as caught:
        adamw.restore(Checkpoint.open(path))
    adamw.close()
    assert str(caught.value) == (
        f"optimizer.name = \"adamw\": {path} holds the state of 'by_row' (row_square), but 'adamw' needs its own "
        "(exp_avg, exp_avg_sq); start a new run from its weights alone with "
        f'model.init_from = "{path}"'
    )


def test_its_options_and_its_name_are_checked() -> None:
    for sets, message in (
        (
            ["optimizer.name=by_row", "optimizer.beta1=0.5"],
            r'beta1 = 0.5 .*: has no effect with optimizer\.name = "by_row"',
        ),
        (["optimizer.name=by_raw"], r'optimizer.name = "by_raw" .*: unknown optimizer; did you mean "by_row"\?'),
        (["optimizer.momentum=0.5"], r'optimizer\.momentum = 0\.5 .*: has no effect with optimizer\.name = "adamw"'),
        (
            ["optimizer.name=muon", "optimizer.momentum=0.999", "optimizer.moments_dtype=bfloat16"],
            r"optimizer\.momentum = 0\.999 .*a moment in bfloat16",
        ),
    ):
        with pytest.raises(RecipeError, match=message):
            load(base={"data": {"store": "unused"}}, overrides=sets)


def test_the_plan_counts_its_slots() -> None:
    def optimizer_state(*sets: str) -> float:
        base = {
            "model": MODEL,
            "data": {"store": "unused"},
            "batch": {"global_batch_size": ROWS, "micro_batch_size": 1},
        }
        recipe = load(base=base, overrides=sets).recipe
        planned = plan_memory(CONFIG, SEQ_LEN, layout_from_recipe(recipe, devices=1, nodes=1))
        assert planned.state_bytes == planned.parts["weights"] + planned.parts["optimizer state"]
        return planned.parts["optimizer state"]

    n = n_parameters(CONFIG)
    in_blocks = sum(spec.numel for spec in param_specs(CONFIG) if spec.type == "matrix")
    assert optimizer_state() == 8 * n
    assert optimizer_state("optimizer.name=muon") == 8 * n - 4 * in_blocks
    assert optimizer_state("optimizer.name=by_row") == 4 * n


def saved_by(sets: tuple[str, ...], folder: str) -> tuple[str, list[StateSlice], list[StateSlice], list[float]]:
    """In a rank: two steps, a checkpoint, a third step."""
    register()
    engine = open_engine("optimizer.name=by_row", *sets)
    return layouts.train_save_train(engine, global_batches(3), folder, lambda: engine.state().shards)


def resumed_by(sets: tuple[str, ...], path: str) -> tuple[list[StateSlice], list[StateSlice], list[float]]:
    """In a rank: the checkpoint, and the third step."""
    register()
    engine = open_engine("optimizer.name=by_row", "run.seed=7", *sets)
    return layouts.restore_and_train(engine, global_batches(3)[2], path, lambda: engine.state().shards)


@pytest.mark.parametrize(("n", "m"), [(2, 1), (1, 4), (2, 4)])
def test_another_slot_is_sharded_saved_and_resharded(
    ranks: Callable[..., list[object]], tmp_path: Path, n: int, m: int
) -> None:
    left = ranks.run(saved_by, (), str(tmp_path), ranks=n)
    taken = ranks.run(resumed_by, (), left[0][0], ranks=m)
    saved, found = assemble([rank[1] for rank in left]), assemble([rank[0] for rank in taken])
    assert saved.keys() == found.keys()
    assert [key for key in saved if saved[key].tobytes() != found[key].tobytes()] == []
    assert all(np.any(tensor) for (group, _), tensor in saved.items() if group == "row_square")
    assert_near(assemble([rank[1] for rank in taken]), assemble([rank[2] for rank in left]), 1e-9)
    assert taken[0][2] == pytest.approx(left[0][3][2:], rel=1e-12)
