"""Plan of a run: memory, time and the nearest layout that fits, as one value, its text and its JSON.

Plans of the gpu engine are made here. The spec of another engine has a `plan` function with the arguments and the
result of `plan_recipe`.

The vocabulary size is the recipe's, else the store's, else the preset's, and the plan records which: plans are often
made on a machine without the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from lt_model import PRESETS, ModelConfig, n_parameters
from lt_model.describe import ALIGNMENT, misaligned_sizes, nearest_aligned
from lt_trainer.config.model_section import ModelOptions
from lt_trainer.config.plausibility import recipe_warnings
from lt_trainer.config.recipe import ResolvedRecipe, model_config
from lt_trainer.config.section import default_of
from lt_trainer.config.sections import Recipe
from lt_trainer.constants import GIB
from lt_trainer.engine import World, engine_names, engine_spec
from lt_trainer.errors import RecipeError
from lt_trainer.planning.devices import DEVICES, OTHER_ENGINES_DEVICES, DeviceModel
from lt_trainer.planning.layout import PlannedLayout, engine_table, layout_from_recipe
from lt_trainer.planning.memory import PlannedMemory, plan_memory
from lt_trainer.planning.run_time import PlannedTime, plan_time
from lt_trainer.planning.search import candidate_layouts


@dataclass(frozen=True)
class Plan:
    """Memory of a device and time of a recipe's run on a number of devices.

    Attributes:
        vocab_source: source of the vocabulary size.
        notes: caveats for the user.
        nearest: plan of the nearest layout that fits; None if this one fits or none does.
    """

    recipe: Recipe
    config: ModelConfig
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
        current, nearest = (plan.layout.to_overrides().items() for plan in (self, self.nearest or self))
        return dict(item for item in nearest if item not in current)


def plan_recipe(
    resolved: ResolvedRecipe, *, device: str, devices: int, nodes: int | None, mfu: float | None
) -> tuple[bool, str, dict[str, Any]]:
    """Make the plan of a recipe for its engine.

    Args:
        resolved: the resolved recipe.
        device: name of the device model.
        devices: devices per node.
        nodes: number of nodes; the recipe's parallel.n_nodes if None.
        mfu: measured MFU, or None to assume one.

    Returns:
        Whether every device has enough memory, and the plan as text and as JSON values.

    Raises:
        RecipeError: invalid recipe or device, or the engine has no plans.
    """
    engine = resolved.recipe.run.engine
    try:
        if engine == "gpu":
            recipe = resolved.recipe.with_nodes(nodes or resolved.recipe.parallel.n_nodes)
            model = find_device(device)
            if engine in engine_names():
                engine_spec(engine).check(recipe, World(size=devices * recipe.parallel.n_nodes, local_size=devices))
            plan = make_plan(recipe, device=model, devices=devices, mfu=mfu)
            return plan.fits, format_plan(plan), plan_to_dict(plan)
        if (engine_plan := getattr(engine_spec(engine), "plan", None)) is None:
            raise RecipeError("this engine has no plans", values={"run.engine": engine}, remedy="plan for another one")
    except RecipeError as exc:
        raise exc.with_origins(resolved.origins) from exc
    return engine_plan(resolved, device=device, devices=devices, nodes=nodes, mfu=mfu)


def find_device(name: str) -> DeviceModel:
    """Return the device called `name` (case-insensitive).

    Raises:
        RecipeError: unknown device.
    """
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    remedy = f"choose one of {', '.join(DEVICES)}"
    if engine := OTHER_ENGINES_DEVICES.get(name.lower()):
        remedy = f'the engine {engine} plans it: set run.engine = "{engine}"'
    raise RecipeError("unknown device of the gpu engine", values={"--device": name}, remedy=remedy)


def make_plan(recipe: Recipe, *, device: DeviceModel, devices: int, mfu: float | None = None) -> Plan:
    """Make the plan of a recipe for the gpu engine; for the arguments see `plan_recipe`.

    Raises:
        RecipeError: degrees, batch or vocabulary are inconsistent.
    """
    layout = layout_from_recipe(recipe, devices=devices, nodes=recipe.parallel.n_nodes)
    vocab_size, source = vocab_size_and_source(recipe)
    config, seq_len = model_config(recipe, vocab_size), recipe.data.seq_len

    def plan_of(layout: PlannedLayout) -> Plan:
        memory, time = plan_memory(config, seq_len, layout), plan_time(recipe, config, layout, device, mfu)
        return Plan(recipe, config, source, device, layout, memory, time, _notes(recipe, config, layout))

    plan = plan_of(layout)
    if plan.fits:
        return plan
    # Other backends than a GPU's kernels have no context parallelism.
    has_cp = engine_table(recipe).get("attention", "auto") in ("auto", "varlen")
    candidates = candidate_layouts(
        layout,
        global_batch_size=recipe.batch.global_batch_size,
        kv_heads=config.n_kv_heads,
        row_lengths=(seq_len,) if has_cp else (),
    )
    weights = n_parameters(config) * layout.weight_bytes
    state = weights if layout.optimizer_offload else plan.memory.state_bytes
    for one in candidates:
        has_room = state * one.dp_replicate / one.world_size <= device.memory_bytes  # else no need to plan the rest
        if has_room and plan_memory(config, seq_len, one).needed <= device.memory_bytes:
            return replace(plan, nearest=plan_of(one))
    return plan


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

            return TokenStore(store).vocab_size, f"the store {store}"
    if recipe.model.preset:
        return PRESETS[recipe.model.preset].vocab_size, f"the preset {recipe.model.preset}; the data's may differ"
    raise RecipeError(
        "unknown vocabulary size: the store does not exist on this machine",
        values={"model.vocab_size": 0, "data.store": recipe.data.store},
        remedy="set it with --set model.vocab_size=N",
    )


def _notes(recipe: Recipe, config: ModelConfig, layout: PlannedLayout) -> list[str]:
    tp, tp_cp = layout.tp, layout.tp * layout.cp
    is_estimate = layout.is_compiled or layout.activation_checkpointing == "memory_budget"
    kv_bytes = 2 * config.n_kv_heads * config.head_width * layout.element_bytes / tp
    gathered = kv_bytes * layout.micro_batch_size * recipe.data.seq_len / GIB
    notes = {
        "activations are an estimate: the compiler decides what it keeps": is_estimate,
        "optimizer offload: its copies are not counted as time": layout.optimizer_offload,
        f"tensor parallelism over {tp} devices crosses nodes, whose links are much slower": tp > layout.devices,
        f"context parallelism over {tp_cp} devices crosses nodes": tp <= layout.devices < tp_cp,
        f"the busiest rank computes {layout.expert_imbalance} times the mean rows of experts": layout.ep > 1,
        f"each layer gathers {gathered:.3g} GiB of keys and values per micro-batch": layout.cp > 1,
    }
    warnings = [text.removeprefix("warning: ") for text in recipe_warnings(recipe, _store_tokens(recipe))]
    return [*warnings, *_alignment_notes(recipe, config), *(text for text, applies in notes.items() if applies)]


def _store_tokens(recipe: Recipe) -> int:
    """Return the tokens in `data.store`; 0 if it is not on this machine."""
    if not recipe.data.store or not Path(recipe.data.store).exists():
        return 0
    from lt_data import TokenStore

    return TokenStore(recipe.data.store).n_tokens


def _alignment_notes(recipe: Recipe, config: ModelConfig) -> list[str]:
    """Return a note per size that makes matrix products slower and that the recipe can change."""
    model, notes = recipe.model, list[str]()
    has_own_shape = not (model.preset or model.config or model.init_from)
    padded_to = engine_table(recipe).get("pad_vocab_to_multiple_of", 0)
    is_padded = bool(padded_to) and padded_to % ALIGNMENT == 0
    for name, size in misaligned_sizes(config).items():
        problem = f"model.{name} = {size} is not a multiple of {ALIGNMENT}, and its matrix products run slower"
        if name == "vocab_size" and not is_padded:
            remedy = f"engine.gpu.pad_vocab_to_multiple_of = {ALIGNMENT} rounds up, with the same results"
            notes.append(f"{problem}; {remedy}")
        if name == "vocab_size":
            continue
        if name in ModelOptions.model_fields and has_own_shape and size != default_of(ModelOptions, name):
            notes.append(f"{problem}; {nearest_aligned(size)} would be aligned")
    return notes


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values: bytes, seconds, FLOP/s, W and kWh."""
    model = plan.config.to_dict() | {"parameters": n_parameters(plan.config), "vocabulary_from": plan.vocab_source}
    layout = vars(plan.layout) | {"optimizer": plan.layout.optimizer.name, "world_size": plan.layout.world_size}
    return {
        "model": model,
        "device": asdict(plan.device),
        "layout": layout,
        "memory_bytes": asdict(plan.memory) | {"needed": plan.memory.needed, "device": plan.device.memory_bytes},
        "fits": plan.fits,
        "time": asdict(plan.time),
        "nearest": None if plan.nearest is None else {"set": plan.changes} | plan_to_dict(plan.nearest),
        "notes": list(plan.notes),
    }


def format_plan(plan: Plan) -> str:
    """Return the plan as text."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    layout, recipe, memory, time, nearest = plan.layout, plan.recipe, plan.memory, plan.time, plan.nearest
    name, steps = recipe.model.preset or "model", recipe.schedule.max_steps
    yield (
        f"{name}: {format_count(n_parameters(plan.config))} parameters; vocabulary {plan.config.vocab_size} from "
        f"{plan.vocab_source}"
    )
    yield f"{layout.world_size} x {plan.device.title} (nodes {layout.nodes}): {', '.join(_degrees(layout))}"
    yield (
        f"one step: {recipe.batch.global_batch_size} rows of {recipe.data.seq_len} tokens; per device "
        f"{layout.accumulation_steps} micro-batch(es) of {layout.micro_batch_size}; activation checkpointing "
        f"{layout.activation_checkpointing}"
    )
    free = (plan.device.memory_bytes - memory.needed) / GIB
    verdict = f"fits, {free:.1f} free" if plan.fits else f"DOES NOT FIT: {-free:.1f} over"
    yield f"\nmemory per device                 GiB   (peak: {memory.peak_phase})"
    for part, n_bytes, note in (
        *((part, n_bytes, "") for part, n_bytes in memory.parts.items()),
        ("peak", memory.peak, ""),
        ("reserve", memory.reserve, "   5 % for fragmentation, 1 GiB for CUDA and NCCL"),
        ("needed", memory.needed, f"   of {plan.device.memory_bytes / GIB:.1f}: {verdict}"),
        ("optimizer state on host", memory.host_bytes, ""),
        ("checkpoint on disk", memory.state_bytes, ""),
    ):
        if n_bytes:
            yield f"  {part:<26} {n_bytes / GIB:>8.2f}{note}"
    tera, per_device = plan.device.peak_flops / 1e12, time.tokens_per_s / layout.world_size
    yield f"\ntime at {time.mfu:.1%} MFU of {tera:.0f} TFLOP/s ({time.mfu_source}; HFU {time.hfu:.1%})"
    yield f"  {'step':<26} {format_duration(time.step_s)}"
    yield f"  {'tokens per second':<26} {time.tokens_per_s:,.0f} ({per_device:,.0f} per device)"
    yield f"  {'run':<26} {format_duration(time.seconds)} for {steps:,} steps, {format_count(time.tokens)} tokens"
    yield f"  {'energy':<26} {time.energy_kwh:,.1f} kWh ({plan.device.power_w:.0f} W per device, boards only)"
    if nearest is not None:
        yield "\nnearest layout that fits:"
        for name, value in plan.changes.items():
            yield f"  --set {name}={str(value).lower() if isinstance(value, bool) else value}"
        yield (
            f"  needs {nearest.memory.needed / GIB:.2f} GiB on {nearest.layout.world_size} devices; a step takes "
            f"{format_duration(nearest.time.step_s)}, the run {format_duration(nearest.time.seconds)}"
        )
    elif not plan.fits:
        yield "\nno layout fits on any number of devices: reduce data.seq_len or choose a larger device"
    for note in plan.notes:
        yield f"note: {note}"


def _degrees(layout: PlannedLayout) -> Iterator[str]:
    names = {
        "tp": "tensor parallel",
        "cp": "context parallel",
        "pp": "pipeline stages",
        "dp_replicate": "replicas",
        "fsdp_size": "sharded over",
        "ep": "expert parallel",
    }
    found = [f"{name} {getattr(layout, field)}" for field, name in names.items() if getattr(layout, field) > 1]
    yield from found or ["not sharded"]


def format_duration(seconds: float) -> str:
    """Return a duration in seconds, from a minute on as [days,] h:mm:ss.

    Example:
        >>> format_duration(0.2531), format_duration(90061)
        ('0.253 s', '1 day, 1:01:01')
    """
    return f"{seconds:.3g} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def format_count(number: float) -> str:
    """Return a large number with two decimals and M, B or T."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,.0f}"
