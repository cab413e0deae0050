"""A plan as a page for a person."""

from __future__ import annotations

from collections.abc import Iterator

from lt_model import n_parameters
from lt_trainer.planning.plan import Plan, with_layout

_GIB = 2**30
_DAY_S, _HOUR_S, _MINUTE_S = 86400, 3600, 60


def page(plan: Plan) -> str:
    """Return the page."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    layout, recipe = plan.layout, plan.recipe
    name = recipe.model.preset or "model"
    yield f"{name}: {count(n_parameters(plan.config))} parameters; vocabulary {plan.config.vocab_size} from " + (
        plan.vocabulary_from
    )
    where = f"{layout.nodes} node{'s' * (layout.nodes > 1)} of {layout.devices}"
    yield f"{layout.world} x {plan.device.title} ({where}): " + ", ".join(_degrees(plan))
    yield (
        f"one update: {recipe.batch.global_batch} rows of {recipe.data.seq_len} tokens; on a device "
        f"{layout.accumulation} pass{'es' * (layout.accumulation > 1)} of {layout.micro_batch} "
        f"row{'s' * (layout.micro_batch > 1)}; activation checkpointing {layout.checkpointing}"
    )
    yield ""
    yield f"memory of a device                GiB   (most when {_moment(plan.memory.moment)})"
    for part, n_bytes in plan.memory.parts.items():
        if n_bytes:
            yield f"  {part:<26} {n_bytes / _GIB:>8.2f}"
    yield f"  {'peak':<26} {plan.memory.peak / _GIB:>8.2f}"
    yield f"  {'reserve':<26} {plan.memory.reserve / _GIB:>8.2f}   5 % for fragments, 1 GiB for CUDA and NCCL"
    there, needed = plan.device.memory_bytes / _GIB, plan.memory.needed / _GIB
    verdict = f"fits, {there - needed:.1f} left" if plan.fits else f"DOES NOT FIT: {needed - there:.1f} too much"
    yield f"  {'needed':<26} {needed:>8.2f}   of {there:.1f}: {verdict}"
    yield f"  {'a checkpoint, on disk':<26} {plan.memory.state / _GIB:>8.2f}"
    yield ""
    yield from _time_lines(plan)
    if not plan.fits:
        yield ""
        yield from _remedy_lines(plan)
    for note in plan.notes:
        yield f"note: {note}"


def _degrees(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    if layout.tp > 1:
        yield f"tensor parallel {layout.tp}" + (" with sequence parallel" if layout.sequence_parallel else "")
    if layout.replicate > 1:
        yield f"{layout.replicate} replicas"
    yield f"sharded over {layout.shard}" if layout.shard > 1 else "not sharded"


def _moment(name: str) -> str:
    return {
        "loss": "the loss is computed",
        "last block": "backward begins",
        "first block": "backward reaches the first block",
        "block reduction": "the first block's gradients are reduced",
        "root reduction": "the gradients of embedding and head are reduced",
        "update": "the weights are updated",
    }[name]


def _time_lines(plan: Plan) -> Iterator[str]:
    time = plan.time
    tera = plan.device.peak_flops / 1e12
    yield f"time at {time.mfu:.1%} MFU of {tera:.0f} TFLOP/s ({time.mfu_source}; HFU {time.hfu:.1%})"
    per_device = time.tokens_per_s / plan.layout.world
    yield f"  {'an update':<26} {duration(time.step_s)}"
    yield f"  {'tokens per second':<26} {time.tokens_per_s:,.0f} ({per_device:,.0f} on a device)"
    total = f"{plan.recipe.schedule.max_steps:,} updates, {count(time.tokens)} tokens"
    yield f"  {'the run':<26} {duration(time.seconds)} for {total}"
    draw = f"{plan.device.power_w:.0f} W each, boards alone"
    yield f"  {'energy':<26} {time.energy_kwh:,.1f} kWh ({draw})"


def _remedy_lines(plan: Plan) -> Iterator[str]:
    if plan.near is None or plan.near_memory is None:
        yield "no layout fits, on any number of devices: shorten data.seq_len or take a larger device"
        return
    yield "the nearest layout that fits:"
    for name, value in plan.changes.items():
        yield f"  --set {name}={str(value).lower() if isinstance(value, bool) else value}"
    changed = with_layout(plan, plan.near)
    yield (
        f"  needs {plan.near_memory.needed / _GIB:.2f} GiB on {plan.near.world} devices; an update takes "
        f"{duration(changed.time.step_s)}, the run {duration(changed.time.seconds)}"
    )


def duration(seconds: float) -> str:
    """Return a time in the two units that a person would use."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < _MINUTE_S:
        return f"{seconds:.2f} s"
    for unit, size, smaller, smaller_size in (
        ("days", _DAY_S, "h", _HOUR_S),
        ("h", _HOUR_S, "min", _MINUTE_S),
        ("min", _MINUTE_S, "s", 1),
    ):
        if seconds >= size:
            whole, rest = divmod(round(seconds / smaller_size), size // smaller_size)
            return f"{whole:,} {'day' if unit == 'days' and whole == 1 else unit} {rest} {smaller}"
    raise AssertionError(seconds)


def count(number: float) -> str:
    """Return a large number with three digits and M, B or T."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,.0f}"
