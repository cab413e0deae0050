"""`lt train bench`: training speed and memory of a recipe, as JSON that documents each number.

The engine is opened as in a run and steps through rows of random ids (`data.synthetic`): no data, checkpoints or
logging. Warmup steps come first. Then all timed steps are started before metrics are fetched, so that a device runs
ahead of the host as in training; the time ends when the last step is done.

Cost: the start of a run and `warmup + steps` steps.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from lt_model import PRESETS, flops_per_token, n_parameters
from lt_trainer.config.data_section import DataOptions
from lt_trainer.config.recipe import ResolvedRecipe, complete, load
from lt_trainer.config.sections import Recipe
from lt_trainer.data.batches import Batches, open_batches
from lt_trainer.engine import Engine, World
from lt_trainer.errors import RecipeError
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import plan_memory
from lt_trainer.planning.plan import vocab_size_and_source
from lt_trainer.training.run_setup import RunSetup

METHOD_NOTES = {
    "data": "rows of random ids, every position labeled (data.synthetic)",
    "step_s": "time from before the first timed step until the last is done (perf_counter), over their number",
    "cpu_s_per_step": "CPU seconds of this process over the same steps",
    "tokens_per_s": "tokens of the global batch over step_s, all devices",
    "mfu": "FLOPs per token ('full': 6 per parameter without the input embedding + 12 x layers x width x seq_len; "
    "'causal': half of the last term) times tokens_per_s, over the peak of all devices",
    "hfu": "mfu ('full') with the FLOPs recomputed by activation checkpointing; null if unknown",
    "peak_flops": "of one device at the compute dtype, from peak_source",
    "first_step_s": "the first step, with loading, compilation and tuning of kernels",
    "memory.peak_bytes": "of the fullest rank: on cuda the peak of torch's allocator during the timed steps; on a CPU "
    "the peak resident memory since the process started",
    "memory.planned_bytes": "peak of lt train plan for cuda, without its reserve; null on a CPU",
    "loss": "of the first and the last step in nats; about ln(vocabulary) with random ids",
}


def resolve_bench_recipe(
    path: str | None, preset: str, *, overrides: Sequence[str], hyperparameters: Mapping[str, Any] | None
) -> ResolvedRecipe:
    """Resolve the recipe to measure: a file or a preset, with synthetic data.

    Raises:
        RecipeError: neither or both are given, the preset is unknown, or the recipe is invalid.
    """
    if bool(path) == bool(preset):
        raise RecipeError(
            "exactly one is required",
            values={"RUN.toml": path or "", "--preset": preset},
            remedy="use lt train bench RUN.toml, or lt train bench --preset llama-160m",
        )
    if preset:
        if preset not in PRESETS:
            raise RecipeError(
                "unknown preset", values={"--preset": preset}, remedy=f"the presets are {', '.join(PRESETS)}"
            )
        base = {
            "model": {"preset": preset, "vocab_size": PRESETS[preset].vocab_size},
            "data": {"synthetic": True, "seq_len": min(4096, PRESETS[preset].max_position_embeddings)},
            "batch": {"global_batch_size": _world_size(), "micro_batch_size": 1},
            "schedule": {"warmup_steps": 0},
        }
        return load(base=base, base_name="lt train bench", overrides=overrides, hyperparameters=hyperparameters)
    given = complete(load(path, overrides=overrides, hyperparameters=hyperparameters))
    if given.recipe.data.source_kind == "synthetic":
        return given
    vocab_size, _ = vocab_size_and_source(given.recipe)
    synthetic = ["data.synthetic=true", "data.store=", "data.validation=", f"model.vocab_size={vocab_size}"]
    synthetic += ["metrics.validation_interval=0"]
    if given.recipe.evaluation.tasks or given.recipe.evaluation.stores:
        synthetic += ["evaluation.stores=false"]
        synthetic += ["evaluation.tasks=[]", "evaluation.tasks_dir=", "evaluation.interval=0", "evaluation.limit=0"]
    if given.is_given("data.packing"):
        synthetic.append("data.packing=bfd")
    if given.is_given("data.tokenizer"):
        synthetic.append(f"data.tokenizer={DataOptions().tokenizer}")
    return complete(load(path, overrides=[*overrides, *synthetic], hyperparameters=hyperparameters))


def _world_size() -> int:
    return World.from_env(os.environ).size


def run_benchmark(resolved: ResolvedRecipe, *, steps: int, warmup: int) -> dict[str, Any] | None:
    """Run the benchmark; return the report on rank 0, None on other ranks.

    Args:
        resolved: from `resolve_bench_recipe`.
        steps: number of timed steps.
        warmup: number of steps before them, with the first one; at least 1.

    Raises:
        RecipeError: also other errors of opening the engine.
    """
    setup = RunSetup.create(resolved, os.environ)
    start = time.perf_counter()
    engine = setup.open_engine()
    try:
        open_s = time.perf_counter() - start
        measured = _open_and_run(setup, engine, steps, warmup)
        report = _report(setup, engine, measured | {"open_s": open_s, "steps": steps, "warmup": warmup})
    finally:
        engine.close()
    return report if setup.world.rank == 0 else None


def _open_and_run(setup: RunSetup, engine: Engine, steps: int, warmup: int) -> dict[str, Any]:
    with closing(open_batches(setup.recipe, setup.data, engine.topology, engine.control)) as batches:
        return _run_steps(setup, engine, batches, steps, warmup)


def _run_steps(setup: RunSetup, engine: Engine, batches: Batches, steps: int, warmup: int) -> dict[str, Any]:
    lr = setup.recipe.optimizer.lr / 100  # small, as in a warmup, so that the weights stay bounded
    start = time.perf_counter()
    (first,) = engine.fetch_metrics([engine.step(batches.next_batch(), lr)])
    first_step_s = time.perf_counter() - start
    engine.fetch_metrics([engine.step(batches.next_batch(), lr) for _ in range(warmup - 1)])
    prepared = [batches.next_batch() for _ in range(steps)]
    engine.peak_memory_bytes()  # reset the peak
    start, cpu_start = time.perf_counter(), time.process_time()
    metrics = engine.fetch_metrics([engine.step(batch, lr) for batch in prepared])
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        "first_step_s": first_step_s,
        "step_s": seconds / steps,
        "cpu_s_per_step": cpu_seconds / steps,
        "peak_bytes": engine.control.all_reduce_max(engine.peak_memory_bytes()),
        "loss": {"first": first.loss, "last": metrics[-1].loss},
        "all_finite": first.is_finite and all(values.is_finite for values in metrics),
    }


def _report(setup: RunSetup, engine: Engine, measured: dict[str, Any]) -> dict[str, Any]:
    recipe, model, device = setup.recipe, setup.model, engine.device
    seq_len = recipe.data.seq_len
    tokens_per_s = recipe.batch.global_batch_size * seq_len / measured["step_s"]
    flops = {convention: flops_per_token(model, seq_len, convention) for convention in ("full", "causal")}
    peak = device.peak_flops * device.count
    recomputed = engine.recomputed_flops_per_token
    return {
        "benchmark": "lt train bench",
        "format": 1,
        "model": model.to_dict() | {"parameters": n_parameters(model)},
        "layout": _layout(recipe, setup.world),
        "device": asdict(device),
        "steps": measured["steps"],
        "warmup": measured["warmup"],
        "open_s": measured["open_s"],
        "first_step_s": measured["first_step_s"],
        "step_s": measured["step_s"],
        "cpu_s_per_step": measured["cpu_s_per_step"],
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / device.count,
        "flops_per_token": flops,
        "mfu": {convention: tokens_per_s * number / peak for convention, number in flops.items()},
        "hfu": None if math.isnan(recomputed) else tokens_per_s * (flops["full"] + recomputed) / peak,
        "memory": {
            "peak_bytes": measured["peak_bytes"],
            "state_bytes": engine.state_bytes(),
            "planned_bytes": _planned_bytes(setup) if device.kind == "cuda" else None,
        },
        "loss": measured["loss"],
        "all_finite": measured["all_finite"],
        "versions": {"python": platform.python_version(), "lt-trainer": version("lt-trainer")},
        "how": METHOD_NOTES,
    }


def _layout(recipe: Recipe, world: World) -> dict[str, Any]:
    names = ("tp", "pp", "cp", "dp_replicate", "dp_shard", "sequence_parallel")
    return {
        "world": world.size,
        "nodes": world.n_nodes,
        "global_batch_size": recipe.batch.global_batch_size,
        "micro_batch_size": recipe.batch.micro_batch_size,
        "seq_len": recipe.data.seq_len,
        **{name: getattr(recipe.parallel, name) for name in names},
        "engine": {name: value if isinstance(value, Mapping) else vars(value) for name, value in recipe.engine.items()},
    }


def _planned_bytes(setup: RunSetup) -> float | None:
    if setup.recipe.run.engine != "gpu":
        return None
    layout = layout_from_recipe(setup.recipe, devices=setup.world.local_size, nodes=setup.world.n_nodes)
    return plan_memory(setup.model, setup.recipe.data.seq_len, layout).peak
