"""Parallel layout of a run, as far as memory and time depend on it: the values that a plan varies.

world size = pp * dp_replicate * dp_shard * cp * tp. `layout_from_recipe` builds a layout from a recipe, `to_overrides`
converts it back to recipe fields, so a proposed layout can be passed to `lt train` unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lt_trainer.config.optimizer_section import OptimizerOptions
from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer.optimizers.spec import DTYPE_BYTES

RECIPE_FIELDS = {
    "nodes": "parallel.n_nodes",
    **{name: f"parallel.{name}" for name in ("tp", "cp", "pp", "sequence_parallel", "dp_replicate", "dp_shard", "ep")},
    "micro_batch_size": "batch.micro_batch_size",
    "activation_checkpointing": "engine.gpu.activation_checkpointing",
    "reduce_each_micro_batch": "engine.gpu.reduce_each_micro_batch",
}
"""Fields of a layout that a search changes, and their names in the recipe."""
OFFLOAD_RESIDENT_BLOCKS = 2
"""Blocks with activations on the device under activation offload: one computing, one being copied."""

EXPERT_IMBALANCE = 1.5
"""Rows of the busiest expert parallel rank over the mean, as balanced experts have them; an assumption."""


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """Parallel degrees, batch split and memory options of a run.

    Attributes:
        devices: devices per node.
        nodes: number of nodes.
        tp: tensor parallel degree.
        sequence_parallel: shard the residual stream over the tensor parallel ranks.
        dp_replicate: number of replicas.
        dp_shard: devices that share one replica of weights and optimizer state.
        micro_batch_size: rows of a micro-batch on one device.
        accumulation_steps: micro-batches per step.
        activation_checkpointing: as engine.gpu.activation_checkpointing.
        activation_memory_budget: fraction of activations that is kept, for "memory_budget".
        compute_dtype: dtype of forward and backward.
        optimizer: the optimizer and its options; its slots are part of the memory.
        reshard_after_forward: free gathered weights after forward.
        loss_chunk_tokens: tokens per chunk of logits in the loss; 0 for a GPU's default.
        activation_offload: the activations of all but two blocks are in host memory.
        optimizer_offload: the optimizer state is in host memory.
        reduce_each_micro_batch: reduce gradients after every micro-batch.
        is_compiled: blocks are compiled.
        cp: context parallel degree; weights and optimizer state are sharded over these devices too.
        ep: expert parallel degree, of the devices of dp_shard x cp x tp.
        expert_imbalance: rows that the busiest expert parallel rank computes, over their mean.
        pp: pipeline parallel degree.
        stages_per_rank: pipeline stages of a device; more than one: interleaved 1F1B.
    """

    devices: int
    nodes: int
    tp: int
    sequence_parallel: bool
    dp_replicate: int
    dp_shard: int
    micro_batch_size: int
    accumulation_steps: int
    activation_checkpointing: Literal["none", "selective", "full", "memory_budget"] = "none"
    activation_memory_budget: float = 1.0
    compute_dtype: str = "bfloat16"
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    reshard_after_forward: bool = True
    loss_chunk_tokens: int = 0
    activation_offload: bool = False
    optimizer_offload: bool = False
    reduce_each_micro_batch: bool = False
    is_compiled: bool = False
    cp: int = 1
    ep: int = 1
    expert_imbalance: float = EXPERT_IMBALANCE
    pp: int = 1
    stages_per_rank: int = 1

    @property
    def world_size(self) -> int:
        """Number of devices of the run."""
        return self.devices * self.nodes

    @property
    def element_bytes(self) -> int:
        """Bytes per element in the compute dtype."""
        return DTYPE_BYTES[self.compute_dtype]

    @property
    def master_bytes(self) -> int:
        """Bytes per element of the master weights."""
        return 8 if self.compute_dtype == "float64" else 4

    @property
    def weight_bytes(self) -> int:
        """Bytes per element of the weights that the optimizer updates."""
        return 2 if self.optimizer.weights_dtype == "bfloat16" else self.master_bytes

    @property
    def uses_fsdp(self) -> bool:
        """True if the engine shards or replicates the weights (FSDP)."""
        return self.fsdp_size * self.dp_replicate > 1

    @property
    def fsdp_size(self) -> int:
        """Devices over which each replica of a weight is sharded: dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def efsdp_size(self) -> int:
        """Devices over which each replica of an expert is sharded, with expert parallelism."""
        return self.fsdp_size * self.tp // self.ep

    @property
    def pipeline_efficiency(self) -> float:
        """Share of a step in which a device of a pipeline works; the rest it waits for others."""
        passes = self.accumulation_steps * self.stages_per_rank
        return passes / (passes + self.pp - 1)

    def max_in_flight(self, pp_rank: int) -> int:
        """Return the most forward passes of a pipeline rank whose backward pass is still to come."""
        passes = self.accumulation_steps * self.stages_per_rank
        if self.stages_per_rank == 1:
            return min(passes, self.pp - pp_rank)
        return min(passes, 2 * (self.pp - pp_rank - 1) + (self.stages_per_rank - 1) * self.pp + 1)

    def fullest_backward_passes(self, pp_rank: int) -> list[tuple[int, bool, bool]]:
        """Return the backward passes that may need most memory: without a pipeline the last one of a step.

        In a pipeline also the first one, with the most passes in flight, and a later one with as many.

        Returns:
            Of each: the device's forward passes whose backward pass has not ended, its own among them; whether earlier
            ones have left gradients; whether FSDP reduces gradients in it.
        """
        passes, most = self.accumulation_steps * self.stages_per_rank, self.max_in_flight(pp_rank)
        found = [(1, passes > 1, True)]
        if self.pp > 1 and passes > 1:
            reduces = not self.keeps_unsharded
            found += [(most, False, reduces), (min(most, passes - 1), True, reduces)]
        return found

    @property
    def keeps_unsharded(self) -> bool:
        """True if FSDP keeps unsharded gradients from one micro-batch to the next."""
        return self.uses_fsdp and self.accumulation_steps > 1 and not self.reduce_each_micro_batch

    @property
    def has_separate_master_weights(self) -> bool:
        """True if model weights in a narrower compute dtype are kept beside the master weights."""
        return not self.uses_fsdp and self.element_bytes < self.weight_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes per element of a gradient kept until the optimizer step; not upcast with one micro-batch."""
        is_single = self.accumulation_steps == 1
        if self.weight_bytes < self.master_bytes:  # FSDP rounds reduced gradients to the weights' dtype
            return self.weight_bytes if self.uses_fsdp or is_single else self.master_bytes
        return self.element_bytes if self.has_separate_master_weights and is_single else self.master_bytes

    def resident_blocks(self, n_blocks: int) -> int:
        """Return how many of `n_blocks` blocks' saved activations are on the device at a time."""
        return min(n_blocks, OFFLOAD_RESIDENT_BLOCKS) if self.activation_offload else n_blocks

    def to_overrides(self) -> dict[str, Any]:
        """Return the recipe fields of this layout, by dotted name."""
        return {name: getattr(self, field) for field, name in RECIPE_FIELDS.items()}


def layout_from_recipe(recipe: Recipe, *, devices: int, nodes: int) -> PlannedLayout:
    """Return the layout of `recipe` on `nodes` nodes with `devices` devices each.

    Raises:
        RecipeError: the degrees do not match the number of devices, the batch is not divisible, or run.engine is not
            "gpu".
    """
    parallel, options, world = recipe.parallel, engine_table(recipe), devices * nodes
    dtype, compile = options.get("dtype", "auto"), options.get("compile", "auto")
    of_engine = {field.name: options[field.name] for field in fields(PlannedLayout) if field.name in options}
    return PlannedLayout(
        devices=devices,
        nodes=nodes,
        **parallel.model_dump(include={"tp", "cp", "pp", "sequence_parallel", "dp_replicate", "ep"}),
        dp_shard=parallel.data_parallel_size(world) // parallel.dp_replicate,
        micro_batch_size=recipe.batch.micro_batch_size,
        accumulation_steps=recipe.accumulation_steps(world),
        compute_dtype="bfloat16" if dtype == "auto" else dtype,
        optimizer=recipe.optimizer,
        is_compiled=options.get("device", "auto") in ("auto", "cuda") if compile == "auto" else compile,
        stages_per_rank=options.get("pipeline_stages_per_rank", 1),
        **of_engine,
    )


def engine_table(recipe: Recipe) -> Mapping[str, Any]:
    """Return the values of `[engine.gpu]`; only the written ones if its package is not installed.

    Raises:
        RecipeError: run.engine is not "gpu".
    """
    if recipe.run.engine != "gpu":
        raise RecipeError(
            "this plan supports only the gpu engine",
            values={"run.engine": recipe.run.engine},
            remedy="plan with --set run.engine=gpu",
        )
    options = recipe.engine.get("gpu", {})
    return options if isinstance(options, Mapping) else vars(options)
