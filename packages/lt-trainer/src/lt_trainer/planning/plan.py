"""`lt train plan`: from a resolved recipe and a kind of device to a plan, and the plan as plain values.

The vocabulary is the recipe's, else the store's, else the preset's, in this order, and the plan says which: a plan is
often made on a machine that does not have the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lt_model import PRESETS, LlamaConfig, n_parameters
from lt_model.describe import alignment_warnings
from lt_trainer.errors import RecipeError
from lt_trainer.planning.devices import PlannedDevice
from lt_trainer.planning.layout import PlannedLayout, of
from lt_trainer.planning.memory import PlannedMemory, planned_memory
from lt_trainer.planning.search import nearest
from lt_trainer.planning.time import PlannedTime, planned_time
from lt_trainer.recipe import Recipe, Resolved, llama_config


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe on devices.

    Attributes:
        recipe: as resolved.
        config: the model.
        vocabulary_from: where its vocabulary size comes from.
        device: one of the devices.
        layout: how the run lies on them.
        memory: of one device.
        time: of the run.
        near: the nearest layout that fits, where this one does not and there is one.
        near_memory: of that layout.
        notes: what a person should know.
    """

    recipe: Recipe
    config: LlamaConfig
    vocabulary_from: str
    device: PlannedDevice
    layout: PlannedLayout
    memory: PlannedMemory
    time: PlannedTime
    near: PlannedLayout | None
    near_memory: PlannedMemory | None
    notes: Sequence[str]

    @property
    def fits(self) -> bool:
        """Whether peak and reserve fit into a device."""
        return self.memory.needed <= self.device.memory_bytes

    @property
    def changes(self) -> dict[str, Any]:
        """What to set for the nearest layout that fits, by dotted name; empty where there is none."""
        if self.near is None:
            return {}
        now = self.layout.sets()
        return {name: value for name, value in self.near.sets().items() if value != now[name]}


def make(
    resolved: Resolved,
    *,
    device: PlannedDevice,
    devices: int,
    nodes: int | None = None,
    mfu: float | None = None,
) -> Plan:
    """Make a plan.

    Args:
        resolved: the recipe.
        device: one of the devices.
        devices: how many a node has.
        nodes: how many nodes; the recipe's parallel.n_nodes when None.
        mfu: measured MFU ("full" convention), or None to assume one.

    Raises:
        RecipeError: degrees, batch or vocabulary do not fit together.
    """
    recipe = resolved.recipe
    if mfu is not None and not 0 < mfu < 1:
        raise RecipeError(
            "is a share of the peak", values={"--mfu": mfu}, remedy="give a number between 0 and 1, such as 0.42"
        )
    nodes = recipe.parallel.n_nodes if nodes is None else nodes
    try:
        layout = of(recipe, devices=devices, nodes=nodes)
        vocab_size, source = vocabulary(recipe)
        config = llama_config(recipe, vocab_size)
    except RecipeError as exc:
        raise exc.located(resolved.origins) from exc
    seq_len = recipe.data.seq_len
    memory = planned_memory(config, seq_len, layout)
    near = None
    if memory.needed > device.memory_bytes:
        near = nearest(
            layout,
            global_batch=recipe.batch.global_batch,
            kv_heads=config.n_kv_heads,
            fits=lambda one: planned_memory(config, seq_len, one).needed <= device.memory_bytes,
        )
    return Plan(
        recipe=recipe,
        config=config,
        vocabulary_from=source,
        device=device,
        layout=layout,
        memory=memory,
        time=planned_time(recipe, config, layout, device, mfu),
        near=near,
        near_memory=None if near is None else planned_memory(config, seq_len, near),
        notes=_notes(recipe, config, layout),
    )


def vocabulary(recipe: Recipe) -> tuple[int, str]:
    """Return the vocabulary size of the model and where it comes from.

    Raises:
        RecipeError: nothing tells it; DataError: the store is damaged.
    """
    if recipe.model.vocab_size:
        return recipe.model.vocab_size, "model.vocab_size"
    stores = [recipe.data.store, *(source.store for source in recipe.data.mixture.values())]
    for store in stores:
        if store and Path(store).exists():
            from lt_data import TokenStore

            return TokenStore.open(store).vocab_size, f"the store {store}"
    if recipe.model.preset:
        return PRESETS[recipe.model.preset].vocab_size, f"the preset {recipe.model.preset}; the data may have another"
    raise RecipeError(
        "the size of the vocabulary is not known: the store is not here",
        values={"model.vocab_size": 0, "data.store": recipe.data.store},
        remedy="give it with --set model.vocab_size=N",
    )


def _notes(recipe: Recipe, config: LlamaConfig, layout: PlannedLayout) -> list[str]:
    notes = list(alignment_warnings(config))
    if layout.compiled:
        notes.append("compiled blocks keep less than is counted here; what they keep, the compiler decides")
    if layout.checkpointing == "budget":
        notes.append("with a memory budget the compiler chooses what to keep: activations are an estimate")
    if layout.tp > layout.devices:
        notes.append(f"tensor parallelism over {layout.tp} devices leaves the node, whose links are much faster")
    attention = recipe.engine.get("gpu")
    if getattr(attention, "attention", "") == "reference":
        notes.append("attention = reference holds the square of the sequence, which is not counted here")
    return notes


def to_values(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values: bytes, seconds, FLOP/s, W and kWh."""
    return {
        "format": 1,
        "model": {
            **plan.config.to_dict(),
            "parameters": n_parameters(plan.config),
            "vocabulary_from": plan.vocabulary_from,
        },
        "device": asdict(plan.device),
        "layout": asdict(plan.layout) | {"world": plan.layout.world},
        "memory_bytes": {
            "parts": dict(plan.memory.parts),
            "moment": plan.memory.moment,
            "peak": plan.memory.peak,
            "reserve": plan.memory.reserve,
            "needed": plan.memory.needed,
            "device": plan.device.memory_bytes,
            "checkpoint": plan.memory.state,
        },
        "fits": plan.fits,
        "time": asdict(plan.time),
        "nearest": None
        if plan.near is None or plan.near_memory is None
        else {"set": plan.changes, "layout": asdict(plan.near), "needed_bytes": plan.near_memory.needed},
        "notes": list(plan.notes),
    }


def with_layout(plan: Plan, layout: PlannedLayout) -> Plan:
    """Return the plan of the same run in another layout, for the time that it would take."""
    memory = planned_memory(plan.config, plan.recipe.data.seq_len, layout)
    given = plan.time.mfu if plan.time.mfu_source == "given" else None
    time = planned_time(plan.recipe, plan.config, layout, plan.device, given)
    return replace(plan, layout=layout, memory=memory, time=time, near=None, near_memory=None)
