"""What a run needs of NeuronCores before it is started: bytes of the fullest core by part, steps of an epoch, time.

A core holds its share of one pipeline stage. Weights and gradients are whole there, as the files of an NxD checkpoint
are cut (so copies of key/value heads count); masters and moments are divided by the data-parallel degree with ZeRO-1.
With P stages, stage s has at most P - s micro-batches in flight, each with all that its layers keep; attention that
is recomputed keeps no scores, but holds those of one layer while it does. Logits are not cut into chunks: the last
stage holds them in fp32, their exponentials, and their gradient in the compute dtype.

Bytes are those on the device, where `bf16_sr` and `downcast` have narrower numbers than torch says. What the runtime,
collectives and compiled code take is the reserve, an assumption: nothing here was measured on Trainium.

Time takes one published figure as the share of the peak that is reached: Llama 3 70B at 8192, TP 32 x PP 8 on 16
trn1.32xlarge, 1024 rows an update in 243.8 s, of AWS's guide for that run. The pipeline's bubble is counted apart.

Cost: the tensors of each stage, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from lt_ckpt.nxd.layout import rank_tensors, stages
from lt_model import LlamaConfig, flops_per_token, n_parameters
from lt_model.activations import block_backward_per_token, kept_per_token
from lt_trainer.engine import World
from lt_trainer.errors import RecipeError
from lt_trainer.fields import suggest
from lt_trainer.planning.plan import vocabulary
from lt_trainer.recipe import Recipe, Resolved, engine_options, llama_config
from lt_trainer_neuron.checks import check, check_model
from lt_trainer_neuron.grid import cut_of
from lt_trainer_neuron.options import SECTION, NeuronOptions

__all__ = ["CORES", "Core", "CoreMemory", "Epoch", "NeuronPlan", "core_memory", "make"]

GIB = 2**30
RESERVE_SHARE, RESERVE_BYTES = 0.05, 1 << 30
BUSY = 0.345
"""Share of the peak between pipeline bubbles, from the published figure in the module's text."""


@dataclass(frozen=True, kw_only=True)
class Core:
    """A NeuronCore: memory in bytes, dense bf16 FLOP/s, and how many a node of the usual size has."""

    name: str
    title: str
    memory_bytes: int
    peak_flops: float
    per_node: int


CORES: Mapping[str, Core] = {
    "trn1": Core(
        name="trn1", title="NeuronCore-v2 (trn1)", memory_bytes=16 * GIB, peak_flops=95e12, per_node=32
    ),  # a Trainium chip: 32 GiB and 190 TFLOP/s of bf16, two cores (AWS Neuron documentation)
}


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Of one number on the device."""

    weight: int
    gradient: int
    master: int
    moment: int


BYTES: Mapping[str, Bytes] = {
    "bf16_sr": Bytes(weight=2, gradient=2, master=0, moment=2),
    "downcast": Bytes(weight=2, gradient=4, master=4, moment=4),
    "fp32_master": Bytes(weight=2, gradient=4, master=4, moment=4),
}
"""By `engine.neuron.precision`; without masters the weights are what is updated."""


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
        """For runtime, collectives, compiled code and what cannot be used."""
        return RESERVE_SHARE * self.peak + RESERVE_BYTES

    @property
    def needed(self) -> float:
        """Peak and reserve."""
        return self.peak + self.reserve


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch over the rows of the recipe's store: rows = steps x global batch + left."""

    rows: int
    steps: int
    left: int


@dataclass(frozen=True, kw_only=True)
class NeuronPlan:
    """A recipe on NeuronCores; of `memory` each stage, the first one first."""

    recipe: Recipe
    config: LlamaConfig
    vocabulary_from: str
    core: Core
    cores: int
    dp: int
    accumulation: int
    memory: tuple[CoreMemory, ...]
    bubble: float
    step_s: float
    mfu: float
    mfu_source: str
    checkpoint_bytes: float
    epoch: Epoch | None

    @property
    def fullest(self) -> CoreMemory:
        """Of the stage that needs most."""
        return max(self.memory, key=lambda one: one.needed)

    @property
    def fits(self) -> bool:
        """Whether every stage fits into a core."""
        return self.fullest.needed <= self.core.memory_bytes

    @property
    def tokens_per_step(self) -> int:
        """Positions of one update."""
        return self.recipe.batch.global_batch * self.recipe.data.seq_len

    def values(self) -> dict[str, Any]:
        """The plan as plain values: bytes and seconds."""
        epoch = self.epoch
        return {
            "format": 1,
            "model": {**self.config.to_dict(), "parameters": n_parameters(self.config)},
            "vocabulary_from": self.vocabulary_from,
            "device": vars(self.core),
            "layout": {
                "cores": self.cores,
                "nodes": self.recipe.parallel.n_nodes,
                "tp": self.recipe.parallel.tp,
                "pp": self.recipe.parallel.pp,
                "dp": self.dp,
                "micro_batch": self.recipe.batch.micro_batch,
                "accumulation": self.accumulation,
                "stages": [len(layers) for layers in stages(self.config.n_layers, self.recipe.parallel.pp)],
            },
            "memory_bytes": {
                "stage": self.fullest.stage,
                "parts": dict(self.fullest.parts),
                "peak": self.fullest.peak,
                "reserve": self.fullest.reserve,
                "needed": self.fullest.needed,
                "device": self.core.memory_bytes,
                "needed_by_stage": [one.needed for one in self.memory],
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
                "bubble": self.bubble,
            },
            "epoch": None if epoch is None else vars(epoch),
        }


def core_memory(recipe: Recipe, config: LlamaConfig, *, dp: int, accumulation: int, stage: int) -> CoreMemory:
    """Bytes of one core of a stage.

    Args:
        recipe: for degrees, lengths and precision.
        config: the model.
        dp: data-parallel degree.
        accumulation: micro-batches of one update.
        stage: which, from 0.
    """
    options = engine_options(recipe, "neuron", NeuronOptions)
    parallel, width = recipe.parallel, BYTES[options.precision]
    numbers = sum(prod(row.shape) for row in rank_tensors(config, cut_of(recipe), 0, stage))
    share = dp if options.zero1 else 1
    tokens, tp = recipe.batch.micro_batch * recipe.data.seq_len, parallel.tp
    layout = {"element_bytes": 2, "tp": tp, "sequence_parallel": parallel.sequence_parallel}
    scores = 0.0 if options.flash_attention else tokens * recipe.data.seq_len * config.n_heads / tp * (4 + 2)
    layers = len(stages(config.n_layers, parallel.pp)[stage])
    kept = tokens * _kept_per_token(recipe, config, options) + (0.0 if options.selective_checkpointing else scores)
    in_flight = min(parallel.pp - stage, accumulation)
    last = stage == parallel.pp - 1
    return CoreMemory(
        stage=stage,
        parts={
            "weights": numbers * width.weight,
            "gradients": numbers * width.gradient,
            "master weights": numbers * width.master / share,
            "moments": 2 * numbers * width.moment / share,
            "activations": in_flight * layers * kept,
            "backward of a layer": tokens * block_backward_per_token(config, "none", **layout) + 2 * scores,
            "logits and loss": tokens * config.vocab_size / tp * (4 + 4 + 2) if last else 0.0,
        },
    )


def _kept_per_token(recipe: Recipe, config: LlamaConfig, options: NeuronOptions) -> float:
    """Bytes per token that a layer keeps, without scores of attention.

    Two things differ from the formula for GPUs: keys and values come in copies, and with sequence parallelism NxD's
    layers keep the part of their input that the rank has, and gather it again for the gradient.
    """
    parallel = recipe.parallel
    kept = kept_per_token(config, "none", element_bytes=2, tp=parallel.tp, sequence_parallel=parallel.sequence_parallel)
    copies = options.kv_replicator - 1
    more = copies * (kept["keys"] + kept["values"])
    gathered = config.hidden_size * 2 * (1 - 1 / parallel.tp) if parallel.sequence_parallel else 0.0
    return sum(kept.values()) + more - 2 * gathered  # of the inputs of two column-parallel products


def make(
    resolved: Resolved, *, device: str, devices: int, nodes: int | None = None, mfu: float | None = None
) -> NeuronPlan:
    """Make a plan.

    Args:
        resolved: the recipe.
        device: `trn1`.
        devices: NeuronCores of a node.
        nodes: how many nodes; the recipe's parallel.n_nodes when None.
        mfu: measured MFU ("full" convention), or None to assume one.

    Raises:
        RecipeError: the recipe would not run, the device is not known, or the recipe is one for the cpu backend.
    """
    if device.lower() not in CORES:
        near = "" if suggest(device, CORES) else " (GPUs are those of run.engine = gpu)"
        raise RecipeError(
            "no such device of the neuron engine", values={"--device": device}, remedy=f"use {', '.join(CORES)}{near}"
        )
    core, recipe = CORES[device.lower()], resolved.recipe
    if nodes is not None and nodes != recipe.parallel.n_nodes:
        recipe = replace(recipe, parallel=replace(recipe.parallel, n_nodes=nodes))
    options = engine_options(recipe, "neuron", NeuronOptions)
    if devices != options.num_neuroncores or options.backend == "cpu":
        raise RecipeError(
            "a plan is one of Trainium, with one rank per core of a node",
            values={
                "--devices": devices,
                f"{SECTION}.num_neuroncores": options.num_neuroncores,
                f"{SECTION}.backend": options.backend,
            },
            remedy=f"give --devices {options.num_neuroncores}, and leave the cpu backend out",
        )
    if mfu is not None and not 0 < mfu < 1:
        raise RecipeError("is a share of the peak", values={"--mfu": mfu}, remedy="give a number between 0 and 1")
    try:
        check(recipe, World())
        vocab_size, source = vocabulary(recipe)
        config = llama_config(recipe, vocab_size)
        check_model(recipe, config)
        cores = options.num_neuroncores * recipe.parallel.n_nodes
        dp, accumulation = recipe.parallel.data_parallel(cores), recipe.accumulation(cores)
    except RecipeError as exc:
        raise exc.located(resolved.origins) from exc
    bubble = (recipe.parallel.pp - 1) / (accumulation + recipe.parallel.pp - 1)
    told = "given"
    if mfu is None:
        mfu, told = (
            BUSY * (1 - bubble),
            f"assumed: {BUSY:.1%} between pipeline bubbles, as of Llama 3 70B in the guide by AWS",
        )
    tokens = recipe.batch.global_batch * recipe.data.seq_len
    return NeuronPlan(
        recipe=recipe,
        config=config,
        vocabulary_from=source,
        core=core,
        cores=cores,
        dp=dp,
        accumulation=accumulation,
        memory=tuple(
            core_memory(recipe, config, dp=dp, accumulation=accumulation, stage=stage)
            for stage in range(recipe.parallel.pp)
        ),
        bubble=bubble,
        step_s=tokens * flops_per_token(config, recipe.data.seq_len) / (cores * core.peak_flops * mfu),
        mfu=mfu,
        mfu_source=told,
        checkpoint_bytes=_checkpoint_bytes(recipe, config, BYTES[options.precision]),
        epoch=_epoch(recipe),
    )


def _checkpoint_bytes(recipe: Recipe, config: LlamaConfig, width: Bytes) -> float:
    """Weights with copies of key/value heads, as NxD's files have them, and the optimizer's state."""
    cut, tp = cut_of(recipe), recipe.parallel.tp
    numbers = tp * sum(
        prod(row.shape) for stage in range(recipe.parallel.pp) for row in rank_tensors(config, cut, 0, stage)
    )
    return numbers * (width.weight + width.master + 2 * width.moment)


def _epoch(recipe: Recipe) -> Epoch | None:
    """An epoch, where the rows are of one store that is here and all of one length."""
    data = recipe.data
    if data.kind != "store" or data.pack == "buckets" or recipe.batch.ramp.start or not Path(data.store).exists():
        return None
    from lt_data import TokenStore, open_pack

    rows = open_pack(TokenStore.open(data.store), seq_len=data.seq_len, mode=data.pack).n_rows
    steps, left = divmod(rows, recipe.batch.global_batch)
    return Epoch(rows=rows, steps=steps, left=left)
