"""How a run lies on its devices, as far as memory and time depend on it: the values that a plan varies.

world = tp * replicate * shard devices. A layout is made from a recipe (`of`) and turned back into the recipe's fields
(`sets`), so that what a plan proposes can be given to `lt train` as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lt_trainer.errors import RecipeError
from lt_trainer.recipe import Recipe

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """See the module's text.

    Attributes:
        devices: of one node.
        nodes: of the run.
        tp: tensor parallel degree.
        sequence_parallel: with it, the residual stream is split too.
        replicate: replicas.
        shard: devices that share one copy of weights and optimizer state.
        micro_batch: rows of one pass on one device.
        accumulation: passes of one update.
        checkpointing: as engine.gpu.activation_checkpointing.
        budget: share of activations that is kept, for "budget".
        compute: dtype of forward and backward.
        moments: dtype of the moments ("float32": that of the weights).
        reshard: whether gathered weights are let go of after forward.
        reduce_each: whether gradients are reduced after every pass.
        compiled: whether blocks are compiled.
    """

    devices: int
    nodes: int
    tp: int
    sequence_parallel: bool
    replicate: int
    shard: int
    micro_batch: int
    accumulation: int
    checkpointing: str = "none"
    budget: float = 1.0
    compute: str = "bfloat16"
    moments: str = "float32"
    reshard: bool = True
    reduce_each: bool = False
    compiled: bool = False

    @property
    def world(self) -> int:
        """Devices of the run."""
        return self.devices * self.nodes

    @property
    def element_bytes(self) -> int:
        """Bytes of a number in the compute dtype."""
        return ELEMENT_BYTES[self.compute]

    @property
    def master_bytes(self) -> int:
        """Bytes of a weight as the optimizer keeps it."""
        return 8 if self.compute == "float64" else 4

    @property
    def moment_bytes(self) -> int:
        """Bytes of each of the two moments of a weight."""
        return 2 if self.moments == "bfloat16" else self.master_bytes

    @property
    def wrapped(self) -> bool:
        """Whether the engine shards or replicates the weights (FSDP)."""
        return self.shard * self.replicate > 1

    @property
    def doubled(self) -> bool:
        """Whether the model's weights stand beside their masters, in the narrower dtype that it computes in."""
        return not self.wrapped and self.element_bytes < self.master_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient that stays until the update; those of one pass are not widened before it."""
        return self.element_bytes if self.doubled and self.accumulation == 1 else self.master_bytes

    def sets(self) -> dict[str, Any]:
        """The recipe's fields that say this layout, by dotted name."""
        return {
            "parallel.n_nodes": self.nodes,
            "parallel.tp": self.tp,
            "parallel.sequence_parallel": self.sequence_parallel,
            "parallel.dp_replicate": self.replicate,
            "parallel.dp_shard": self.shard,
            "batch.micro_batch": self.micro_batch,
            "engine.gpu.activation_checkpointing": self.checkpointing,
            "engine.gpu.reduce_each_micro_batch": self.reduce_each,
        }


def of(recipe: Recipe, *, devices: int, nodes: int) -> PlannedLayout:
    """Return the layout of `recipe` on `nodes` machines with `devices` devices each.

    Raises:
        RecipeError: the degrees do not make up the devices, the batch does not divide, or another engine trains.
    """
    parallel, options = recipe.parallel, engine_values(recipe)
    for name in ("pp", "cp"):
        if getattr(parallel, name) != 1:
            raise RecipeError(
                "plans know data and tensor parallelism",
                values={f"parallel.{name}": getattr(parallel, name)},
                remedy=f"set parallel.{name} to 1",
            )
    world = devices * nodes
    data = parallel.data_parallel(world)
    dtype = options.get("dtype", "auto")
    checkpointing = options.get("activation_checkpointing", "none")
    return PlannedLayout(
        devices=devices,
        nodes=nodes,
        tp=parallel.tp,
        sequence_parallel=parallel.sequence_parallel,
        replicate=parallel.dp_replicate,
        shard=data // parallel.dp_replicate,
        micro_batch=recipe.batch.micro_batch,
        accumulation=recipe.accumulation(world),
        checkpointing=checkpointing,
        budget=options.get("activation_budget", 1.0) if checkpointing == "budget" else 1.0,
        compute="bfloat16" if dtype == "auto" else dtype,
        moments=recipe.optimizer.moments,
        reshard=options.get("reshard_after_forward", True),
        reduce_each=options.get("reduce_each_micro_batch", False),
        compiled=options.get("compile", False),
    )


def engine_values(recipe: Recipe) -> Mapping[str, Any]:
    """The values of `[engine.gpu]`; where that engine's package is not installed, those that were written.

    Raises:
        RecipeError: another engine trains.
    """
    if recipe.run.engine != "gpu":
        raise RecipeError(
            "lt train plan knows what the gpu engine holds, and no other's",
            values={"run.engine": recipe.run.engine},
            remedy="plan with --set run.engine=gpu",
        )
    options = recipe.engine.get("gpu", {})
    return options if isinstance(options, Mapping) else vars(options)
