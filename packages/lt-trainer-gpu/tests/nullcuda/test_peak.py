"""`lt train plan`'s peak against what torch's CUDA allocator holds at most in a step, on the null device.

The layouts are chosen so that each phase of the plan is the peak of some. Other families than Llama are held to the
plan in some layouts each; each family and each layout has a listed case, and the slow set has all.
"""

from collections.abc import Callable
from typing import Any

import pytest
from null_device.ranks import Job
from peaks import FAMILY_FIELDS, check_peak, job, planned_memory

TP, SP, HSDP, EP = "parallel.tp=2", "parallel.sequence_parallel=true", "parallel.dp_replicate=2", "parallel.ep=2"
CP, CP4, PP = "parallel.cp=2", "parallel.cp=4", "parallel.pp=2"
INTERLEAVED = "engine.gpu.pipeline_stages_per_rank=2"
FULL, SELECTIVE = "engine.gpu.activation_checkpointing=full", "engine.gpu.activation_checkpointing=selective"
KEEP, EACH = "engine.gpu.reshard_after_forward=false", "engine.gpu.reduce_each_micro_batch=true"
NARROW, MUON = "optimizer.moments_dtype=bfloat16", "optimizer.name=muon"


CASES: dict[str, tuple[Job, str]] = {
    "one": (job(), "loss"),
    "fsdp": (job(ranks=2), "loss"),
    "fsdp-tied-recompute": (job(FULL, ranks=2, vocab_size=1024, tied=True), "first block"),
    "tp-sp": (job(TP, SP, ranks=2, rows=1, vocab_size=1024), "last block"),
    "pp": (job(PP, ranks=2, rows=4), "last block"),
    "pp-fsdp-recompute": (job(PP, FULL, ranks=4, rows=8), "last block"),
    "one-muon": (job(MUON, vocab_size=1024, n_layers=2, seq_len=512), "optimizer step"),
}
SLOW_CASES: dict[str, tuple[Job, str]] = {
    "one-accumulation": (job(rows=2), "loss"),
    "one-little-batch": (job(seq_len=512), "optimizer step"),
    "one-bf16-moments": (job(NARROW, seq_len=512), "optimizer step"),
    "one-recompute": (job(FULL, rows=4, micro_batch_size=4, vocab_size=8192), "first block"),
    "one-recompute-selectively": (job(SELECTIVE, rows=4, micro_batch_size=4), "last block"),
    "one-wide-head": (job(FULL, vocab_size=128256), "optimizer step"),
    "fsdp-little-batch": (job(ranks=4, vocab_size=1024, seq_len=512), "first block"),
    "fsdp-accumulation": (job(ranks=4, rows=8), "loss"),
    "fsdp-reduce-each": (job(EACH, ranks=4, rows=8), "loss"),
    "fsdp-keep-weights": (job(KEEP, ranks=4, vocab_size=1024, seq_len=512), "last block"),
    "fsdp-recompute": (job(FULL, ranks=4, vocab_size=1024), "first block"),
    "fsdp-recompute-selectively": (job(SELECTIVE, ranks=4, vocab_size=1024), "last block"),
    "fsdp8-wide-head": (job(FULL, ranks=8, vocab_size=128256), "loss"),
    "ddp": (job(HSDP, FULL, ranks=2), "embedding reduction"),
    "tp-sp-recompute": (job(TP, SP, FULL, ranks=2, rows=2, micro_batch_size=2, vocab_size=1024), "first block"),
    "fsdp-tp-sp": (job(TP, SP, ranks=4, rows=2), "loss"),
    "cp": (job(CP, ranks=2, rows=1, vocab_size=1024, seq_len=8192), "last block"),
    "cp-recompute": (job(CP, FULL, ranks=2, rows=1, vocab_size=1024, seq_len=8192), "first block"),
    "cp4-recompute-selectively": (job(CP4, SELECTIVE, ranks=4, rows=1, vocab_size=1024, seq_len=8192), "last block"),
    "cp-tp-sp": (job(CP, TP, SP, ranks=4, rows=1, seq_len=8192), "loss"),
    "pp-recompute": (job(PP, FULL, ranks=2, rows=4, vocab_size=1024), "last block"),
    "pp-tied": (job(PP, ranks=2, rows=4, seq_len=512, tied=True), "last block"),
    "pp-interleaved": (job(PP, INTERLEAVED, ranks=2, rows=4, vocab_size=1024), "last block"),
    "pp-offload": (job(PP, "engine.gpu.activation_offload=true", ranks=2, rows=4, vocab_size=1024), "last block"),
    "pp4-fsdp-recompute": (job("parallel.pp=4", FULL, ranks=8, rows=8, vocab_size=128256), "loss"),
    "pp-fsdp": (job(PP, ranks=4, rows=8, vocab_size=1024), "last block"),
    "pp-fsdp-reduce-each": (job(PP, EACH, ranks=4, rows=8, vocab_size=1024), "last block"),
    "pp-fsdp-keep-weights": (job(PP, KEEP, ranks=4, rows=8, vocab_size=1024), "last block"),
    "pp-fsdp-interleaved": (job(PP, INTERLEAVED, ranks=4, rows=8, vocab_size=1024), "last block"),
    "pp-cp": (job(PP, CP, ranks=4, rows=4, vocab_size=1024, seq_len=8192), "last block"),
    "pp-tp-sp": (job(PP, TP, SP, ranks=4, rows=4, vocab_size=1024), "last block"),
    "pp-fsdp-tp-sp": (job(PP, TP, SP, ranks=8, rows=8), "last block"),
    "one-tied": (job(tied=True), "loss"),
    "one-few-words": (job(vocab_size=1024), "last block"),
    "fsdp-few-words": (job(ranks=2, vocab_size=1024), "last block"),
    "fsdp-short-tied": (job(ranks=2, vocab_size=64000, seq_len=64, n_layers=2, tied=True), "embedding reduction"),
    "hsdp": (job(HSDP, ranks=4, vocab_size=1024, seq_len=512), "first block"),
    "tp": (job(TP, ranks=2, rows=1, vocab_size=1024), "last block"),
    "pp4": (job("parallel.pp=4", ranks=4, rows=8, vocab_size=1024), "last block"),
    "fsdp-muon": (job(MUON, ranks=2, seq_len=512), "block reduction"),
}


LITTLE: dict[str, Any] = {"vocab_size": 1024, "rows": 2, "micro_batch_size": 2}
FAMILY_LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "one": ((), LITTLE),
    "recompute": ((FULL,), LITTLE),
    "recompute-selectively": ((SELECTIVE,), LITTLE),
    "tp-sp": ((TP, SP), LITTLE | {"ranks": 2}),
    "tp-recompute": ((TP, FULL), LITTLE | {"ranks": 2}),
    "cp": ((CP,), {"vocab_size": 1024, "rows": 1, "ranks": 2, "seq_len": 8192}),
    "fsdp": ((), {"ranks": 2}),
}
EP_LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "ep": ((EP,), {"vocab_size": 1024, "ranks": 2}),
    "ep-skewed": ((EP, SELECTIVE), {"vocab_size": 1024, "ranks": 4, "expert_skew": 2}),
    "ep-recompute": ((EP, FULL), {"vocab_size": 1024, "ranks": 4}),
    "ep-skewed-sp": ((EP, TP, SP), LITTLE | {"ranks": 2, "expert_skew": 2}),
}
HEAD_LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "cp4-recompute": ((CP4, FULL), {"vocab_size": 1024, "rows": 1, "ranks": 4, "seq_len": 16384}),
}
"""Where the peak is attention's: of families whose queries are wider than the stream, or than values."""
FAMILY_CASES = [(family, layout) for family in FAMILY_FIELDS for layout in FAMILY_LAYOUTS]
FAMILY_CASES += [("olmoe", layout) for layout in EP_LAYOUTS]
FAMILY_CASES += [(family, "cp4-recompute") for family in ("qwen3", "gemma3_text", "deepseek_v3")]
LISTED = [
    *(("mistral", "recompute-selectively"), ("qwen2", "recompute"), ("qwen3", "tp-sp"), ("olmo2", "tp-recompute")),
    *(("gemma3_text", "one"), ("gemma2", "fsdp"), ("gpt_neox", "recompute"), ("granite", "cp")),
    *(("olmoe", "ep"), ("olmoe", "ep-skewed"), ("olmoe", "ep-recompute"), ("olmoe", "ep-skewed-sp")),
    ("deepseek_v3", "tp-sp"),
]


def test_each_family_and_each_layout_has_a_listed_case() -> None:
    families, layouts = zip(*LISTED, strict=True)
    assert set(families) == FAMILY_FIELDS.keys()
    assert set(layouts) == FAMILY_LAYOUTS.keys() | EP_LAYOUTS.keys()


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param(*pair, marks=() if pair in LISTED else pytest.mark.slow) for pair in FAMILY_CASES],
)
def test_a_family_holds_what_the_plan_says(run_job: Callable[[Job], Any], family: str, layout: str) -> None:
    overrides, fields = (FAMILY_LAYOUTS | EP_LAYOUTS | HEAD_LAYOUTS)[layout]
    asked = job(*overrides, family=family, **fields)
    check_peak(asked, run_job(asked)[0])


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CASES)])
def test_the_allocator_holds_what_the_plan_says(run_job: Callable[[Job], Any], case: str) -> None:
    asked, phase = (CASES | SLOW_CASES)[case]
    assert planned_memory(asked).peak_phase == phase
    check_peak(asked, run_job(asked)[0])
