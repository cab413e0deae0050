"""Memory and time plan of a run on NeuronCores: bytes of the largest stage, time.

A core holds its share of one pipeline stage. Weights and gradients are not sharded further, as in the files of an NxD
checkpoint (so replicas of key/value heads count); master weights and optimizer state are divided by the data-parallel
degree with ZeRO-1. With P stages, stage s has at most P - s micro-batches in flight, each with all activations that its
layers keep; recomputed attention keeps no scores, but holds those of one layer during recomputation. Logits are not
chunked: the last stage holds them in fp32, their exponentials, and their gradient in the compute dtype.

Bytes are those on the device, where `bf16_sr` and `downcast` use narrower dtypes than torch reports. The reserve covers
runtime, collectives and compiled code, and is an assumption: nothing here was measured on Trainium.

Time assumes the MFU of one published figure: Llama 3 70B at 8192, TP 32 x PP 8 on 16 trn1.32xlarge, 1024 rows per step
in 243.8 s, from AWS's guide for that run. The pipeline bubble is counted separately.

Cost: the tensors of each stage are listed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from lt_ckpt.nxd.layout import layers_per_stage, rank_tensors
from lt_model import LlamaConfig, flops_per_token, n_parameters
from lt_model.activation_memory import activation_bytes_per_token, block_backward_bytes_per_token
from lt_trainer.config.recipe import ResolvedRecipe, engine_options, llama_config
from lt_trainer.config.section import suggest
from lt_trainer.config.sections import Recipe
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer.optimizers import optimizer_spec
from lt_trainer.planning.plan import vocab_size_and_source
from lt_trainer_neuron.checks import check_model, check_recipe
from lt_trainer_neuron.grid import build_nxd_options
from lt_trainer_neuron.options import SECTION, NeuronOptions

GIB = 2**30
RESERVE_SHARE, RESERVE_BYTES = 0.05, 1 << 30
ASSUMED_MFU = 0.345
"""MFU excluding pipeline bubbles, from the published figure in the module docstring."""


@dataclass(frozen=True, kw_only=True)
class NeuronCore:
    """NeuronCore type: memory in bytes, dense bf16 FLOP/s, and cores per node."""

    name: str
    title: str
    memory_bytes: int
    peak_flops: float
    per_node: int


NEURON_CORES: Mapping[str, NeuronCore] = {
    "trn1": NeuronCore(
        name="trn1", title="NeuronCore-v2 (trn1)", memory_bytes=16 * GIB, peak_flops=95e12, per_node=32
    ),  # a Trainium chip: 32 GiB and 190 TFLOP/s of bf16, two cores (AWS Neuron documentation)
}


@dataclass(frozen=True, kw_only=True)
class BytesPerParam:
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


@dataclass(frozen=True, kw_only=True)
class CoreMemory:
    """Bytes of one core of a stage, by part."""

    stage: int
    parts: Mapping[str, float]

    @property
    def peak(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def reserve(self) -> float:
        """Bytes reserved for runtime, collectives, compiled code and fragmentation."""
        return RESERVE_SHARE * self.peak + RESERVE_BYTES

    @property
    def needed(self) -> float:
        """Peak and reserve."""
        return self.peak + self.reserve


@dataclass(frozen=True, kw_only=True)
class NeuronPlan:
    """Plan of a recipe on NeuronCores; `memory` is by stage, first stage first."""

    recipe: Recipe
    config: LlamaConfig
    vocabulary_from: str
    core: NeuronCore
    n_cores: int
    dp: int
    accumulation: int
    memory: tuple[CoreMemory, ...]
    pipeline_bubble: float
    step_s: float
    mfu: float
    mfu_source: str
    checkpoint_bytes: float

    @property
    def largest_stage(self) -> CoreMemory:
        """Memory of the stage that needs most."""
        return max(self.memory, key=lambda stage_memory: stage_memory.needed)

    @property
    def fits(self) -> bool:
        """True if every stage fits into a core."""
        return self.largest_stage.needed <= self.core.memory_bytes

    @property
    def tokens_per_step(self) -> int:
        """Token positions of one step."""
        return self.recipe.batch.global_batch_size * self.recipe.data.seq_len

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, in bytes and seconds."""
        return {
            "format": 1,
            "model": {**self.config.to_dict(), "parameters": n_parameters(self.config)},
            "vocabulary_from": self.vocabulary_from,
            "device": vars(self.core),
            "layout": {
                "cores": self.n_cores,
                "nodes": self.recipe.parallel.n_nodes,
                "tp": self.recipe.parallel.tp,
                "pp": self.recipe.parallel.pp,
                "dp": self.dp,
                "micro_batch_size": self.recipe.batch.micro_batch_size,
                "accumulation": self.accumulation,
                "stages": [len(layers) for layers in layers_per_stage(self.config.n_layers, self.recipe.parallel.pp)],
            },
            "memory_bytes": {
                "stage": self.largest_stage.stage,
                "parts": dict(self.largest_stage.parts),
                "peak": self.largest_stage.peak,
                "reserve": self.largest_stage.reserve,
                "needed": self.largest_stage.needed,
                "device": self.core.memory_bytes,
                "needed_by_stage": [stage_memory.needed for stage_memory in self.memory],
                "checkpoint": self.checkpoint_bytes,
            },
            "fits": self.fits,
            "time": {
                "step_s": self.step_s,
                "tokens_per_step": self.tokens_per_step,
                "tokens_per_s": self.tokens_per_step / self.step_s,
                "seconds": self.step_s * self.recipe.schedule.max_steps,
                "mfu": self.mfu,
                "mfu_source": self.mfu_source,
                "bubble": self.pipeline_bubble,
            },
        }


def core_memory(recipe: Recipe, config: LlamaConfig, *, dp: int, accumulation: int, stage: int) -> CoreMemory:
    """Return the memory of one core of a stage.

    Args:
        recipe: recipe with degrees, lengths and precision.
        config: model configuration.
        dp: data-parallel degree.
        accumulation: micro-batches per step.
        stage: index of the stage, from 0.
    """
    options = engine_options(recipe, "neuron", NeuronOptions)
    parallel, width = recipe.parallel, BYTES_PER_PARAM[options.precision]
    shapes = [row.shape for row in rank_tensors(config, build_nxd_options(recipe), 0, stage)]
    n_params = sum(map(prod, shapes))
    share = dp if options.zero1 else 1
    tokens, tp = recipe.batch.micro_batch_size * recipe.data.seq_len, parallel.tp
    layout = {"element_bytes": 2, "tp": tp, "sequence_parallel": parallel.sequence_parallel}
    scores = 0.0 if options.flash_attention else tokens * recipe.data.seq_len * config.n_heads / tp * (4 + 2)
    layers = len(layers_per_stage(config.n_layers, parallel.pp)[stage])
    kept = tokens * _activation_bytes_per_token(recipe, config, options) + (
        0.0 if options.selective_checkpointing else scores
    )
    in_flight = min(parallel.pp - stage, accumulation)
    last = stage == parallel.pp - 1
    return CoreMemory(
        stage=stage,
        parts={
            "weights": n_params * width.weight,
            "gradients": n_params * width.gradient,
            "master weights": n_params * width.master / share,
            "optimizer state": _optimizer_state_bytes(recipe, shapes, width) / share,
            "activations": in_flight * layers * kept,
            "backward of a layer": tokens * block_backward_bytes_per_token(config, "none", **layout) + 2 * scores,
            "logits and loss": tokens * config.vocab_size / tp * (4 + 4 + 2) if last else 0.0,
        },
    )


def _optimizer_state_bytes(recipe: Recipe, shapes: Iterable[tuple[int, ...]], width: BytesPerParam) -> int:
    spec = optimizer_spec(recipe.optimizer.name)
    return spec.state_bytes(recipe.optimizer, shapes, width.master or width.weight)


def _activation_bytes_per_token(recipe: Recipe, config: LlamaConfig, options: NeuronOptions) -> float:
    """Return the activation bytes per token that a layer keeps, without attention scores.

    Two things differ from the formula for GPUs: keys and values are replicated, and with sequence parallelism NxD's
    layers keep only the rank's part of their input, and gather it again for the gradient.
    """
    parallel = recipe.parallel
    kept = activation_bytes_per_token(
        config, "none", element_bytes=2, tp=parallel.tp, sequence_parallel=parallel.sequence_parallel
    )
    copies = options.kv_size_multiplier - 1
    replicated = copies * (kept["keys"] + kept["values"])
    gathered = config.hidden_size * 2 * (1 - 1 / parallel.tp) if parallel.sequence_parallel else 0.0
    return sum(kept.values()) + replicated - 2 * gathered  # for the inputs of two column-parallel matmuls


def make_plan(
    resolved: ResolvedRecipe, *, device: str, devices: int, nodes: int | None = None, mfu: float | None = None
) -> NeuronPlan:
    """Return the plan of a recipe.

    Args:
        resolved: resolved recipe.
        device: device name, `trn1`.
        devices: NeuronCores per node.
        nodes: number of nodes; the recipe's parallel.n_nodes if None.
        mfu: measured MFU ("full" convention), or None to assume one.

    Raises:
        RecipeError: the recipe cannot run, the device is unknown, or the recipe uses the cpu backend.
    """
    if device.lower() not in NEURON_CORES:
        near = "" if suggest(device, NEURON_CORES) else " (for GPUs set run.engine = gpu)"
        raise RecipeError(
            "unknown device of the neuron engine",
            values={"--device": device},
            remedy=f"use {', '.join(NEURON_CORES)}{near}",
        )
    core, recipe = NEURON_CORES[device.lower()], resolved.recipe
    if nodes is not None and nodes != recipe.parallel.n_nodes:
        recipe = recipe.with_nodes(nodes)
    options = engine_options(recipe, "neuron", NeuronOptions)
    if devices != options.num_neuroncores or options.backend == "cpu":
        raise RecipeError(
            "plans are for Trainium with one rank per core of a node",
            values={
                "--devices": devices,
                f"{SECTION}.num_neuroncores": options.num_neuroncores,
                f"{SECTION}.backend": options.backend,
            },
            remedy=f"use --devices {options.num_neuroncores}, without the cpu backend",
        )
    if mfu is not None and not 0 < mfu < 1:
        raise RecipeError("must be a fraction of the peak", values={"--mfu": mfu}, remedy="use a value between 0 and 1")
    try:
        check_recipe(recipe, World())
        vocab_size, source = vocab_size_and_source(recipe)
        config = llama_config(recipe, vocab_size)
        check_model(recipe, config)
        cores = options.num_neuroncores * recipe.parallel.n_nodes
        dp, accumulation = recipe.parallel.data_parallel_size(cores), recipe.accumulation_steps(cores)
    except RecipeError as exc:
        raise exc.with_origins(resolved.origins) from exc
    bubble = (recipe.parallel.pp - 1) / (accumulation + recipe.parallel.pp - 1)
    mfu_source = "given"
    if mfu is None:
        mfu, mfu_source = (
            ASSUMED_MFU * (1 - bubble),
            f"assumed: {ASSUMED_MFU:.1%} without pipeline bubbles, from Llama 3 70B in AWS's guide",
        )
    tokens = recipe.batch.global_batch_size * recipe.data.seq_len
    return NeuronPlan(
        recipe=recipe,
        config=config,
        vocabulary_from=source,
        core=core,
        n_cores=cores,
        dp=dp,
        accumulation=accumulation,
        memory=tuple(
            core_memory(recipe, config, dp=dp, accumulation=accumulation, stage=stage)
            for stage in range(recipe.parallel.pp)
        ),
        pipeline_bubble=bubble,
        step_s=tokens * flops_per_token(config, recipe.data.seq_len) / (cores * core.peak_flops * mfu),
        mfu=mfu,
        mfu_source=mfu_source,
        checkpoint_bytes=_checkpoint_bytes(recipe, config, BYTES_PER_PARAM[options.precision]),
    )


def _checkpoint_bytes(recipe: Recipe, config: LlamaConfig, width: BytesPerParam) -> float:
    """Return the bytes of weights, with replicated key/value heads as in NxD's files, and optimizer state."""
    nxd_options, tp = build_nxd_options(recipe), recipe.parallel.tp
    shapes = [row.shape for stage in range(recipe.parallel.pp) for row in rank_tensors(config, nxd_options, 0, stage)]
    weights = sum(map(prod, shapes)) * (width.weight + width.master)
    return tp * (weights + _optimizer_state_bytes(recipe, shapes, width))
