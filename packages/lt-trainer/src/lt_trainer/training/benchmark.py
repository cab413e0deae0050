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
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lt_data.display.terminal import echo_error
from lt_model import PRESETS, flops_per_token, n_parameters
from lt_trainer.config.data_section import DataOptions
from lt_trainer.config.recipe import ResolvedRecipe, complete, load, to_dict
from lt_trainer.config.sections import EvaluationOptions, Recipe
from lt_trainer.data.batches import describe_held_rows, open_batches
from lt_trainer.engine import Engine, World
from lt_trainer.errors import RecipeError
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import plan_memory
from lt_trainer.planning.plan import vocab_size_and_source
from lt_trainer.training.run import read_inputs

if TYPE_CHECKING:
    from lt_model import ModelConfig


def resolve_bench_recipe(
    path: str | None, preset: str, *, overrides: Sequence[str], hyperparameters: Mapping[str, Any] | None
) -> ResolvedRecipe:
    """Resolve the recipe to measure: a file or a preset, with synthetic data.

    Raises:
        RecipeError: neither or both are given, the preset is unknown, or the recipe is invalid.
    """
    if bool(path) == bool(preset) or preset not in ("", *PRESETS):
        raise RecipeError(
            "exactly one is required",
            values={"RUN.toml": path or "", "--preset": preset},
            remedy="use lt train bench RUN.toml, or --preset with a name of `lt model list`",
        )
    if preset:
        base = {
            "model": {"preset": preset, "vocab_size": PRESETS[preset].vocab_size},
            "data": {"synthetic": True, "seq_len": min(4096, PRESETS[preset].max_position_embeddings)},
            "batch": {"global_batch_size": World.from_env(os.environ).size, "micro_batch_size": 1},
            "schedule": {"warmup_steps": 0},
        }
        return load(base=base, base_name="lt train bench", overrides=overrides, hyperparameters=hyperparameters)
    given = complete(load(path, overrides=overrides, hyperparameters=hyperparameters, reads_data=False))
    return _with_random_rows(given)


def _with_random_rows(given: ResolvedRecipe) -> ResolvedRecipe:
    """Return the recipe with rows of random ids in place of its data, and without validation and evaluation."""
    recipe = given.recipe
    vocab_size, _ = vocab_size_and_source(recipe)
    data = DataOptions(
        synthetic=True,
        seq_len=recipe.data.seq_len,
        document_mask=recipe.data.document_mask,
        prefetch=recipe.data.prefetch,
    )
    sections = {
        "data": data,
        "model": recipe.model.model_copy(update={"vocab_size": vocab_size}),
        "metrics": recipe.metrics.model_copy(update={"validation_interval": 0, "validation_tokens": 0}),
        "evaluation": EvaluationOptions(),
    }
    return replace(given, recipe=recipe.model_copy(update=sections))


def run_benchmark(resolved: ResolvedRecipe, *, steps: int, warmup: int) -> dict[str, Any] | None:
    """Run the benchmark; return the report on rank 0, None on other ranks.

    Args:
        resolved: from `resolve_bench_recipe`.
        steps: number of timed steps.
        warmup: number of steps before them, with the first one; at least 1.

    Returns:
        Among others `step_s`, the time from before the first timed step until the last is done over their number;
        `cpu_s_per_step` of this process; `tokens_per_s` of the global batch on all devices; `mfu` and `hfu` over the
        peak of all devices; `memory.peak_bytes` of the fullest rank, on CUDA of the timed steps; `loss` of the first
        and the last step. docs/benchmarks says how each is defined.

    Raises:
        RecipeError: also other errors of opening the engine.
    """
    world, recipe, tables = World.from_env(os.environ), resolved.recipe, to_dict(resolved.recipe)
    inputs = read_inputs(resolved, world)
    lr = recipe.optimizer.lr / 100  # small, as in a warmup, so that the weights stay bounded
    opened = time.perf_counter()
    with closing(inputs.open_engine(recipe, world)) as engine:
        if world.rank == 0:
            echo_error(describe_held_rows(recipe, engine.topology.dp_size, n_steps=steps))
        with closing(open_batches(recipe, inputs.data, engine.topology, engine.control)) as batches:
            began = time.perf_counter()
            (first,) = engine.fetch_metrics([engine.step(batches.next_batch(), lr)])
            first_step_s = time.perf_counter() - began
            engine.fetch_metrics([engine.step(batches.next_batch(), lr) for _ in range(warmup - 1)])
            prepared = [batches.next_batch() for _ in range(steps)]
            engine.peak_memory_bytes()  # reset the peak
            start, cpu_start = time.perf_counter(), time.process_time()
            metrics = engine.fetch_metrics([engine.step(batch, lr) for batch in prepared])
            step_s, cpu_s = (time.perf_counter() - start) / steps, (time.process_time() - cpu_start) / steps
        peak_bytes = engine.control.all_reduce_max(engine.peak_memory_bytes())
        planned = None  # without the reserve of `lt train plan`
        if engine.device.kind == "cuda" and recipe.run.engine == "gpu":
            layout = layout_from_recipe(recipe, devices=world.local_size, nodes=world.n_nodes)
            planned = plan_memory(inputs.model, recipe.data.seq_len, layout).peak
        report = {
            "benchmark": "lt train bench",
            "format": 1,
            "model": inputs.model.to_dict() | {"parameters": n_parameters(inputs.model)},
            "layout": {
                "world": world.size,
                "nodes": world.n_nodes,
                "global_batch_size": recipe.batch.global_batch_size,
                "micro_batch_size": recipe.batch.micro_batch_size,
                "seq_len": recipe.data.seq_len,
                **tables["parallel"],
                "engine": tables["engine"],
            },
            "device": asdict(engine.device),
            "steps": steps,
            "warmup": warmup,
            "open_s": began - opened,
            "first_step_s": first_step_s,
            "step_s": step_s,
            "cpu_s_per_step": cpu_s,
            **_rates(recipe, inputs.model, engine, step_s),
            "memory": {
                "peak_bytes": peak_bytes,
                "state_bytes": engine.state_bytes(),
                "planned_bytes": planned,
            },
            "loss": {"first": first.loss, "last": metrics[-1].loss},
            "all_finite": first.is_finite and all(values.is_finite for values in metrics),
            "versions": {"python": platform.python_version(), "lt-trainer": version("lt-trainer")},
        }
    return report if world.rank == 0 else None


def _rates(recipe: Recipe, model: ModelConfig, engine: Engine, step_s: float) -> dict[str, Any]:
    device, seq_len = engine.device, recipe.data.seq_len
    tokens_per_s = recipe.batch.global_batch_size * seq_len / step_s
    flops = {convention: flops_per_token(model, seq_len, convention) for convention in ("full", "causal")}
    peak, recomputed = device.peak_flops * device.count, engine.recomputed_flops_per_token
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / device.count,
        "flops_per_token": flops,
        "mfu": {convention: tokens_per_s * number / peak for convention, number in flops.items()},
        "hfu": None if math.isnan(recomputed) else tokens_per_s * (flops["full"] + recomputed) / peak,
    }
