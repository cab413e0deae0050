"""Plan of the gpu engine: memory, time and the nearest layout that fits, from a resolved recipe.

The vocabulary size is the recipe's, else the store's, else the preset's, and the plan records which: plans are often
made on a machine without the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lt_model import PRESETS, LlamaConfig, n_parameters
from lt_model.describe import alignment_warnings
from lt_model.devices import DeviceModel
from lt_trainer.config.recipe import ResolvedRecipe, llama_config
from lt_trainer.config.sections import Recipe
from lt_trainer.constants import GIB
from lt_trainer.errors import RecipeError
from lt_trainer.planning.layout import PlannedLayout, engine_table, layout_from_recipe
from lt_trainer.planning.memory import PlannedMemory, plan_memory
from lt_trainer.planning.run_time import PlannedTime, plan_time
from lt_trainer.planning.search import find_nearest_layout


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory and time of a recipe on a number of devices.

    Attributes:
        recipe: the resolved recipe.
        config: model config.
        vocab_source: source of the vocabulary size.
        device: device model.
        layout: parallel layout.
        memory: memory of one device.
        time: time and energy of the run.
        notes: caveats for the user.
        nearest: plan of the nearest layout that fits; None if this one fits or none does.
    """

    recipe: Recipe
    config: LlamaConfig
    vocab_source: str
    device: DeviceModel
    layout: PlannedLayout
    memory: PlannedMemory
    time: PlannedTime
    notes: Sequence[str]
    nearest: Plan | None = None

    @property
    def fits(self) -> bool:
        """True if peak and reserve fit into device memory."""
        return self.memory.needed <= self.device.memory_bytes

    @property
    def changes(self) -> dict[str, Any]:
        """Recipe overrides for the nearest layout that fits, by dotted name; empty if there is none."""
        if self.nearest is None:
            return {}
        current = self.layout.to_overrides()
        return {name: value for name, value in self.nearest.layout.to_overrides().items() if value != current[name]}


def make_plan(
    resolved: ResolvedRecipe,
    *,
    device: DeviceModel,
    devices: int,
    nodes: int | None = None,
    mfu: float | None = None,
) -> Plan:
    """Make the plan of a recipe.

    Args:
        resolved: the resolved recipe.
        device: device model.
        devices: devices per node.
        nodes: number of nodes; the recipe's parallel.n_nodes if None.
        mfu: measured MFU ("full" convention), or None to assume one.

    Raises:
        RecipeError: degrees, batch or vocabulary are inconsistent.
    """
    recipe = resolved.recipe
    if mfu is not None and not 0 < mfu < 1:
        raise RecipeError(
            "must be a fraction of the peak", values={"--mfu": mfu}, remedy="use a number between 0 and 1, such as 0.42"
        )
    try:
        layout = layout_from_recipe(recipe, devices=devices, nodes=nodes or recipe.parallel.n_nodes)
        vocab_size, source = vocab_size_and_source(recipe)
        config = llama_config(recipe, vocab_size)
    except RecipeError as exc:
        raise exc.with_origins(resolved.origins) from exc

    def plan_of(layout: PlannedLayout) -> Plan:
        return Plan(
            recipe=recipe,
            config=config,
            vocab_source=source,
            device=device,
            layout=layout,
            memory=plan_memory(config, recipe.data.seq_len, layout),
            time=plan_time(recipe, config, layout, device, mfu),
            notes=_notes(recipe, config, layout),
        )

    plan = plan_of(layout)
    if plan.fits:
        return plan
    nearest = find_nearest_layout(
        layout,
        global_batch_size=recipe.batch.global_batch_size,
        kv_heads=config.n_kv_heads,
        fits=lambda one: plan_memory(config, recipe.data.seq_len, one).needed <= device.memory_bytes,
        # other backends than a GPU's kernels have no context parallelism
        row_lengths=recipe.data.row_lengths
        if engine_table(recipe).get("attention", "auto") in ("auto", "varlen")
        else (),
    )
    return plan if nearest is None else replace(plan, nearest=plan_of(nearest))


def vocab_size_and_source(recipe: Recipe) -> tuple[int, str]:
    """Return the vocabulary size of the model and its source.

    Raises:
        RecipeError: unknown vocabulary size; DataError: the store is damaged.
    """
    if recipe.model.vocab_size:
        return recipe.model.vocab_size, "model.vocab_size"
    for store in (recipe.data.store, *(source.store for source in recipe.data.mixture.values())):
        if store and Path(store).exists():
            from lt_data import TokenStore

            return TokenStore.open(store).vocab_size, f"the store {store}"
    if recipe.model.preset:
        return PRESETS[recipe.model.preset].vocab_size, f"the preset {recipe.model.preset}; the data's may differ"
    raise RecipeError(
        "unknown vocabulary size: the store does not exist on this machine",
        values={"model.vocab_size": 0, "data.store": recipe.data.store},
        remedy="set it with --set model.vocab_size=N",
    )


def _notes(recipe: Recipe, config: LlamaConfig, layout: PlannedLayout) -> list[str]:
    options, tp, tp_cp = engine_table(recipe), layout.tp, layout.tp * layout.cp
    kv_bytes = 2 * config.n_kv_heads * config.head_dim * layout.element_bytes / tp
    gathered = kv_bytes * layout.micro_batch_size * recipe.data.seq_len / GIB
    notes = {
        "compiled blocks keep fewer activations than counted here; the compiler decides which": layout.is_compiled,
        "with a memory budget the compiler chooses which activations to keep: their size is an estimate": (
            layout.activation_checkpointing == "memory_budget"
        ),
        "MFU is assumed as in bfloat16: fp8 is faster, by how much is to be measured": (
            options.get("fp8", "off") != "off"
        ),
        "activation offload: its copies are assumed to be hidden behind computation": layout.activation_offload,
        "optimizer offload: each step copies the state to the device and back, which is not counted as time": (
            layout.optimizer_offload
        ),
        f"tensor parallelism over {tp} devices crosses nodes, whose links are much slower": tp > layout.devices,
        f"context parallelism over {tp_cp} devices crosses nodes: keys and values are gathered there": (
            tp <= layout.devices < tp_cp
        ),
        f"each layer gathers {gathered:.3g} GiB of keys and values per micro-batch; counted for rows of one document, "
        "shorter ones need less memory": layout.cp > 1,
        "attention = reference keeps seq_len x seq_len scores, which are not counted here": (
            options.get("attention") == "reference"
        ),
    }
    return [*alignment_warnings(config), *(text for text, applies in notes.items() if applies)]


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values: bytes, seconds, FLOP/s, W and kWh."""
    model = plan.config.to_dict() | {"parameters": n_parameters(plan.config), "vocabulary_from": plan.vocab_source}
    layout = vars(plan.layout) | {"optimizer": plan.layout.optimizer.name, "world_size": plan.layout.world_size}
    return {
        "format": 1,
        "model": model,
        "device": asdict(plan.device),
        "layout": layout,
        "memory_bytes": asdict(plan.memory) | {"needed": plan.memory.needed, "device": plan.device.memory_bytes},
        "fits": plan.fits,
        "time": asdict(plan.time),
        "nearest": None if plan.nearest is None else {"set": plan.changes} | plan_to_dict(plan.nearest),
        "notes": list(plan.notes),
    }
