"""Plain-text rendering of a plan."""

from __future__ import annotations

from collections.abc import Iterator

from lt_model import n_parameters
from lt_trainer.constants import GIB
from lt_trainer.planning.plan import Plan


def format_plan(plan: Plan) -> str:
    """Return the plan as plain text."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    layout, recipe, memory = plan.layout, plan.recipe, plan.memory
    yield (
        f"{recipe.model.preset or 'model'}: {format_count(n_parameters(plan.config))} parameters; vocabulary "
        f"{plan.config.vocab_size} from {plan.vocab_source}"
    )
    where = f"{layout.nodes} node{'s' * (layout.nodes > 1)} of {layout.devices}"
    yield f"{layout.world_size} x {plan.device.title} ({where}): {', '.join(_degrees(plan))}"
    yield (
        f"one step: {recipe.batch.global_batch_size} rows of {recipe.data.seq_len} tokens; per device "
        f"{layout.accumulation_steps} micro-batch{'es' * (layout.accumulation_steps > 1)} of {layout.micro_batch_size} "
        f"row{'s' * (layout.micro_batch_size > 1)}; activation checkpointing {layout.activation_checkpointing}"
    )
    available, over = plan.device.memory_bytes / GIB, (memory.needed - plan.device.memory_bytes) / GIB
    verdict = f"fits, {-over:.1f} free" if plan.fits else f"DOES NOT FIT: {over:.1f} over"
    yield f"\nmemory per device                 GiB   (peak: {memory.peak_phase})"
    for part, n_bytes, note in (
        *((part, n_bytes, "") for part, n_bytes in memory.parts.items()),
        ("peak", memory.peak, ""),
        ("reserve", memory.reserve, "   5 % for fragmentation, 1 GiB for CUDA and NCCL"),
        ("needed", memory.needed, f"   of {available:.1f}: {verdict}"),
        ("optimizer state on host", memory.host_bytes, ""),
        ("checkpoint on disk", memory.state_bytes, ""),
    ):
        if n_bytes:
            yield f"  {part:<26} {n_bytes / GIB:>8.2f}{note}"
    yield ""
    yield from _time_lines(plan)
    if not plan.fits:
        yield from _remedy_lines(plan)
    for note in plan.notes:
        yield f"note: {note}"


def _degrees(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    if layout.tp > 1:
        yield f"tensor parallel {layout.tp}" + (" with sequence parallel" if layout.sequence_parallel else "")
    if layout.cp > 1:
        yield f"context parallel {layout.cp}"
    if layout.dp_replicate > 1:
        yield f"{layout.dp_replicate} replicas"
    yield f"sharded over {layout.fsdp_size}" if layout.fsdp_size > 1 else "not sharded"


def _time_lines(plan: Plan) -> Iterator[str]:
    time, tera = plan.time, plan.device.peak_flops / 1e12
    per_device = time.tokens_per_s / plan.layout.world_size
    total = f"{plan.recipe.schedule.max_steps:,} steps, {format_count(time.tokens)} tokens"
    yield f"time at {time.mfu:.1%} MFU of {tera:.0f} TFLOP/s ({time.mfu_source}; HFU {time.hfu:.1%})"
    yield f"  {'step':<26} {format_duration(time.step_s)}"
    yield f"  {'tokens per second':<26} {time.tokens_per_s:,.0f} ({per_device:,.0f} per device)"
    yield f"  {'run':<26} {format_duration(time.seconds)} for {total}"
    yield f"  {'energy':<26} {time.energy_kwh:,.1f} kWh ({plan.device.power_w:.0f} W per device, boards only)"


def _remedy_lines(plan: Plan) -> Iterator[str]:
    nearest = plan.nearest
    if nearest is None:
        yield "\nno layout fits on any number of devices: reduce data.seq_len or choose a larger device"
        return
    yield "\nnearest layout that fits:"
    for name, value in plan.changes.items():
        yield f"  --set {name}={str(value).lower() if isinstance(value, bool) else value}"
    yield (
        f"  needs {nearest.memory.needed / GIB:.2f} GiB on {nearest.layout.world_size} devices; a step takes "
        f"{format_duration(nearest.time.step_s)}, the run {format_duration(nearest.time.seconds)}"
    )


def format_duration(seconds: float) -> str:
    """Return a duration in at most two units."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
    sizes = (("days", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
    unit, size, smaller, smaller_size = next(row for row in sizes if seconds >= row[1])
    whole, rest = divmod(round(seconds / smaller_size), size // smaller_size)
    return f"{whole:,} {'day' if (unit, whole) == ('days', 1) else unit} {rest} {smaller}"


def format_count(number: float) -> str:
    """Return a large number with two decimals and M, B or T."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,.0f}"
