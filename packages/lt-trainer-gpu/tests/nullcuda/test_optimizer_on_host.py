"""Optimizer offload on the null device: no waits, the state once over the bus each way, the plan's peak."""

from collections.abc import Callable
from typing import Any

import pytest
from null_device.ranks import Job
from test_peak import NEAR, job

from lt_model import LlamaConfig, n_parameters
from lt_trainer.config.recipe import load
from lt_trainer.planning.layout import layout_from_recipe
from lt_trainer.planning.memory import plan_memory

SEQ_LEN = 512
OFFLOAD = "engine.gpu.optimizer_offload=true"
SMALL = {"vocab_size": 1024, "n_layers": 2, "seq_len": SEQ_LEN}
CASES = {"one": job(OFFLOAD, **SMALL), "fsdp": job(OFFLOAD, ranks=2, **SMALL)}


def config_of(asked: Job) -> LlamaConfig:
    return LlamaConfig(vocab_size=asked.vocab_size, max_position_embeddings=SEQ_LEN, **dict(asked.model))


@pytest.mark.guarantee("cuda-step-without-sync")
@pytest.mark.parametrize("case", CASES)
def test_a_step_does_not_wait(run_job: Callable[[Job], Any], case: str) -> None:
    asked = CASES[case]
    for log in run_job(asked)[1]:
        part = log["step 2"]
        assert part.of("sync") == []
        assert part.of("malloc") == []
        copies = [text.split() for text in part.of("copy")]
        n_bytes = 8 * n_parameters(config_of(asked)) // asked.ranks
        to_host = sum(int(words[-1]) for words in copies if words[2] == "host")
        to_device = sum(int(words[-1]) for words in copies if words[0] == "pinned")
        assert to_host == n_bytes
        assert n_bytes <= to_device < n_bytes + (1 << 20), "the batch too"


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
    planned = plan_memory(config_of(asked), SEQ_LEN, layout_from_recipe(recipe, devices=asked.ranks, nodes=1))
    for result in run_job(asked)[0]:
        assert result.peak_bytes[-1] == pytest.approx(planned.peak, rel=NEAR)
