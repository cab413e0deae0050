"""Activation offload on the null device: nothing waits, what goes out comes back, two blocks' activations stay."""

from collections.abc import Callable
from typing import Any

import pytest
from null_device.ranks import Job
from test_peak import NEAR, job

from lt_model import LlamaConfig
from lt_trainer.config.recipe import load
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import plan_memory

SEQ_LEN = 4096
OFFLOAD = "engine.gpu.activation_offload=true"
CASES = {
    "one": job(OFFLOAD, vocab_size=1024),
    "fsdp-accumulation": job(OFFLOAD, ranks=2, rows=4, vocab_size=1024),
}


def copied(copies: list[str], what: str) -> int:
    """Bytes of copies in one direction that are large enough to be activations."""
    sizes = [int(text.split()[-1]) for text in copies if what in text]
    return sum(size for size in sizes if size >= 1 << 20)


@pytest.mark.guarantee("cuda-step-without-sync")
@pytest.mark.parametrize("case", CASES)
def test_a_step_with_offload_does_not_wait(run_job: Callable[[Job], Any], case: str) -> None:
    for log in run_job(CASES[case])[1]:
        part = log["step 2"]
        assert part.of("sync") == []
        assert copied(part.of("copy"), "to host") == copied(part.of("copy"), "pinned to device") > 1 << 30


@pytest.mark.guarantee("plan-peak")
@pytest.mark.parametrize("case", CASES)
def test_the_device_holds_what_the_plan_says(run_job: Callable[[Job], Any], case: str) -> None:
    asked = CASES[case]
    base = {
        "model": dict(asked.model),
        "data": {"store": "unused", "seq_len": SEQ_LEN},
        "batch": {"global_batch_size": asked.rows, "micro_batch_size": asked.micro_batch_size},
    }
    recipe = load(base=base, overrides=asked.overrides).recipe
    config = LlamaConfig(vocab_size=asked.vocab_size, max_position_embeddings=SEQ_LEN, **dict(asked.model))
    planned = plan_memory(config, SEQ_LEN, layout_from_recipe(recipe, devices=asked.ranks, nodes=1))
    for result in run_job(asked)[0]:
        assert result.peak_bytes[-1] == pytest.approx(planned.peak, rel=NEAR)
