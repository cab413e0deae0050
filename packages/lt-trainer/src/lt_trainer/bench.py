"""`lt train bench`: how fast and in how much memory a recipe trains, as one JSON that says how each number was made.

The engine is opened as a run opens it and steps through rows of random ids (`synthetic`): no data, no checkpoints, no
logging. Warm-up steps come first. The timed ones are then all started before the numbers of any is read, so that a
device runs ahead of the host as in training; the time is that from before the first to after the wait for the last.

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
from lt_trainer.batches import Batches, open_batches
from lt_trainer.engine import Engine, World
from lt_trainer.errors import RecipeError
from lt_trainer.planning.layout import of
from lt_trainer.planning.memory import planned_memory
from lt_trainer.planning.plan import vocabulary
from lt_trainer.recipe import Recipe, Resolved, load
from lt_trainer.run import Plan

HOW = {
    "data": "rows of random ids below the vocabulary size, every position labelled (data.synthetic)",
    "step_s": "perf_counter from before the first timed step to after the wait for the last, over their number",
    "cpu_s_per_step": "CPU seconds of this process over the same steps",
    "tokens_per_s": "tokens of the global batch over step_s, all devices",
    "mfu": "FLOPs per token ('full': 6 per parameter without the input embedding + 12 x layers x width x seq_len; "
    "'causal': half of the last term) times tokens_per_s, over the peak of all devices",
    "hfu": "as mfu in full, with the FLOPs that activation checkpointing does again; null where no formula knows",
    "peak_flops": "of one device at the compute dtype; peak_source says from where",
    "first_step_s": "the first step, with the wait for it: kernels are loaded, compiled, tuned",
    "memory.peak_bytes": "on cuda the most that torch's allocator had given out during the timed steps; on a CPU the "
    "most that was resident since the process began",
    "memory.planned_bytes": "what lt train plan says for cuda (peak, without its reserve); null on a CPU",
    "loss": "of the first and the last step in nats; random ids stay near ln(vocabulary)",
}


def bench_recipe(
    path: str | None, preset: str, *, sets: Sequence[str], hyperparameters: Mapping[str, Any] | None
) -> Resolved:
    """Resolve the recipe to measure: a file or a preset, its data replaced by random ids.

    Raises:
        RecipeError: neither or both are given, the preset is unknown, or the recipe is wrong.
    """
    if bool(path) == bool(preset):
        raise RecipeError(
            "give one of the two",
            values={"RUN.toml": path or "", "--preset": preset},
            remedy="lt train bench RUN.toml, or lt train bench --preset llama-160m",
        )
    if preset:
        if preset not in PRESETS:
            raise RecipeError(
                "unknown preset", values={"--preset": preset}, remedy=f"the presets are {', '.join(PRESETS)}"
            )
        base = {
            "model": {"preset": preset, "vocab_size": PRESETS[preset].vocab_size},
            "data": {"synthetic": True, "seq_len": min(4096, PRESETS[preset].max_position_embeddings)},
            "batch": {"global_batch": _world_size(), "micro_batch": 1},
            "schedule": {"warmup_steps": 0},
        }
        return load(base=base, base_name="lt train bench", sets=sets, hyperparameters=hyperparameters)
    given = load(path, sets=sets, hyperparameters=hyperparameters)
    if given.recipe.data.kind == "synthetic":
        return given
    vocab_size, _ = vocabulary(given.recipe)
    random = ["data.synthetic=true", "data.store=", "data.validation=", f"model.vocab_size={vocab_size}"]
    random += ["metrics.eval_interval=0"]
    if given.given("data.pack"):
        random.append("data.pack=bfd")
    if given.given("data.tokenizer"):
        random.append(f"data.tokenizer={type(given.recipe.data).tokenizer}")
    return load(path, sets=[*sets, *random], hyperparameters=hyperparameters)


def _world_size() -> int:
    return World.from_env(os.environ).size


def measure(resolved: Resolved, *, steps: int, warmup: int) -> dict[str, Any] | None:
    """Run the steps; returns the report on rank 0 and None on the others.

    Args:
        resolved: of `bench_recipe`.
        steps: timed ones.
        warmup: before them, the first one included; at least 1.

    Raises:
        RecipeError: and what opening the engine raises.
    """
    plan = Plan.make(resolved, os.environ)
    began = time.perf_counter()
    engine = plan.open_engine()
    try:
        open_s = time.perf_counter() - began
        found = _timed(plan, engine, steps, warmup)
        report = _report(plan, engine, found | {"open_s": open_s, "steps": steps, "warmup": warmup})
    finally:
        engine.close()
    return report if plan.world.rank == 0 else None


def _timed(plan: Plan, engine: Engine, steps: int, warmup: int) -> dict[str, Any]:
    with closing(open_batches(plan.recipe, plan.data, engine.topology, engine.control)) as batches:
        return _steps(plan, engine, batches, steps, warmup)


def _steps(plan: Plan, engine: Engine, batches: Batches, steps: int, warmup: int) -> dict[str, Any]:
    lr = plan.recipe.optimizer.lr / 100  # as in a warm-up: random ids teach nothing, and weights should stay tame
    began = time.perf_counter()
    (first,) = engine.read([engine.step(batches.next_batch(), lr)])
    first_step_s = time.perf_counter() - began
    engine.read([engine.step(batches.next_batch(), lr) for _ in range(warmup - 1)])
    ready = [batches.next_batch() for _ in range(steps)]
    engine.memory_bytes()  # from here on
    began, began_cpu = time.perf_counter(), time.process_time()
    numbers = engine.read([engine.step(batch, lr) for batch in ready])
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    return {
        "first_step_s": first_step_s,
        "step_s": seconds / steps,
        "cpu_s_per_step": cpu_seconds / steps,
        "peak_bytes": engine.memory_bytes(),
        "loss": {"first": first.loss, "last": numbers[-1].loss},
        "all_finite": first.finite and all(number.finite for number in numbers),
    }


def _report(plan: Plan, engine: Engine, found: dict[str, Any]) -> dict[str, Any]:
    recipe, model, device = plan.recipe, plan.model, engine.device
    seq_len = recipe.data.seq_len
    tokens_per_s = recipe.batch.global_batch * seq_len / found["step_s"]
    flops = {convention: flops_per_token(model, seq_len, convention) for convention in ("full", "causal")}
    peak = device.peak_flops * device.count
    again = engine.recomputed_flops_per_token
    return {
        "benchmark": "lt train bench",
        "format": 1,
        "model": model.to_dict() | {"parameters": n_parameters(model)},
        "layout": _layout(recipe, plan.world),
        "device": asdict(device),
        "steps": found["steps"],
        "warmup": found["warmup"],
        "open_s": found["open_s"],
        "first_step_s": found["first_step_s"],
        "step_s": found["step_s"],
        "cpu_s_per_step": found["cpu_s_per_step"],
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / device.count,
        "flops_per_token": flops,
        "mfu": {convention: tokens_per_s * number / peak for convention, number in flops.items()},
        "hfu": None if math.isnan(again) else tokens_per_s * (flops["full"] + again) / peak,
        "memory": {
            "peak_bytes": found["peak_bytes"],
            "state_bytes": engine.state_bytes(),
            "planned_bytes": _planned_bytes(plan) if device.kind == "cuda" else None,
        },
        "loss": found["loss"],
        "all_finite": found["all_finite"],
        "versions": {"python": platform.python_version(), "lt-trainer": version("lt-trainer")},
        "how": HOW,
    }


def _layout(recipe: Recipe, world: World) -> dict[str, Any]:
    names = ("tp", "pp", "cp", "dp_replicate", "dp_shard", "sequence_parallel")
    return {
        "world": world.size,
        "nodes": world.n_nodes,
        "global_batch": recipe.batch.global_batch,
        "micro_batch": recipe.batch.micro_batch,
        "seq_len": recipe.data.seq_len,
        **{name: getattr(recipe.parallel, name) for name in names},
        "engine": {name: value if isinstance(value, Mapping) else vars(value) for name, value in recipe.engine.items()},
    }


def _planned_bytes(plan: Plan) -> float | None:
    if plan.recipe.run.engine != "gpu":
        return None
    layout = of(plan.recipe, devices=plan.world.local_size, nodes=plan.world.n_nodes)
    return planned_memory(plan.model, plan.recipe.data.seq_len, layout).peak
