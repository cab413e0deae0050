"""Text report of a run plan on NeuronCores."""

from __future__ import annotations

from collections.abc import Iterator

from lt_ckpt.nxd.layout import layers_per_stage
from lt_model import n_parameters
from lt_trainer.planning.plan import format_count, format_duration
from lt_trainer_neuron.planning import GIB, NeuronPlan


def format_plan(plan: NeuronPlan) -> str:
    """Return the plan as a text report."""
    return "\n".join(_iter_lines(plan))


def _iter_lines(plan: NeuronPlan) -> Iterator[str]:
    recipe, parallel, batch = plan.recipe, plan.recipe.parallel, plan.recipe.batch
    yield (
        f"{recipe.model.preset or 'model'}: {format_count(n_parameters(plan.config))} parameters; vocabulary "
        f"{plan.config.vocab_size} from {plan.vocabulary_from}"
    )
    per_node = plan.n_cores // parallel.n_nodes
    where = f"{parallel.n_nodes} node{'s' * (parallel.n_nodes > 1)} of {per_node}"
    yield f"{plan.n_cores} x {plan.core.title} ({where}): {', '.join(_iter_degrees(plan))}"
    rows = f"{plan.accumulation} micro-batch{'es' * (plan.accumulation > 1)} of {batch.micro_batch_size}"
    yield (
        f"one step: {batch.global_batch_size} rows of {recipe.data.seq_len} = {plan.tokens_per_step:,} tokens; on each "
        f"of {plan.dp} data parallel ranks {rows}"
    )
    yield ""
    full = plan.largest_stage
    of_stage = f"of stage {full.stage}, the fullest" if parallel.pp > 1 else ""
    yield f"{'memory of a core ' + of_stage:<32}    GiB"
    for part, n_bytes in full.parts.items():
        if n_bytes:
            yield f"  {part:<30} {n_bytes / GIB:>8.2f}"
    yield f"  {'peak':<30} {full.peak / GIB:>8.2f}"
    yield f"  {'reserve':<30} {full.reserve / GIB:>8.2f}   assumed, for runtime, collectives and compiled code"
    there, needed = plan.core.memory_bytes / GIB, full.needed / GIB
    verdict = f"fits, {there - needed:.1f} left" if plan.fits else f"DOES NOT FIT: {needed - there:.1f} too much"
    yield f"  {'needed':<30} {needed:>8.2f}   of {there:.1f}: {verdict}"
    yield f"  {'a checkpoint, on disk':<30} {plan.checkpoint_bytes / GIB:>8.2f}"
    yield ""
    yield from _iter_time_lines(plan)
    if not plan.fits:
        yield ""
        yield "to fit: more nodes with engine.neuron.zero1, a larger parallel.tp or parallel.pp,"
        yield "parallel.sequence_parallel, engine.neuron.selective_checkpointing, a smaller batch.micro_batch_size"
        yield "or data.seq_len"
    yield "note: nothing here was measured on Trainium"


def _iter_degrees(plan: NeuronPlan) -> Iterator[str]:
    parallel = plan.recipe.parallel
    if parallel.tp > 1:
        yield f"tensor parallel {parallel.tp}" + (" with sequence parallel" if parallel.sequence_parallel else "")
    if parallel.pp > 1:
        sizes = [len(layers) for layers in layers_per_stage(plan.config.n_layers, parallel.pp)]
        yield f"{parallel.pp} stages of {min(sizes)}" + (f" to {max(sizes)}" * (min(sizes) < max(sizes))) + " layers"
    yield f"data parallel {plan.dp}"


def _iter_time_lines(plan: NeuronPlan) -> Iterator[str]:
    schedule = plan.recipe.schedule
    tera = plan.core.peak_flops / 1e12
    yield f"time at {plan.mfu:.1%} MFU of {tera:.0f} TFLOP/s ({plan.mfu_source})"
    if plan.pipeline_bubble:
        yield f"  {'pipeline bubble':<30} {plan.pipeline_bubble:.1%}"
    yield f"  {'an update':<30} {format_duration(plan.step_s)}"
    yield f"  {'tokens per second':<30} {plan.tokens_per_step / plan.step_s:,.0f}"
    total = f"{schedule.max_steps:,} updates, {format_count(schedule.max_steps * plan.tokens_per_step)} tokens"
    yield f"  {'the run':<30} {format_duration(plan.step_s * schedule.max_steps)} for {total}"
