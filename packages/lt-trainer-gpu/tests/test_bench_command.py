"""`lt train bench`: what it runs, on one rank and on two, and how its numbers hang together."""

import json
from pathlib import Path
from typing import Any

import pytest

from lt_model import PRESETS, flops_per_token
from lt_trainer.errors import RecipeError
from lt_trainer.training.benchmark import resolve_bench_recipe, run_benchmark

SETS = ("engine.gpu.device=cpu", "data.seq_len=32", "batch.global_batch_size=4")


def bench(path: str | None, preset: str, sets: tuple[str, ...]) -> dict[str, Any] | None:
    """One rank's measurement, in that rank."""
    import torch

    torch.set_num_threads(1)
    return run_benchmark(resolve_bench_recipe(path, preset, overrides=sets, hyperparameters=None), steps=2, warmup=1)


def test_the_numbers_of_a_report_hang_together(ranks) -> None:
    first, second = ranks.run(bench, None, "tiny-2m", (*SETS, "engine.gpu.activation_checkpointing=full"))
    assert second is None
    found = json.loads(json.dumps(first))
    assert found["tokens_per_s"] == pytest.approx(4 * 32 / found["step_s"])
    assert found["tokens_per_s_per_device"] == found["tokens_per_s"] / 2
    config, peak = PRESETS["tiny-2m"], 2 * found["device"]["peak_flops"]
    for convention in ("full", "causal"):
        flops = flops_per_token(config, 32, convention)
        assert found["mfu"][convention] == pytest.approx(found["tokens_per_s"] * flops / peak)
    assert found["hfu"] > found["mfu"]["full"]
    assert found["device"]["count"] == found["layout"]["world"] == 2
    assert found["memory"]["peak_bytes"] > found["memory"]["state_bytes"] > 0
    assert found["memory"]["planned_bytes"] is None  # what a plan says is for GPUs
    assert found["all_finite"]
    assert found["loss"]["first"] == pytest.approx(7.62, abs=0.5)  # ln 2048


def test_a_recipe_is_measured_on_random_ids_of_its_own_vocabulary(tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text(
        '[model]\npreset = "tiny-2m"\n[data]\nseq_len = 512\nstore = "not here"\npacking = "concat"\n'
        'tokenizer = "own"\n'
    )
    resolved = resolve_bench_recipe(str(recipe), "", overrides=["batch.micro_batch_size=2"], hyperparameters=None)
    assert resolved.recipe.data.synthetic
    assert not resolved.recipe.data.store
    assert resolved.recipe.model.vocab_size == 2048
    assert resolved.recipe.batch.micro_batch_size == 2


@pytest.mark.parametrize(("path", "preset"), [(None, ""), ("run.toml", "tiny-2m"), (None, "tiny-3m")])
def test_what_is_not_one_thing_to_measure_is_refused(path: str | None, preset: str) -> None:
    with pytest.raises(RecipeError, match="preset"):
        resolve_bench_recipe(path, preset, overrides=(), hyperparameters=None)
