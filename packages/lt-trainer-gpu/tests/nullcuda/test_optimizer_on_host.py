"""Optimizer offload on the null device: no waits, the state once over the bus each way, the plan's peak."""

from collections.abc import Callable
from typing import Any

import pytest
from null_device.ranks import Job
from peaks import check_peak, config_of, job

from lt_model import param_specs
from lt_trainer.optimizers import optimizer_spec
from lt_trainer.optimizers.muon import MOMENTUM

OFFLOAD = "engine.gpu.optimizer_offload=true"
MUON = "optimizer.name=muon"
SMALL = {"vocab_size": 1024, "n_layers": 2, "seq_len": 512}
CASES = {
    "one": job(OFFLOAD, **SMALL),
    "fsdp": job(OFFLOAD, ranks=2, **SMALL),
    "one-muon": job(OFFLOAD, MUON, **SMALL),
    "fsdp-muon": job(OFFLOAD, MUON, ranks=2, **SMALL),
}


def slot_bytes(asked: Job) -> tuple[int, int]:
    """Bytes of the momentum of Muon's matrices, and of AdamW's moments of all other parameters."""
    optimizer = optimizer_spec("muon" if MUON in asked.overrides else "adamw")
    found = {True: 0, False: 0}
    for spec in param_specs(config_of(asked)):
        slots = optimizer.for_params([spec]).slots
        found[slots[0].name == MOMENTUM] += 4 * len(slots) * spec.numel
    return found[True], found[False]


@pytest.mark.parametrize("case", CASES)
def test_a_step_does_not_wait(run_job: Callable[[Job], Any], case: str) -> None:
    """State goes once over the bus each way; Muon's momentum twice to the device."""
    asked = CASES[case]
    momentum, moments = (n_bytes // asked.ranks for n_bytes in slot_bytes(asked))
    for log in run_job(asked)[1]:
        part = log["step 2"]
        assert part.of("sync") == []
        assert part.of("malloc") == []
        copies = [text.split() for text in part.of("copy")]
        to_host = sum(int(words[-1]) for words in copies if words[2] == "host")
        to_device = sum(int(words[-1]) for words in copies if words[0] == "pinned")
        assert to_host == momentum + moments
        assert 0 <= to_device - (2 * momentum + moments) < 1 << 20, "the batch too"


@pytest.mark.parametrize("case", CASES)
def test_the_device_holds_what_the_plan_says(run_job: Callable[[Job], Any], case: str) -> None:
    check_peak(CASES[case], run_job(CASES[case])[0])
