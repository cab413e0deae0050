"""`lt train plan`'s peak against what torch's CUDA allocator holds at most in a step, on the null device.

Memory is never touched there, so the shapes are those of real runs: a billion parameters, rows of 4096 tokens. The
layouts are chosen so that each phase of the plan is the peak of some.
"""

from collections.abc import Callable
from typing import Any

import pytest
from null_device.ranks import Job

from lt_model import LlamaConfig
from lt_trainer.config.recipe import load
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import plan_memory

NEAR = 0.03

SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "n_heads": 16, "n_kv_heads": 4, "n_layers": 8}
TP, SP, HSDP = "parallel.tp=2", "parallel.sequence_parallel=true", "parallel.dp_replicate=2"
CP, CP4 = "parallel.cp=2", "parallel.cp=4"
FULL, SELECTIVE = "engine.gpu.activation_checkpointing=full", "engine.gpu.activation_checkpointing=selective"
KEEP, EACH = "engine.gpu.reshard_after_forward=false", "engine.gpu.reduce_each_micro_batch=true"
NARROW = "optimizer.moments_dtype=bfloat16"


def job(*overrides: str, seq_len: int = 4096, tied: bool = False, n_layers: int = 8, **fields: Any) -> Job:
    shape = SHAPE | {"n_layers": n_layers, "tie_word_embeddings": tied}
    values = {"vocab_size": 32000, "rows": fields.get("ranks", 1), **fields}
    return Job(model=tuple(shape.items()), overrides=overrides, row_lengths=(seq_len,) * 3, initialize=False, **values)


CASES: dict[str, tuple[Job, str]] = {
    "one": (job(), "loss"),
    "fsdp": (job(ranks=2), "loss"),
    "fsdp-tied-recompute": (job(FULL, ranks=2, vocab_size=1024, tied=True), "first block"),
    "tp-sp": (job(TP, SP, ranks=2, rows=1, vocab_size=1024), "last block"),
}
SLOW_CASES: dict[str, tuple[Job, str]] = {
    "one-accumulation": (job(rows=2), "loss"),
    "one-tied": (job(tied=True), "loss"),
    "one-little-batch": (job(seq_len=512), "optimizer step"),
    "one-bf16-moments": (job(NARROW, seq_len=512), "optimizer step"),
    "one-few-words": (job(vocab_size=1024), "last block"),
    "one-recompute": (job(FULL, rows=4, micro_batch_size=4), "first block"),
    "one-recompute-selectively": (job(SELECTIVE, rows=4, micro_batch_size=4), "loss"),
    "one-wide-head": (job(FULL, vocab_size=128256), "loss"),
    "fsdp-few-words": (job(ranks=2, vocab_size=1024), "last block"),
    "fsdp-little-batch": (job(ranks=4, vocab_size=1024, seq_len=512), "first block"),
    "fsdp-little-batch-tied": (job(ranks=2, vocab_size=64000, seq_len=64, n_layers=2, tied=True), "loss"),
    "fsdp-accumulation": (job(ranks=4, rows=8), "loss"),
    "fsdp-reduce-each": (job(EACH, ranks=4, rows=8), "loss"),
    "fsdp-keep-weights": (job(KEEP, ranks=4, vocab_size=1024, seq_len=512), "last block"),
    "fsdp-recompute": (job(FULL, ranks=4, vocab_size=1024), "first block"),
    "fsdp-recompute-selectively": (job(SELECTIVE, ranks=4, vocab_size=1024), "last block"),
    "fsdp8-wide-head": (job(FULL, ranks=8, vocab_size=128256), "loss"),
    "hsdp": (job(HSDP, ranks=4, vocab_size=1024, seq_len=512), "first block"),
    "ddp": (job(HSDP, FULL, ranks=2), "embedding reduction"),
    "tp": (job(TP, ranks=2, rows=1, vocab_size=1024), "last block"),
    "tp-sp-recompute": (job(TP, SP, FULL, ranks=2, rows=2, micro_batch_size=2, vocab_size=1024), "first block"),
    "fsdp-tp-sp": (job(TP, SP, ranks=4, rows=2), "loss"),
    "cp": (job(CP, ranks=2, rows=1, vocab_size=1024, seq_len=8192), "last block"),
    "cp-recompute": (job(CP, FULL, ranks=2, rows=1, vocab_size=1024, seq_len=8192), "first block"),
    "cp4-recompute-selectively": (job(CP4, SELECTIVE, ranks=4, rows=1, vocab_size=1024, seq_len=8192), "last block"),
    "cp-tp-sp": (job(CP, TP, SP, ranks=4, rows=1, seq_len=8192), "loss"),
}


@pytest.mark.guarantee("plan-peak")
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CASES)])
def test_the_allocator_holds_what_the_plan_says(run_job: Callable[[Job], Any], case: str) -> None:
    asked, phase = (CASES | SLOW_CASES)[case]
    seq_len = asked.row_lengths[0]
    base = {
        "model": dict(asked.model),
        "data": {"store": "unused", "seq_len": seq_len},
        "batch": {"global_batch_size": asked.rows, "micro_batch_size": asked.micro_batch_size},
    }
    recipe = load(base=base, overrides=asked.overrides).recipe
    config = LlamaConfig(vocab_size=asked.vocab_size, max_position_embeddings=seq_len, **dict(asked.model))
    planned = plan_memory(config, seq_len, layout_from_recipe(recipe, devices=asked.ranks, nodes=1))
    assert planned.peak_phase == phase
    for result in run_job(asked)[0]:
        assert result.peak_bytes[-1] == pytest.approx(planned.peak, rel=NEAR)
