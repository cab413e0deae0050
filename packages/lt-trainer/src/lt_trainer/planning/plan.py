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
from lt_trainer.config.recipe import ResolvedRecipe, llama_config
from lt_trainer.config.sections.recipe import Recipe
from lt_trainer.constants import GIB
from lt_trainer.errors import RecipeError
from lt_trainer.planning.devices import PlannedDevice
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
        nearest_layout: nearest layout that fits; None if this one fits or none does.
        nearest_memory: memory of the nearest layout.
        notes: caveats for the user.
    """

    recipe: Recipe
    config: LlamaConfig
    vocab_source: str
    device: PlannedDevice
    layout: PlannedLayout
    memory: PlannedMemory
    time: PlannedTime
    nearest_layout: PlannedLayout | None
    nearest_memory: PlannedMemory | None
    notes: Sequence[str]

    @property
    def fits(self) -> bool:
        """True if peak and reserve fit into device memory."""
        return self.memory.needed <= self.device.memory_bytes

    @property
    def changes(self) -> dict[str, Any]:
        """Recipe overrides for the nearest layout that fits, by dotted name; empty if there is none."""
        if self.nearest_layout is None:
            return {}
        current = self.layout.to_overrides()
        return {name: value for name, value in self.nearest_layout.to_overrides().items() if value != current[name]}


def make_plan(
    resolved: ResolvedRecipe,
    *,
    device: PlannedDevice,
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
    nodes = recipe.parallel.n_nodes if nodes is None else nodes
    try:
        layout = layout_from_recipe(recipe, devices=devices, nodes=nodes)
        vocab_size, source = vocab_size_and_source(recipe)
        config = llama_config(recipe, vocab_size)
    except RecipeError as exc:
        raise exc.with_origins(resolved.origins) from exc
    seq_len = recipe.data.seq_len
    memory = plan_memory(config, seq_len, layout)
    nearest = None
    if memory.needed > device.memory_bytes:
        nearest = find_nearest_layout(
            layout,
            global_batch_size=recipe.batch.global_batch_size,
            kv_heads=config.n_kv_heads,
            fits=lambda candidate: plan_memory(config, seq_len, candidate).needed <= device.memory_bytes,
            row_lengths=recipe.data.row_lengths if _allows_context_parallelism(recipe) else (),
        )
    return Plan(
        recipe=recipe,
        config=config,
        vocab_source=source,
        device=device,
        layout=layout,
        memory=memory,
        time=plan_time(recipe, config, layout, device, mfu),
        nearest_layout=nearest,
        nearest_memory=None if nearest is None else plan_memory(config, seq_len, nearest),
        notes=_notes(recipe, config, layout),
    )


def vocab_size_and_source(recipe: Recipe) -> tuple[int, str]:
    """Return the vocabulary size of the model and its source.

    Raises:
        RecipeError: unknown vocabulary size; DataError: the store is damaged.
    """
    if recipe.model.vocab_size:
        return recipe.model.vocab_size, "model.vocab_size"
    stores = [recipe.data.store, *(source.store for source in recipe.data.mixture.values())]
    for store in stores:
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


def _allows_context_parallelism(recipe: Recipe) -> bool:
    """Return True if another context parallel degree may be proposed: the kernels of a GPU allow it."""
    return engine_table(recipe).get("attention", "auto") in ("auto", "varlen")


def _notes(recipe: Recipe, config: LlamaConfig, layout: PlannedLayout) -> list[str]:
    notes = list(alignment_warnings(config))
    if layout.is_compiled:
        notes.append("compiled blocks keep fewer activations than counted here; the compiler decides which")
    if layout.activation_checkpointing == "memory_budget":
        notes.append("with a memory budget the compiler chooses which activations to keep: their size is an estimate")
    if getattr(recipe.engine.get("gpu"), "fp8", "off") != "off":
        notes.append("MFU is assumed as in bfloat16: fp8 is faster, by how much is to be measured")
    if layout.activation_offload:
        notes.append("activation offload: its copies are assumed to be hidden behind computation")
    if layout.optimizer_offload:
        notes.append(
            "optimizer offload: each step copies the state to the device and back, which is not counted as time"
        )
    if layout.tp > layout.devices:
        notes.append(f"tensor parallelism over {layout.tp} devices crosses nodes, whose links are much slower")
    if layout.tp <= layout.devices < layout.tp * layout.cp:
        notes.append(f"context parallelism over {layout.cp} devices crosses nodes: keys and values are gathered there")
    if layout.cp > 1:
        kv = 2 * config.n_kv_heads * config.head_dim * layout.element_bytes / layout.tp
        gathered = kv * layout.micro_batch_size * recipe.data.seq_len
        notes.append(
            f"each layer gathers {gathered / GIB:.3g} GiB of keys and values per micro-batch; counted for rows of one "
            "document, shorter ones need less memory"
        )
    if getattr(recipe.engine.get("gpu"), "attention", "") == "reference":
        notes.append("attention = reference keeps seq_len x seq_len scores, which are not counted here")
    return notes


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values: bytes, seconds, FLOP/s, W and kWh."""
    return {
        "format": 1,
        "model": {
            **plan.config.to_dict(),
            "parameters": n_parameters(plan.config),
            "vocabulary_from": plan.vocab_source,
        },
        "device": asdict(plan.device),
        "layout": asdict(plan.layout) | {"world": plan.layout.world_size},
        "memory_bytes": {
            "parts": dict(plan.memory.parts),
            "peak_phase": plan.memory.peak_phase,
            "peak": plan.memory.peak,
            "reserve": plan.memory.reserve,
            "needed": plan.memory.needed,
            "device": plan.device.memory_bytes,
            "checkpoint": plan.memory.state_bytes,
            "host": plan.memory.host_bytes,
        },
        "fits": plan.fits,
        "time": asdict(plan.time),
        "nearest": None
        if plan.nearest_layout is None or plan.nearest_memory is None
        else {"set": plan.changes, "layout": asdict(plan.nearest_layout), "needed_bytes": plan.nearest_memory.needed},
        "notes": list(plan.notes),
    }


def with_layout(plan: Plan, layout: PlannedLayout) -> Plan:
    """Return the plan of the same run with another layout."""
    memory = plan_memory(plan.config, plan.recipe.data.seq_len, layout)
    mfu = plan.time.mfu if plan.time.mfu_source == "given" else None
    time = plan_time(plan.recipe, plan.config, layout, plan.device, mfu)
    return replace(plan, layout=layout, memory=memory, time=time, nearest_layout=None, nearest_memory=None)
