"""Optimizer offload on the null device: no waits, the state once over the bus each way, the plan's peak."""

from collections.abc import Callable
from typing import Any

import pytest
from null_device.ranks import Job
from peaks import check_peak, config_of, job

from lt_model import param_specs
from lt_trainer.optimizers import optimizer_spec
from lt_trainer.optimizers.muon import MOMENTUM
from lt_trainer_gpu.optimizer_offload import CHUNK_BYTES

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


@pytest.mark.parametrize("case", ["one", "fsdp"])
def test_a_chunk_is_fetched_updated_and_copied_back_in_this_order(run_job: Callable[[Job], Any], case: str) -> None:
    """Whatever the streams do at the same time: a buffer is filled again only when its last chunk has been written."""
    for log in run_job(CASES[case])[1]:
        part = log["step 2"].queued()
        (computing,) = {one.stream for one in part if "FusedAdam" in one.text}
        moved = [one for one in part if one.kind == "copy" and one.stream != computing]
        to_host = [one for one in moved if "to host" in one.text]
        to_device = [one for one in moved if one.text.startswith("pinned") and one.stream != to_host[0].stream]
        updates = [one for one in part if "FusedAdam" in one.text]
        assert [one.text.split()[-1] for one in to_device] == [one.text.split()[-1] for one in to_host]
        assert len(to_host) >= 2 * len(updates) >= 8
        for fetched, written in zip(to_device, to_host, strict=True):
            between = [one for one in updates if one.follows(fetched) and written.follows(one)]
            assert between, "no update between"
        size_of_buffer = 0
        for index, fetched in enumerate(to_device):
            size_of_buffer += int(fetched.text.split()[-1])
            overwritten = [one for one in to_host[:index] if fetched.follows(one)]
            assert sum(int(one.text.split()[-1]) for one in overwritten) >= size_of_buffer - 2 * CHUNK_BYTES
        for later in part[part.index(updates[-1]) + 1 :]:
            assert later.stream != computing or all(later.follows(one) for one in to_host), "it may read the result"


@pytest.mark.parametrize("case", CASES)
def test_the_device_holds_what_the_plan_says(run_job: Callable[[Job], Any], case: str) -> None:
    check_peak(CASES[case], run_job(CASES[case])[0])
