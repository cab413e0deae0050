"""`lt train bench`: what it runs, on one rank and on two, and how its numbers hang together."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lt_trainer.engine
from lt_model import PRESETS, flops_per_token
from lt_trainer.config.data_section import DataOptions
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer.training.benchmark import resolve_bench_recipe, run_benchmark
from lt_trainer.training.run import read_inputs
from lt_trainer_gpu.spec import GpuSpec

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


def test_the_engine_may_be_derived_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options are those of its own section, and errors name that."""
    spec = type("OtherSpec", (GpuSpec,), {"name": "other"})()
    entries = {"other": SimpleNamespace(load=lambda: spec)}
    monkeypatch.setattr(lt_trainer.engine, "engine_entries", lambda: entries)
    sets = [text.replace(".gpu.", ".other.") for text in (*SETS, "run.engine=other", "engine.gpu.compile=false")]
    report = bench(None, "tiny-2m", tuple(sets))
    assert report is not None
    assert report["layout"]["engine"]["other"]["device"] == "cpu"
    with pytest.raises(RecipeError, match=r'^engine.other.fp8 = "rowwise" .*engine.other.fp8 to off$'):
        bench(None, "tiny-2m", (*sets, "engine.other.fp8=rowwise", "data.seq_len=24"))


TABLES = {
    "store": 'store = "not here"\nshuffle = false\nprefetch = 0\npacking = "concat"\ntokenizer = "own"\n',
    "epochs": 'store = "not here"\n[schedule]\nmax_steps = "3 epochs"\nwarmup_steps = "5%"\n',
    "mixture": 'phase_steps = [5]\n[data.mixture.a]\nstore = "a"\nphase_weights = [2]\n[data.mixture.b]\nstore = "b"\n',
    "loader": 'loader = "nowhere:rows"\nloader_resume = "replay"\n',
    "validation": 'store = "not here"\nvalidation = "v"\n[data.validation_sets.other]\nstore = "o"\n'
    "[metrics]\nvalidation_interval = 5\nvalidation_tokens = -1\n[evaluation]\nstores = true\ninterval = 5\n",
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_recipe_is_measured_on_random_ids_whatever_its_data(tmp_path: Path, kind: str) -> None:
    recipe = tmp_path / "run.toml"
    vocab = "vocab_size = 2048\n" if kind == "loader" else ""
    recipe.write_text(f'[model]\npreset = "tiny-2m"\n{vocab}[data]\nseq_len = 512\n{TABLES[kind]}')
    resolved = resolve_bench_recipe(str(recipe), "", overrides=["batch.micro_batch_size=2"], hyperparameters=None)
    inputs = read_inputs(resolved, World())
    assert resolved.recipe.data == DataOptions(synthetic=True, seq_len=512, prefetch=0 if kind == "store" else 2)
    assert inputs.model.vocab_size == 2048
    assert resolved.recipe.batch.micro_batch_size == 2


@pytest.mark.parametrize(("path", "preset"), [(None, ""), ("run.toml", "tiny-2m"), (None, "tiny-3m")])
def test_what_is_not_one_thing_to_measure_is_refused(path: str | None, preset: str) -> None:
    with pytest.raises(RecipeError, match="preset"):
        resolve_bench_recipe(path, preset, overrides=(), hyperparameters=None)
