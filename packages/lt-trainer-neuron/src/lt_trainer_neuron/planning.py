"""Memory and time plan of a run on NeuronCores: bytes of the largest stage, time; as plain values and as text.

A core holds its share of one pipeline stage. Weights and gradients are not sharded further, as in the files of an NxD
checkpoint (so replicas of key/value heads count); master weights and optimizer state are divided by the data-parallel
degree with ZeRO-1. With P stages, stage s has at most P - s micro-batches in flight, each with all activations that its
layers keep; recomputed attention keeps no scores, but holds those of one layer during recomputation. Logits are not
chunked: the last stage holds them in fp32, their exponentials, and their gradient in the compute dtype. A soft-cap
keeps its slopes in fp32, and a window is a mask: it saves nothing.

Bytes are those on the device, where `bf16_sr` and `downcast` use narrower dtypes than torch reports. The reserve covers
runtime, collectives and compiled code, and is an assumption: nothing here was measured on Trainium.

Time assumes the MFU of one published figure: Llama 3 70B at 8192, TP 32 x PP 8 on 16 trn1.32xlarge, 1024 rows per step
in 243.8 s, from AWS's guide for that run. The pipeline bubble is counted separately.

Cost: the tensors of each stage are listed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from lt_ckpt.nxd.layout import layers_per_stage, rank_tensors
from lt_model import ModelConfig, flops_per_token, n_parameters
from lt_model.activation_memory import activation_bytes_per_token, block_backward_bytes_per_token
from lt_trainer.config.recipe import ResolvedRecipe, engine_options, model_config
from lt_trainer.config.sections import Recipe
from lt_trainer.constants import GIB
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer.optimizers import optimizer_spec
from lt_trainer.planning.plan import format_count, format_duration, vocab_size_and_source
from lt_trainer_neuron.checks import check_model, check_recipe
from lt_trainer_neuron.grid import build_nxd_options
from lt_trainer_neuron.options import SECTION, NeuronOptions

RESERVE_SHARE, RESERVE_BYTES = 0.05, 1 << 30
ASSUMED_MFU = 0.345
"""MFU excluding pipeline bubbles, from the published figure in the module docstring."""

TRN1 = {"name": "trn1", "title": "NeuronCore-v2 (trn1)", "memory_bytes": 16 * GIB, "peak_flops": 95e12, "per_node": 32}
"""A core, half of a Trainium chip of 32 GiB and 190 TFLOP/s of bf16 (AWS Neuron documentation)."""


class BytesPerParam(NamedTuple):
    """Bytes per parameter on the device."""

    weight: int
    gradient: int
    master: int


BYTES_PER_PARAM: Mapping[str, BytesPerParam] = {
    "bf16_sr": BytesPerParam(weight=2, gradient=2, master=0),
    "downcast": BytesPerParam(weight=2, gradient=4, master=4),
    "fp32_master_weights": BytesPerParam(weight=2, gradient=4, master=4),
}
"""By `engine.neuron.precision`; without master weights the optimizer updates the weights directly."""


def core_memory(recipe: Recipe, config: ModelConfig, *, dp: int, accumulation: int, stage: int) -> dict[str, float]:
    """Return the bytes of one core of a stage, by part.

    Args:
        recipe: recipe with degrees, lengths and precision.
        config: model configuration.
        dp: data-parallel degree.
        accumulation: micro-batches per step.
        stage: index of the stage, from 0.
    """
    options = engine_options(recipe, "neuron", NeuronOptions)
    parallel, width = recipe.parallel, BYTES_PER_PARAM[options.precision]
    shapes = _stage_shapes(recipe, config, stage)
    n_params, share = sum(map(prod, shapes)), dp if options.zero1 else 1
    tokens, tp = recipe.batch.micro_batch_size * recipe.data.seq_len, parallel.tp
    layout = {"element_bytes": 2, "tp": tp, "sequence_parallel": parallel.sequence_parallel}
    capped, capped_logits = (4 * (cap > 0) for cap in (config.attention_softcap, config.logits_softcap))
    scores = 0.0 if options.flash_attention else tokens * recipe.data.seq_len * config.n_heads / tp * (4 + 2 + capped)
    kept_scores = 0.0 if options.selective_checkpointing else scores
    layers = len(layers_per_stage(config.n_layers, parallel.pp)[stage])
    in_flight, last = min(parallel.pp - stage, accumulation), stage == parallel.pp - 1
    # Unlike on GPUs keys and values are replicated, and with sequence parallelism NxD's layers keep only the rank's
    # part of their input and gather it again for the gradient: the inputs of two column-parallel matmuls.
    kept = activation_bytes_per_token(config, "none", **layout)
    replicated = (options.kv_size_multiplier - 1) * (kept["keys"] + kept["values"])
    gathered = config.hidden_size * 2 * (1 - 1 / tp) if parallel.sequence_parallel else 0.0
    activations = tokens * (sum(kept.values()) + replicated - 2 * gathered) + kept_scores
    return {
        "weights": n_params * width.weight,
        "gradients": n_params * width.gradient,
        "master weights": n_params * width.master / share,
        "optimizer state": _optimizer_state_bytes(recipe, shapes, width) / share,
        "activations": in_flight * layers * activations,
        "backward of a layer": tokens * block_backward_bytes_per_token(config, "none", **layout) + 2 * scores,
        "logits and loss": tokens * config.vocab_size / tp * (4 + 4 + 2 + capped_logits) if last else 0.0,
    }


def _stage_shapes(recipe: Recipe, config: ModelConfig, stage: int) -> list[tuple[int, ...]]:
    return [row.shape for row in rank_tensors(config, build_nxd_options(recipe), 0, stage)]


def _optimizer_state_bytes(recipe: Recipe, shapes: Iterable[tuple[int, ...]], width: BytesPerParam) -> int:
    spec = optimizer_spec(recipe.optimizer.name)
    return spec.state_bytes(recipe.optimizer, shapes, width.master or width.weight)


def make_plan(
    resolved: ResolvedRecipe, *, device: str, devices: int, nodes: int | None = None, mfu: float | None = None
) -> dict[str, Any]:
    """Return the plan of a recipe as plain values, in bytes and seconds.

    Args:
        resolved: resolved recipe.
        device: device name, `trn1`.
        devices: NeuronCores per node.
        nodes: number of nodes; the recipe's parallel.n_nodes if None.
        mfu: measured MFU ("full" convention), or None to assume one.

    Raises:
        RecipeError: the recipe cannot run, the device is unknown, or the recipe uses the cpu backend.
    """
    if device.lower() != "trn1":
        remedy = "use trn1 (for GPUs set run.engine = gpu)"
        raise RecipeError("unknown device of the neuron engine", values={"--device": device}, remedy=remedy)
    recipe = resolved.recipe.with_nodes(nodes or resolved.recipe.parallel.n_nodes)
    options = engine_options(recipe, "neuron", NeuronOptions)
    if devices != options.num_neuroncores or options.backend == "cpu":
        fields = {f"{SECTION}.{name}": getattr(options, name) for name in ("num_neuroncores", "backend")}
        raise RecipeError(
            "plans are for Trainium with one rank per core of a node",
            values={"--devices": devices} | fields,
            remedy=f"use --devices {options.num_neuroncores}, without the cpu backend",
        )
    if mfu is not None and not 0 < mfu < 1:
        raise RecipeError("must be a fraction of the peak", values={"--mfu": mfu}, remedy="use a value between 0 and 1")
    try:
        check_recipe(recipe, World())
        vocab_size, source = vocab_size_and_source(recipe)
        config = model_config(recipe, vocab_size)
        check_model(recipe, config)
    except RecipeError as exc:
        raise exc.with_origins(resolved.origins) from exc
    parallel, batch, cores = recipe.parallel, recipe.batch, options.num_neuroncores * recipe.parallel.n_nodes
    dp, accumulation = parallel.data_parallel_size(cores), recipe.accumulation_steps(cores)
    stages = range(parallel.pp)
    memory = [core_memory(recipe, config, dp=dp, accumulation=accumulation, stage=stage) for stage in stages]
    needed = [sum(parts.values()) * (1 + RESERVE_SHARE) + RESERVE_BYTES for parts in memory]
    fullest = max(stages, key=needed.__getitem__)
    peak = sum(memory[fullest].values())
    bubble = (parallel.pp - 1) / (accumulation + parallel.pp - 1)
    mfu_source = "given"
    if mfu is None:
        mfu_source = f"assumed: {ASSUMED_MFU:.1%} without pipeline bubbles, from Llama 3 70B in AWS's guide"
        mfu = ASSUMED_MFU * (1 - bubble)
    tokens, steps = batch.global_batch_size * recipe.data.seq_len, recipe.schedule.max_steps
    step_s = tokens * flops_per_token(config, recipe.data.seq_len) / (cores * TRN1["peak_flops"] * mfu)
    return {
        "format": 1,
        "model": {**config.to_dict(), "preset": recipe.model.preset, "parameters": n_parameters(config)},
        "vocabulary_from": source,
        "device": TRN1,
        "layout": {
            "cores": cores,
            "nodes": parallel.n_nodes,
            "tp": parallel.tp,
            "pp": parallel.pp,
            "dp": dp,
            "sequence_parallel": parallel.sequence_parallel,
            "micro_batch_size": batch.micro_batch_size,
            "accumulation": accumulation,
            "stages": [len(layers) for layers in layers_per_stage(config.n_layers, parallel.pp)],
        },
        "memory_bytes": {
            "stage": fullest,
            "parts": memory[fullest],
            "peak": peak,
            "reserve": needed[fullest] - peak,
            "needed": needed[fullest],
            "device": TRN1["memory_bytes"],
            "needed_by_stage": needed,
            "checkpoint": _checkpoint_bytes(recipe, config, BYTES_PER_PARAM[options.precision]),
        },
        "fits": needed[fullest] <= TRN1["memory_bytes"],
        "time": {
            "step_s": step_s,
            "rows_per_step": batch.global_batch_size,
            "tokens_per_step": tokens,
            "tokens_per_s": tokens / step_s,
            "steps": steps,
            "seconds": step_s * steps,
            "mfu": mfu,
            "mfu_source": mfu_source,
            "bubble": bubble,
        },
    }


def _checkpoint_bytes(recipe: Recipe, config: ModelConfig, width: BytesPerParam) -> float:
    """Return the bytes of weights, with replicated key/value heads as in NxD's files, and optimizer state."""
    shapes = [shape for stage in range(recipe.parallel.pp) for shape in _stage_shapes(recipe, config, stage)]
    weights = sum(map(prod, shapes)) * (width.weight + width.master)
    return recipe.parallel.tp * (weights + _optimizer_state_bytes(recipe, shapes, width))


def format_plan(plan: Mapping[str, Any]) -> str:
    """Return the plan of `make_plan` as a text report."""
    return "\n".join(_iter_lines(plan))


def _iter_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    model, layout, memory, time, core = (plan[name] for name in ("model", "layout", "memory_bytes", "time", "device"))
    yield (
        f"{model['preset'] or 'model'}: {format_count(model['parameters'])} parameters; vocabulary "
        f"{model['vocab_size']} from {plan['vocabulary_from']}"
    )
    stages = layout["stages"]
    degrees = {
        f"tensor parallel {layout['tp']}" + " with sequence parallel" * layout["sequence_parallel"]: layout["tp"] > 1,
        f"{layout['pp']} stages of {min(stages)} to {max(stages)} layers": layout["pp"] > 1,
        f"data parallel {layout['dp']}": True,
    }
    nodes = f"{layout['nodes']} node(s) of {layout['cores'] // layout['nodes']}"
    yield f"{layout['cores']} x {core['title']} ({nodes}): {', '.join(text for text, said in degrees.items() if said)}"
    yield (
        f"one step: {time['rows_per_step']} rows, {time['tokens_per_step']:,} tokens; on each of {layout['dp']} data "
        f"parallel ranks {layout['accumulation']} micro-batch(es) of {layout['micro_batch_size']}"
    )
    free = (memory["device"] - memory["needed"]) / GIB
    verdict = f"fits, {free:.1f} left" if plan["fits"] else f"DOES NOT FIT: {-free:.1f} too much"
    yield f"\nmemory of a core of stage {memory['stage']}, the fullest   GiB"
    for part, n_bytes, note in (
        *((part, n_bytes, "") for part, n_bytes in memory["parts"].items()),
        ("peak", memory["peak"], ""),
        ("reserve", memory["reserve"], "   assumed, for runtime, collectives and compiled code"),
        ("needed", memory["needed"], f"   of {memory['device'] / GIB:.1f}: {verdict}"),
        ("a checkpoint, on disk", memory["checkpoint"], ""),
    ):
        if n_bytes:
            yield f"  {part:<30} {n_bytes / GIB:>8.2f}{note}"
    yield f"\ntime at {time['mfu']:.1%} MFU of {core['peak_flops'] / 1e12:.0f} TFLOP/s ({time['mfu_source']})"
    yield f"  {'pipeline bubble':<30} {time['bubble']:.1%}"
    yield f"  {'step':<30} {format_duration(time['step_s'])}"
    yield f"  {'tokens per second':<30} {time['tokens_per_s']:,.0f}"
    total = format_count(time["steps"] * time["tokens_per_step"])
    yield f"  {'run':<30} {format_duration(time['seconds'])} for {time['steps']:,} steps, {total} tokens"
    if not plan["fits"]:
        yield "\nto fit: more nodes with engine.neuron.zero1, a larger parallel.tp or parallel.pp,"
        yield "parallel.sequence_parallel, engine.neuron.selective_checkpointing, a smaller batch.micro_batch_size"
        yield "or data.seq_len"
    yield "note: nothing here was measured on Trainium"
